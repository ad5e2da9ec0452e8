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
use crate::pool::{PoolMapping, PoolRegion};
use crate::seqpacket::{FrameBuffer, SeqPacket};
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
    /// Whether the pool has several regions.
    pub(crate) is_divided: bool,
    pub(crate) timeout_ms: u64,
    pub(crate) waiting_queue_depth: u64,
    pub(crate) running_queue_depth: u64,
}

#[derive(Debug)]
enum Way {
    Embedded(Session),
    Socket(Socket),
}

#[derive(Debug)]
struct Socket {
    socket: SeqPacket,
    buffer: FrameBuffer,
    request_id: u64,
    depot: Option<Pid>,
    /// Who connected. A child that it forks has the descriptor too, and must not say goodbye for it.
    process: u32,
}

/// A pool that a depot passed.
#[derive(Debug)]
pub(crate) struct PassedPool {
    fd: OwnedFd,
    regions: Vec<PoolRegion>,
}

impl PassedPool {
    /// Maps it.
    pub(crate) fn map(self) -> Result<Arc<PoolMapping>> {
        PoolMapping::map_regions(self.fd, self.regions).map(Arc::new)
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Lane {
    way: Way,
    /// The NUMA node near which the depot was told to have this lane's blocks.
    near: Option<u32>,
}

impl Lane {
    pub(crate) const fn embedded(session: Session) -> Self {
        Self { way: Way::Embedded(session), near: None }
    }

    /// Connects and shakes hands; returns the pool that the depot passes as well.
    pub(crate) fn connect(path: &Path, deadline: Instant) -> Result<(Self, Welcome, PassedPool)> {
        let socket = SeqPacket::connect(path)?;
        let depot = peer_process(socket.as_fd());
        let process = std::process::id();
        let buffer = FrameBuffer::default();
        let way = Way::Socket(Socket { socket, buffer, request_id: 0, depot, process });
        let mut lane = Self { way, near: None };
        let Way::Socket(socket) = &mut lane.way else { return Err(unexpected()) };
        let hello = Request::Hello { magic: HELLO_MAGIC, version: PROTOCOL_VERSION, pid: process };
        socket.ask(&hello, deadline)?;
        let (response, fd) = socket.answer(deadline)?;
        let Response::Welcome {
            depot, regions, timeout_ms, waiting_queue_depth, running_queue_depth, ..
        } = response.into_result()?
        else {
            return Err(unexpected());
        };
        let fd = fd.ok_or_else(|| Error::new(ErrorKind::Protocol, "the depot did not pass its pool"))?;
        let is_divided = regions.len() > 1;
        let welcome = Welcome { depot, is_divided, timeout_ms, waiting_queue_depth, running_queue_depth };
        Ok((lane, welcome, PassedPool { fd, regions }))
    }

    /// Asks and waits for the answer until the deadline. After an error of the way itself (not a `Failed` answer) the
    /// lane is out of step and must be dropped.
    pub(crate) fn call(&mut self, request: Request<'_>, deadline: Instant) -> Result<Response> {
        match &mut self.way {
            Way::Embedded(session) => Ok(session.handle(request)),
            Way::Socket(socket) => {
                socket.ask(&request, deadline)?;
                socket.answer(deadline).map(|(response, _)| response)
            }
        }
    }

    /// As `call`, of a request that may take long: from `patience` on the wait goes on only while the depot answers others.
    pub(crate) fn call_patiently(
        &mut self,
        request: Request<'_>,
        deadline: Instant,
        patience: Duration,
        mut is_answering: impl FnMut() -> bool,
    ) -> Result<Response> {
        let socket = match &mut self.way {
            Way::Embedded(session) => return Ok(session.handle(request)),
            Way::Socket(socket) => socket,
        };
        let mut look = patience;
        socket.ask(&request, deadline.min(Instant::now() + look))?;
        loop {
            let until = deadline.min(Instant::now() + look);
            match socket.answer(until) {
                Err(error) if error.kind() == ErrorKind::Timeout && until < deadline && is_answering() => {}
                outcome => return outcome.map(|(response, _)| response),
            }
            look *= 2;
        }
    }

    /// Sends a request that is not answered.
    pub(crate) fn tell(&mut self, request: Request<'_>, deadline: Instant) -> Result<()> {
        match &mut self.way {
            Way::Embedded(session) => session.handle(request).into_result().map(drop),
            Way::Socket(socket) => socket.ask(&request, deadline),
        }
    }

    /// Has blocks that are asked for on this lane lie near a NUMA node, where the depot has room there.
    pub(crate) fn wish_near(&mut self, node: Option<u32>, deadline: Instant) -> Result<()> {
        if self.near != node {
            self.tell(Request::Near { node }, deadline)?;
            self.near = node;
        }
        Ok(())
    }

    /// Whether the depot at the other end has gone, as far as can be told without asking it.
    pub(crate) fn hung_up(&self) -> bool {
        match &self.way {
            Way::Embedded(_) => false,
            Way::Socket(socket) => socket.socket.hung_up(),
        }
    }
}

impl Socket {
    fn ask(&mut self, request: &Request<'_>, deadline: Instant) -> Result<()> {
        self.request_id += 1;
        self.socket.send_by(&encode(self.request_id, request)?, deadline)
    }

    /// The answer to the last request.
    fn answer(&mut self, deadline: Instant) -> Result<(Response, Option<OwnedFd>)> {
        let is_starved = || self.depot.is_some_and(is_runnable);
        let fd = answer(&mut self.socket, &mut self.buffer, deadline, STARVED_WAIT, is_starved)?;
        let (id, response) = decode::<Response>(&self.buffer)?;
        if id != self.request_id {
            return Err(Error::new(ErrorKind::Protocol, "an answer to another request")
                .with("request", self.request_id));
        }
        Ok((response, fd))
    }
}

/// Tells the depot that no copy under the lane's leases is under way, so that they end at once: a lane is dropped only
/// after its copies, also when it is out of step. A process that is killed does not get here.
impl Drop for Socket {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            return;
        }
        if let Ok(frame) = encode(self.request_id + 1, &Request::Goodbye) {
            // A depot that has gone needs none, and one that takes none keeps the leases for a while.
            let _ = self.socket.send_now(&frame);
        }
    }
}

