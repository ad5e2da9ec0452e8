//! What an engine is asked, and how it answers: whole files in one request, so that every engine does its best.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use kvdepot_core::{Error, ErrorKind, Result};

use crate::device::{Device, DeviceFile};
use crate::iobuf::IoBuf;

/// Which queue a request stands in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Someone waits for it: served first.
    Read,
    /// Write-behind.
    Write,
}

/// What to write, made on the I/O thread so that checksums cost nobody else's time.
#[derive(Debug)]
pub enum Prepared {
    /// Write this into a new file.
    Buf(IoBuf),
    /// Write this over the file of the same length that was renamed to the temporary name ([`Device::take_over`]).
    Over(IoBuf, Box<dyn DeviceFile>),
    /// Nothing to do: the file is there.
    Skip,
}

/// How a file write ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileWritten {
    /// Written whole and renamed into place.
    Published,
    /// `prepare` said that there was nothing to do.
    Skipped,
}

/// Called exactly once when a request has ended, from any thread, possibly before `submit` returns (`Busy`, `Timeout`).
pub type Ended<T> = Box<dyn FnOnce(Result<T>) + Send>;

/// Reads a file's first `buf.len()` bytes.
pub struct ReadFile {
    /// Where.
    pub device: Arc<dyn Device>,
    /// Which file.
    pub path: PathBuf,
    /// Where its bytes go.
    pub buf: IoBuf,
    /// Gets the filled buffer. Runs on the I/O thread, which is where checksums belong; a file that is too short is
    /// `Corrupt`.
    pub done: Ended<IoBuf>,
}

/// Writes a file under a temporary name and renames it into place (P1).
pub struct WriteFile {
    /// Where.
    pub device: Arc<dyn Device>,
    /// Name while it is not whole; removed on failure.
    pub temporary: PathBuf,
    /// Name when it is whole.
    pub target: PathBuf,
    /// Whether to sync the bytes before the rename.
    pub durable: bool,
    /// Makes the bytes; runs on the I/O thread and may do I/O of its own.
    pub prepare: Box<dyn FnOnce() -> Result<Prepared> + Send>,
    /// Called on the I/O thread when the device has no space left (`NoSpace`); `true` if it freed some, and then the
    /// file is written once more.
    pub make_room: Box<dyn FnOnce() -> bool + Send>,
    /// Says how it ended.
    pub done: Ended<FileWritten>,
}

/// Anything else that must not run on the caller's thread: look-ups, removals.
pub struct Call {
    /// Runs on an I/O thread with `Ok`, or anywhere with the reason why it cannot run.
    pub run: Ended<()>,
}

/// One operation.
#[derive(Debug)]
pub enum Op {
    /// Read a file.
    Read(ReadFile),
    /// Write a file.
    Write(WriteFile),
    /// Run something.
    Call(Call),
}

/// An operation with its queue and its deadline.
#[derive(Debug)]
pub struct Request {
    /// Which queue.
    pub class: Class,
    /// When the caller stops caring: not begun by then ends with `Timeout` (P2).
    pub deadline: Instant,
    /// What to do.
    pub op: Op,
}

impl Request {
    /// Ends a request that did not run.
    pub fn fail(self, error: Error) {
        match self.op {
            Op::Read(read) => (read.done)(Err(error)),
            Op::Write(write) => (write.done)(Err(error)),
            Op::Call(call) => (call.run)(Err(error)),
        }
    }

    /// The error of a request that had not begun by its deadline.
    pub fn expired() -> Error {
        Error::new(
            ErrorKind::Timeout,
            "an I/O request had not begun by its deadline: the device is slower than its load",
        )
    }

    /// The error of a request that a full queue refused.
    pub fn refused(queue_depth: usize) -> Error {
        Error::new(ErrorKind::Busy, "an I/O queue is full").with("queue_depth", queue_depth)
    }

    /// The error of a request that met an engine shutting down.
    pub fn closed() -> Error {
        Error::new(ErrorKind::Closed, "the I/O engine is shutting down")
    }
}

impl fmt::Debug for ReadFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadFile").field("path", &self.path).field("bytes", &self.buf.len()).finish()
    }
}

impl fmt::Debug for WriteFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WriteFile").field("target", &self.target).field("durable", &self.durable).finish()
    }
}

impl fmt::Debug for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Call")
    }
}

/// Counters of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Reads waiting.
    pub reads_queued: usize,
    /// Writes waiting.
    pub writes_queued: usize,
    /// Requests running now, stuck ones included.
    pub running: usize,
    /// Threads written off and still stuck in the operating system.
    pub written_off: usize,
    /// Requests that ended since the start.
    pub ended: u64,
    /// Requests that ended with `Timeout` without having begun.
    pub expired: u64,
    /// Requests refused with `Busy`.
    pub refused: u64,
}

/// Runs requests. Every request ends exactly once (P2), also at shutdown.
pub trait IoEngine: Send + Sync + fmt::Debug {
    /// Short name for logs: `psync`, `noop`…
    fn name(&self) -> &'static str;

    /// Takes requests; returns at once.
    fn submit(&self, batch: Vec<Request>);

    /// Waits until nothing waits or runs, or the deadline passes (`false`).
    fn drain(&self, deadline: Instant) -> bool;

    /// Counters now.
    fn stats(&self) -> EngineStats;
}
