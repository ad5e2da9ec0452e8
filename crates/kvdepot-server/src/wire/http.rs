//! HTTP management: the requests of InfiniStore's server, health and metrics. Requests that change or walk the depot
//! need the token if there is one, and otherwise must not come from a web page.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use kvdepot_core::Result;
use kvdepot_depot::values::Values;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};

use super::self_test::self_test;
use super::shared::Door;
use super::tls;
use crate::http::answer::{Answer, error, failed, json};
use crate::http::browser;
use crate::http::pages::{Page, Reveals, Subject};
use crate::http::token;
use crate::http::visitors::{Place, Visitors};
use crate::log_limit::LogLimit;

/// Limit of concurrent connections.
const VISITORS_MAX: usize = 64;
/// Limit of concurrent requests that walk or change the depot. It is below that of connections, so that there is always
/// a place for `/health`.
const HEAVY_MAX: usize = 16;
/// Pause after a connection that could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// The longest total time of a visit.
const VISIT_MAX: Duration = Duration::from_secs(120);

/// State shared by all connections.
struct Http {
    door: Arc<Door>,
    heavy: Semaphore,
    own_name: String,
    refused: LogLimit,
}

pub(super) async fn serve(door: Arc<Door>, listener: TcpListener, mut closing: watch::Receiver<bool>) {
    let (visitors, not_accepted) = (Visitors::new(VISITORS_MAX), LogLimit::default());
    let http = Arc::new(Http {
        door,
        heavy: Semaphore::new(HEAVY_MAX),
        own_name: browser::own_name(),
        refused: LogLimit::default(),
    });
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = closing.changed() => return,
        };
        let tcp = match accepted {
            Ok((tcp, _)) => tcp,
            Err(error) => {
                not_accepted.line(|left_out| {
                    tracing::warn!(
                        "a connection for HTTP management could not be accepted: {error}{left_out}"
                    );
                });
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let place = tokio::select! {
            place = visitors.admit() => place,
            _ = closing.changed() => return,
        };
        let visitor = Arc::clone(&place.visitor);
        let task = tokio::spawn(visit(Arc::clone(&http), tcp, place));
        visitor.served_by(task.abort_handle());
    }
}

async fn visit(http: Arc<Http>, tcp: TcpStream, place: Place) {
    let visitor = Arc::clone(&place.visitor);
    let (tls, stall) = (http.door.tls.clone(), http.door.config.stall());
    let service = service_fn(move |request| {
        let (http, answering) = (Arc::clone(&http), visitor.answering());
        async move {
            let _answering = answering;
            Ok::<_, Infallible>(answer(&http, request).await)
        }
    });
    let mut builder = hyper::server::conn::http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(stall);
    let visit = async {
        match tls {
            None => builder.serve_connection(TokioIo::new(tcp), service).await.is_ok(),
            Some(acceptor) => match tls::accept(&acceptor, tcp).await {
                Ok(tls) => builder.serve_connection(TokioIo::new(tls), service).await.is_ok(),
                Err(_) => false,
            },
        }
    };
    // A client that stays longer, or does not speak HTTP, is disconnected.
    let _ = tokio::time::timeout(VISIT_MAX, visit).await;
}

/// A page of this door: one of every depot's, or one of its own. A new one of its own needs a line in
/// [`WirePage::OWN`], [`WirePage::entry`] and [`WirePage::answer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WirePage {
    Common(Page),
    Purge,
    KvmapLen,
    Selftest,
}

impl WirePage {
    /// Those that only this door has.
    const OWN: [Self; 3] = [Self::Purge, Self::KvmapLen, Self::Selftest];

    /// Returns the page at a path.
    fn at(path: &str) -> Option<Self> {
        let own = || Self::OWN.into_iter().find(|page| page.entry().0 == path);
        Page::at(path).map(Self::Common).or_else(own)
    }

    /// Returns its path and method.
    const fn entry(self) -> (&'static str, Method) {
        match self {
            Self::Common(page) => (page.path(), Page::METHOD),
            Self::Purge => ("/purge", Method::POST),
            Self::KvmapLen => ("/kvmap_len", Method::GET),
            Self::Selftest => ("/selftest", Method::GET),
        }
    }

