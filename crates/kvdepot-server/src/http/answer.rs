//! Answers in the forms that pages use.

use http_body_util::Full;
use hyper::body::Bytes;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Response, StatusCode};
use kvdepot_core::Error;
use serde_json::Value;

pub(crate) type Answer = Response<Full<Bytes>>;

/// Returns the answer to a request that failed in the depot.
pub(crate) fn failed(error: &Error) -> Answer {
    tracing::warn!("an administrator's request failed: {error}");
    json(StatusCode::INTERNAL_SERVER_ERROR, &serde_json::json!({"error": error.to_string()}))
}

pub(crate) fn error(status: StatusCode, why: &str) -> Answer {
    json(status, &serde_json::json!({"error": why}))
}

pub(crate) fn json(status: StatusCode, value: &Value) -> Answer {
    answer_with(status, "application/json", value.to_string())
}

pub(super) fn answer_with(status: StatusCode, kind: &'static str, text: String) -> Answer {
    let mut answer = Response::new(Full::new(Bytes::from(text)));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    answer
}
