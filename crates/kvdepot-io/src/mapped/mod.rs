//! A medium of fixed size that many threads read and write at offsets: a persistent-memory device or a plain file.
//!
//! A DAX character device (`/dev/daxX.Y`) has no read and write calls: it is mapped, and writes are flushed out of the
//! processor's caches. A plain file is written with positional calls, which a full file system refuses with an error, and
//! read with such calls, or from a mapping if it lies in memory: a copy from a mapping is faster. Touching the mapping of a
//! truncated file, or of a device that was taken away, raises SIGBUS; a handler of that signal turns lost pages into errors.

mod copy;
mod device;
mod faulty;
mod flush;
mod in_memory;
mod lent;
mod open;
mod positional;
mod sigbus;

use std::fmt::Debug;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use kvdepot_core::{Error, Result};
use rustix::fs::{Mode, OFlags};

use crate::buf::SlotBuf;
use copy::{STEP_BYTES, Sum};

pub use crate::checksum::combined;
pub use device::MappedMedium;
pub use faulty::{Hook, HookMedium, MediumCall, MemoryMedium, Recorded};
pub use lent::LentMedium;
pub use open::{Access, open, open_to_read};
pub use positional::FileMedium;

/// A part of a slot.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    /// The slot.
    pub slot: &'a SlotBuf,
    /// Offset in the slot.
    pub from: usize,
    /// Length in bytes.
    pub bytes: usize,
}

/// Bytes at offsets. Calls block and may run on many threads at a time. A read that races with a write returns any mix
/// of both, and a lost medium causes no more than an error.
pub trait Medium: Send + Sync + Debug {
    /// Returns the path, for messages.
    fn path(&self) -> &Path;

    /// Returns the size in bytes, which does not change.
    fn bytes(&self) -> u64;

    /// Returns whether the medium is memory, where `persist` costs next to nothing.
    fn is_memory(&self) -> bool;

    /// Returns whether nothing lies below the medium from which other bytes could come back, as a disk does after an
    /// error: it is a device, or a file of a file system in memory.
    fn rests_in_memory(&self) -> bool {
        self.is_memory()
    }

    /// Reads from `at` on until `out` is full.
    fn read(&self, at: u64, out: &mut [u8]) -> Result<()>;

    /// Writes `bytes` at `at`.
    fn write(&self, at: u64, bytes: &[u8]) -> Result<()>;

    /// Reads from `at` on into consecutive pieces of slots. Appends the CRC-64 of each completed piece to `checksums`, if
    /// they are wanted; after an error these are the pieces before it.
    fn read_pieces(&self, at: u64, pieces: &[Piece<'_>], checksums: Option<&mut Vec<u64>>) -> Result<()>;

    /// Writes a piece of a slot at `at`. Returns its CRC-64.
    fn write_piece(&self, at: u64, piece: Piece<'_>) -> Result<u64>;

    /// Waits until all earlier writes survive a power loss.
    fn persist(&self) -> Result<()>;

    /// Returns the CRC-64 of `bytes` from `at` on.
    fn checksum(&self, at: u64, bytes: usize) -> Result<u64> {
        let mut sum = Sum::new();
        let mut step = vec![0; STEP_BYTES.min(bytes)];
        let (mut at, mut left) = (at, bytes);
        while left > 0 {
            let now = &mut step[..left.min(STEP_BYTES)];
            self.read(at, now)?;
            sum.add_bytes(now);
            (at, left) = (at + now.len() as u64, left - now.len());
        }
        Ok(sum.end())
    }

    /// Returns whether an access has found that the medium was taken away, or became shorter. It does not come back.
    fn is_lost(&self) -> bool {
        false
    }

    /// Returns whether the medium is read from a mapping of memory, whose pages [`Medium::map_ahead`] can map.
    fn is_read_from_memory(&self) -> bool {
        false
    }

    /// Maps the pages of `bytes` from `at` on into this process, so that the first read of each does not fault. What cannot
    /// be mapped, or would have to be read from swap space, is left to that read. Returns `false` if nothing ever can.
    fn map_ahead(&self, _at: u64, _bytes: usize) -> bool {
        false
    }

    /// Returns a descriptor by which other processes can map the medium to read it ([`LentMedium`]); `None` if it has
    /// none.
    fn lend(&self) -> Result<Option<OwnedFd>> {
        Ok(None)
    }
}

/// Opens a file again, only to read it: whoever gets the descriptor cannot write, and does not hold the lock.
fn reopened(file: BorrowedFd<'_>, path: &Path) -> Result<OwnedFd> {
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    rustix::fs::open(link, flags, Mode::empty()).map_err(|error| {
        Error::io("cannot open a medium again for other processes to read", error.into())
            .with("path", path.display())
    })
}

#[cfg(test)]
mod tests;