/// Waits for an answer until the deadline, and a little longer for a depot that only gets no processor.
fn answer(
    socket: &mut SeqPacket,
    buffer: &mut FrameBuffer,
    deadline: Instant,
    starved_wait: Duration,
    is_starved: impl Fn() -> bool,
) -> Result<Option<OwnedFd>> {
    let (mut until, end) = (deadline, deadline + starved_wait);
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

    /// Longer than the test itself may be kept from running.
    const LONG: Duration = Duration::from_secs(60);

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
        let mut buffer = FrameBuffer::default();
        answer(&mut here, &mut buffer, Instant::now(), LONG, is_starved).unwrap();
        assert_eq!((&*buffer, looks.get()), (b"late".as_slice(), 2));
    }

    #[test]
    fn a_depot_that_gets_none_for_long_or_hangs_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let (mut here, _there) = pair(directory.path());
        for starved in [true, false] {
            let outcome =
                answer(&mut here, &mut FrameBuffer::default(), Instant::now(), STARVED_WAIT, || starved);
            assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Timeout, "starved: {starved}");
        }
    }

    #[test]
    fn an_answer_that_came_while_the_caller_got_no_processor_is_taken() {
        let directory = tempfile::tempdir().unwrap();
        let (mut here, there) = pair(directory.path());
        let mut buffer = FrameBuffer::default();
        let answers = || {
            there.send(b"there", None).unwrap();
            false
        };
        answer(&mut here, &mut buffer, Instant::now(), LONG, answers).unwrap();
        assert_eq!(&*buffer, b"there");
    }
}
