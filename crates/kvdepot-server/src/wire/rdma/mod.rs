//! RDMA for InfiniStore clients: `E` over TCP makes a queue pair, `W` and `A` arrive in SENDs, and this side moves the
//! bytes between the client's memory and the pool.
//!
//! A few threads serve all connections ([`poller`]). Each has one completion queue and one receive queue shared by its
//! connections, so a client only costs a queue pair.

pub(super) mod config;
mod finder;
mod inbox;
mod inboxes;
mod link;
mod mailbox;
mod means;
mod poller;
mod regions;
mod request;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_depot::Depot;
use kvdepot_depot::values::Values;
use kvdepot_verbs::{Access, CompletionChannel, Cq, Endpoint, Pd, Port, Qp, QpConfig, RcAttributes, Verbs};
use kvdepot_wire::infini::ConnInfo;
use parking_lot::Mutex;
use tokio::sync::Notify;

pub use config::{Link as RdmaLink, RdmaConfig};
use inboxes::{CurrentSrq, INBOXES_MAX, Inboxes};
use link::{Counted, Link};
use mailbox::{Command, Mailbox};
use poller::{Plan, Poller};
use regions::Regions;

use super::config::WireConfig;
use super::counters::Counters;

/// Limit of outstanding work requests of all connections of a thread, if the device supports completion queues of that
/// length.
const WORK_REQUESTS_TOTAL: u32 = 1 << 14;
/// Number of pieces of local memory in one work request, if the device supports it. Values rarely have more.
const SGES_MAX: u32 = 4;
/// Number of bytes in one work request.
const MESSAGE_BYTES_MAX: u32 = 1 << 30;
/// Path MTUs, with the library's numbers.
const MTUS: std::ops::RangeInclusive<u32> = 1..=5;

/// RDMA at a wire door.
#[derive(Debug)]
pub(super) struct Rdma {
    pd: Pd,
    port: Port,
    attributes: RcAttributes,
    link_requests_max: u32,
    sges_max: u32,
    links_max: usize,
    links: Arc<AtomicUsize>,
    serial: AtomicU64,
    lanes: Vec<Lane>,
    regions: Arc<Regions>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// The parts of a poller that new connections need.
#[derive(Debug)]
struct Lane {
    cq: Cq,
    srq: CurrentSrq,
    mailbox: Arc<Mailbox>,
}

/// A client's queue pair. It is served until this value is dropped.
#[derive(Debug)]
pub(super) struct QueuePair {
    mailbox: Arc<Mailbox>,
    serial: u64,
    over: Arc<Notify>,
}

impl QueuePair {
    /// Returns when the queue pair has failed or was ended by this side.
    pub(super) async fn over(&self) {
        self.over.notified().await;
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // A poller that has ended has dropped it already.
        let _ = self.mailbox.tell(Command::Close(self.serial));
    }
}

impl Rdma {
    /// Opens the device and starts the threads.
    pub(super) fn open(
        config: &RdmaConfig,
        wire: &WireConfig,
        depot: &Arc<Depot>,
        counters: &Arc<Counters>,
    ) -> Result<Self> {
        let verbs = config.library.as_deref().map_or_else(Verbs::load, Verbs::load_from)?;
        let (context, port) = config.choice().open(&verbs)?;
        let limits = context.limits()?;
        let pd = Pd::new(&context)?;
        let (regions, wanted) = Regions::open(&pd, depot, config.region_bytes)?;
        let receives = config.receives.saturating_mul(INBOXES_MAX);
        let beside = receives.saturating_add(u32::try_from(wire.connections_max).unwrap_or(u32::MAX));
        let requests_max = limits.completions_max.saturating_sub(beside).min(WORK_REQUESTS_TOTAL);
        let link_requests_max =
            config.work_requests_max.min(requests_max).min(limits.queue_requests_max.saturating_sub(1));
        if link_requests_max == 0 {
            return Err(Error::new(
                ErrorKind::Config,
                "the RDMA device's completion queues are too short for so many connections and receives",
            )
            .with("device", context.name())
            .with("completions_max", limits.completions_max)
            .with("connections_max", wire.connections_max)
            .with("receives", config.receives));
        }
        let sges_max = SGES_MAX.min(limits.sges_max).max(1);
        let finder = finder::start(counters)?;
        let mut rdma = Self {
            attributes: RcAttributes {
                reads_max: limits.reads_max.min(16),
                timeout: config.ack_timeout,
                ..RcAttributes::default()
            },
            link_requests_max,
            sges_max,
            links_max: wire.connections_max,
            links: Arc::new(AtomicUsize::new(0)),
            serial: AtomicU64::new(1),
            lanes: Vec::new(),
            regions: Arc::clone(&regions),
            threads: Mutex::new(Vec::new()),
            pd: pd.clone(),
            port,
        };
        for _ in 0..config.threads {
            let (mailbox, commands) = Mailbox::new()?;
            let channel = CompletionChannel::new(&context)?;
            let completions_max = requests_max + beside;
            let cq = Cq::with_events(&channel, completions_max, 0)?;
            let inboxes = Inboxes::new(&pd, config.receives, config.receive_bytes)?;
            rdma.lanes.push(Lane {
                cq: cq.clone(),
                srq: Arc::clone(inboxes.current()),
                mailbox: Arc::clone(&mailbox),
            });
            let plan = Plan {
                channel,
                cq,
                inboxes,
                regions: Arc::clone(&regions),
                counters: Arc::clone(counters),
                finder: finder.clone(),
                mailbox,
                link_requests_max,
                requests_max,
                completions_max: completions_max as usize,
                sges_max: sges_max as usize,
                bytes_max: rdma.port.message_bytes_max.clamp(1 << 20, MESSAGE_BYTES_MAX) as usize,
                put_wait: Duration::from_millis(wire.put_wait_ms),
                stall: wire.stall(),
            };
            rdma.spawn("kvdepot-rdma", move || Poller::new(plan, commands).run())?;
        }
        let mailboxes: Vec<Arc<Mailbox>> = rdma.lanes.iter().map(|lane| Arc::clone(&lane.mailbox)).collect();
        let bytes = depot.config().pool_bytes;
        rdma.spawn("kvdepot-rdma-reg", move || {
            regions.register_all(bytes, &wanted, || {
                for mailbox in &mailboxes {
                    // A poller that has ended need not check.
                    let _ = mailbox.tell(Command::Look);
                }
            });
        })?;
        tracing::info!(
            "RDMA is served by {} port {} ({:?})",
            context.name(),
            rdma.port.number,
            rdma.port.link
        );
        Ok(rdma)
    }

