//! An exclusive connection to a depot: one call at a time, and everything leased on it ends with it (P4).

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_io::socket::peer_process;
use kvdepot_tier::TierMemory;
use rustix::process::Pid;

use crate::client::starved::is_runnable;
use crate::message::{ANNOUNCEMENT_ID, HELLO_MAGIC, PROTOCOL_VERSION, Request, Response, decode, encode};
use crate::pool::{PoolMapping, PoolRegion};
use crate::seqpacket::{FrameBuffer, SeqPacket};
use crate::session::Session;

/// How much longer than its limit a call waits for a depot that is runnable but gets no processor: on such a machine,
/// computing what would have been a hit takes much longer.
const STARVED_WAIT: Duration = Duration::from_millis(50);
/// How often to check whether the depot is starved.
const STARVED_LOOK: Duration = Duration::from_millis(5);

/// The contents of a depot's welcome.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Welcome {
    pub(crate) depot: u64,
    /// Whether the pool has several regions.
    pub(crate) is_divided: bool,
    /// Whether a tier leases blocks in its memory.
    pub(crate) has_memory: bool,
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
    /// Whether the depot has announced that it hands its pool over.
    handed_over: bool,
    depot: Option<Pid>,
    /// The process that connected. A forked child has the descriptor too, and must not say goodbye on it.
    process: u32,
}

/// A pool passed by a depot.
#[derive(Debug)]
pub(crate) struct PassedPool {
    fd: OwnedFd,
    regions: Vec<PoolRegion>,
}

