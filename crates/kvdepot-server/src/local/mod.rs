//! The local door: a blocking thread for each connection, one frame in and one frame out. Only the depot's own user may
//! enter.

pub(crate) mod conversation;

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvdepot_core::limits::{ACCEPTS_AT_ONCE_MAX, CONNECTIONS_MAX};
use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_depot::Depot;
use kvdepot_depot::message::{ANNOUNCEMENT_ID, Response, encode};
use kvdepot_depot::seqpacket::SeqPacket;
use rustix::event::{PollFd, PollFlags};
use rustix::net::{SendFlags, Shutdown, SocketFlags, sockopt};

use self::conversation::converse;
use crate::ended::Ended;
use crate::handover::Asking;
use crate::keeper::Keeper;
use crate::lock::{DoorLock, FileId, Standing};
use crate::log_limit::LogLimit;
use crate::peer::Process;
use crate::quarantine::{Held, Quarantine, Waits};
use crate::refusal::Refusals;
use crate::users::Users;

/// How often the door checks whether to close, and how long it pauses after accepting has failed.
const TICK: Duration = Duration::from_millis(100);
/// How often the door checks that its socket is still the one at its path.
const PLACE_CHECK: Duration = Duration::from_secs(1);
/// How long clients may continue to copy when another depot takes over the pool. Slots of copies that take longer stay
/// leased until their clients have exited.
const COPIES_WAIT: Duration = Duration::from_secs(5);
/// How often to check whether they have ended.
const COPIES_LOOK: Duration = Duration::from_millis(5);
/// Number of connections that may wait to be accepted.
const BACKLOG: i32 = 128;

/// A listening local door. Its socket is removed when it is dropped.
#[derive(Debug)]
pub struct LocalDoor<'a> {
    lock: &'a DoorLock,
    path: PathBuf,
    listener: SeqPacket,
    /// The socket file that this door created.
    socket: FileId,
    open: Arc<AtomicUsize>,
    pub(crate) quarantine: Arc<Quarantine>,
    users: Arc<Users>,
    connections_max: usize,
    refusals: Refusals,
    log: LogLimits,
    /// The depot that has requested this one's pool.
    asking: Option<Asking>,
    /// The keeper of the pool beyond a crash.
    keeper: Option<Arc<Keeper>>,
}

/// Limits of log lines that a peer, or a system short of resources, can cause repeatedly.
#[derive(Debug, Default)]
struct LogLimits {
    not_accepted: LogLimit,
    full: LogLimit,
    other_user: LogLimit,
    no_thread: LogLimit,
    place: LogLimit,
}

struct Connection {
    fd: OwnedFd,
    thread: JoinHandle<Option<Asking>>,
}

/// The outcome of an attempt to accept a connection.
enum Accepted {
    Connection(OwnedFd),
    /// None is waiting, or it has disconnected already.
    None,
    /// The system has no descriptor or memory for one. The connection stays in the backlog.
    Exhausted,
}

impl<'a> LocalDoor<'a> {
    /// Listens on the lock's socket. An existing socket is a dead depot's, because the lock was free; anything but a
    /// socket is left alone.
    pub fn open(lock: &'a DoorLock) -> Result<Self> {
        let path = lock.socket().to_owned();
        let (listener, socket) = listen(&path)?;
        let quarantine = Arc::new(Quarantine::start(Waits::default())?);
        Ok(Self {
            lock,
            path,
            listener,
            socket,
            open: Arc::new(AtomicUsize::new(0)),
            quarantine,
            users: Arc::default(),
            connections_max: CONNECTIONS_MAX,
            refusals: Refusals::default(),
            log: LogLimits::default(),
            asking: None,
            keeper: None,
        })
    }

    /// Refuses connections beyond this many.
    #[must_use]
    pub fn with_connections_max(mut self, connections_max: usize) -> Self {
        self.connections_max = connections_max;
        self
    }

    /// Registers clients with a keeper before they are given the pool.
    #[must_use]
    pub(crate) fn with_keeper(mut self, keeper: Option<Arc<Keeper>>) -> Self {
        self.keeper = keeper;
        self
    }

