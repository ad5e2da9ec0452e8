//! HTTP management: what InfiniStore's server has, and health and metrics. What changes or walks the depot needs the
//! token where there is one.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use kvdepot_core::Result;
use kvdepot_depot::values::Values;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};

use super::door::{Door, self_test};
use super::tls;

/// Requests of administrators at a time.
const VISITORS_MAX: usize = 64;
/// How long a visitor may take to say what it wants.
const HEADER_WAIT: Duration = Duration::from_secs(5);
/// How long a visitor may stay in all.
const VISIT_MAX: Duration = Duration::from_secs(120);

type Answer = Response<Full<Bytes>>;

pub(super) async fn serve(door: Arc<Door>, listener: TcpListener, mut closing: watch::Receiver<bool>) {
    let visitors = Arc::new(Semaphore::new(VISITORS_MAX));
    loop {
        let Ok(permit) = Arc::clone(&visitors).acquire_owned().await else { return };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = closing.changed() => return,
        };
        let Ok((tcp, _)) = accepted else {
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let (door, tls) = (Arc::clone(&door), door.tls.clone());
        tokio::spawn(async move {
            let _permit = permit;
            let service = service_fn(move |request| {
                let door = Arc::clone(&door);
                async move { Ok::<_, Infallible>(answer(door, request).await) }
            });
            let mut http = hyper::server::conn::http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(HEADER_WAIT);
            let visit = async {
                match tls {
                    None => http.serve_connection(TokioIo::new(tcp), service).await.is_ok(),
                    Some(acceptor) => match tls::accept(&acceptor, tcp).await {
                        Ok(tls) => http.serve_connection(TokioIo::new(tls), service).await.is_ok(),
                        Err(_) => false,
                    },
                }
            };
            // Who stays longer, or speaks no HTTP, is shown out.
            let _ = tokio::time::timeout(VISIT_MAX, visit).await;
        });
    }
}

async fn answer(door: Arc<Door>, request: Request<Incoming>) -> Answer {
    match (request.method(), request.uri().path()) {
        (&Method::GET, "/health") => json(StatusCode::OK, &serde_json::json!({"status": "ok"})),
        (&Method::GET, "/metrics") => match door.counters.text(&door.depot.direct().stats()) {
            Ok(text) => answer_with(
                StatusCode::OK,
                "application/openmetrics-text; version=1.0.0; charset=utf-8",
                text,
            ),
            Err(error) => failed(&error),
        },
        (method, "/purge" | "/kvmap_len" | "/selftest") if !is_allowed(&door, &request) => {
            tracing::warn!("{method} {} was refused: no or another token", request.uri().path());
            json(
                StatusCode::UNAUTHORIZED,
                &serde_json::json!({"error": "send the token: Authorization: Bearer …"}),
            )
        }
        (&Method::POST, "/purge") => match apart(&door, Values::purge).await {
            Ok(count) => {
                tracing::info!("{count} values were purged");
                json(StatusCode::OK, &serde_json::json!({"status": "ok", "num": count}))
            }
            Err(error) => failed(&error),
        },
        (&Method::GET, "/kvmap_len") => match apart(&door, Values::count).await {
            Ok(count) => json(StatusCode::OK, &serde_json::json!({"len": count})),
            Err(error) => failed(&error),
        },
        (&Method::GET, "/selftest") => match apart(&door, self_test).await {
            Ok(()) => json(StatusCode::OK, &serde_json::json!({"status": "ok"})),
            Err(error) => failed(&error),
        },
        (_, "/purge" | "/kvmap_len" | "/selftest" | "/health" | "/metrics") => {
            json(StatusCode::METHOD_NOT_ALLOWED, &serde_json::json!({"error": "another method is wanted"}))
        }
        _ => json(StatusCode::NOT_FOUND, &serde_json::json!({"error": "no such page"})),
    }
}

async fn apart<T: Send + 'static>(door: &Arc<Door>, work: fn(&Values) -> Result<T>) -> Result<T> {
    // An owner of its own, so that nothing that it leases outlives this call.
    let values = door.values.for_owner(door.depot.direct());
    let task = tokio::task::spawn_blocking(move || work(&values)).await;
    task.unwrap_or_else(|e| {
        Err(kvdepot_core::Error::new(kvdepot_core::ErrorKind::Io, "ended early").with_source(e))
    })
}

fn is_allowed(door: &Door, request: &Request<Incoming>) -> bool {
    let Some(token) = &door.token else { return true };
    let said = request.headers().get(AUTHORIZATION).map(|value| value.as_bytes());
    said.and_then(|said| said.strip_prefix(b"Bearer ")).is_some_and(|said| token.is(said.trim_ascii()))
}

fn failed(error: &kvdepot_core::Error) -> Answer {
    tracing::warn!("an administrator's request failed: {error}");
    json(StatusCode::INTERNAL_SERVER_ERROR, &serde_json::json!({"error": error.to_string()}))
}

fn json(status: StatusCode, value: &serde_json::Value) -> Answer {
    answer_with(status, "application/json", value.to_string())
}

fn answer_with(status: StatusCode, kind: &'static str, text: String) -> Answer {
    let mut answer = Response::new(Full::new(Bytes::from(text)));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, hyper::header::HeaderValue::from_static(kind));
    answer
}