impl PassedPool {
    /// Maps the pool.
    pub(crate) fn map(self) -> Result<Arc<PoolMapping>> {
        PoolMapping::map_regions(self.fd, self.regions).map(Arc::new)
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Lane {
    way: Way,
    /// The NUMA node near which the depot places this lane's blocks.
    near: Option<u32>,
}

impl Lane {
    pub(crate) const fn embedded(session: Session) -> Self {
        Self { way: Way::Embedded(session), near: None }
    }

    /// Connects and performs the handshake. Also returns the pool that the depot passes.
    pub(crate) fn connect(path: &Path, deadline: Instant) -> Result<(Self, Welcome, PassedPool)> {
        let socket = SeqPacket::connect(path)?;
        let depot = peer_process(socket.as_fd());
        let process = std::process::id();
        let buffer = FrameBuffer::default();
        let way = Way::Socket(Socket { socket, buffer, request_id: 0, handed_over: false, depot, process });
        let mut lane = Self { way, near: None };
        let Way::Socket(socket) = &mut lane.way else { return Err(unexpected()) };
        let hello = Request::Hello { magic: HELLO_MAGIC, version: PROTOCOL_VERSION, pid: process };
        socket.ask(&hello, deadline)?;
        let (response, fd) = socket.answer(deadline)?;
        let Response::Welcome {
            depot,
            regions,
            timeout_ms,
            waiting_queue_depth,
            running_queue_depth,
            has_memory,
            ..
        } = response.into_result()?
        else {
            return Err(unexpected());
        };
        let fd = fd.ok_or_else(|| Error::new(ErrorKind::Protocol, "the depot did not pass its pool"))?;
        let is_divided = regions.len() > 1;
        let welcome =
            Welcome { depot, is_divided, has_memory, timeout_ms, waiting_queue_depth, running_queue_depth };
        Ok((lane, welcome, PassedPool { fd, regions }))
    }

    /// Makes a request and waits for the answer until the deadline. After a transport error (not a `Failed` answer) the
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

    /// Returns the memory of a tier in which the depot leases blocks. Only a depot in another process passes it here.
    pub(crate) fn memory(&mut self, deadline: Instant) -> Result<TierMemory> {
        let Way::Socket(socket) = &mut self.way else { return Err(unexpected()) };
        socket.ask(&Request::Memory, deadline)?;
        let (response, file) = socket.answer(deadline)?;
        let Response::Memory { bytes, head } = response.into_result()? else { return Err(unexpected()) };
        let file = file.ok_or_else(|| {
            Error::new(ErrorKind::Protocol, "the depot did not pass the memory of its tier")
        })?;
        Ok(TierMemory::new(file, bytes, head))
    }

    /// Like `call`, for a request that may take long: after `patience` the wait continues only while the depot answers
    /// others.
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

    /// Makes the depot place blocks requested on this lane near a NUMA node, where it has space.
    pub(crate) fn wish_near(&mut self, node: Option<u32>, deadline: Instant) -> Result<()> {
        if self.near != node {
            self.tell(Request::Near { node }, deadline)?;
            self.near = node;
        }
        Ok(())
    }

    /// Returns whether the depot has announced that it hands its pool over, as far as frames were read.
    pub(crate) const fn is_handed_over(&self) -> bool {
        matches!(&self.way, Way::Socket(Socket { handed_over: true, .. }))
    }

    /// Like `is_handed_over`, and reads an announcement that has arrived on a lane without a request in flight. Never
    /// waits.
    pub(crate) fn look_for_announcement(&mut self) -> bool {
        if let Way::Socket(socket) = &mut self.way {
            socket.look_for_announcement();
        }
        self.is_handed_over()
    }

    /// Returns whether the depot has announced that it hands its pool over, after a call with this outcome: after an error
    /// the announcement may not have been read yet.
    pub(crate) fn is_handed_over_after<T>(&mut self, outcome: &Result<T>) -> bool {
        if outcome.is_ok() { self.is_handed_over() } else { self.look_for_announcement() }
    }

    /// Returns whether the depot has hung up, as far as can be told without a request.
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

    fn look_for_announcement(&mut self) {
        // The first error may be one that is reported before frames that can still be read.
        for _ in 0..2 {
            if self.handed_over || !self.socket.is_readable() {
                return;
            }
            if self.socket.recv(&mut self.buffer, Some(Instant::now())).is_ok() {
                // Anything else in a frame is no announcement.
                let _ = self.take_frame();
            }
        }
    }

    /// Returns the answer to the last request.
    fn answer(&mut self, deadline: Instant) -> Result<(Response, Option<OwnedFd>)> {
        loop {
            let is_starved = || self.depot.is_some_and(is_runnable);
            let fd = answer(&mut self.socket, &mut self.buffer, deadline, STARVED_WAIT, is_starved)?;
            match self.take_frame()? {
                (ANNOUNCEMENT_ID, _) => {}
                (id, response) if id == self.request_id => return Ok((response, fd)),
                _ => {
                    return Err(Error::new(ErrorKind::Protocol, "an answer to another request")
                        .with("request", self.request_id));
                }
            }
        }
    }

    /// Decodes the frame in the buffer, and notes an announcement.
    fn take_frame(&mut self) -> Result<(u64, Response)> {
        let (id, response) = decode::<Response>(&self.buffer)?;
        self.handed_over |= id == ANNOUNCEMENT_ID && matches!(response, Response::HandsOver);
        Ok((id, response))
    }
}

/// Tells the depot that no copy under the lane's leases is in flight, so that they end immediately: a lane is dropped
/// only after its copies, even if it is out of step. A process that is killed does not get here.
impl Drop for Socket {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            return;
        }
        if let Ok(frame) = encode(self.request_id + 1, &Request::Goodbye) {
            // A depot that has gone needs no goodbye, and one that does not read it keeps the leases for a while.
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
            // If this thread itself is late, take an answer that has arrived meanwhile, or report that there is none.
            return socket.recv(buffer, Some(Instant::now()));
        }
        until = (Instant::now() + STARVED_LOOK).min(end);
    }
}

/// Returns the error of an answer that does not fit the request.
pub(crate) fn unexpected() -> Error {
    Error::new(ErrorKind::Protocol, "the depot's answer does not fit the request")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Longer than the test itself can be kept from running.
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
