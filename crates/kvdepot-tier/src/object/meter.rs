//! Counts requests to a store in the way it bills them: each request that leaves this machine, including retries.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use http_body_util::{BodyExt, Limited};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody,
    HttpService, ReqwestConnector,
};

/// Counters since the tier was opened.
#[derive(Debug, Default)]
pub(super) struct Meter {
    puts: AtomicU64,
    gets: AtomicU64,
    heads: AtomicU64,
    deletes: AtomicU64,
    lists: AtomicU64,
    bytes_up: AtomicU64,
    bytes_down: AtomicU64,
    pub(super) tried_again: AtomicU64,
    pub(super) slowed_down: AtomicU64,
    pub(super) timeouts: AtomicU64,
    pub(super) failures: AtomicU64,
    pub(super) corrupt: AtomicU64,
    pub(super) lost: AtomicU64,
    pub(super) swept: AtomicU64,
}

pub(super) fn one_more(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl Meter {
    /// Returns the counters for `stat` and metrics.
    pub(super) fn figures(&self) -> Vec<(&'static str, u64)> {
        let all = [
            ("put_requests", &self.puts),
            ("get_requests", &self.gets),
            ("head_requests", &self.heads),
            ("delete_requests", &self.deletes),
            ("list_requests", &self.lists),
            ("sent_bytes", &self.bytes_up),
            ("received_bytes", &self.bytes_down),
            ("tried_again", &self.tried_again),
            ("slowed_down", &self.slowed_down),
            ("timeouts", &self.timeouts),
            ("failures", &self.failures),
            ("corrupt_blocks", &self.corrupt),
            ("lost_blocks", &self.lost),
            ("swept_objects", &self.swept),
        ];
        all.map(|(name, counter)| (name, counter.load(Ordering::Relaxed))).into()
    }

    /// Returns the counter of a request's billing category.
    fn line(&self, method: &str, query: &str) -> &AtomicU64 {
        let has =
            |name: &str| query.split('&').any(|part| part == name || part.starts_with(&format!("{name}=")));
        match method {
            "GET" if has("list-type") => &self.lists,
            "GET" => &self.gets,
            "HEAD" => &self.heads,
            "DELETE" => &self.deletes,
            "POST" if has("delete") => &self.deletes,
            _ => &self.puts,
        }
    }
}

/// The status of an error answer. The client's own errors do not expose such a status.
#[derive(Debug)]
pub(super) struct StatusError {
    pub(super) status: u16,
    said: String,
}

impl std::fmt::Display for StatusError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "status {} {}", self.status, self.said)
    }
}

impl std::error::Error for StatusError {}

/// Statuses for which the client has distinguishable errors.
const TOLD_APART: [u16; 4] = [401, 403, 404, 412];
/// Maximum length of a store's answer that is searched for its code.
const SAID_BYTES_MAX: usize = 16 << 10;

/// Returns the code in a store's error answer. The rest is not kept, because some stores repeat the signed headers of a
/// request.
fn code(said: &str) -> &str {
    let code =
        said.split_once("<Code>").and_then(|(_, rest)| rest.split_once("</Code>")).map(|(code, _)| code);
    let is_code = |code: &&str| code.len() <= 64 && code.bytes().all(|byte| byte.is_ascii_alphanumeric());
    code.filter(is_code).unwrap_or_default()
}

/// Makes clients that count the traffic of one bucket. Requests for credentials are not billed.
#[derive(Debug)]
pub(super) struct Metered {
    pub(super) meter: Arc<Meter>,
    pub(super) bucket: String,
}

impl HttpConnector for Metered {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let inner = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(MeteredClient {
            inner,
            meter: Arc::clone(&self.meter),
            bucket: self.bucket.clone(),
        }))
    }
}

#[derive(Debug)]
struct MeteredClient {
    inner: HttpClient,
    meter: Arc<Meter>,
    bucket: String,
}

#[async_trait]
impl HttpService for MeteredClient {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let uri = request.uri();
        let is_bucket = |text: &str, end: char| {
            text.strip_prefix(&self.bucket).is_some_and(|rest| rest.is_empty() || rest.starts_with(end))
        };
        let is_billed = is_bucket(uri.host().unwrap_or_default(), '.')
            || is_bucket(uri.path().trim_start_matches('/'), '/');
        if !is_billed {
            return self.inner.execute(request).await;
        }
        one_more(self.meter.line(request.method().as_str(), uri.query().unwrap_or_default()));
        let sent = request.body().content_length() as u64;
        self.meter.bytes_up.fetch_add(sent, Ordering::Relaxed);
        let (mut parts, body) = self.inner.execute(request).await?.into_parts();
        let status = parts.status.as_u16();
        if status >= 400 {
            let text = Limited::new(body, SAID_BYTES_MAX).collect().await;
            let text = text.map(|text| String::from_utf8_lossy(&text.to_bytes()).into_owned());
            let said = code(&text.unwrap_or_default()).to_owned();
            if TOLD_APART.contains(&status) {
                parts.headers.remove("content-length");
                return Ok(HttpResponse::from_parts(parts, said.into()));
            }
            return Err(HttpError::new(HttpErrorKind::Unknown, StatusError { status, said }));
        }
        let meter = Arc::clone(&self.meter);
        let body = body.map_frame(move |frame| {
            if let Some(data) = frame.data_ref() {
                meter.bytes_down.fetch_add(data.len() as u64, Ordering::Relaxed);
            }
            frame
        });
        Ok(HttpResponse::from_parts(parts, HttpResponseBody::new(body)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_an_error_the_code_is_kept() {
        assert_eq!(code("<Error><Code>ExpiredToken</Code><Token-0>abc</Token-0></Error>"), "ExpiredToken");
        for said in ["", "<Code>a key</Code>", "<Code>abc", "<html>"] {
            assert_eq!(code(said), "");
        }
    }

    #[test]
    fn requests_stand_in_their_line_of_the_bill() {
        let meter = Meter::default();
        for (method, query, line) in [
            ("PUT", "", &meter.puts),
            ("PUT", "partNumber=1&uploadId=x", &meter.puts),
            ("POST", "uploads", &meter.puts),
            ("POST", "uploadId=x", &meter.puts),
            ("POST", "delete", &meter.deletes),
            ("DELETE", "uploadId=x", &meter.deletes),
            ("GET", "", &meter.gets),
            ("GET", "list-type=2&prefix=p", &meter.lists),
            ("HEAD", "", &meter.heads),
        ] {
            assert!(std::ptr::eq(meter.line(method, query), line), "{method} {query}");
        }
    }
}
