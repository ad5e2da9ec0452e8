//! Hands a pool over to another depot process, or takes it over. This module has both sides of a conversation at the
//! local door:
//!
//! ```text
//!   new depot                                  running depot
//!   Hello                          ──▶
//!                                  ◀──         Welcome, with the pool
//!   HandOver                       ──▶         may refuse; then freezes, ends connections, lets tiers settle
//!                                  ◀──         HandOver, with the list of blocks
//!                                  ◀──         Ok, with the lock
//!                                  ◀──         Ok for each client that may still copy, with its pidfd
//!   TakenOver                      ──▶
//!                                  ◀──         Ok; ends without writing anything
//!   waits for the process's exit
//! ```
//!
//! Until its last `Ok` the running depot keeps serving if anything fails, and the new one begins nothing before that
//! `Ok` and the exit. So the pool is never used by two depots at the same time.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_depot::handover::{HAND_OVER_VERSION, Snapshot, other_size};
use kvdepot_depot::message::{HELLO_MAGIC, PROTOCOL_VERSION, Request, Response, decode, encode};
use kvdepot_depot::seqpacket::{FrameBuffer, SeqPacket};
use kvdepot_depot::{Depot, DepotConfig, PoolMapping, Session};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::sockopt::{Timeout, set_socket_timeout};

use crate::lock::DoorLock;
use crate::peer::{Peer, Process, ensure_own_user};
use crate::quarantine::{Held, Quarantine};

/// The longest time for the running depot's answer to the hello.
const HELLO_WAIT: Duration = Duration::from_secs(5);
/// The longest time for tiers to finish reads and removals.
const SETTLE_WAIT: Duration = Duration::from_secs(10);
/// The longest time for the other side to send a frame of the hand-over.
const FRAME_WAIT: Duration = Duration::from_secs(10);
/// The longest time for the running depot to stop and write its list of blocks: connections end within their deadlines.
const HAND_OVER_WAIT: Duration = Duration::from_secs(180);
/// How often a wait checks whether to continue.
const TICK: Duration = Duration::from_millis(100);
/// How often a wait for the running depot's exit is logged.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

fn unexpected() -> Error {
    Error::new(ErrorKind::Protocol, "an answer that does not belong to a hand-over")
}

/// A depot that has requested this one's pool.
#[derive(Debug)]
pub(crate) struct Asking {
    pub(crate) socket: SeqPacket,
    pub(crate) request: u64,
    pub(crate) version: u32,
    pub(crate) pool_bytes: u64,
}

impl Asking {
    /// Refuses a process of another user.
    pub(crate) fn ensure_own_user(&self) -> Result<()> {
        ensure_own_user(self.socket.as_fd(), "a pool is handed over to a process of the same user only")
    }

    /// Refuses the request.
    pub(crate) fn refuse(&self, error: &Error) {
        // A depot that has disconnected needs no answer.
        let _ = self.send(&Response::from_error(error), None);
    }

    fn send(&self, response: &Response, fd: Option<BorrowedFd<'_>>) -> Result<()> {
        self.socket.send(&encode(self.request, response)?, fd)
    }

    /// Hands over the pool of a frozen depot whose connections have ended, with the sessions whose copies may still run.
    /// Those are held in `quarantine` again if that fails. Returns the connection to the new owner, to be closed when
    /// nothing in this process touches the pool any more.
    pub(crate) fn hand_over(
        mut self,
        depot: &Depot,
        held: Vec<Held>,
        quarantine: &Quarantine,
        lock: &DoorLock,
    ) -> Result<SeqPacket> {
        let outcome = self.try_hand_over(depot, &held, lock);
        match outcome {
            // Their leases now belong to the other depot; this one's machine no longer matters.
            Ok(()) => Ok(self.socket),
            Err(error) => {
                self.refuse(&error);
                quarantine.hold_all(held.into_iter().map(|held| (held.session, held.peer)));
                Err(error)
            }
        }
    }

