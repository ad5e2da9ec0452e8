//! Queues of the kernel: I/O that one thread begins now and hears of later.
//!
//! Each queue belongs to one thread. What it has been given is the kernel's until its completion has come: the memory, the
//! descriptor, and the list of pieces (P4). No queue takes that back; a request to cancel only makes the completion come sooner,
//! if the kernel can.

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

/// What the kernel is asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Read into the pieces, from an offset.
    Read,
    /// Write the pieces, at an offset.
    Write,
    /// Wait until the file's bytes would survive a power loss.
    SyncData,
    /// Wait until the descriptor can be read from.
    Readable,
}

/// One operation.
#[derive(Clone, Copy, Debug)]
pub struct Entry<'a> {
    /// Comes back with the completion.
    pub token: u64,
    /// On which descriptor.
    pub fd: RawFd,
    /// What.
    pub work: Work,
    /// Memory, for reads and writes: at most `IO_VECTORS_MAX` pieces.
    pub pieces: &'a [libc::iovec],
    /// Offset in the file.
    pub offset: u64,
}

/// The end of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Of the entry.
    pub token: u64,
    /// Bytes, or an error's number below zero.
    pub result: i64,
    /// Whether the queue did not take the operation, so that nothing of it has happened.
    pub is_refused: bool,
}

impl Completion {
    /// Bytes, or an error's number.
    pub(crate) fn outcome(&self) -> std::result::Result<usize, i32> {
        usize::try_from(self.result).map_err(|_| i32::try_from(-self.result).unwrap_or(libc::EIO))
    }
}

/// A queue of one thread.
pub trait KernelQueue: fmt::Debug {
    /// Gives an operation to the kernel, at the latest with the next `wait`. An operation that the kernel refuses completes with
    /// the error. An error of the call means that it was not taken and that the queue is broken: what it holds may never complete.
    ///
    /// # Safety
    /// Descriptor, pieces and the memory that they name stay valid until the completion has come out of `wait`, and nobody
    /// else touches memory that is read into, or writes memory that is written. No two operations that have not completed
    /// have the same token.
    unsafe fn push(&mut self, entry: Entry<'_>) -> io::Result<()>;

    /// Begins what was pushed, without waiting.
    fn submit(&mut self) -> io::Result<()>;

    /// Begins what was pushed, and waits for a completion, at most this long; all that have come are appended. An error means that
    /// the queue is broken; what had come by then is appended all the same.
    fn wait(&mut self, timeout: Option<Duration>, out: &mut Vec<Completion>) -> io::Result<()>;

    /// Asks for an operation to be given up. Its completion comes all the same.
    fn cancel(&mut self, token: u64);

    /// Whether reads that may come from the page cache do not hold up the thread that pushes them.
    fn takes_buffered_reads(&self) -> bool;
}

/// What makes a queue, on the thread that will use it.
pub type MakeQueue = dyn Fn(usize) -> io::Result<Box<dyn KernelQueue>> + Send + Sync;
