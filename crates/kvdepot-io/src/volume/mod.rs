//! One large preallocated file or block device, read and written at offsets: the medium of a tier that lays out its bytes
//! itself. [`FileVolume`] is a real one; [`crate::faults`] has one that fails and one in memory.

mod file;

use std::fmt::Debug;
use std::path::Path;

use kvdepot_core::Result;

use crate::device::DirectAlign;
use crate::iobuf::IoBuf;

pub use file::FileVolume;

/// A medium of one owner. Calls block; whoever calls runs them on a thread that may hang.
pub trait Volume: Send + Sync + Debug {
    /// Where it is, for messages.
    fn path(&self) -> &Path;

    /// Its length.
    fn bytes(&self) -> u64;

    /// Whether it is empty and may be given a length by `allocate`: a file, not a block device.
    fn can_grow(&self) -> bool;

    /// Gives it `bytes` in all, allocated on its file system. `NoSpace` where they are not there.
    fn allocate(&self, bytes: u64) -> Result<()>;

    /// What O_DIRECT asks of memory and offsets; `None` where transfers go through the page cache.
    fn direct(&self) -> Option<DirectAlign>;

    /// Fills `buf` from `offset` on; `Corrupt` if the volume ends before.
    fn read_at(&self, buf: &mut IoBuf, offset: u64) -> Result<()>;

    /// Writes all of `bufs`, one behind the other, from `offset` on. After an error any part of them may be there.
    fn write_at(&self, bufs: &[IoBuf], offset: u64) -> Result<()>;

    /// Waits until all that was written before would survive a power loss.
    fn sync(&self) -> Result<()>;
}
