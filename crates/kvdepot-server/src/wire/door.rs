//! The listening side: admission, eviction ahead of need, and an orderly end.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_depot::Depot;
use kvdepot_depot::values::Values;
use kvdepot_wire::own::Token;
use rustix::process::{Resource, Rlimit};
use tokio::net::{TcpListener, TcpSocket};
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use super::config::WireConfig;
use super::connection::converse;
use super::counters::Counters;
use super::http;
use super::rdma::Rdma;
use super::tls;

/// Connections that may wait to be accepted.
const BACKLOG: u32 = 1024;
/// Threads that wait for tiers at a time; more requests wait for one of them.
const BLOCKING_THREADS_MAX: usize = 256;
/// Descriptors of a TLS connection: its TCP socket, and both ends of the pair inside.
const TLS_DESCRIPTORS: u64 = 3;
/// Descriptors that are not connections: tiers, sockets, logs.
const DESCRIPTORS_BESIDE: u64 = 512;
/// How long no connection is accepted after the system had no descriptor for one.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What all connections share.
pub(super) struct Door {
    pub(super) config: WireConfig,
    pub(super) depot: Arc<Depot>,
    pub(super) values: Values,
    pub(super) token: Option<Token>,
    pub(super) tls: Option<TlsAcceptor>,
    pub(super) rdma: Option<Arc<Rdma>>,
    pub(super) counters: Arc<Counters>,
}

/// An open wire door. Dropping it ends all connections; [`WireDoor::close`] does so in order.
#[derive(Debug)]
pub struct WireDoor {
    runtime: Option<Runtime>,
    draining: watch::Sender<bool>,
    service: SocketAddr,
    manage: Option<SocketAddr>,
    listener: Option<tokio::task::JoinHandle<()>>,
    drain: Duration,
    rdma: Option<Arc<Rdma>>,
}

impl WireDoor {
    /// Opens a wire door to a depot; with RDMA where the configuration has it.
    pub fn open(config: WireConfig, depot: &Arc<Depot>) -> Result<Self> {
        let token = config.token()?;
        if !config.host.is_loopback() && token.is_none() {
            tracing::warn!(
                "THE WIRE DOOR IS OPEN TO THE NETWORK WITHOUT A TOKEN: whoever reaches {} can read, change and delete \
                 everything in it. Set a token, or listen at 127.0.0.1.",
                config.host
            );
        }
        let tls =
            config.tls.as_ref().map(|tls| tls::acceptor(&tls.certificate_file, &tls.key_file)).transpose()?;
        raise_descriptor_limit(descriptors_max(config.connections_max, tls.is_some()));
        let pool_bytes = depot.config().mapped_bytes();
        let values = Values::open(depot.direct(), pool_bytes, config.value_bytes_min)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(config.worker_threads())
            .max_blocking_threads(BLOCKING_THREADS_MAX)
            .thread_name("kvdepot-wire")
            .enable_all()
            .build()
            .map_err(|e| Error::io("cannot start the wire door's threads", e))?;
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
            counters,
        });
        if door.config.evict.periodic {
            runtime.spawn(evict(Arc::clone(&door)));
        }
        if let Some(managing) = managing {
            runtime.spawn(http::serve(Arc::clone(&door), managing, closing.clone()));
        }
        let listener = runtime.spawn(accept(door, listener, closing));
        tracing::info!("the wire door is open at {service}");
        if let Some(manage) = manage {
            tracing::info!("HTTP management is open at {manage}");
        }
        Ok(Self { runtime: Some(runtime), draining, service, manage, listener: Some(listener), drain, rdma })
    }

    /// Where clients connect.
    pub const fn service_address(&self) -> SocketAddr {
        self.service
    }

    /// Where the HTTP management is.
    pub const fn manage_address(&self) -> Option<SocketAddr> {
        self.manage
    }

    /// Accepts nobody any more, lets requests that have begun end within bounds, and ends all connections.
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

fn listen(at: SocketAddr) -> Result<TcpListener> {
    let open = || {
        let socket = if at.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        // A server that comes back must not wait until the kernel has forgotten its connections.
        socket.set_reuseaddr(true)?;
        socket.bind(at)?;
        socket.listen(BACKLOG)
    };
    open().map_err(|e| Error::io("cannot listen: is the port in use?", e).with("address", at))
}

fn local_addr(listener: &TcpListener) -> Result<SocketAddr> {
    listener.local_addr().map_err(|e| Error::io("cannot tell the port", e))
}

/// Descriptors that so many connections take, and all else.
const fn descriptors_max(connections_max: usize, has_tls: bool) -> u64 {
    let each = if has_tls { TLS_DESCRIPTORS } else { 1 };
    (connections_max as u64).saturating_mul(each).saturating_add(DESCRIPTORS_BESIDE)
}

/// Lets the process have as many descriptors as connections take, where the system allows it.
fn raise_descriptor_limit(wanted: u64) {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current >= wanted) {
        return;
    }
    let current = Some(limit.maximum.map_or(wanted, |maximum| maximum.min(wanted)));
    if rustix::process::setrlimit(Resource::Nofile, Rlimit { current, maximum: limit.maximum }).is_err()
        || limit.maximum.is_some_and(|maximum| maximum < wanted)
    {
        tracing::warn!(
            "the system allows fewer descriptors than the configured connections take: raise `ulimit -n` to {wanted}"
        );
    }
}

async fn accept(door: Arc<Door>, listener: TcpListener, mut closing: watch::Receiver<bool>) {
    let mut connections = JoinSet::new();
    while !*closing.borrow() {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = closing.changed() => break,
        };
        while connections.try_join_next().is_some() {}
        match accepted {
            Ok(_) if connections.len() >= door.config.connections_max => {
                door.counters.refused("full");
                tracing::warn!("a connection was refused: {} are open already", connections.len());
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
                tracing::warn!("a connection could not be accepted: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// Counts a connection as open, until it ends in whatever way.
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

/// Stores, finds and removes a value: whether the whole path through the pool works.
pub(super) fn self_test(values: &Values) -> Result<()> {
    let bad = |what: &str| Error::new(ErrorKind::Corrupt, what.to_owned());
    let mut key = [0; 16];
    rustix::rand::getrandom(&mut key, rustix::rand::GetRandomFlags::empty())
        .map_err(|e| Error::io("no random numbers", e.into()))?;
    let hash = Values::hash(&key);
    let mut slot = values.reserve(hash, key.len() as u64)?;
    let mut at = 0;
    for mut piece in slot.io_slices_mut(0, key.len()) {
        let len = piece.len();
        piece.copy_from_slice(&key[at..at + len]);
        at += len;
    }
    slot.publish()?;
    let value =
        values.get(hash, Duration::from_secs(5))?.ok_or_else(|| bad("a value was not found again"))?;
    let same = value.io_slices(0, value.len()).iter().flat_map(|piece| piece.to_vec()).eq(key);
    drop(value);
    values.remove(&[hash]);
    if same { Ok(()) } else { Err(bad("a value came back changed")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tls_connection_takes_three_descriptors() {
        assert_eq!(descriptors_max(4096, false), 4096 + DESCRIPTORS_BESIDE);
        assert_eq!(descriptors_max(4096, true), 3 * 4096 + DESCRIPTORS_BESIDE);
        assert_eq!(descriptors_max(usize::MAX, true), u64::MAX, "a limit that nobody reaches");
    }
}
