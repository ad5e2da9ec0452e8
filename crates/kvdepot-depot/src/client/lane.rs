//! One exclusive way to a depot: a call at a time, and everything leased on it ends with it (P4).

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_io::socket::peer_process;
use rustix::process::Pid;

use crate::client::starved::is_runnable;
use crate::message::{HELLO_MAGIC, PROTOCOL_VERSION, Request, Response, decode, encode};
use crate::pool::PoolMapping;
use crate::seqpacket::SeqPacket;
use crate::session::Session;

/// How much longer than its bound a call waits for a depot that would run if it got a processor: a hit that is computed
/// instead takes much longer on such a machine.
const STARVED_WAIT: Duration = Duration::from_millis(50);
/// How often it is looked whether that is so.
const STARVED_LOOK: Duration = Duration::from_millis(5);

/// What a depot says of itself in its welcome.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Welcome {
    pub(crate) depot: u64,
    pub(crate) timeout_ms: u64,
    pub(crate) waiting_queue_depth: u64,
    pub(crate) running_queue_depth: u64,
}

#[derive(Debug)]
enum Way {
    Embedded(Session),
    Socket { socket: SeqPacket, buffer: Vec<u8>, request_id: u64, depot: Option<Pid> },
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Lane {
    way: Way,
}

impl Lane {
    pub(crate) const fn embedded(session: Session) -> Self {
        Self { way: Way::Embedded(session) }
    }

    /// Connects and shakes hands; returns the pool as well when `map` asks for it.
    pub(crate) fn connect(
        path: &Path,
        deadline: Instant,
        map: bool,
    ) -> Result<(Self, Welcome, Option<Arc<PoolMapping>>)> {
        let socket = SeqPacket::connect(path)?;
        let depot = peer_process(socket.as_fd());
        let mut lane = Self { way: Way::Socket { socket, buffer: Vec::new(), request_id: 0, depot } };
        let hello = Request::Hello { magic: HELLO_MAGIC, version: PROTOCOL_VERSION, pid: std::process::id() };
        let (response, fd) = lane.exchange(&hello, deadline)?;
        let Response::Welcome {
            depot, pool_bytes, timeout_ms, waiting_queue_depth, running_queue_depth, ..
        } = response.into_result()?
        else {
            return Err(unexpected());
        };
        let pool = match (map, fd) {
            (false, _) => None,
            (true, Some(fd)) => Some(Arc::new(PoolMapping::map(fd, pool_bytes)?)),
            (true, None) => return Err(Error::new(ErrorKind::Protocol, "the depot did not pass its pool")),
        };
        Ok((lane, Welcome { depot, timeout_ms, waiting_queue_depth, running_queue_depth }, pool))
    }

    /// Asks and waits for the answer until the deadline. After an error of the way itself (not a `Failed` answer) the
    /// lane is out of step and must be dropped.
    pub(crate) fn call(&mut self, request: Request<'_>, deadline: Instant) -> Result<Response> {
        match &mut self.way {
            Way::Embedded(session) => Ok(session.handle(request)),
            Way::Socket { .. } => self.exchange(&request, deadline).map(|(response, _)| response),
        }
    }

    /// Whether the depot at the other end has gone, as far as can be told without asking it.
    pub(crate) fn hung_up(&self) -> bool {
        match &self.way {
            Way::Embedded(_) => false,
            Way::Socket { socket, .. } => socket.hung_up(),
        }
    }

    fn exchange(&mut self, request: &Request<'_>, deadline: Instant) -> Result<(Response, Option<OwnedFd>)> {
        let Way::Socket { socket, buffer, request_id, depot } = &mut self.way else {
            return Err(Error::new(ErrorKind::Protocol, "an embedded depot has no socket"));
        };
        *request_id += 1;
        socket.send(&encode(*request_id, request)?, None)?;
        let fd = answer(socket, buffer, deadline, || depot.is_some_and(is_runnable))?;
        let (id, response) = decode::<Response>(buffer)?;
        if id != *request_id {
            return Err(
                Error::new(ErrorKind::Protocol, "an answer to another request").with("request", *request_id)
            );
        }
        Ok((response, fd))
    }
}

/// Waits for an answer until the deadline, and a little longer for a depot that only gets no processor.
fn answer(
    socket: &mut SeqPacket,
    buffer: &mut Vec<u8>,
    deadline: Instant,
    is_starved: impl Fn() -> bool,
) -> Result<Option<OwnedFd>> {
    let (mut until, end) = (deadline, deadline + STARVED_WAIT);
    loop {
        let outcome = socket.recv(buffer, Some(until));
        if !outcome.as_ref().is_err_and(|error| error.kind() == ErrorKind::Timeout) {
            return outcome;
        }
        if Instant::now() >= end || !is_starved() {
            // Whoever is late itself finds what has come meanwhile, or else that nothing has.
            return socket.recv(buffer, Some(Instant::now()));
        }
        until = (Instant::now() + STARVED_LOOK).min(end);
    }
}

/// The error of an answer that fits no question.
pub(crate) fn unexpected() -> Error {
    Error::new(ErrorKind::Protocol, "the depot's answer does not fit the request")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(directory: &Path) -> (SeqPacket, SeqPacket) {
        let path = directory.join("lane.sock");
        let listener = SeqPacket::listen(&path, 1).unwrap();
        let here = SeqPacket::connect(&path).unwrap();
        let there = rustix::net::accept(listener.as_fd()).unwrap();
        (here, SeqPacket::from_fd(there))
    }

    #[test]
    fn a_depot_that_gets_no_processor_is_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let (mut here, there) = pair(directory.path());
        let looks = std::cell::Cell::new(0);
        let is_starved = || {
            looks.set(looks.get() + 1);
            if looks.get() == 2 {
                there.send(b"late", None).unwrap();
            }
            true
        };
        let mut buffer = Vec::new();
        answer(&mut here, &mut buffer, Instant::now(), is_starved).unwrap();
        assert_eq!((buffer.as_slice(), looks.get()), (b"late".as_slice(), 2));
    }

    #[test]
    fn a_depot_that_gets_none_for_long_or_hangs_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let (mut here, _there) = pair(directory.path());
        for starved in [true, false] {
            let outcome = answer(&mut here, &mut Vec::new(), Instant::now(), || starved);
            assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Timeout, "starved: {starved}");
        }
    }

    #[test]
    fn an_answer_that_came_while_the_caller_got_no_processor_is_taken() {
        let directory = tempfile::tempdir().unwrap();
        let (mut here, there) = pair(directory.path());
        let mut buffer = Vec::new();
        let answers = || {
            there.send(b"there", None).unwrap();
            false
        };
        answer(&mut here, &mut buffer, Instant::now(), answers).unwrap();
        assert_eq!(buffer, b"there");
    }
}
