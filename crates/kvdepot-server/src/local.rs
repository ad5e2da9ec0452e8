//! The local door: a thread a connection, blocking, a frame in and a frame out. Only the depot's own user may enter.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvdepot_core::limits::CONNECTIONS_MAX;
use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_depot::message::{Request, Response, decode, encode};
use kvdepot_depot::seqpacket::SeqPacket;
use kvdepot_depot::{Depot, Session};
use rustix::event::{PollFd, PollFlags};
use rustix::net::{Shutdown, SocketFlags, sockopt};

use crate::Ended;
use crate::lock::DoorLock;

/// How often the door looks whether it is to close.
const TICK: Duration = Duration::from_millis(100);
/// How long a new connection may take to say hello.
const HELLO_WAIT: Duration = Duration::from_secs(5);
/// Connections that may wait to be accepted.
const BACKLOG: i32 = 128;

/// A listening local door. Its socket goes when it is dropped.
#[derive(Debug)]
pub struct LocalDoor {
    path: PathBuf,
    listener: SeqPacket,
    open: Arc<AtomicUsize>,
}

struct Connection {
    fd: OwnedFd,
    thread: JoinHandle<()>,
}

impl LocalDoor {
    /// Listens on the lock's socket. What lies there is a dead depot's, because the lock was free; anything but a
    /// socket is left alone.
    pub fn open(lock: &DoorLock) -> Result<Self> {
        let path = lock.socket().to_owned();
        if let Ok(meta) = std::fs::symlink_metadata(&path) {
            if !meta.file_type().is_socket() {
                return Err(Error::new(
                    ErrorKind::Config,
                    "something that is no socket lies where the socket should be",
                )
                .with("path", path.display()));
            }
            std::fs::remove_file(&path).map_err(|e| {
                Error::io("cannot remove a dead depot's socket", e).with("path", path.display())
            })?;
        }
        let listener = SeqPacket::listen(&path, BACKLOG)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).map_err(|e| {
            Error::io("cannot restrict the socket to its user", e).with("path", path.display())
        })?;
        Ok(Self { path, listener, open: Arc::new(AtomicUsize::new(0)) })
    }

    /// Serves until `keep_on` says no or the door was idle for long enough; then ends all connections.
    pub fn run(
        &self,
        depot: &Arc<Depot>,
        idle_exit: Option<Duration>,
        keep_on: &mut dyn FnMut() -> bool,
    ) -> Result<Ended> {
        let mut connections: Vec<Connection> = Vec::new();
        let mut idle_since = Instant::now();
        let ended = loop {
            if !keep_on() {
                break Ended::Stopped;
            }
            self.wait_for_visitor()?;
            while let Some(fd) = self.accept()? {
                if let Some(connection) = self.admit(depot, fd) {
                    connections.push(connection);
                }
            }
            connections.retain(|connection| !connection.thread.is_finished());
            if self.open.load(Ordering::Acquire) > 0 {
                idle_since = Instant::now();
            } else if idle_exit.is_some_and(|limit| idle_since.elapsed() >= limit) {
                break Ended::Idle;
            }
        };
        for connection in connections {
            let _ = rustix::net::shutdown(&connection.fd, Shutdown::Both);
            let _ = connection.thread.join();
        }
        Ok(ended)
    }

    fn wait_for_visitor(&self) -> Result<()> {
        let mut fds = [PollFd::from_borrowed_fd(self.listener.as_fd(), PollFlags::IN)];
        let tick = rustix::event::Timespec { tv_sec: 0, tv_nsec: TICK.subsec_nanos().into() };
        match rustix::event::poll(&mut fds, Some(&tick)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(e) => Err(Error::io("cannot wait at the local door", e.into())),
        }
    }

    fn accept(&self) -> Result<Option<OwnedFd>> {
        let mut fds = [PollFd::from_borrowed_fd(self.listener.as_fd(), PollFlags::IN)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        if !matches!(rustix::event::poll(&mut fds, Some(&now)), Ok(1..)) {
            return Ok(None);
        }
        match rustix::net::accept_with(self.listener.as_fd(), SocketFlags::CLOEXEC) {
            Ok(fd) => Ok(Some(fd)),
            // The visitor left, or descriptors are short: the door stays open for the next one.
            Err(error) => {
                tracing::warn!("a connection could not be accepted: {error}");
                Ok(None)
            }
        }
    }

    fn admit(&self, depot: &Arc<Depot>, fd: OwnedFd) -> Option<Connection> {
        let credentials = sockopt::socket_peercred(&fd).ok()?;
        let own = rustix::process::geteuid();
        if credentials.uid != own && !credentials.uid.is_root() {
            tracing::warn!("a connection of another user was refused (uid {})", credentials.uid.as_raw());
            return None;
        }
        let watched = fd.try_clone().ok()?;
        if self.open.fetch_add(1, Ordering::AcqRel) >= CONNECTIONS_MAX {
            self.open.fetch_sub(1, Ordering::AcqRel);
            tracing::warn!("a connection was refused: {CONNECTIONS_MAX} are open already");
            return None;
        }
        let (depot, open) = (Arc::clone(depot), Arc::clone(&self.open));
        let spawned = std::thread::Builder::new().name("kvdepot-door".to_owned()).spawn(move || {
            converse(&depot, SeqPacket::from_fd(fd));
            open.fetch_sub(1, Ordering::AcqRel);
        });
        match spawned {
            Ok(thread) => Some(Connection { fd: watched, thread }),
            Err(error) => {
                self.open.fetch_sub(1, Ordering::AcqRel);
                tracing::warn!("a connection was refused: no thread for it: {error}");
                None
            }
        }
    }
}

impl Drop for LocalDoor {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// One connection, to its end. Leases end with the session, which is dropped only here: when the peer is dead or has
/// closed, and so has no copy under way (P4).
fn converse(depot: &Depot, mut socket: SeqPacket) {
    let session = depot.session();
    if let Err(error) = exchange(depot, &session, &mut socket)
        && error.kind() != ErrorKind::Closed
    {
        tracing::warn!("a connection was closed: {error}");
    }
}

fn exchange(depot: &Depot, session: &Session, socket: &mut SeqPacket) -> Result<()> {
    let mut buffer = Vec::new();
    let mut greeted = false;
    loop {
        let deadline = (!greeted).then(|| Instant::now() + HELLO_WAIT);
        let passed = socket.recv(&mut buffer, deadline)?;
        drop(passed);
        let (id, request) = match decode::<Request<'_>>(&buffer) {
            Ok(decoded) => decoded,
            Err(error) => {
                socket.send(&encode(0, &Response::from_error(&error))?, None)?;
                return Err(error);
            }
        };
        let hello = matches!(request, Request::Hello { .. });
        if hello == greeted {
            let error = Error::new(ErrorKind::Protocol, "a connection begins with one hello");
            socket.send(&encode(id, &Response::from_error(&error))?, None)?;
            return Err(error);
        }
        let response = session.handle(request);
        let welcome = matches!(response, Response::Welcome { .. });
        let pool = depot.pool();
        let frame = match encode(id, &response) {
            Ok(frame) => frame,
            Err(error) => encode(id, &Response::from_error(&error))?,
        };
        socket.send(&frame, pool.fd().filter(|_| welcome))?;
        if hello && !welcome {
            return Err(Error::new(ErrorKind::Protocol, "a connection was turned away at its hello"));
        }
        greeted = true;
    }
}
