//! Pages that answer a question in the query: `/misses`, `/namespaces` and `/why`.

use hyper::StatusCode;
use kvdepot_core::{Error, ErrorKind};
use kvdepot_depot::direct::Direct;

use super::answer::{Answer, error, json};

/// Maximum number of misses in one answer.
const MISSES_MAX: usize = 256;

/// `/misses`: the last requests that found less than they asked for. `last` limits their number, `request` their labels' prefix.
pub(super) fn misses(depot: &Direct, query: Option<&str>) -> Answer {
    let asked = parameters(query);
    let of = |name: &str| asked.iter().find(|(given, _)| given == name).map(|(_, value)| value.as_str());
    let count = of("last").map_or(Ok(MISSES_MAX), str::parse);
    match count {
        Ok(count) => json(StatusCode::OK, &depot.last_misses(count.min(MISSES_MAX), of("request"))),
        Err(_) => error(StatusCode::BAD_REQUEST, "last is how many misses are told"),
    }
}

/// `/namespaces`: what the depot knows, with complete descriptions. `namespace` is a prefix of their names, `after` the `next` of
/// the answer before.
pub(super) fn namespaces(depot: &Direct, query: Option<&str>) -> Answer {
    let asked = parameters(query);
    let of = |name: &str| asked.iter().find(|(given, _)| given == name).map(|(_, value)| value.as_str());
    match of("after").map(str::parse).transpose() {
        Ok(after) => {
            json(StatusCode::OK, &depot.describe_namespaces(of("namespace").unwrap_or_default(), after))
        }
        Err(_) => error(StatusCode::BAD_REQUEST, "after is the number in next of the answer before"),
    }
}

/// `/why`: where blocks are, and why missing ones are missing. `namespace` is a prefix of its name; `hash`, once for each block,
/// has 32 hexadecimal digits. May wait for a tier's I/O, on a separate thread; the depot bounds how many do.
pub(super) async fn why(depot: Direct, query: Option<&str>) -> Answer {
    let asked = parameters(query);
    let of = |name: &'static str| {
        asked.iter().filter(move |(given, _)| given == name).map(|(_, value)| value.as_str())
    };
    let Some(namespace) = of("namespace").next() else {
        return error(StatusCode::BAD_REQUEST, "namespace is how a namespace's name begins, hash a block's");
    };
    let namespace = namespace.to_owned();
    let hashes: Vec<String> = of("hash").map(str::to_owned).collect();
    let ask = move || depot.explain(&namespace, &hashes.iter().map(String::as_str).collect::<Vec<_>>());
    let told = tokio::task::spawn_blocking(ask).await;
    match told.unwrap_or_else(|e| Err(Error::new(ErrorKind::Io, "ended early").with_source(e))) {
        Ok(told) => json(StatusCode::OK, &told),
        Err(why) => error(refused_with(why.kind()), &why.to_string()),
    }
}

const fn refused_with(kind: ErrorKind) -> StatusCode {
    match kind {
        ErrorKind::NotFound => StatusCode::NOT_FOUND,
        ErrorKind::Config => StatusCode::BAD_REQUEST,
        ErrorKind::Busy => StatusCode::SERVICE_UNAVAILABLE,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// Returns the names and values of a query.
fn parameters(query: Option<&str>) -> Vec<(String, String)> {
    let pairs = query.unwrap_or_default().split('&').filter_map(|pair| pair.split_once('='));
    pairs.map(|(name, value)| (name.to_owned(), decoded(value))).collect()
}

/// Decodes bytes written as `%` and two digits. A malformed escape is kept as it is.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, behind)) = rest.split_first() {
        let digits = behind.get(..2).filter(|_| first == b'%').and_then(|two| std::str::from_utf8(two).ok());
        let byte = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok());
        bytes.push(byte.unwrap_or(first));
        rest = if byte.is_some() { &behind[2..] } else { behind };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_may_have_any_text_in_it() {
        let asked = parameters(Some("last=3&request=cmpl%2D1%20%26x&hash=a&hash=b&none&odd=%zz%é%"));
        let pairs: Vec<(&str, &str)> = asked.iter().map(|(name, value)| (&**name, &**value)).collect();
        let expected =
            [("last", "3"), ("request", "cmpl-1 &x"), ("hash", "a"), ("hash", "b"), ("odd", "%zz%é%")];
        assert_eq!(pairs, expected);
        assert!(parameters(None).is_empty());
    }
}