    fn try_hand_over(&mut self, depot: &Depot, held: &[Held], lock: &DoorLock) -> Result<()> {
        set_socket_timeout(self.socket.as_fd(), Timeout::Send, Some(FRAME_WAIT))
            .map_err(|e| Error::io("cannot set a deadline", e.into()))?;
        let sessions: Vec<&Session> = held.iter().map(|held| &held.session).collect();
        depot.settle(&sessions, SETTLE_WAIT)?;
        let blocks = depot.hand_over(&sessions)?;
        let holders = u32::try_from(held.len()).unwrap_or(u32::MAX);
        self.send(&Response::HandOver { holders }, Some(blocks.as_fd()))?;
        self.send(&Response::Ok, Some(lock.descriptor()?.as_fd()))?;
        for held in held {
            self.send(&Response::Ok, held.peer.exit())?;
        }
        let mut buffer = FrameBuffer::default();
        drop(self.socket.recv(&mut buffer, Some(Instant::now() + FRAME_WAIT))?);
        let (_, request) = decode::<Request<'_>>(&buffer)?;
        if !matches!(request, Request::TakenOver) {
            return Err(unexpected());
        }
        // From here on the pool is the other depot's. If this answer is lost, neither depot uses it.
        self.send(&Response::Ok, None)
    }
}

/// The hand-over by a running depot, which is terminating but may not have exited yet.
#[derive(Debug)]
pub(crate) struct Inheritance {
    what: Inherited,
    running: Process,
}

/// The inheritance from a depot that has exited.
#[derive(Debug)]
pub(crate) struct Inherited {
    socket: PathBuf,
    pool: PoolMapping,
    snapshot: Snapshot,
    lock: OwnedFd,
    /// The processes that may still copy.
    holders: Vec<Option<OwnedFd>>,
}

struct Conversation {
    socket: SeqPacket,
    buffer: FrameBuffer,
}

impl Conversation {
    fn send(&self, request: &Request<'_>) -> Result<()> {
        self.socket.send_by(&encode(1, request)?, Instant::now() + FRAME_WAIT)
    }

    fn receive(&mut self, wait: Duration) -> Result<(Response, Option<OwnedFd>)> {
        let fd = self.socket.recv(&mut self.buffer, Some(Instant::now() + wait))?;
        Ok((decode::<Response>(&self.buffer)?.1.into_result()?, fd))
    }
}

/// Requests the pool of the depot that serves `socket`. Returns `None` if there is no depot. A pool that can grow less
/// far than `config` says, because the machine allows no more, is accepted, and `config` is adjusted.
pub(crate) fn ask(socket: &Path, config: &mut DepotConfig) -> Result<Option<Inheritance>> {
    let connected = match SeqPacket::connect(socket) {
        Ok(connected) => connected,
        Err(error) if error.kind() == ErrorKind::Unavailable => return Ok(None),
        Err(error) => return Err(error),
    };
    ensure_own_user(connected.as_fd(), "the running depot is another user's: take over as that user")?;
    let running = Process::of(&connected);
    if running.is_this() {
        return Err(Error::new(ErrorKind::Unsupported, "a process cannot take over its own depot"));
    }
    if running.exit().is_none() {
        return Err(Error::new(
            ErrorKind::Unsupported,
            "the exit of the running depot cannot be watched from here, so its pool cannot be taken over: start the new \
             one in the same container, on Linux 5.3 or later",
        ));
    }
    let mut talk = Conversation { socket: connected, buffer: FrameBuffer::default() };
    talk.send(&Request::Hello { magic: HELLO_MAGIC, version: PROTOCOL_VERSION, pid: std::process::id() })?;
    let (Response::Welcome { regions, .. }, Some(pool)) = talk.receive(HELLO_WAIT)? else {
        return Err(unexpected());
    };
    let pool = PoolMapping::map_regions(pool, regions)?;
    let pool_bytes = pool.bytes();
    let configured = config.mapped_bytes();
    if !(config.pool_bytes..=configured).contains(&pool_bytes) {
        return Err(other_size(pool_bytes, configured));
    }
    if pool_bytes < configured {
        tracing::warn!("the pool that is taken over may grow to {pool_bytes} bytes, not to {configured}");
        config.pool_bytes_max = pool_bytes;
    }
    talk.send(&Request::HandOver { version: HAND_OVER_VERSION, pool_bytes })?;
    let (Response::HandOver { holders }, Some(snapshot)) = talk.receive(HAND_OVER_WAIT)? else {
        return Err(unexpected());
    };
    let snapshot = Snapshot::open(snapshot, config)?;
    if snapshot.holders() != holders as usize {
        return Err(unexpected());
    }
    let (Response::Ok, Some(lock)) = talk.receive(FRAME_WAIT)? else { return Err(unexpected()) };
    let mut processes = Vec::new();
    for _ in 0..holders {
        let (Response::Ok, process) = talk.receive(FRAME_WAIT)? else { return Err(unexpected()) };
        processes.push(process);
    }
    talk.send(&Request::TakenOver)?;
    let (Response::Ok, None) = talk.receive(FRAME_WAIT)? else { return Err(unexpected()) };
    let what = Inherited { socket: socket.to_owned(), pool, snapshot, lock, holders: processes };
    Ok(Some(Inheritance { what, running }))
}

