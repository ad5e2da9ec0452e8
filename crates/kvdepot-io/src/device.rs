//! What files are to an engine: a directory with a few operations, so that a faulty one can stand in.

use std::fmt::Debug;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::time::SystemTime;

use kvdepot_core::Result;

use crate::iobuf::IoBuf;

/// What O_DIRECT asks of a file's requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectAlign {
    /// Addresses of memory are multiples of this.
    pub memory_bytes: usize,
    /// Offsets and lengths are multiples of this.
    pub offset_bytes: usize,
}

/// Which transfers go past the page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DirectUse {
    /// None.
    Never,
    /// All.
    Always,
    /// Reads of files that the page cache does not hold: they would only be copied once more on their way.
    #[default]
    ColdReads,
}

/// Length and recency of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStat {
    /// Length in bytes.
    pub bytes: u64,
    /// When it was last written or touched.
    pub modified: SystemTime,
    /// Whether it is a directory.
    pub is_dir: bool,
}

/// Size and free space of the file system that holds a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceSpace {
    /// Tells file systems apart (`st_dev`).
    pub file_system: u64,
    /// Size of the file system in bytes.
    pub total_bytes: u64,
    /// Bytes in use, by anyone.
    pub used_bytes: u64,
    /// Bytes that an unprivileged process may still write.
    pub free_bytes: u64,
}

/// One name of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListEntry {
    /// The name; names that are not UTF-8 are left out, because no name of ours is like that.
    pub name: String,
    /// Whether it is a directory.
    pub is_dir: bool,
}

/// An open file of a device.
pub trait DeviceFile: Send + Debug {
    /// Reads into `buf` from its byte `skip` on, at `offset` of the file: one call to the system. Returns the bytes
    /// that came, 0 at the file's end.
    fn read_at(&self, buf: &mut IoBuf, skip: usize, offset: u64) -> Result<usize>;

    /// Writes `buf` from its byte `skip` on, at `offset` of the file: one call to the system. Returns the bytes that
    /// went.
    fn write_at(&self, buf: &IoBuf, skip: usize, offset: u64) -> Result<usize>;

    /// Waits until the file's bytes would survive a power loss.
    fn sync_data(&self) -> Result<()>;

    /// Closes a file that was written and reports errors of earlier writes that only come to light now. File systems
    /// that write back later, such as NFS, are waited for; on local ones the checked close(2) is enough.
    fn finish(self: Box<Self>) -> Result<()>;

    /// Goes past the page cache from here on if that does not hold most of the file's first `bytes`; whether it does.
    /// `false` where the system cannot tell.
    fn go_direct_if_cold(&self, bytes: u64) -> bool;

    /// The descriptor, for engines that submit by themselves; `None` where only the calls above may be used.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;
}

/// A directory. Paths are relative to it; errors name the whole path.
pub trait Device: Send + Sync + Debug {
    /// Where it is, for messages.
    fn root(&self) -> &Path;

    /// What O_DIRECT asks for, if files can and shall be opened so.
    fn direct(&self) -> Option<DirectAlign>;

    /// What O_DIRECT asks for, if it shall be used for reads of files that are not cached alone.
    fn direct_when_cold(&self) -> Option<DirectAlign>;

    /// Whether the file system is mounted read-only.
    fn is_read_only(&self) -> bool;

    /// Opens a regular file for reading. Anything else under that name, or a file that may not be read, is `Corrupt`:
    /// the fault of that one name, and never a reason to wait.
    fn open(&self, path: &Path, direct: bool) -> Result<Box<dyn DeviceFile>>;

    /// Creates a file for writing that must not be there, and missing directories above it.
    fn create(&self, path: &Path, direct: bool) -> Result<Box<dyn DeviceFile>>;

    /// Whether a file may be overwritten in place of one that goes. Not where readers on other machines or the caches of a
    /// network file system may mix the bytes of both without an error.
    fn overwrites(&self) -> bool;

    /// Renames a file and opens it for overwriting all of its `bytes`. `None` if it is no regular file of exactly this
    /// length, of this process's user and with no other name: then it is removed. After an error it has its old name.
    fn take_over(
        &self,
        from: &Path,
        to: &Path,
        bytes: u64,
        direct: bool,
    ) -> Result<Option<Box<dyn DeviceFile>>>;

    /// Renames within the device, over what was there.
    fn publish(&self, from: &Path, to: &Path) -> Result<()>;

    /// Renames within the device; `false` if the new name is taken or the old one is gone.
    fn rename_new(&self, from: &Path, to: &Path) -> Result<bool>;

    /// Removes a file; `false` if it was not there.
    fn unlink(&self, path: &Path) -> Result<bool>;

    /// Length and recency; `None` if there is no such file.
    fn stat(&self, path: &Path) -> Result<Option<FileStat>>;

    /// `stat` of several names in one directory, one answer a name.
    fn stat_in(&self, directory: &Path, names: &[String]) -> Result<Vec<Option<FileStat>>> {
        names.iter().map(|name| self.stat(&directory.join(name))).collect()
    }

    /// Calls `each` for every name in a directory; none if the directory is not there.
    fn list(&self, path: &Path, each: &mut dyn FnMut(ListEntry)) -> Result<()>;

    /// Creates a directory and those above it.
    fn make_dir(&self, path: &Path) -> Result<()>;

    /// Creates a directory, whose parent must be there; `false` if the name is taken. Of several callers on several
    /// machines exactly one gets `true`.
    fn create_dir(&self, path: &Path) -> Result<bool>;

    /// Removes an empty directory; `false` if it was not there or is not empty.
    fn remove_dir(&self, path: &Path) -> Result<bool>;

    /// Sets a file's recency.
    fn set_modified(&self, path: &Path, time: SystemTime) -> Result<()>;

    /// Waits until renames in a directory would survive a power loss.
    fn sync_dir(&self, path: &Path) -> Result<()>;

    /// Size and free space of its file system.
    fn space(&self) -> Result<DeviceSpace>;

    /// Bytes that may still be written.
    fn free_bytes(&self) -> Result<u64> {
        self.space().map(|space| space.free_bytes)
    }

    /// A small file's bytes, at most `bytes_max` (more is `Corrupt`); `None` if it is not there.
    fn read_small(&self, path: &Path, bytes_max: usize) -> Result<Option<Vec<u8>>>;

    /// Writes a small file whole or not at all: temporary name, sync, rename.
    fn write_small(&self, path: &Path, temporary: &Path, bytes: &[u8]) -> Result<()>;
}
