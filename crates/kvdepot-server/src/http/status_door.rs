//! The depot's status over HTTP, with or without a wire door: at a Unix socket next to its own, and if requested at a
//! port, which asks for a token or refuses web pages. It is read-only. A depot that cannot open this door serves
//! nevertheless.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{HeaderMap, Method, Request, StatusCode, Uri};
use hyper_util::rt::{TokioIo, TokioTimer};
use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_depot::Depot;
use kvdepot_wire::own::Token;
use parking_lot::RwLock;
use prometheus_client::registry::Registry;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpSocket, UnixListener};
use tokio::runtime::Runtime;

use super::answer::{Answer, error};
use super::browser;
use super::pages::{Page, Reveals, Subject};
use super::token;
use super::visitors::{Place, Visitors};
use crate::lock::FileId;
use crate::log_limit::LogLimit;

/// Checks requests at the port. `None` at the socket, which no browser and no other user reaches.
type Guard = Option<Arc<PortGuard>>;

struct PortGuard {
    own_name: String,
    /// The secret for the depot's state and its blocks.
    token: Option<Token>,
    /// Refuses pages about blocks where there is no token, and says where they are.
    not_here: String,
    refused: LogLimit,
}

impl PortGuard {
    fn new(socket: &Path, token: Option<Token>) -> Self {
        let not_here = format!(
            "this port has no token, so everyone who reaches it can read it: ask at the depot's Unix socket {}, as \
             kvdepot why does, or at its network listener, or set a token (metrics_token_file)",
            socket.display()
        );
        Self { own_name: browser::own_name(), token, not_here, refused: LogLimit::default() }
    }

    /// Returns why a request is refused. That the depot lives tells a web page nothing that it could use. With a token,
    /// state and blocks need it, as at the network listener. Without one, other pages are for everyone who reaches the
    /// port, except those about single requests, blocks and secret facts.
    fn refusal(&self, path: &str, headers: &HeaderMap) -> Option<Answer> {
        let reveals = Page::at(path).map(Page::reveals);
        if reveals == Some(Reveals::Life) {
            return None;
        }
        let (status, why) = match &self.token {
            Some(_)
                if matches!(reveals, Some(Reveals::State | Reveals::Blocks)) && !self.is_trusted(headers) =>
            {
                (StatusCode::UNAUTHORIZED, token::WANTED)
            }
            Some(_) => return None,
            None => {
                let why = browser::refusal(headers, &self.own_name)
                    .or_else(|| (reveals == Some(Reveals::Blocks)).then_some(&*self.not_here))?;
                (StatusCode::FORBIDDEN, why)
            }
        };
        self.refused.line(|left_out| tracing::warn!("a request for {path} was refused: {why}{left_out}"));
        Some(error(status, why))
    }

    /// Returns whether the reader may know the names of namespaces, if it may read the page at all.
    fn is_trusted(&self, headers: &HeaderMap) -> bool {
        self.token.as_ref().is_none_or(|token| token::is_sent(token, headers))
    }
}

/// Limit of concurrent connections, of both doors together.
const VISITORS_MAX: usize = 16;
/// The longest time for a request's head, and for a complete visit.
const HEAD_WAIT: Duration = Duration::from_secs(10);
const VISIT_MAX: Duration = Duration::from_secs(60);
/// Pause after a connection that could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long closing the door waits for answers in flight.
const END_WAIT: Duration = Duration::from_secs(1);

/// Returns the Unix socket for HTTP of the depot at `socket`.
pub fn socket_of(socket: &Path) -> PathBuf {
    let mut name = socket.as_os_str().to_owned();
    name.push(".http");
    name.into()
}

/// What the pages tell about.
#[derive(Debug)]
struct Told {
    depot: Arc<Depot>,
    /// Series of the network listener, if it is open.
    listener: RwLock<Option<Arc<Registry>>>,
}