impl Inheritance {
    /// Waits until the earlier depot has exited, after which nothing of it touches the pool or the tiers. Returns
    /// `None` if `keep_on` returns `false` first; the blocks are lost then.
    pub(crate) fn wait_for_exit(self, keep_on: &mut dyn FnMut() -> bool) -> Result<Option<Inherited>> {
        let Some(exit) = self.running.exit() else { return Err(unexpected()) };
        let tick = Timespec { tv_sec: 0, tv_nsec: TICK.subsec_nanos().into() };
        let mut logged = Instant::now();
        loop {
            match rustix::event::poll(&mut [PollFd::from_borrowed_fd(exit, PollFlags::IN)], Some(&tick)) {
                Ok(1..) => return Ok(Some(self.what)),
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(Error::io("cannot wait for the running depot's exit", e.into())),
            }
            if !keep_on() {
                return Ok(None);
            }
            if logged.elapsed() >= LOG_INTERVAL {
                logged = Instant::now();
                tracing::warn!("the depot whose pool is taken over has not exited yet: {:?}", self.running);
            }
        }
    }
}

impl Inherited {
    /// Starts a depot with the inherited pool, and sessions for the clients that may still copy. If that fails, starts
    /// one with an empty pool.
    #[expect(clippy::type_complexity, reason = "each part goes another way")]
    pub(crate) fn start(
        self,
        config: DepotConfig,
    ) -> Result<(DoorLock, Depot, Vec<(Session, Box<dyn Peer>)>)> {
        let lock = DoorLock::inherit(&self.socket, self.lock)?;
        let begun = Instant::now();
        let depot = Depot::start_on(config.clone(), self.pool)?;
        match depot.take_over(self.snapshot) {
            Ok(taken) => {
                tracing::info!(
                    "{} blocks were taken over in {} ms, {} were left out; {} clients of the earlier depot may still copy",
                    taken.blocks,
                    begun.elapsed().as_millis(),
                    taken.left_out,
                    taken.held.len()
                );
                let peers =
                    self.holders.into_iter().map(|pidfd| Box::new(Process::watched(pidfd)) as Box<dyn Peer>);
                let held = taken.held.into_iter().zip(peers).collect();
                Ok((lock, depot, held))
            }
            Err(error) => {
                // Its slots may be in use by unknown clients.
                tracing::error!(
                    "the pool could not be taken over, this depot starts with an empty one: {error}"
                );
                drop(depot);
                Ok((lock, Depot::start(config)?, Vec::new()))
            }
        }
    }
}
