//! What the keeper's process does: see the drawing in [`super`].

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_depot::message::{decode, encode};
use kvdepot_depot::seqpacket::{FrameBuffer, SeqPacket};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::SocketFlags;
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::{FromKeeper, ToKeeper};
use crate::peer::{Peer, Process};

/// How long a next depot may take for a frame.
const FRAME_WAIT: Duration = Duration::from_secs(10);

/// What is kept.
#[derive(Debug, Default)]
struct Kept {
    listener: Option<OwnedFd>,
    pool: Option<OwnedFd>,
    ledger: Option<OwnedFd>,
    /// Connections whose clients may copy.
    clients: BTreeMap<u64, Option<OwnedFd>>,
    keep: Duration,
}

/// How a depot's connection ended.
#[derive(Debug, PartialEq, Eq)]
enum Left {
    Orderly,
    Crashed,
}

/// Keeps a pool for the depot at the other end of the standard input, and for those after it. Returns when nobody needs it
/// any more.
pub fn run() -> Result<()> {
    let stdin = std::io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .map_err(|e| Error::io("a keeper is started by a depot, over its standard input", e))?;
    // Each client is a descriptor.
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    keep(SeqPacket::from_fd(stdin))
}

pub(super) fn keep(mut depot: SeqPacket) -> Result<()> {
    let mut kept = Kept::default();
    loop {
        let process = Process::of(&depot);
        if kept.serve(&mut depot)? == Left::Orderly {
            return Ok(());
        }
        let deadline = Instant::now() + kept.keep;
        drop(depot);
        // Its exit is the last that it does to the pool, and to its clients' connections.
        let Some(exit) = process.exit() else {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "the exit of the depot cannot be watched from here",
            ));
        };
        if !readable_by(exit, deadline)? {
            return Ok(());
        }
        depot = match kept.next_depot(deadline)? {
            Some(next) => next,
            None => return Ok(()),
        };
    }
}

impl Kept {
    /// Does what a depot says until it ends.
    fn serve(&mut self, depot: &mut SeqPacket) -> Result<Left> {
        let mut buffer = FrameBuffer::default();
        loop {
            let fd = match depot.recv(&mut buffer, None) {
                Ok(fd) => fd,
                Err(error) if error.kind() == ErrorKind::Closed => return Ok(Left::Crashed),
                // A descriptor got lost, for one: nothing that is kept can be relied on.
                Err(error) => return Err(error),
            };
            match decode::<ToKeeper>(&buffer)?.1 {
                ToKeeper::Listener => self.listener = fd,
                // Of no use before its ledger has come.
                ToKeeper::Pool { keep_ms } => {
                    (self.pool, self.ledger) = (fd, None);
                    self.keep = Duration::from_millis(keep_ms);
                }
                ToKeeper::Ledger => self.ledger = fd,
                ToKeeper::Client { number } => drop(self.clients.insert(number, fd)),
                ToKeeper::ClientEnded { number } => drop(self.clients.remove(&number)),
                ToKeeper::Go => return Ok(Left::Orderly),
            }
        }
    }

    /// Waits for a depot that asks, and gives it everything.
    fn next_depot(&self, deadline: Instant) -> Result<Option<SeqPacket>> {
        let (Some(listener), Some(_), Some(_)) = (&self.listener, &self.pool, &self.ledger) else {
            return Ok(None);
        };
        while readable_by(listener.as_fd(), deadline)? {
            let Ok(fd) = rustix::net::accept_with(listener, SocketFlags::CLOEXEC) else { continue };
            let is_own = socket_peercred(&fd).is_ok_and(|peer| peer.uid == rustix::process::geteuid());
            let next = SeqPacket::from_fd(fd);
            // One that has given up meanwhile is no next depot.
            if is_own && !next.hung_up() && self.give(&next).is_ok() {
                return Ok(Some(next));
            }
        }
        Ok(None)
    }

    fn give(&self, next: &SeqPacket) -> Result<()> {
        set_socket_timeout(next.as_fd(), Timeout::Send, Some(FRAME_WAIT))
            .map_err(|e| Error::io("cannot set a deadline", e.into()))?;
        let send =
            |frame: &FromKeeper, fd: Option<&OwnedFd>| next.send(&encode(0, frame)?, fd.map(AsFd::as_fd));
        let clients = u32::try_from(self.clients.len()).unwrap_or(u32::MAX);
        send(&FromKeeper::Pool { clients }, self.pool.as_ref())?;
        send(&FromKeeper::Ledger, self.ledger.as_ref())?;
        for (&number, pidfd) in &self.clients {
            send(&FromKeeper::Client { number }, pidfd.as_ref())?;
        }
        Ok(())
    }
}

/// Whether a descriptor becomes readable by the deadline.
fn readable_by(fd: rustix::fd::BorrowedFd<'_>, deadline: Instant) -> Result<bool> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let wait = Timespec {
            tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        match rustix::event::poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&wait)) {
            Ok(0) => return Ok(false),
            Ok(_) => return Ok(true),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(Error::io("the keeper cannot wait", e.into())),
        }
    }
}