    /// Returns whether it walks or changes the depot, or reveals data that the token protects.
    const fn is_heavy(self) -> bool {
        match self {
            Self::Common(page) => matches!(page.reveals(), Reveals::State | Reveals::Blocks),
            _ => true,
        }
    }

    /// Answers a request for it that may be answered.
    async fn answer(self, http: &Http, request: &Request<Incoming>) -> Answer {
        let door = &http.door;
        match self {
            Self::Common(page) => {
                // Namespaces are named only to those who may read `/status`.
                let names_namespaces = page.reveals() != Reveals::Numbers || refusal(http, request).is_none();
                let series = Some(&**door.counters.registry());
                let subject = Subject { depot: &door.depot, series, names_namespaces };
                page.answer(&subject, request.uri().query()).await
            }
            Self::Purge => match apart(door, Values::purge).await {
                Ok(count) => {
                    tracing::info!("{count} values were purged");
                    json(StatusCode::OK, &serde_json::json!({"status": "ok", "num": count}))
                }
                Err(error) => failed(&error),
            },
            Self::KvmapLen => match apart(door, Values::count).await {
                Ok(count) => json(StatusCode::OK, &serde_json::json!({"len": count})),
                Err(error) => failed(&error),
            },
            Self::Selftest => match apart(door, self_test).await {
                Ok(()) => json(StatusCode::OK, &serde_json::json!({"status": "ok"})),
                Err(error) => failed(&error),
            },
        }
    }
}

async fn answer(http: &Http, request: Request<Incoming>) -> Answer {
    let Some(page) = WirePage::at(request.uri().path()) else {
        let own = WirePage::OWN.into_iter().map(|page| page.entry().0);
        let pages: Vec<_> = Page::ALL.into_iter().map(Page::path).chain(own).collect();
        return error(StatusCode::NOT_FOUND, &format!("no such page: there are {}", pages.join(", ")));
    };
    // The page holds no data: its own requests need the token.
    if page == WirePage::Common(Page::Root)
        && http.door.token.is_none()
        && let Some(refused) = refused(http, &request)
    {
        return refused;
    }
    let _heavy = if page.is_heavy() {
        if let Some(refused) = refused(http, &request) {
            return refused;
        }
        let Ok(permit) = http.heavy.try_acquire() else {
            return error(
                StatusCode::SERVICE_UNAVAILABLE,
                "too many management requests are under way: try again",
            );
        };
        Some(permit)
    } else {
        None
    };
    if *request.method() != page.entry().1 {
        return error(StatusCode::METHOD_NOT_ALLOWED, "another method is wanted");
    }
    page.answer(http, &request).await
}

async fn apart<T: Send + 'static>(door: &Arc<Door>, work: fn(&Values) -> Result<T>) -> Result<T> {
    // A separate owner, so that none of its leases outlives this call.
    let values = door.values.for_owner(door.depot.direct());
    let task = tokio::task::spawn_blocking(move || work(&values)).await;
    task.unwrap_or_else(|e| {
        Err(kvdepot_core::Error::new(kvdepot_core::ErrorKind::Io, "ended early").with_source(e))
    })
}

/// Returns why a request may not walk or change the depot.
fn refusal(http: &Http, request: &Request<Incoming>) -> Option<(StatusCode, &'static str)> {
    let headers = request.headers();
    match &http.door.token {
        Some(wanted) => {
            (!token::is_sent(wanted, headers)).then_some((StatusCode::UNAUTHORIZED, token::WANTED))
        }
        None => browser::refusal(headers, &http.own_name).map(|why| (StatusCode::FORBIDDEN, why)),
    }
}

/// Returns the answer to a request that may not walk or change the depot, and logs it.
fn refused(http: &Http, request: &Request<Incoming>) -> Option<Answer> {
    let (status, why) = refusal(http, request)?;
    let (method, path) = (request.method(), request.uri().path());
    http.refused.line(|left_out| tracing::warn!("{method} {path} was refused: {why}{left_out}"));
    Some(error(status, why))
}
