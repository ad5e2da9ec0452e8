//! Connections beyond the local door's limit. Each gets a refusal in answer to its hello, so that a client can tell a
//! full depot from a dead one.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use kvdepot_core::limits::REFUSALS_MAX;
use kvdepot_core::{Error, ErrorKind};
use kvdepot_depot::message::{Request, Response, decode, encode};
use kvdepot_depot::seqpacket::{FrameBuffer, SeqPacket};

/// The longest time for a refused connection to send its hello.
const HELLO_WAIT: Duration = Duration::from_secs(5);

/// Connections to be refused, oldest first. If a connection is closed with its hello unread, the kernel resets it and
/// the client does not get the answer, so a refusal waits for the hello.
#[derive(Debug, Default)]
pub(crate) struct Refusals {
    waiting: VecDeque<(SeqPacket, Instant)>,
}

impl Refusals {
    /// Takes over a connection. If there are too many, the oldest one is closed without an answer.
    pub(crate) fn add(&mut self, fd: OwnedFd) {
        if self.waiting.len() == REFUSALS_MAX {
            self.waiting.pop_front();
        }
        self.waiting.push_back((SeqPacket::from_fd(fd), Instant::now() + HELLO_WAIT));
    }

    /// Returns the descriptors on which to wait for their hellos.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.waiting.iter().map(|(socket, _)| socket.as_fd())
    }

    /// Answers those that have said hello. Closes them and those that took too long.
    pub(crate) fn answer(&mut self, connections_max: usize) {
        let now = Instant::now();
        self.waiting.retain_mut(|(socket, until)| {
            if !is_readable(socket) {
                return now < *until;
            }
            let mut buffer = FrameBuffer::default();
            if socket.recv(&mut buffer, Some(now)).is_ok() {
                let id = decode::<Request<'_>>(&buffer).map_or(0, |(id, _)| id);
                let error = Error::new(
                    ErrorKind::Busy,
                    "the depot has reached its limit of connections: close some, or raise `ulimit -n` for the depot",
                )
                .with("connections_max", connections_max);
                // A client that has disconnected meanwhile needs no answer.
                let _ = encode(id, &Response::from_error(&error)).and_then(|frame| socket.send(&frame, None));
            }
            false
        });
    }
}

fn is_readable(socket: &SeqPacket) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut polled = [PollFd::new(socket, PollFlags::IN)];
    matches!(poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(1..))
}
