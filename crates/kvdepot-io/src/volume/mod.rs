//! One large preallocated file or block device, read and written at offsets: the medium of a tier with its own layout.
//! [`FileVolume`] is a real one; [`crate::faults`] has one that fails and one in memory.

mod file;

use std::fmt::Debug;
use std::path::Path;

use kvdepot_core::Result;

use crate::device::DirectAlign;
use crate::iobuf::IoBuf;

pub use file::FileVolume;

/// A medium with one owner. Calls block, and callers run them on a thread that may hang.
pub trait Volume: Send + Sync + Debug {
    /// Returns the path, for messages.
    fn path(&self) -> &Path;

    /// Returns the length in bytes.
    fn bytes(&self) -> u64;

    /// Returns whether it is empty and `allocate` may give it a length: a file, not a block device.
    fn can_grow(&self) -> bool;

    /// Sets the total length to `bytes`, allocated on its file system. `NoSpace` if there is not enough space.
    fn allocate(&self, bytes: u64) -> Result<()>;

    /// Returns the alignment that O_DIRECT requires; `None` where transfers go through the page cache.
    fn direct(&self) -> Option<DirectAlign>;

    /// Fills `buf` from `offset` on; `Corrupt` if the volume is too short.
    fn read_at(&self, buf: &mut IoBuf, offset: u64) -> Result<()>;

    /// Writes all of `bufs`, one after another, from `offset` on. After an error any part of them may have been
    /// written.
    fn write_at(&self, bufs: &[IoBuf], offset: u64) -> Result<()>;

    /// Waits until all earlier writes survive a power loss.
    fn sync(&self) -> Result<()>;
}