    /// Serves until `keep_on` returns `false`, the door was idle for long enough, or another depot has taken its place.
    /// Then ends all connections.
    pub fn run(
        &mut self,
        depot: &Arc<Depot>,
        idle_exit: Option<Duration>,
        keep_on: &mut dyn FnMut() -> bool,
    ) -> Result<Ended> {
        let mut connections: Vec<Connection> = Vec::new();
        let mut idle_since = Instant::now();
        let mut place_checked = Instant::now();
        let ended = loop {
            if !keep_on() {
                break Ended::Stopped;
            }
            self.wait()?;
            self.refusals.answer(self.connections_max);
            self.accept_waiting(depot, &mut connections);
            if self.look_for_heirs(depot, &mut connections) {
                if self.let_copies_end(depot, &connections, keep_on) {
                    break Ended::HandedOver;
                }
                // Dirty blocks must be written now.
                self.asking = None;
                depot.thaw();
                break Ended::Stopped;
            }
            if place_checked.elapsed() >= PLACE_CHECK {
                place_checked = Instant::now();
                if !self.keep_place() {
                    break Ended::Replaced;
                }
            }
            if self.open.load(Ordering::Acquire) > 0 {
                idle_since = Instant::now();
            } else if idle_exit.is_some_and(|limit| idle_since.elapsed() >= limit) {
                break Ended::Idle;
            }
        };
        self.quarantine.close();
        // A connection's thread may be waiting for dirty blocks to be written.
        depot.end_waits();
        for connection in connections {
            let _ = rustix::net::shutdown(&connection.fd, Shutdown::Both);
            let _ = connection.thread.join();
        }
        Ok(ended)
    }

    /// Forgets finished connections. Returns whether one of them was another depot that requests the pool and may have
    /// it.
    fn look_for_heirs(&mut self, depot: &Depot, connections: &mut Vec<Connection>) -> bool {
        for connection in connections.extract_if(.., |connection| connection.thread.is_finished()) {
            let Ok(Some(asking)) = connection.thread.join() else { continue };
            match depot.may_hand_over(asking.version, asking.pool_bytes) {
                Ok(()) if self.asking.is_none() => self.asking = Some(asking),
                Ok(()) => asking.refuse(&Error::new(ErrorKind::Busy, "another depot takes the pool over")),
                Err(error) => {
                    tracing::warn!("another depot may not take the pool over: {error}");
                    asking.refuse(&error);
                }
            }
        }
        self.asking.is_some()
    }

