//! Refuses requests made by a foreign web page: a browser on an administrator's machine reaches ports that the page's
//! own server does not. Only needed without a token, which no page knows.

use std::net::IpAddr;

use hyper::HeaderMap;
use hyper::header::{HOST, ORIGIN};

/// Returns why a request is refused; `None` if no web page can have made it. `own_name` is the machine's host name.
pub(crate) fn refusal(headers: &HeaderMap, own_name: &str) -> Option<&'static str> {
    // Browsers send it with every POST and every request to another site. This server's own page sends neither.
    if headers.contains_key(ORIGIN) {
        return Some("a request with an Origin comes from a web page: refused where no token is set");
    }
    // "none": the user typed the address. "same-origin": the status page, as long as the Host is this machine.
    if headers.get("sec-fetch-site").is_some_and(|site| site != "none" && site != "same-origin") {
        return Some("a request with Sec-Fetch-Site comes from a web page: refused where no token is set");
    }
    // A page can make its own name resolve to this machine (DNS rebinding), but cannot change the Host header.
    let foreign = |host: &hyper::header::HeaderValue| !host.to_str().is_ok_and(|host| is_own(host, own_name));
    headers.get_all(HOST).iter().any(foreign).then_some(
        "the Host is neither an address, localhost, nor this machine's host name: ask by address, or set a token",
    )
}

fn is_own(host: &str, own_name: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(v6) => v6.split(']').next().unwrap_or_default(),
        None => host.rsplit_once(':').map_or(host, |(name, _port)| name),
    };
    name.parse::<IpAddr>().is_ok()
        || name.eq_ignore_ascii_case("localhost")
        || (!own_name.is_empty() && name.eq_ignore_ascii_case(own_name))
}

/// Returns the machine's host name; empty if it cannot be read.
pub(crate) fn own_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map(|name| name.trim().to_owned())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use hyper::header::{HeaderName, HeaderValue};

    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let pair = |(name, value): &(&'static str, &'static str)| {
            (HeaderName::from_static(name), HeaderValue::from_static(value))
        };
        pairs.iter().map(pair).collect()
    }

    #[test]
    fn addresses_and_own_names_are_answered() {
        for host in [
            "127.0.0.1:18080",
            "10.0.0.1",
            "[::1]:18080",
            "[fe80::1]",
            "localhost",
            "LocalHost:1",
            "pool-0:18080",
        ] {
            assert_eq!(refusal(&headers(&[("host", host)]), "pool-0"), None, "{host}");
        }
        assert_eq!(
            refusal(&headers(&[]), "pool-0"),
            None,
            "HTTP/1.0 sends no Host, and no browser speaks it"
        );
        for site in ["none", "same-origin"] {
            assert_eq!(
                refusal(&headers(&[("host", "localhost"), ("sec-fetch-site", site)]), ""),
                None,
                "{site}"
            );
        }
    }

    #[test]
    fn what_a_web_page_sends_is_refused() {
        for host in [
            "evil.example",
            "evil.example:18080",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "",
            ":80",
        ] {
            assert!(refusal(&headers(&[("host", host)]), "").is_some(), "{host:?}");
        }
        for (name, value) in [
            ("origin", "http://evil.example"),
            ("origin", "null"),
            ("origin", "http://localhost"),
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-site", "same-site"),
        ] {
            assert!(
                refusal(&headers(&[("host", "localhost"), (name, value)]), "").is_some(),
                "{name}: {value}"
            );
        }
        let rebound = [("host", "evil.example"), ("sec-fetch-site", "same-origin")];
        assert!(refusal(&headers(&rebound), "").is_some(), "a name that a page had resolve to this machine");
    }
}
