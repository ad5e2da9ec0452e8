//! Which requests a store bills, and in which category.

use super::cloud::Cloud;

/// Billing category of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Line {
    Put,
    Get,
    Head,
    Delete,
    List,
}

/// Recognises the requests to one bucket. Requests for credentials are not billed.
#[derive(Debug)]
pub(super) struct Bill {
    pub(super) cloud: Cloud,
    /// Host of the store; `None` for any.
    host: Option<String>,
    /// Paths of the bucket, without slashes at their ends.
    paths: Vec<String>,
}

/// What of a request's URL the bill looks at.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target<'a> {
    pub(super) host: &'a str,
    pub(super) path: &'a str,
    pub(super) query: &'a str,
}

impl Bill {
    /// A bucket is in the path or in the name of the host.
    pub(super) fn of_aws(bucket: &str) -> Self {
        Self { cloud: Cloud::Aws, host: None, paths: vec![bucket.to_owned()] }
    }

    /// A bucket's name is percent-encoded in some requests.
    pub(super) fn of_google(endpoint: &str, bucket: &str) -> Self {
        let encoded = bucket.chars().map(|c| match c {
            c if c.is_ascii_alphanumeric() => c.to_string(),
            c => format!("%{:02X}", u32::from(c)),
        });
        Self::at(Cloud::Google, endpoint, &[bucket.to_owned(), encoded.collect()])
    }

    pub(super) fn of_azure(endpoint: &str, container: &str) -> Self {
        Self::at(Cloud::Azure, endpoint, &[container.to_owned()])
    }

    fn at(cloud: Cloud, endpoint: &str, buckets: &[String]) -> Self {
        let rest = endpoint.split_once("://").map_or(endpoint, |(_, rest)| rest);
        let (place, path) = rest.split_once('/').unwrap_or((rest, ""));
        let path = path.trim_end_matches('/');
        let full =
            |bucket: &String| if path.is_empty() { bucket.clone() } else { format!("{path}/{bucket}") };
        Self { cloud, host: Some(host_of(place)), paths: buckets.iter().map(full).collect() }
    }

    /// Returns the category of a request; `None` if it is not to the bucket.
    pub(super) fn line(&self, method: &str, target: Target<'_>) -> Option<Line> {
        let starts = |text: &str, start: &str, end: char| {
            text.strip_prefix(start).is_some_and(|rest| rest.is_empty() || rest.starts_with(end))
        };
        let path = target.path.trim_start_matches('/');
        let is_below = self.paths.iter().any(|bucket| starts(path, bucket, '/'));
        let is_billed = match &self.host {
            Some(host) => host.eq_ignore_ascii_case(target.host) && is_below,
            None => is_below || self.paths.iter().any(|bucket| starts(target.host, bucket, '.')),
        };
        is_billed.then(|| self.category(method, target.query))
    }

    fn category(&self, method: &str, query: &str) -> Line {
        let has = |name: &str, value: Option<&str>| {
            let mut parts = query.split('&').map(|part| part.split_once('=').unwrap_or((part, "")));
            parts.any(|(its, is)| its == name && value.is_none_or(|value| value == is))
        };
        let (lists, deletes) = match self.cloud {
            Cloud::Aws | Cloud::Google => (has("list-type", None), has("delete", None)),
            Cloud::Azure => (has("comp", Some("list")), has("comp", Some("batch"))),
        };
        match method {
            "GET" if lists => Line::List,
            "GET" => Line::Get,
            "HEAD" => Line::Head,
            "DELETE" => Line::Delete,
            "POST" if deletes => Line::Delete,
            _ => Line::Put,
        }
    }
}

/// Returns the host of `host` or `host:port`.
fn host_of(place: &str) -> String {
    let is_port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit());
    let host = place.rsplit_once(':').filter(|(_, port)| is_port(port)).map_or(place, |(host, _)| host);
    host.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(bill: &Bill, host: &str, expected: &[(&str, &str, &str, Option<Line>)]) {
        for (method, path, query, line) in expected {
            let target = Target { host, path, query };
            assert_eq!(bill.line(method, target), *line, "{method} {host}{path}?{query}");
        }
    }

    #[test]
    fn requests_to_s3() {
        let bill = Bill::of_aws("b");
        let all = [
            ("PUT", "/b/x", "", Some(Line::Put)),
            ("PUT", "/b/x", "partNumber=1&uploadId=x", Some(Line::Put)),
            ("POST", "/b/x", "uploads", Some(Line::Put)),
            ("POST", "/b/x", "uploadId=x", Some(Line::Put)),
            ("POST", "/b", "delete", Some(Line::Delete)),
            ("DELETE", "/b/x", "uploadId=x", Some(Line::Delete)),
            ("GET", "/b/x", "", Some(Line::Get)),
            ("GET", "/b", "list-type=2&prefix=p", Some(Line::List)),
            ("HEAD", "/b/x", "", Some(Line::Head)),
            ("GET", "/bc/x", "", None),
            ("PUT", "/latest/api/token", "", None),
        ];
        check(&bill, "host", &all);
        check(&bill, "b.s3.eu-central-1.amazonaws.com", &[("GET", "/x", "", Some(Line::Get))]);
        check(&bill, "bc.s3.eu-central-1.amazonaws.com", &[("GET", "/x", "", None)]);
    }

    #[test]
    fn requests_to_google() {
        let bill = Bill::of_google("https://storage.googleapis.com", "my-b.c");
        let all = [
            ("PUT", "/my%2Db%2Ec/kv%2Fx", "", Some(Line::Put)),
            ("POST", "/my%2Db%2Ec/kv%2Fx", "uploads=", Some(Line::Put)),
            ("DELETE", "/my%2Db%2Ec/kv%2Fx", "", Some(Line::Delete)),
            ("GET", "/my%2Db%2Ec/kv%2Fx", "", Some(Line::Get)),
            ("HEAD", "/my-b.c/kv/x", "", Some(Line::Head)),
            ("GET", "/my%2Db%2Ec", "list-type=2&prefix=kv", Some(Line::List)),
            ("GET", "/computeMetadata/v1/instance/service-accounts/default/token", "", None),
        ];
        check(&bill, "storage.googleapis.com", &all);
        check(&bill, "accounts.google.com", &[("POST", "/my-b.c/token", "", None)]);
    }

    #[test]
    fn requests_to_azure() {
        let bill = Bill::of_azure("https://acc.blob.core.windows.net", "metadata");
        let all = [
            ("PUT", "/metadata/kv/x", "", Some(Line::Put)),
            ("PUT", "/metadata/kv/x", "comp=block&blockid=list", Some(Line::Put)),
            ("PUT", "/metadata/kv/x", "comp=blocklist", Some(Line::Put)),
            ("POST", "/metadata", "restype=container&comp=batch", Some(Line::Delete)),
            ("GET", "/metadata", "restype=container&comp=list&prefix=kv", Some(Line::List)),
            ("GET", "/metadata/kv/x", "sv=2024&sig=x", Some(Line::Get)),
            ("HEAD", "/metadata/kv/x", "", Some(Line::Head)),
        ];
        check(&bill, "acc.blob.core.windows.net", &all);
        check(&bill, "169.254.169.254", &[("GET", "/metadata/identity/oauth2/token", "", None)]);
        let emulator = Bill::of_azure("http://127.0.0.1:10000/acc/", "c");
        check(&emulator, "127.0.0.1", &[("GET", "/acc/c/x", "", Some(Line::Get)), ("GET", "/c/x", "", None)]);
    }
}
