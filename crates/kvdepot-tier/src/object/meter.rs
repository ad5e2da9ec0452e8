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
use reqwest::header::HeaderMap;

use super::bill::{Bill, Line, Target};
use super::cloud::Cloud;

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
    pub(super) packs: AtomicU64,
    pub(super) packed: AtomicU64,
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
            ("written_packs", &self.packs),
            ("packed_blocks", &self.packed),
        ];
        all.map(|(name, counter)| (name, counter.load(Ordering::Relaxed))).into()
    }

    const fn counter(&self, line: Line) -> &AtomicU64 {
        match line {
            Line::Put => &self.puts,
            Line::Get => &self.gets,
            Line::Head => &self.heads,
            Line::Delete => &self.deletes,
            Line::List => &self.lists,
        }
    }
}

/// The status of an error answer. The client's own errors do not expose such a status.
#[derive(Debug)]
pub(super) struct StatusError {
    pub(super) status: u16,
    /// The store's code for it; empty if it has none.
    pub(super) code: String,
    /// Whether it is the answer to a request for credentials.
    pub(super) is_for_credentials: bool,
}

impl std::fmt::Display for StatusError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "status {} {}", self.status, self.code)
    }
}

impl std::error::Error for StatusError {}

/// Statuses for which the client has distinguishable errors.
const TOLD_APART: [u16; 4] = [401, 403, 404, 412];
/// Maximum length of a store's answer that is searched for its code.
const SAID_BYTES_MAX: usize = 16 << 10;

/// Returns the code in an error answer: of XML, or of the JSON that token servers answer. The rest is not kept, because
/// some stores repeat the signed headers of a request.
fn code(said: &str) -> &str {
    let between = |before: &str, after: &str| {
        said.split_once(before).and_then(|(_, rest)| rest.split_once(after)).map(|(code, _)| code)
    };
    let code = between("<Code>", "</Code>").or_else(|| between("\"error\":", ",")).unwrap_or_default();
    let code = code.trim_matches([' ', '"', '}']);
    let is_code = code.len() <= 64 && code.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    if is_code { code } else { "" }
}

/// Makes clients that count the traffic of one bucket.
#[derive(Debug)]
pub(super) struct Metered {
    pub(super) meter: Arc<Meter>,
    pub(super) bill: Arc<Bill>,
}

impl HttpConnector for Metered {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let inner = ReqwestConnector::default().connect(options)?;
        let (meter, bill) = (Arc::clone(&self.meter), Arc::clone(&self.bill));
        Ok(HttpClient::new(MeteredClient { inner, meter, bill }))
    }
}

#[derive(Debug)]
struct MeteredClient {
    inner: HttpClient,
    meter: Arc<Meter>,
    bill: Arc<Bill>,
}

impl MeteredClient {
    /// Sends a request for credentials.
    async fn ask_for_credentials(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let response = self.inner.execute(request).await?;
        // The client of S3 distinguishes the statuses of the machine's metadata.
        if self.bill.cloud == Cloud::Aws || response.status().as_u16() < 400 {
            return Ok(response);
        }
        let (parts, body) = response.into_parts();
        let (status, code) = (parts.status.as_u16(), code_of(&parts.headers, body).await);
        let error = StatusError { status, code, is_for_credentials: true };
        Err(HttpError::new(HttpErrorKind::Unknown, error))
    }
}

#[async_trait]
impl HttpService for MeteredClient {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let uri = request.uri();
        let target = Target {
            host: uri.host().unwrap_or_default(),
            path: uri.path(),
            query: uri.query().unwrap_or_default(),
        };
        let Some(line) = self.bill.line(request.method().as_str(), target) else {
            return self.ask_for_credentials(request).await;
        };
        one_more(self.meter.counter(line));
        let sent = request.body().content_length() as u64;
        self.meter.bytes_up.fetch_add(sent, Ordering::Relaxed);
        let (mut parts, body) = self.inner.execute(request).await?.into_parts();
        let status = parts.status.as_u16();
        if status >= 400 {
            let code = code_of(&parts.headers, body).await;
            if TOLD_APART.contains(&status) {
                parts.headers.remove("content-length");
                return Ok(HttpResponse::from_parts(parts, code.into()));
            }
            let error = StatusError { status, code, is_for_credentials: false };
            return Err(HttpError::new(HttpErrorKind::Unknown, error));
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

/// Returns the code of an error answer. Azure repeats it in a header, because the answer to `HEAD` has no body.
async fn code_of(headers: &HeaderMap, body: HttpResponseBody) -> String {
    let text = Limited::new(body, SAID_BYTES_MAX).collect().await;
    let text = text.map(|text| String::from_utf8_lossy(&text.to_bytes()).into_owned()).unwrap_or_default();
    let in_header = headers.get("x-ms-error-code").and_then(|code| code.to_str().ok()).unwrap_or_default();
    match code(&text) {
        "" => code(&format!("<Code>{in_header}</Code>")).to_owned(),
        code => code.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_an_error_the_code_is_kept() {
        assert_eq!(code("<Error><Code>ExpiredToken</Code><Token-0>abc</Token-0></Error>"), "ExpiredToken");
        assert_eq!(code("{\"error\":\"invalid_grant\",\"error_description\":\"Bad\"}"), "invalid_grant");
        assert_eq!(code("{\"error\": \"invalid_client\", \"x\": 1}"), "invalid_client");
        for said in ["", "<Code>a key</Code>", "<Code>abc", "<html>"] {
            assert_eq!(code(said), "");
        }
    }
}
