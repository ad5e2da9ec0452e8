//! One exclusive way to a depot: a call at a time, and everything leased on it ends with it (P4).

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use kvdepot_core::{Error, ErrorKind, Result};

use crate::message::{HELLO_MAGIC, PROTOCOL_VERSION, Request, Response, decode, encode};
use crate::pool::PoolMapping;
use crate::seqpacket::SeqPacket;
use crate::session::Session;

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
    Socket { socket: SeqPacket, buffer: Vec<u8>, request_id: u64 },
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
        let mut lane = Self { way: Way::Socket { socket, buffer: Vec::new(), request_id: 0 } };
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

    fn exchange(
        &mut self,
        request: &Request<'_>,
        deadline: Instant,
    ) -> Result<(Response, Option<std::os::fd::OwnedFd>)> {
        let Way::Socket { socket, buffer, request_id } = &mut self.way else {
            return Err(Error::new(ErrorKind::Protocol, "an embedded depot has no socket"));
        };
        *request_id += 1;
        socket.send(&encode(*request_id, request)?, None)?;
        let fd = socket.recv(buffer, Some(deadline))?;
        let (id, response) = decode::<Response>(buffer)?;
        if id != *request_id {
            return Err(
                Error::new(ErrorKind::Protocol, "an answer to another request").with("request", *request_id)
            );
        }
        Ok((response, fd))
    }
}

/// The error of an answer that fits no question.
pub(crate) fn unexpected() -> Error {
    Error::new(ErrorKind::Protocol, "the depot's answer does not fit the request")
}