/// An open door. Dropping it closes it.
#[derive(Debug)]
pub struct StatusDoor {
    told: Arc<Told>,
    runtime: Option<Runtime>,
    socket: Option<(PathBuf, FileId)>,
    port: Option<SocketAddr>,
}

impl StatusDoor {
    /// Opens the door of the depot at `socket` as far as possible, and logs what is not.
    pub fn open(socket: &Path, depot: &Arc<Depot>) -> Self {
        let told = Arc::new(Told { depot: Arc::clone(depot), listener: RwLock::default() });
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("kvdepot-status")
            .enable_all()
            .build();
        let runtime = match runtime {
            Ok(runtime) => runtime,
            Err(error) => {
                tracing::error!("cannot serve metrics: no thread can be started: {error}");
                return Self { told, runtime: None, socket: None, port: None };
            }
        };
        // One set for each door: strangers at the port displace nobody at the socket.
        let visitors = || Arc::new(Visitors::new(VISITORS_MAX));
        let (mut path, mut at) = (None, None);
        let entered = runtime.enter();
        match listen_at_socket(&socket_of(socket)) {
            Ok((listener, id)) => {
                path = Some((socket_of(socket), id));
                tokio::spawn(serve_socket(listener, Arc::clone(&told), visitors()));
            }
            Err(error) => tracing::error!("cannot open the Unix socket for metrics: {error}"),
        }
        match depot.config().metrics_port.map(|port| open_port(port, depot)) {
            None => {}
            Some(Ok((listener, address, token))) => {
                at = Some(address);
                tracing::info!(
                    "metrics are at http://{address}/metrics, the status page at http://{address}/"
                );
                let guard = PortGuard::new(&socket_of(socket), token);
                tokio::spawn(serve_port(listener, Arc::clone(&told), visitors(), guard));
            }
            Some(Err(error)) => tracing::error!("cannot open the metrics port: {error}"),
        }
        drop(entered);
        Self { told, runtime: Some(runtime), socket: path, port: at }
    }

    /// Shows these series of the network listener among the metrics from now on.
    pub fn show_listener(&self, series: Option<Arc<Registry>>) {
        *self.told.listener.write() = series;
    }

    /// Returns the listening address of the port.
    pub const fn port_address(&self) -> Option<SocketAddr> {
        self.port
    }
}

impl Drop for StatusDoor {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(END_WAIT);
        }
        if let Some((path, own)) = &self.socket {
            // It may be another depot's by now.
            if FileId::at(path).is_ok_and(|there| there.as_ref() == Some(own)) {
                let _ = std::fs::remove_file(path);
            }
        }
    }
}

/// Listens at the path. The caller holds the lock of the depot's own socket, so an existing socket is a dead depot's.
fn listen_at_socket(path: &Path) -> Result<(UnixListener, FileId)> {
    let context = |what: &'static str| move |e| Error::io(what, e).with("path", path.display());
    if let Ok(there) = std::fs::symlink_metadata(path) {
        if !there.file_type().is_socket() {
            let what = "something else is in the place of the socket for metrics: remove it";
            return Err(Error::new(ErrorKind::Config, what).with("path", path.display()));
        }
        std::fs::remove_file(path).map_err(context("cannot remove a dead depot's socket"))?;
    }
    let listener = UnixListener::bind(path).map_err(context("cannot listen"))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
        .map_err(context("cannot restrict the socket to its user"))?;
    let gone = || context("cannot check the socket")(std::io::ErrorKind::NotFound.into());
    let id = FileId::at(path).map_err(context("cannot check the socket"))?.ok_or_else(gone)?;
    Ok((listener, id))
}

/// Listens where the depot's configuration says. A token that cannot be read opens nothing.
fn open_port(port: u16, depot: &Depot) -> Result<(TcpListener, SocketAddr, Option<Token>)> {
    let config = depot.config();
    let token = config.metrics_token_file.as_deref().map(token::read).transpose()?;
    let (listener, address) = listen_at_port(SocketAddr::new(config.metrics_host, port))?;
    if !address.ip().is_loopback() && token.is_none() {
        tracing::warn!(
            "THE DEPOT'S STATUS IS ON THE NETWORK WITHOUT A TOKEN: anyone who reaches {address} can read its \
             configuration, errors and namespaces. Set a token (metrics_token_file), or listen on 127.0.0.1."
        );
    }
    Ok((listener, address, token))
}

