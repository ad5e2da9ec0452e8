//! The keeper's process; [`super`] shows the conversation.

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

use super::message::{FromKeeper, ToKeeper};
use crate::peer::{Peer, Process};

/// The longest time for a next depot to accept a frame.
const FRAME_WAIT: Duration = Duration::from_secs(10);

/// The descriptors and clients that are kept.
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

/// Keeps a pool for the depot at the other end of the standard input, and for its successors. Returns when it is no
/// longer needed.
pub fn run() -> Result<()> {
    let stdin = std::io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .map_err(|e| Error::io("a keeper is started by a depot, over its standard input", e))?;
    // Each client takes a descriptor.
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    keep(SeqPacket::from_fd(stdin))
}

pub(super) fn keep(mut depot: SeqPacket) -> Result<()> {
    let mut kept = Kept::default();
    let mut process = Process::of(&depot);
    loop {
        if kept.serve(&mut depot)? == Left::Orderly {
            return Ok(());
        }
        let deadline = Instant::now() + kept.keep;
        drop(depot);
        // Until it exits the depot can still touch the pool, and its clients' connections stay open.
        let Some(exit) = process.exit() else {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "the exit of the depot cannot be watched from here",
            ));
        };
        if !readable_by(exit, deadline)? {
            return Ok(());
        }
        (depot, process) = match kept.next_depot(deadline)? {
            Some(next) => next,
            None => return Ok(()),
        };
    }
}

impl Kept {
    /// Processes the messages of a depot until it ends.
    fn serve(&mut self, depot: &mut SeqPacket) -> Result<Left> {
        let mut buffer = FrameBuffer::default();
        let mut was_reset = false;
        loop {
            let fd = match depot.recv(&mut buffer, None) {
                Ok(fd) => fd,
                // ECONNRESET is reported before data that can still be read: the other side had left something unread.
                Err(error) if error.kind() == ErrorKind::Closed && !was_reset => {
                    was_reset = true;
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::Closed => return Ok(Left::Crashed),
                // For example a lost descriptor: nothing that is kept can be relied on.
                Err(error) => return Err(error),
            };
            match decode::<ToKeeper>(&buffer)?.1 {
                ToKeeper::Listener => self.listener = fd,
                // Useless until its ledger has arrived.
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

    /// Waits for the next depot and gives it everything. Returns `None` if none connects in time, or if the keeper is
    /// dismissed.
    fn next_depot(&self, deadline: Instant) -> Result<Option<(SeqPacket, Process)>> {
        let (Some(listener), Some(_), Some(_)) = (&self.listener, &self.pool, &self.ledger) else {
            return Ok(None);
        };
        while readable_by(listener.as_fd(), deadline)? {
            let Ok(fd) = rustix::net::accept_with(listener, SocketFlags::CLOEXEC) else { continue };
            if !socket_peercred(&fd).is_ok_and(|peer| peer.uid == rustix::process::geteuid()) {
                continue;
            }
            let mut next = SeqPacket::from_fd(fd);
            // Taken while the process is there: one that has exited has no pidfd any more.
            let process = Process::of(&next);
            // A depot that has already disconnected is skipped, and one whose exit cannot be watched gets nothing.
            if !next.hung_up() && process.exit().is_some() && self.give(&next).is_ok() {
                return Ok(Some((next, process)));
            }
            // Dismissing a keeper means to send `Go` and close.
            if says_go(&mut next) {
                return Ok(None);
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

/// Returns whether the next message is `Go`. A depot sends nothing else before it was given the pool.
fn says_go(next: &mut SeqPacket) -> bool {
    let mut buffer = FrameBuffer::default();
    // The first error may be ECONNRESET, which is reported before data that can still be read.
    (0..2).any(|_| {
        next.recv(&mut buffer, Some(Instant::now())).is_ok()
            && matches!(decode(&buffer), Ok((_, ToKeeper::Go)))
    })
}

/// Waits until a descriptor is readable. Returns `false` at the deadline.
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

#[cfg(test)]
mod tests {
    use super::super::link::dismiss_at;
    use super::*;

    /// A limit for events that always happen.
    const LONG: Duration = Duration::from_secs(60);

    fn listening(directory: &std::path::Path) -> (std::path::PathBuf, Kept) {
        let path = directory.join("d.sock.keeper");
        let listener = SeqPacket::listen(&path, 8).unwrap();
        let some = || Some(std::fs::File::open("/dev/null").unwrap().into());
        let listener = Some(listener.as_fd().try_clone_to_owned().unwrap());
        (path, Kept { listener, pool: some(), ledger: some(), ..Kept::default() })
    }

    /// As when it was waiting for the exit of its depot meanwhile.
    #[test]
    fn a_dismissal_reaches_a_keeper_that_looks_when_the_other_side_has_gone() {
        let directory = tempfile::tempdir().unwrap();
        let (path, kept) = listening(directory.path());
        let given_up = SeqPacket::connect(&path).unwrap();
        drop(given_up);
        dismiss_at(&path);
        // Otherwise it would wait a minute for another depot.
        let begun = Instant::now();
        assert!(kept.next_depot(begun + LONG).unwrap().is_none());
        assert!(begun.elapsed() < LONG);
    }

    #[test]
    fn a_dismissal_reaches_a_keeper_that_has_given_the_pool_to_who_dismisses_it() {
        let directory = tempfile::tempdir().unwrap();
        let (path, mut kept) = listening(directory.path());
        let dismisses = SeqPacket::connect(&path).unwrap();
        let (mut depot, _) = kept.next_depot(Instant::now() + LONG).unwrap().unwrap();
        dismisses.send(&encode(0, &ToKeeper::Go).unwrap(), None).unwrap();
        // What it was given is left unread.
        drop(dismisses);
        assert_eq!(kept.serve(&mut depot).unwrap(), Left::Orderly);
    }

    #[test]
    fn a_depot_that_ends_without_a_word_has_crashed() {
        let directory = tempfile::tempdir().unwrap();
        let (path, mut kept) = listening(directory.path());
        let crashes = SeqPacket::connect(&path).unwrap();
        let (mut depot, _) = kept.next_depot(Instant::now() + LONG).unwrap().unwrap();
        crashes.send(&encode(0, &ToKeeper::Client { number: 3 }).unwrap(), None).unwrap();
        drop(crashes);
        assert_eq!(kept.serve(&mut depot).unwrap(), Left::Crashed);
        assert!(kept.clients.contains_key(&3), "what it said before is known");
    }
}
