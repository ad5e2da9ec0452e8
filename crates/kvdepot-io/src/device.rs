//! The files below an engine: a directory with a few operations. Tests replace it by a faulty one.

use std::fmt::Debug;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::time::SystemTime;

use kvdepot_core::Result;

use crate::iobuf::IoBuf;

/// The alignment that O_DIRECT requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectAlign {
    /// Alignment of memory addresses.
    pub memory_bytes: usize,
    /// Alignment of file offsets and lengths.
    pub offset_bytes: usize,
}

/// Which transfers bypass the page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DirectUse {
    /// None.
    Never,
    /// All.
    Always,
    /// Reads of files that are not in the page cache, which would only cost them one more copy.
    #[default]
    ColdReads,
}

/// Length and recency of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStat {
    /// Length in bytes.
    pub bytes: u64,
    /// Time of the last write or touch.
    pub modified: SystemTime,
    /// Whether it is a directory.
    pub is_dir: bool,
}

/// Size and free space of the file system that holds a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceSpace {
    /// Identifies the file system (`st_dev`).
    pub file_system: u64,
    /// Size of the file system in bytes.
    pub total_bytes: u64,
    /// Bytes in use by all users.
    pub used_bytes: u64,
    /// Bytes that an unprivileged process can still write.
    pub free_bytes: u64,
}

/// A directory entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListEntry {
    /// The name. Names that are not UTF-8 are left out, because kvdepot creates none.
    pub name: String,
    /// Whether it is a directory.
    pub is_dir: bool,
}

/// An open file of a device.
pub trait DeviceFile: Send + Debug {
    /// Reads from `offset` of the file into `buf`, starting at its byte `skip`, with one system call. Returns the
    /// number of bytes read, 0 at the end of the file.
    fn read_at(&self, buf: &mut IoBuf, skip: usize, offset: u64) -> Result<usize>;

    /// Writes `buf`, starting at its byte `skip`, to `offset` of the file, with one system call. Returns the number of
    /// bytes written.
    fn write_at(&self, buf: &IoBuf, skip: usize, offset: u64) -> Result<usize>;

    /// Waits until the file's bytes survive a power loss.
    fn sync_data(&self) -> Result<()>;

    /// Closes a written file and reports errors of earlier writes that only show up now. File systems that write back
    /// later, such as NFS, are waited for; on local ones the checked close(2) is enough.
    fn finish(self: Box<Self>) -> Result<()>;

    /// Bypasses the page cache from here on, unless it holds most of the file's first `bytes`. Returns whether it does;
    /// `false` where the system cannot tell what is cached.
    fn go_direct_if_cold(&self, bytes: u64) -> bool;

    /// Returns the descriptor, for engines that submit requests to the kernel themselves. `None` where only the calls
    /// above may be used.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;
}

/// A directory. Paths are relative to it; errors name the full path.
pub trait Device: Send + Sync + Debug {
    /// Returns the directory's path, for messages.
    fn root(&self) -> &Path;

    /// Returns the alignment of O_DIRECT if files can and should be opened with it.
    fn direct(&self) -> Option<DirectAlign>;

    /// Returns the alignment of O_DIRECT if only reads of uncached files should use it.
    fn direct_when_cold(&self) -> Option<DirectAlign>;

    /// Returns whether the file system is mounted read-only.
    fn is_read_only(&self) -> bool;

    /// Opens a regular file for reading. Anything else under that name, or a file without read permission, is
    /// `Corrupt`: the fault of this one name, and no reason to wait.
    fn open(&self, path: &Path, direct: bool) -> Result<Box<dyn DeviceFile>>;

    /// Creates a file for writing, and missing parent directories. Fails if the file exists.
    fn create(&self, path: &Path, direct: bool) -> Result<Box<dyn DeviceFile>>;

    /// Returns whether a new file may overwrite an evicted one in place. Not so where readers on other machines or the
    /// caches of a network file system can mix the bytes of both without an error.
    fn overwrites(&self) -> bool;

    /// Renames a file and opens it for overwriting all of its `bytes`. If it is not a regular file of exactly this
    /// length, owned by this process's user and without other names, it is removed and `None` is returned. After an
    /// error the file has its old name.
    fn take_over(
        &self,
        from: &Path,
        to: &Path,
        bytes: u64,
        direct: bool,
    ) -> Result<Option<Box<dyn DeviceFile>>>;

    /// Renames a file within the device and replaces an existing target.
    fn publish(&self, from: &Path, to: &Path) -> Result<()>;

    /// Renames a file within the device. Returns `false` if the new name exists or the old one does not.
    fn rename_new(&self, from: &Path, to: &Path) -> Result<bool>;

    /// Gives a file of the device a second name. Returns `false` if the name is taken; of several callers on several
    /// machines exactly one gets `true`. `Unsupported` where the file system has no hard links.
    fn link_new(&self, from: &Path, to: &Path) -> Result<bool>;

    /// Removes a file. Returns `false` if it did not exist.
    fn unlink(&self, path: &Path) -> Result<bool>;

    /// Returns length and recency of a file, `None` if it does not exist.
    fn stat(&self, path: &Path) -> Result<Option<FileStat>>;

    /// Like `stat`, for several names of one directory. Returns one answer for each name.
    fn stat_in(&self, directory: &Path, names: &[String]) -> Result<Vec<Option<FileStat>>> {
        names.iter().map(|name| self.stat(&directory.join(name))).collect()
    }

    /// Calls `each` for every name in a directory, and for none if the directory does not exist.
    fn list(&self, path: &Path, each: &mut dyn FnMut(ListEntry)) -> Result<()>;

    /// Creates a directory and its missing parents.
    fn make_dir(&self, path: &Path) -> Result<()>;

    /// Creates a directory in an existing parent. Returns `false` if the name is taken. Of several callers on several
    /// machines exactly one gets `true`.
    fn create_dir(&self, path: &Path) -> Result<bool>;

    /// Removes an empty directory. Returns `false` if it did not exist or is not empty.
    fn remove_dir(&self, path: &Path) -> Result<bool>;

    /// Sets a file's recency.
    fn set_modified(&self, path: &Path, time: SystemTime) -> Result<()>;

    /// Waits until renames in a directory survive a power loss.
    fn sync_dir(&self, path: &Path) -> Result<()>;

    /// Returns size and free space of the file system.
    fn space(&self) -> Result<DeviceSpace>;

    /// Returns the number of bytes that can still be written.
    fn free_bytes(&self) -> Result<u64> {
        self.space().map(|space| space.free_bytes)
    }

    /// Reads a small file of at most `bytes_max` bytes (a larger one is `Corrupt`). Returns `None` if it does not
    /// exist.
    fn read_small(&self, path: &Path, bytes_max: usize) -> Result<Option<Vec<u8>>>;

    /// Writes a small file atomically: temporary name, sync, rename.
    fn write_small(&self, path: &Path, temporary: &Path, bytes: &[u8]) -> Result<()>;
}
