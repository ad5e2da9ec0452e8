//! Queues of the kernel: asynchronous I/O of one thread.
//!
//! Each queue belongs to one thread. Memory, descriptor and list of pieces of an operation belong to the kernel until
//! its completion arrives (P4). No queue can take them back: a cancellation only makes the completion arrive sooner, if
//! the kernel supports it.

mod aio;
mod uring;
mod wake;

use std::fmt;
use std::io;
use std::os::fd::RawFd;
use std::time::Duration;

pub use aio::AioQueue;
pub use uring::UringQueue;
pub(crate) use wake::Wake;

/// A kind of operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Read into the pieces, from an offset.
    Read,
    /// Write the pieces, at an offset.
    Write,
    /// Wait until the file's bytes survive a power loss.
    SyncData,
    /// Wait until the descriptor is readable.
    Readable,
}

/// An operation.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'a> {
    /// Returned with the completion.
    pub token: u64,
    /// The descriptor.
    pub fd: RawFd,
    /// The kind of operation.
    pub work: Work,
    /// The memory of reads and writes: at most `IO_VECTORS_MAX` pieces.
    pub pieces: &'a [libc::iovec],
    /// Offset in the file.
    pub offset: u64,
}

/// The completion of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The token of the entry.
    pub token: u64,
    /// Number of bytes, or a negative errno.
    pub result: i64,
    /// Whether the queue did not take the operation, so that it had no effect.
    pub is_refused: bool,
}

impl Completion {
    /// Returns the number of bytes, or the errno.
    pub(crate) fn outcome(&self) -> std::result::Result<usize, i32> {
        usize::try_from(self.result).map_err(|_| i32::try_from(-self.result).unwrap_or(libc::EIO))
    }
}

/// A queue for one thread.
pub trait KernelQueue: fmt::Debug {
    /// Passes an operation to the kernel, no later than the next `wait`. An operation that the kernel refuses completes
    /// with the error. An error of this call means that the operation was not taken and that the queue is broken: the
    /// operations that it holds may never complete.
    ///
    /// # Safety
    /// Descriptor, pieces and the memory that they name stay valid until the completion has been returned by `wait`. No
    /// other code touches memory that is read into, or writes to memory that is written. No two incomplete operations
    /// have the same token.
    unsafe fn push(&mut self, entry: Entry<'_>) -> io::Result<()>;

    /// Starts the pushed operations without waiting.
    fn submit(&mut self) -> io::Result<()>;

    /// Starts the pushed operations and waits for a completion, at most this long. Appends all that have arrived. An
    /// error means that the queue is broken; completions that had arrived are appended nevertheless.
    fn wait(&mut self, timeout: Option<Duration>, out: &mut Vec<Completion>) -> io::Result<()>;

    /// Requests the cancellation of an operation. Its completion arrives in any case.
    fn cancel(&mut self, token: u64);

    /// Returns whether reads that may hit the page cache do not block the thread that pushes them.
    fn takes_buffered_reads(&self) -> bool;
}

/// Makes a queue, on the thread that will use it.
pub type MakeQueue = dyn Fn(usize) -> io::Result<Box<dyn KernelQueue>> + Send + Sync;
