//! Connections beyond the local door's limit: each is told so in answer to its hello, so that a client can tell a depot
//! that is full from one that is dead.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use kvdepot_core::limits::REFUSALS_MAX;
use kvdepot_core::{Error, ErrorKind};
use kvdepot_depot::message::{Request, Response, decode, encode};
use kvdepot_depot::seqpacket::{FrameBuffer, SeqPacket};

/// How long a refused connection may take to send its hello.
const HELLO_WAIT: Duration = Duration::from_secs(5);

/// Connections that are to be refused, oldest first. The kernel resets a connection that is closed with its hello unread,
/// and the client would not get the answer: a refusal waits for the hello.
#[derive(Debug, Default)]
pub(crate) struct Refusals {
    waiting: VecDeque<(SeqPacket, Instant)>,
}

impl Refusals {
    /// Takes a connection over; the oldest one is closed without an answer when there are too many.
    pub(crate) fn add(&mut self, fd: OwnedFd) {
        if self.waiting.len() == REFUSALS_MAX {
            self.waiting.pop_front();
        }
        self.waiting.push_back((SeqPacket::from_fd(fd), Instant::now() + HELLO_WAIT));
    }

    /// What to wait on for their hellos.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.waiting.iter().map(|(socket, _)| socket.as_fd())
    }

    /// Answers those that have said hello, and closes them and those that took too long.
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
                    "the depot has as many connections as it takes: close some, or raise `ulimit -n` for the depot",
                )
                .with("connections_max", connections_max);
                // A client that has gone meanwhile needs no answer.
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
