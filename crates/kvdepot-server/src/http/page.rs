//! The status page: a self-contained HTML file that reads `/status`, `/history`, `/config` and `/errors` of the door
//! that served it.

use http_body_util::Full;
use hyper::Response;
use hyper::body::Bytes;
use hyper::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName, HeaderValue};
use hyper::header::{REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS};
use kvdepot_depot::DepotConfig;
use serde_json::{Map, Value, json};

use super::answer::Answer;

const HTML: &str = include_str!("status.html");

/// Nothing but the page's own script and style runs, known by their SHA-256 (tests/python/test_status_page.py computes both),
/// and they reach this door alone.
const POLICY: &str = "default-src 'none'; script-src 'sha256-u8jNiwAJaurOeyCalG81oy4mWl9BC3f0zvbWEagou2E='; style-src 'sha256-OjDje3l0wS+dLiXNLN0bIKQU9HPEwsjmwITFKdV2vWk='; connect-src 'self'; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const HEADERS: [(HeaderName, &str); 6] = [
    (CONTENT_TYPE, "text/html; charset=utf-8"),
    (CONTENT_SECURITY_POLICY, POLICY),
    (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (X_FRAME_OPTIONS, "DENY"),
    (REFERRER_POLICY, "no-referrer"),
    (CACHE_CONTROL, "no-store"),
];

/// `/`: the page, which holds no data.
pub(crate) fn page() -> Answer {
    let mut answer = Response::new(Full::new(Bytes::from_static(HTML.as_bytes())));
    for (name, value) in HEADERS {
        answer.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    answer
}

/// `/config`: the depot's configuration. It has paths and addresses, and no secrets: tokens are in files.
pub(crate) fn config(config: &DepotConfig) -> Value {
    let mut whole = Map::new();
    let mut put = |name: &str, value: Value| whole.insert(name.to_owned(), value);
    put("pipeline", json!(config.pipeline));
    put("pool_bytes", json!(config.pool_bytes));
    put("pool_bytes_max", json!(config.pool_bytes_max));
    put("eviction", json!(config.eviction));
    put("timeout_ms", json!(config.timeout_ms));
    put("drain_timeout_ms", json!(config.drain_timeout_ms));
    put("pool_keep_ms", json!(config.pool_keep_ms));
    put("pool_mlock", json!(config.pool_mlock));
    put("pool_numa", json!(config.pool_numa));
    put("metrics_port", json!(config.metrics_port));
    put("metrics_host", json!(config.metrics_host));
    put("metrics_token_file", json!(config.metrics_token_file));
    put("evicted_blocks_remembered", json!(config.evicted_blocks_remembered));
    put("placement", json!(config.placement));
    for (name, settings) in &config.tiers {
        put(&name.to_lowercase(), settings.clone());
    }
    Value::Object(whole)
}
