//! Taking a socket: its lock, or the certainty that the process that holds the lock serves it.

use std::path::Path;
use std::time::{Duration, Instant};

use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_depot::message::{HELLO_MAGIC, PROTOCOL_VERSION, Request, Response, decode, encode};
use kvdepot_depot::seqpacket::{FrameBuffer, SeqPacket};

use crate::lock::DoorLock;
use crate::{keeper, systemd};

/// How long another process that holds the lock may take to answer: it may be starting.
pub const ANSWER_WAIT: Duration = Duration::from_secs(15);
/// How long one hello may take.
const HELLO_WAIT: Duration = Duration::from_secs(1);
/// Pause between two tries.
const RETRY: Duration = Duration::from_millis(50);
/// Pause between two tries of a depot that waits for the end of another one.
const STANDBY_RETRY: Duration = Duration::from_millis(100);

/// Tries after which a process that holds the lock and does not answer is taken for a depot that has served.
const SILENT_TRIES: u32 = 10;

/// What became of the attempt.
#[derive(Debug)]
pub enum Place {
    /// The socket is the caller's to serve.
    Free(DoorLock),
    /// Another depot serves it and answers.
    Served,
    /// The caller was told to stop.
    Stopped,
}

impl Place {
    /// Takes the lock of a socket. While another process holds it, asks for a depot at the socket; when none has answered
    /// after `wait`, that is an error. `keep_on` is asked between tries.
    pub fn take(socket: &Path, wait: Duration, keep_on: &mut dyn FnMut() -> bool) -> Result<Self> {
        let end = Instant::now() + wait;
        loop {
            if let Some(lock) = DoorLock::take(socket)? {
                return Ok(Self::Free(lock));
            }
            if answers(socket) {
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

    /// Takes the lock of a socket, however long another process holds it; never [`Place::Served`]. `keep_on` is asked between
    /// tries. A service manager is told that this service is up: its socket is served, by another process so far. What the
    /// manager kept of this service's last depot is dropped: the other one may have reset and removed what is in it (P1).
    pub fn wait(socket: &Path, keep_on: &mut dyn FnMut() -> bool) -> Result<Self> {
        let (mut tries, mut forgotten) = (0, false);
        loop {
            // Where a depot answers, its lock file may have been deleted: it makes that anew, and has the right to it.
            let served = tries > 0 && answers(socket);
            if !served && let Some(lock) = DoorLock::take(socket)? {
                return Ok(Self::Free(lock));
            }
            tries += 1;
            if (served || tries > SILENT_TRIES) && !forgotten {
                forgotten = true;
                keeper::forget_stored();
            }
            if tries == 1 {
                tracing::info!(
                    "another process holds the lock of {}: this depot waits until that one ends",
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

/// Whether a depot answers a hello, in whatever way: one that is full or of another version serves the socket, too.
fn answers(socket: &Path) -> bool {
    let ask = || -> Result<Response> {
        let mut socket = SeqPacket::connect(socket)?;
        let hello = Request::Hello { magic: HELLO_MAGIC, version: PROTOCOL_VERSION, pid: std::process::id() };
        socket.send(&encode(1, &hello)?, None)?;
        let mut buffer = FrameBuffer::default();
        drop(socket.recv(&mut buffer, Some(Instant::now() + HELLO_WAIT))?);
        Ok(decode(&buffer)?.1)
    };
    ask().is_ok()
}
