//! The listening side: admission, background eviction, and orderly shutdown.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kvdepot_core::{Error, Result};
use kvdepot_depot::Depot;
use kvdepot_depot::values::Values;
use prometheus_client::registry::Registry;
use tokio::net::{TcpListener, TcpSocket};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::config::WireConfig;
use super::conversation::converse;
use super::counters::Counters;
use super::http;
use super::rdma::Rdma;
use super::shared::Door;
use super::tls;
use crate::descriptors;
use crate::log_limit::LogLimit;

/// Number of connections that may wait to be accepted.
const BACKLOG: u32 = 1024;
/// Number of threads that wait for tiers at a time. Further requests wait for one of them.
const BLOCKING_THREADS_MAX: usize = 256;
/// How long accepting pauses after the system had no descriptor for a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// An open wire door. Dropping it ends all connections; [`WireDoor::close`] does so in an orderly way.
#[derive(Debug)]
pub struct WireDoor {
    runtime: Option<Runtime>,
    draining: watch::Sender<bool>,
    service: SocketAddr,
    manage: Option<SocketAddr>,
    listener: Option<tokio::task::JoinHandle<()>>,
    drain: Duration,
    rdma: Option<Arc<Rdma>>,
    series: Arc<Registry>,
}

impl WireDoor {
    /// Checks that the configured files can be read: the token, certificate and key.
    pub fn check(config: &WireConfig) -> Result<()> {
        config.token()?;
        config.tls.as_ref().map(|tls| tls::acceptor(&tls.certificate_file, &tls.key_file)).transpose()?;
        Ok(())
    }

    /// Opens a wire door to a depot, with RDMA if configured.
    pub fn open(mut config: WireConfig, depot: &Arc<Depot>) -> Result<Self> {
        let token = config.token()?;
        if !config.host.is_loopback() && token.is_none() {
            tracing::warn!(
                "THE DEPOT LISTENS ON THE NETWORK WITHOUT A TOKEN: anyone who reaches {} can read, change and delete \
                 everything in it. Set a token (--token-file), or listen on 127.0.0.1.",
                config.host
            );
        }
        let tls =
            config.tls.as_ref().map(|tls| tls::acceptor(&tls.certificate_file, &tls.key_file)).transpose()?;
        config.connections_max = descriptors::reserve(0, Some(&config)).wire;
        let pool_bytes = depot.config().mapped_bytes();
        let values = Values::open(depot.direct(), pool_bytes, config.value_bytes_min)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(config.worker_threads())
            .max_blocking_threads(BLOCKING_THREADS_MAX)
            .thread_name("kvdepot-wire")
            .enable_all()
            .build()
            .map_err(|e| Error::io("cannot start the network listener's threads", e))?;
        let (draining, closing) = watch::channel(false);
        let drain = Duration::from_millis(config.drain_ms);
        let (service_at, manage_at) = (
            SocketAddr::new(config.host, config.service_port),
            config.manage_port.map(|p| SocketAddr::new(config.host, p)),
        );
        let entered = runtime.enter();
        let listener = listen(service_at)?;
        let managing = manage_at.map(listen).transpose()?;
        drop(entered);
        let service = local_addr(&listener)?;
        let manage = managing.as_ref().map(local_addr).transpose()?;
        let protection =
            format!("{} TLS, {} a token", with_or_not(tls.is_some()), with_or_not(token.is_some()));
        let counters = Arc::new(Counters::new());
        let rdma = config.rdma.as_ref().map(|rdma| Rdma::open(rdma, &config, depot, &counters)).transpose();
        let rdma = rdma.map_err(|error| error.with("asked_for", "RDMA"))?.map(Arc::new);
        let door = Arc::new(Door {
            config,
            depot: Arc::clone(depot),
            values,
            token,
            tls,
            rdma: rdma.clone(),
            counters: Arc::clone(&counters),
        });
        if door.config.evict.periodic {
            runtime.spawn(evict(Arc::clone(&door)));
        }
        if let Some(managing) = managing {
            runtime.spawn(http::serve(Arc::clone(&door), managing, closing.clone()));
        }
        let listener = runtime.spawn(accept(door, listener, closing));
        tracing::info!("the network listener is ready at {service}, {protection}");
        if let Some(manage) = manage {
            tracing::info!("HTTP management is open at {manage}, {protection}");
        }
        let (runtime, listener, series) = (Some(runtime), Some(listener), Arc::clone(counters.registry()));
        Ok(Self { runtime, draining, service, manage, listener, drain, rdma, series })
    }

