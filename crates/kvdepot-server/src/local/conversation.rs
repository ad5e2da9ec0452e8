//! One connection of the local door, from its hello to its end.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use kvdepot_core::limits::{BATCH_HASHES_MAX, CLAIM_HASHES_MAX};
use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_depot::message::{Request, Response, decode, encode};
use kvdepot_depot::seqpacket::{FrameBuffer, SeqPacket};
use kvdepot_depot::{Depot, Session};

use crate::handover::Asking;
use crate::peer::Peer;
use crate::quarantine::Quarantine;

/// The longest time for a new connection to say hello.
const HELLO_WAIT: Duration = Duration::from_secs(5);
/// Number of frames searched for a goodbye after a connection failed. A claim is the most that a client sends ahead.
const UNREAD_FRAMES_MAX: usize = 2 + CLAIM_HASHES_MAX / BATCH_HASHES_MAX;

/// The outcome of a conversation that did not fail.
enum Exchanged {
    /// The client said goodbye.
    Goodbye,
    /// Another depot requests the pool, with a request of this number.
    HandOver { request: u64, version: u32, pool_bytes: u64 },
}

/// Runs one connection to its end. Leases end immediately when the client said goodbye, which it does after its copies.
/// Otherwise it may have been killed with copies in flight, and the quarantine ends its leases after its exit (P1, P4).
pub(crate) fn converse(
    depot: &Depot,
    session: Session,
    mut socket: SeqPacket,
    peer: impl Peer + 'static,
    quarantine: &Quarantine,
    copies_ended: &dyn Fn(),
) -> Option<Asking> {
    let is_clean = match exchange(depot, &session, &mut socket, copies_ended) {
        Ok(Exchanged::Goodbye) => true,
        Ok(Exchanged::HandOver { request, version, pool_bytes }) => {
            let asking = Asking { socket, request, version, pool_bytes };
            if let Err(error) = asking.ensure_own_user() {
                asking.refuse(&error);
                return None;
            }
            return Some(asking);
        }
        Err(error) => {
            if error.kind() != ErrorKind::Closed {
                tracing::warn!("a connection was closed: {error}");
            }
            said_goodbye(&mut socket)
        }
    };
    drop(socket);
    if !is_clean && session.end_claims() {
        quarantine.hold(session, Box::new(peer));
    }
    None
}

/// Answers requests until the client says goodbye. Returns an error when the connection ends otherwise.
fn exchange(
    depot: &Depot,
    session: &Session,
    socket: &mut SeqPacket,
    copies_ended: &dyn Fn(),
) -> Result<Exchanged> {
    let mut buffer = FrameBuffer::default();
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
        match request {
            Request::Goodbye => return Ok(Exchanged::Goodbye),
            Request::HandOver { version, pool_bytes } if greeted => {
                return Ok(Exchanged::HandOver { request: id, version, pool_bytes });
            }
            Request::CopiesEnded => copies_ended(),
            _ => {}
        }
        let hello = matches!(request, Request::Hello { .. });
        if hello == greeted {
            let error = Error::new(ErrorKind::Protocol, "a connection begins with one hello");
            socket.send(&encode(id, &Response::from_error(&error))?, None)?;
            return Err(error);
        }
        let is_one_way = request.is_one_way();
        let response = session.handle(request);
        if is_one_way {
            continue;
        }
        let welcome = matches!(response, Response::Welcome { .. });
        let pool = depot.pool();
        let passed = match &response {
            Response::Welcome { .. } => pool.fd(),
            Response::Memory { .. } => depot.memory().map(|memory| memory.file.as_fd()),
            _ => None,
        };
        let frame = match encode(id, &response) {
            Ok(frame) => frame,
            Err(error) => encode(id, &Response::from_error(&error))?,
        };
        socket.send(&frame, passed)?;
        if hello && !welcome {
            return Err(Error::new(ErrorKind::Protocol, "a connection was turned away at its hello"));
        }
        greeted = true;
    }
}

/// Returns whether a goodbye is among the client's unread frames: a client that abandons a request closes without
/// waiting for the answer, and sending that answer then fails before the goodbye was read.
pub(crate) fn said_goodbye(socket: &mut SeqPacket) -> bool {
    let mut buffer = FrameBuffer::default();
    let mut failures = 0;
    // A client that keeps sending has not closed.
    for _ in 0..UNREAD_FRAMES_MAX {
        match socket.recv(&mut buffer, Some(Instant::now())) {
            Ok(_) if matches!(decode(&buffer), Ok((_, Request::Goodbye))) => return true,
            Ok(_) => {}
            // The first error may be ECONNRESET, which is reported before data that can still be read.
            Err(_) if failures == 0 => failures += 1,
            Err(_) => return false,
        }
    }
    false
}