    /// Freezes the depot and waits for a short time until no client copies. Returns `false` if the depot was stopped
    /// meanwhile.
    fn let_copies_end(
        &self,
        depot: &Depot,
        connections: &[Connection],
        keep_on: &mut dyn FnMut() -> bool,
    ) -> bool {
        tracing::info!("another depot takes over the pool: this one accepts no new work");
        // Before the first request is refused, so that clients know why.
        if let Ok(frame) = encode(ANNOUNCEMENT_ID, &Response::HandsOver) {
            for connection in connections {
                // A client that reads nothing misses, as after a crash.
                let _ = rustix::net::send(&connection.fd, &frame, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
            }
        }
        depot.freeze();
        let end = Instant::now() + COPIES_WAIT;
        while depot.is_copied() && Instant::now() < end {
            if !keep_on() {
                return false;
            }
            std::thread::sleep(COPIES_LOOK);
        }
        true
    }

    /// Takes the depot that requested the pool.
    pub(crate) const fn take_asking(&mut self) -> Option<Asking> {
        self.asking.take()
    }

    /// Takes the sessions whose copies may still run, and ends the thread that waited for them.
    pub(crate) fn take_held(&mut self) -> Result<Vec<Held>> {
        let quarantine = Arc::new(Quarantine::start(Waits::default())?);
        let before = std::mem::replace(&mut self.quarantine, quarantine);
        // The connections' threads have ended, so there is no other reference.
        Ok(Arc::into_inner(before).map_or_else(Vec::new, Quarantine::take_all))
    }

    /// Waits until the next tick for a connection, or for the hello of one to be refused.
    fn wait(&self) -> Result<()> {
        let mut fds: Vec<PollFd<'_>> = std::iter::once(self.listener.as_fd())
            .chain(self.refusals.descriptors())
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        let tick = rustix::event::Timespec { tv_sec: 0, tv_nsec: TICK.subsec_nanos().into() };
        match rustix::event::poll(&mut fds, Some(&tick)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(e) => Err(Error::io("cannot wait at the local door", e.into())),
        }
    }

    /// Accepts waiting connections, up to a limit. Pauses for a tick if the system cannot accept: the connection stays
    /// in the backlog, so `poll` would report it again immediately.
    fn accept_waiting(&mut self, depot: &Arc<Depot>, connections: &mut Vec<Connection>) {
        for _ in 0..ACCEPTS_AT_ONCE_MAX {
            match self.accept() {
                Accepted::Connection(fd) => connections.extend(self.admit(depot, fd)),
                Accepted::None => return,
                Accepted::Exhausted => {
                    std::thread::sleep(TICK);
                    return;
                }
            }
        }
    }

    fn accept(&self) -> Accepted {
        let mut fds = [PollFd::from_borrowed_fd(self.listener.as_fd(), PollFlags::IN)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        if !matches!(rustix::event::poll(&mut fds, Some(&now)), Ok(1..)) {
            return Accepted::None;
        }
        match rustix::net::accept_with(self.listener.as_fd(), SocketFlags::CLOEXEC) {
            Ok(fd) => Accepted::Connection(fd),
            Err(rustix::io::Errno::CONNABORTED | rustix::io::Errno::INTR) => Accepted::None,
            Err(error) => {
                self.log.not_accepted.line(|left_out| {
                    tracing::warn!("a local connection could not be accepted: {error}{left_out}");
                });
                Accepted::Exhausted
            }
        }
    }

    fn admit(&mut self, depot: &Arc<Depot>, fd: OwnedFd) -> Option<Connection> {
        let credentials = sockopt::socket_peercred(&fd).ok()?;
        let own = rustix::process::geteuid();
        if credentials.uid != own && !credentials.uid.is_root() {
            let uid = credentials.uid.as_raw();
            self.log.other_user.line(|left_out| {
                tracing::warn!("a connection of another user was refused (uid {uid}){left_out}");
            });
            return None;
        }
        if self.open.load(Ordering::Acquire) >= self.connections_max {
            self.refuse(fd);
            return None;
        }
        // If there is no descriptor for the duplicate, there is none for block files either.
        let Ok(watched) = fd.try_clone() else {
            self.refuse(fd);
            return None;
        };
        let open = Open::new(&self.open);
        let (depot, quarantine) = (Arc::clone(depot), Arc::clone(&self.quarantine));
        let keeper = self.keeper.clone();
        let users = Arc::clone(&self.users);
        let spawned = std::thread::Builder::new().name("kvdepot-door".to_owned()).spawn(move || {
            let _open = open;
            let socket = SeqPacket::from_fd(fd);
            let peer = Process::of(&socket);
            let session = users.session(&depot, peer.pid());
            if let Some(keeper) = &keeper {
                session.accompany(keeper.client(&peer));
            }
            let pid = peer.pid();
            let copies_ended = || {
                if let (Some(keeper), Some(pid)) = (&keeper, pid) {
                    keeper.copies_ended(pid);
                    quarantine.look_again();
                }
            };
            converse(&depot, session, socket, peer, &quarantine, &copies_ended)
        });
        match spawned {
            Ok(thread) => Some(Connection { fd: watched, thread }),
            Err(error) => {
                self.log.no_thread.line(|left_out| {
                    tracing::warn!("a connection was refused: no thread for it: {error}{left_out}");
                });
                self.refusals.add(watched);
                None
            }
        }
    }

    fn refuse(&mut self, fd: OwnedFd) {
        let open = self.open.load(Ordering::Acquire);
        self.log.full.line(|left_out| {
            tracing::warn!(
                "a connection was refused: {open} of at most {} are open{left_out}",
                self.connections_max
            );
        });
        self.refusals.add(fd);
    }

    /// Creates the socket again if it was deleted or replaced. Returns `false` if another depot owns the place now.
    fn keep_place(&mut self) -> bool {
        let kept = self.lock.renew().and_then(|standing| {
            if standing == Standing::Lost {
                return Ok(false);
            }
            if FileId::at(&self.path).ok() != Some(Some(self.socket)) {
                tracing::warn!(
                    "the socket {} was deleted or replaced: it is created again; find out what removes it",
                    self.path.display()
                );
                (self.listener, self.socket) = listen(&self.path)?;
            }
            Ok(true)
        });
        match kept {
            Ok(true) => true,
            Ok(false) => {
                tracing::error!(
                    "this depot ends: the lock beside {} was deleted, and another depot has taken its place",
                    self.path.display()
                );
                false
            }
            Err(error) => {
                self.log.place.line(|left_out| {
                    tracing::error!("no new client can reach this depot, retrying: {error}{left_out}");
                });
                true
            }
        }
    }
}

impl Drop for LocalDoor<'_> {
    fn drop(&mut self) {
        // It may be another depot's socket.
        if FileId::at(&self.path).ok() == Some(Some(self.socket)) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Counts a connection as open until it is dropped, even by a panic.
struct Open(Arc<AtomicUsize>);

impl Open {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(count))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Listens at a path and replaces the socket there.
fn listen(path: &Path) -> Result<(SeqPacket, FileId)> {
    if let Ok(meta) = std::fs::symlink_metadata(path) {
        if !meta.file_type().is_socket() {
            return Err(Error::new(ErrorKind::Config, "something else is in the place of the socket")
                .with("path", path.display()));
        }
        std::fs::remove_file(path)
            .map_err(|e| Error::io("cannot remove a dead depot's socket", e).with("path", path.display()))?;
    }
    let listener = SeqPacket::listen(path, BACKLOG)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
        .map_err(|e| Error::io("cannot restrict the socket to its user", e).with("path", path.display()))?;
    let gone = |e| Error::io("cannot check the socket", e).with("path", path.display());
    let socket = FileId::at(path).map_err(gone)?.ok_or_else(|| gone(rustix::io::Errno::NOENT.into()))?;
    Ok((listener, socket))
}
