//! A medium of fixed size that many threads read and write at offsets: a device of persistent memory, or a plain file.
//!
//! A DAX character device (`/dev/daxX.Y`) has no read and write calls: it is mapped, and what was written is flushed out of
//! the processor's caches. A plain file is read and written at positions, because a mapping of a file that is truncated ends
//! the process by SIGBUS. A device whose pages are taken away is an error too, by a handler of that signal.

mod copy;
mod device;
mod faulty;
mod flush;
mod open;
mod positional;
mod sigbus;

use std::fmt::Debug;
use std::path::Path;

use kvdepot_core::Result;

use crate::buf::SlotBuf;

pub use crate::checksum::combined;
pub use device::MappedMedium;
pub use faulty::{Hook, HookMedium, MediumCall, MemoryMedium, Recorded};
pub use open::{Access, open};
pub use positional::FileMedium;

/// A part of a slot.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    /// The slot.
    pub slot: &'a SlotBuf,
    /// First byte in it.
    pub from: usize,
    /// Length.
    pub bytes: usize,
}

/// Bytes at offsets. Calls block, and may run on many threads at a time; who reads what another one writes gets any mix of
/// both, and never more than an error when the medium has gone.
pub trait Medium: Send + Sync + Debug {
    /// Where it is, for messages.
    fn path(&self) -> &Path;

    /// Its size, which does not change.
    fn bytes(&self) -> u64;

    /// Whether it is memory: then `persist` costs next to nothing.
    fn is_memory(&self) -> bool;

    /// Fills `out` with what lies at `at`.
    fn read(&self, at: u64, out: &mut [u8]) -> Result<()>;

    /// Writes `bytes` at `at`.
    fn write(&self, at: u64, bytes: &[u8]) -> Result<()>;

    /// Fills pieces of slots, one behind the other, with what lies from `at` on. Adds the CRC-64 of each whole piece to
    /// `checksums`: after an error those of the pieces before it.
    fn read_pieces(&self, at: u64, pieces: &[Piece<'_>], checksums: &mut Vec<u64>) -> Result<()>;

    /// Writes a piece of a slot at `at`; its CRC-64.
    fn write_piece(&self, at: u64, piece: Piece<'_>) -> Result<u64>;

    /// Waits until all that was written before would survive a power loss.
    fn persist(&self) -> Result<()>;
}

#[cfg(test)]
mod tests;
