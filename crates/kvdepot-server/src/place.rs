//! Taking a socket: its lock, or the certainty that the process that holds the lock serves it.

use std::path::Path;
use std::time::{Duration, Instant};

use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_depot::message::{HELLO_MAGIC, PROTOCOL_VERSION, Request, Response, decode, encode};
use kvdepot_depot::seqpacket::{FrameBuffer, SeqPacket};

use crate::lock::DoorLock;

/// How long another process that holds the lock may take to answer: it may be starting.
pub const ANSWER_WAIT: Duration = Duration::from_secs(15);
/// How long one hello may take.
const HELLO_WAIT: Duration = Duration::from_secs(1);
/// Pause between two tries.
const RETRY: Duration = Duration::from_millis(50);

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