fn listen_at_port(at: SocketAddr) -> Result<(TcpListener, SocketAddr)> {
    let open = || {
        let socket = if at.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        socket.set_reuseaddr(true)?;
        socket.bind(at)?;
        let listener = socket.listen(u32::try_from(VISITORS_MAX).unwrap_or(u32::MAX))?;
        let address = listener.local_addr()?;
        Ok((listener, address))
    };
    open().map_err(|e| {
        Error::io("cannot listen: does another depot have this port? Each needs its own metrics_port", e)
            .with("address", at)
    })
}

async fn serve_socket(listener: UnixListener, told: Arc<Told>, visitors: Arc<Visitors>) {
    let refused = LogLimit::default();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => admit(stream, &told, &visitors, None).await,
            Err(error) => not_accepted(&refused, &error).await,
        }
    }
}

async fn serve_port(listener: TcpListener, told: Arc<Told>, visitors: Arc<Visitors>, guard: PortGuard) {
    let refused = LogLimit::default();
    let guard = Arc::new(guard);
    loop {
        match listener.accept().await {
            Ok((stream, _)) => admit(stream, &told, &visitors, Some(Arc::clone(&guard))).await,
            Err(error) => not_accepted(&refused, &error).await,
        }
    }
}

async fn not_accepted(limit: &LogLimit, error: &std::io::Error) {
    limit.line(|left_out| {
        tracing::warn!("a connection for metrics could not be accepted: {error}{left_out}");
    });
    tokio::time::sleep(ACCEPT_PAUSE).await;
}

async fn admit<S>(stream: S, told: &Arc<Told>, visitors: &Visitors, guard: Guard)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let place = visitors.admit().await;
    let visitor = Arc::clone(&place.visitor);
    let task = tokio::spawn(visit(stream, Arc::clone(told), place, guard));
    visitor.served_by(task.abort_handle());
}

async fn visit<S>(stream: S, told: Arc<Told>, place: Place, guard: Guard)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let visitor = Arc::clone(&place.visitor);
    let service = service_fn(move |request: Request<Incoming>| {
        let answering = visitor.answering();
        let (path, headers) = (request.uri().path(), request.headers());
        let refused = guard.as_ref().and_then(|guard| guard.refusal(path, headers));
        let names_namespaces = guard.as_ref().is_none_or(|guard| guard.is_trusted(headers));
        let told = Arc::clone(&told);
        async move {
            let _answering = answering;
            Ok::<_, Infallible>(match refused {
                Some(refused) => refused,
                None => answer(&told, request.method(), request.uri(), names_namespaces).await,
            })
        }
    });
    let mut builder = hyper::server::conn::http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEAD_WAIT);
    let visit = builder.serve_connection(TokioIo::new(stream), service);
    // A client that stays longer, or does not speak HTTP, is disconnected.
    let _ = tokio::time::timeout(VISIT_MAX, visit).await;
}

async fn answer(told: &Told, method: &Method, uri: &Uri, names_namespaces: bool) -> Answer {
    match Page::at(uri.path()) {
        Some(page) if *method == Page::METHOD => {
            let series = told.listener.read().clone();
            let subject = Subject { depot: &told.depot, series: series.as_deref(), names_namespaces };
            page.answer(&subject, uri.query()).await
        }
        Some(_) => error(StatusCode::METHOD_NOT_ALLOWED, "only GET is answered"),
        None => {
            let pages = Page::ALL.map(Page::path).join(", ");
            error(StatusCode::NOT_FOUND, &format!("no such page: there are {pages}"))
        }
    }
}