    fn spawn(&self, name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(body)
            .map_err(|e| Error::io("cannot start a thread", e).with("thread", name))?;
        self.threads.lock().push(thread);
        Ok(())
    }

    /// Connects a queue pair to the client's and starts to serve it, with values owned by this connection. Returns the
    /// connection data for the client, and the queue pair, which ends when it is dropped (P4).
    pub(super) fn exchange(&self, client: ConnInfo, values: Values) -> Result<(ConnInfo, QueuePair)> {
        if !MTUS.contains(&client.mtu) {
            return Err(
                Error::new(ErrorKind::Protocol, "a client's path MTU makes no sense").with("mtu", client.mtu)
            );
        }
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        let lane = &self.lanes[serial as usize % self.lanes.len()];
        let counted = Counted::one_of(self.links_max, &self.links).ok_or_else(|| {
            Error::new(ErrorKind::Busy, "there are as many RDMA connections as there may be")
                .with("connections_max", self.links_max)
        })?;
        let (generation, srq) = lane.srq.lock().clone();
        let config = QpConfig {
            srq: Some(srq),
            max_send_sges: self.sges_max,
            // One more than is used: the marker after the last work request.
            ..QpConfig::new(&lane.cq, self.link_requests_max + 1, 0)
        };
        let qp = Qp::new(&self.pd, config)?;
        let own = Endpoint::new(&qp, &self.port, u32::from_le_bytes(kvdepot_io::random::bytes()?));
        let peer = Endpoint {
            qp_number: client.qpn,
            psn: client.psn,
            lid: client.lid,
            gid: client.gid,
            mtu: client.mtu,
        };
        // The client has no access to our memory: this side does all reads and writes.
        qp.connect(&self.port, Access::READ_ONLY, &own, &peer, &self.attributes)?;
        let over = Arc::new(Notify::new());
        let link = Link::new(serial, qp, generation, values, Arc::clone(&over), counted);
        lane.mailbox.tell(Command::Open(Box::new(link)))?;
        let info =
            ConnInfo { qpn: own.qp_number, psn: own.psn, gid: own.gid, lid: own.lid, mtu: self.port.mtu };
        Ok((info, QueuePair { mailbox: Arc::clone(&lane.mailbox), serial, over }))
    }

    /// Ends all connections and the threads.
    pub(super) fn close(&self) {
        self.regions.stop();
        for lane in &self.lanes {
            // It fails if the poller has ended already.
            let _ = lane.mailbox.tell(Command::Stop);
        }
        for thread in std::mem::take(&mut *self.threads.lock()) {
            if thread.join().is_err() {
                tracing::error!("a thread of RDMA panicked");
            }
        }
    }
}

impl Drop for Rdma {
    fn drop(&mut self) {
        self.close();
    }
}
