//! Takes the place at a socket: either its lock, or the certainty that the lock's holder serves it.

use std::path::Path;
use std::time::{Duration, Instant};

use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_depot::message::{HELLO_MAGIC, PROTOCOL_VERSION, Request, Response, decode, encode};
use kvdepot_depot::seqpacket::{FrameBuffer, SeqPacket};

use crate::lock::DoorLock;
use crate::{keeper, systemd};

/// The longest time for another holder of the lock to answer: it may be starting.
pub const ANSWER_WAIT: Duration = Duration::from_secs(15);
/// The longest time for one hello.
const HELLO_WAIT: Duration = Duration::from_secs(1);
/// Pause between attempts.
const RETRY: Duration = Duration::from_millis(50);
/// Pause between attempts of a depot that waits for the end of another one.
const STANDBY_RETRY: Duration = Duration::from_millis(100);

/// Number of attempts after which a lock holder that does not answer is assumed to be a depot that has served.
const SILENT_TRIES: u32 = 10;

/// The outcome of the attempt.
#[derive(Debug)]
pub enum Place {
    /// The caller may serve the socket.
    Free(DoorLock),
    /// Another depot serves it and answers.
    Served,
    /// The caller was stopped.
    Stopped,
}

impl Place {
    /// Takes the lock of a socket. While another process holds it, checks for a depot at the socket; fails if none has
    /// answered after `wait`. `keep_on` is called between attempts.
    pub fn take(socket: &Path, wait: Duration, keep_on: &mut dyn FnMut() -> bool) -> Result<Self> {
        let end = Instant::now() + wait;
        loop {
            if let Some(lock) = DoorLock::take(socket)? {
                return Ok(Self::Free(lock));
            }
            if greet(socket) == Greeted::Answers {
                return Ok(Self::Served);
            }
            if Instant::now() >= end {
                return Err(Error::new(
                    ErrorKind::Unavailable,
                    "another process holds the lock beside the socket, but no depot answers there: it may be ending or \
                     hang; end it (`fuser` on the lock file names it), or choose another socket",
                )
                .with("socket", socket.display())
                .with("waited_s", wait.as_secs()));
            }
            if !keep_on() {
                return Ok(Self::Stopped);
            }
            std::thread::sleep(RETRY);
        }
    }

    /// Takes the lock of a socket, however long another process holds it; never returns [`Place::Served`]. `keep_on` is
    /// called between attempts. The service manager is notified that this service is up: its socket is served, so far
    /// by another process. Descriptors that the manager stored for this service's last depot are dropped, because the
    /// other process may have reset or removed blocks in them (P1).
    pub fn wait(socket: &Path, keep_on: &mut dyn FnMut() -> bool) -> Result<Self> {
        let (mut tries, mut forgotten) = (0, false);
        loop {
            // A depot that answers, now or late, may have lost its lock file: it makes that again, and owns the place.
            let there = if tries > 0 { greet(socket) } else { Greeted::Nobody };
            if there == Greeted::Nobody
                && let Some(lock) = DoorLock::take(socket)?
            {
                return Ok(Self::Free(lock));
            }
            tries += 1;
            if (there == Greeted::Answers || tries > SILENT_TRIES) && !forgotten {
                forgotten = true;
                keeper::forget_stored();
            }
            if tries == 1 {
                tracing::info!(
                    "another process holds the lock of {}: waiting until it exits",
                    socket.display()
                );
                systemd::notify("READY=1\nSTATUS=Waiting for the end of another depot at the same socket");
            }
            if !keep_on() {
                return Ok(Self::Stopped);
            }
            std::thread::sleep(STANDBY_RETRY);
        }
    }
}

/// Who is at a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Greeted {
    /// A depot that answers in any way: one that is full or of another version serves the socket, too.
    Answers,
    /// A process that listens and has not answered in time.
    IsSilent,
    Nobody,
}

/// Says hello.
fn greet(socket: &Path) -> Greeted {
    let ask = || -> Result<Response> {
        let mut socket = SeqPacket::connect(socket)?;
        let hello = Request::Hello { magic: HELLO_MAGIC, version: PROTOCOL_VERSION, pid: std::process::id() };
        socket.send(&encode(1, &hello)?, None)?;
        let mut buffer = FrameBuffer::default();
        drop(socket.recv(&mut buffer, Some(Instant::now() + HELLO_WAIT))?);
        Ok(decode(&buffer)?.1)
    };
    match ask() {
        Ok(_) => Greeted::Answers,
        Err(error) if error.kind() == ErrorKind::Timeout => Greeted::IsSilent,
        Err(_) => Greeted::Nobody,
    }
}
