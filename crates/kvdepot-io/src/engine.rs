//! The interface of an I/O engine. One request covers a complete file, so that each engine can move it in its own best
//! way.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use kvdepot_core::{Error, ErrorKind, Result};

use crate::device::{Device, DeviceFile};
use crate::iobuf::IoBuf;

/// The queue of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// A caller waits for it; served first.
    Read,
    /// Write-behind.
    Write,
}

/// The bytes to write. They are made on the I/O thread, so that no other thread pays for checksums.
#[derive(Debug)]
pub enum Prepared {
    /// Write these bytes into a new file.
    Buf(IoBuf),
    /// Overwrite the file of the same length that was renamed to the temporary name ([`Device::take_over`]).
    Over(IoBuf, Box<dyn DeviceFile>),
    /// Write nothing: the file exists.
    Skip,
}

/// The outcome of a file write.
#[derive(Clone, Debug)]
pub enum FileWritten {
    /// The complete file was written and renamed into place.
    Published,
    /// `prepare` returned [`Prepared::Skip`].
    Skipped,
    /// The rename failed with this error, and may have taken effect all the same: the file may have its final name.
    InDoubt(Error),
}

/// The completion callback of a request. It is called exactly once, from any thread, possibly before `submit` returns
/// (`Busy`, `Timeout`).
pub type Ended<T> = Box<dyn FnOnce(Result<T>) + Send>;

/// A request to read the first `buf.len()` bytes of a file, or all of a shorter one.
pub struct ReadFile {
    /// The device.
    pub device: Arc<dyn Device>,
    /// The path on the device.
    pub path: PathBuf,
    /// The destination.
    pub buf: IoBuf,
    /// The fewest bytes of the file: a shorter one is `Corrupt`. `buf.len()` if it must fill the buffer.
    pub fewest_bytes: usize,
    /// Receives the filled buffer, on the I/O thread, where checksums are computed. [`IoBuf::filled`] tells how many
    /// bytes the file had.
    pub done: Ended<IoBuf>,
}

/// A request to write a file under a temporary name and rename it into place (P1).
pub struct WriteFile {
    /// The device.
    pub device: Arc<dyn Device>,
    /// The name until the file is complete. It is removed on failure.
    pub temporary: PathBuf,
    /// The name of the complete file.
    pub target: PathBuf,
    /// Whether to sync the bytes before the rename.
    pub durable: bool,
    /// Makes the bytes. It runs on the I/O thread and may do I/O of its own.
    pub prepare: Box<dyn FnOnce() -> Result<Prepared> + Send>,
    /// Called on the I/O thread when the device is full (`NoSpace`). If it returns `true`, some space was freed and
    /// the write is retried once. If it returns an error, the write ends with that one.
    pub make_room: Box<dyn FnOnce() -> Result<bool> + Send>,
    /// Receives the outcome.
    pub done: Ended<FileWritten>,
}

/// Any other work that must not run on the caller's thread, such as lookups and removals.
pub struct Call {
    /// Runs on an I/O thread with `Ok`, or on any thread with the reason why it cannot run.
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

/// An operation with its queue and deadline.
#[derive(Debug)]
pub struct Request {
    /// The queue.
    pub class: Class,
    /// A request that has not begun by then fails with `Timeout` (P2).
    pub deadline: Instant,
    /// The operation.
    pub op: Op,
}

impl Request {
    /// Completes a request that did not run with an error.
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

    /// The error of a request refused by a full queue.
    pub fn refused(queue_depth: usize) -> Error {
        Error::new(ErrorKind::Busy, "an I/O queue is full").with("queue_depth", queue_depth)
    }

    /// The error of a request submitted to an engine that is shutting down.
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
    /// Number of queued reads.
    pub reads_queued: usize,
    /// Number of queued writes.
    pub writes_queued: usize,
    /// Number of running requests, stuck ones included.
    pub running: usize,
    /// Number of threads that were abandoned and are still stuck in the operating system.
    pub written_off: usize,
    /// Number of requests that have completed since the start.
    pub ended: u64,
    /// Number of requests that failed with `Timeout` before they began.
    pub expired: u64,
    /// Number of requests refused with `Busy`.
    pub refused: u64,
}

/// Runs requests. Every request completes exactly once (P2), also at shutdown.
pub trait IoEngine: Send + Sync + fmt::Debug {
    /// Short name for logs: `psync`, `noop`…
    fn name(&self) -> &'static str;

    /// Accepts requests and returns immediately.
    fn submit(&self, batch: Vec<Request>);

    /// Waits until no request is queued or running. Returns `false` if the deadline passes first.
    fn drain(&self, deadline: Instant) -> bool;

    /// Returns the current counters.
    fn stats(&self) -> EngineStats;
}