    /// Returns the address for clients.
    pub const fn service_address(&self) -> SocketAddr {
        self.service
    }

    /// Returns the address of the HTTP management.
    pub const fn manage_address(&self) -> Option<SocketAddr> {
        self.manage
    }

    /// Returns the series of its metrics.
    pub fn series(&self) -> Arc<Registry> {
        Arc::clone(&self.series)
    }

    /// Stops accepting, lets requests in flight finish within limits, and ends all connections.
    pub fn close(mut self) {
        self.end(self.drain);
    }

    fn end(&mut self, patience: Duration) {
        self.draining.send_replace(true);
        let Some(runtime) = self.runtime.take() else { return };
        if let Some(listener) = self.listener.take() {
            let ended = runtime.block_on(async { tokio::time::timeout(patience, listener).await.is_ok() });
            if !ended {
                tracing::warn!("connections were cut off: they did not end within {patience:?}");
            }
        }
        runtime.shutdown_timeout(Duration::from_secs(1));
        if let Some(rdma) = self.rdma.take() {
            rdma.close();
        }
    }
}

impl Drop for WireDoor {
    fn drop(&mut self) {
        self.end(Duration::ZERO);
    }
}

const fn with_or_not(is_on: bool) -> &'static str {
    if is_on { "with" } else { "without" }
}

fn listen(at: SocketAddr) -> Result<TcpListener> {
    let open = || {
        let socket = if at.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        // Without it a restarted server waits until the kernel has forgotten its old connections.
        socket.set_reuseaddr(true)?;
        socket.bind(at)?;
        socket.listen(BACKLOG)
    };
    open().map_err(|e| Error::io("cannot listen: is the port in use?", e).with("address", at))
}

fn local_addr(listener: &TcpListener) -> Result<SocketAddr> {
    listener.local_addr().map_err(|e| Error::io("cannot tell the port", e))
}

async fn accept(door: Arc<Door>, listener: TcpListener, mut closing: watch::Receiver<bool>) {
    let mut connections = JoinSet::new();
    let (full, not_accepted) = (LogLimit::default(), LogLimit::default());
    while !*closing.borrow() {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = closing.changed() => break,
        };
        while connections.try_join_next().is_some() {}
        match accepted {
            Ok(_) if connections.len() >= door.config.connections_max => {
                door.counters.refused("full");
                let open = connections.len();
                full.line(|left_out| {
                    tracing::warn!("a connection was refused: {open} are open already{left_out}");
                });
            }
            Ok((tcp, _)) => {
                let (door, closing) = (Arc::clone(&door), closing.clone());
                door.counters.accepted.inc();
                door.counters.connections.inc();
                let open = Open(Arc::clone(&door.counters));
                connections.spawn(async move {
                    let _open = open;
                    converse(door, tcp, closing).await;
                });
            }
            Err(error) => {
                not_accepted.line(|left_out| {
                    tracing::warn!("a connection could not be accepted: {error}{left_out}");
                });
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// Counts a connection as open until it ends in any way.
struct Open(Arc<Counters>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.connections.dec();
    }
}

async fn evict(door: Arc<Door>) {
    let config = door.config.evict;
    let mut ticks = tokio::time::interval(Duration::from_millis(config.interval_ms));
    let direct = door.depot.direct();
    loop {
        ticks.tick().await;
        let used = direct.used_percent();
        if used < config.max_percent {
            continue;
        }
        let direct = direct.clone();
        let gone = tokio::task::spawn_blocking(move || direct.evict_to_percent(config.min_percent)).await;
        tracing::info!("{used:.0} % of the pool were in use: {} blocks were evicted", gone.unwrap_or(0));
    }
}
