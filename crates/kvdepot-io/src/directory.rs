//! A device backed by a directory of a file system.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use kvdepot_core::{Error, ErrorKind, Result};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags, ResolveFlags};
use rustix::io::Errno;

use crate::aligned::AlignedBuf;
use crate::cached::cached_bytes;
use crate::device::{Device, DeviceFile, DeviceSpace, DirectAlign, DirectUse, FileStat, ListEntry};
use crate::iobuf::IoBuf;

/// Prefix of the file that probes O_DIRECT. It is unlinked immediately, unless its process dies in that moment.
pub const PROBE_PREFIX: &str = ".probe-";

/// A directory of a local or network file system.
///
/// Nothing in it is trusted. Files are created exclusively, reached from the root without following a symbolic link;
/// only regular files are read. The directory is remembered by device and inode number, so nothing is written into a
/// mount point whose file system was unmounted.
#[derive(Debug)]
pub struct DirDevice {
    root: PathBuf,
    /// Device and inode number of the root.
    identity: (u64, u64),
    /// Whether errors of writes can show up as late as the write-back, so that a file is flushed before it is
    /// published.
    writes_back_late: bool,
    /// Whether openat2(2) works here: it walks a path without following links in one call.
    resolves_at_once: AtomicBool,
    direct_use: DirectUse,
    align: Option<DirectAlign>,
}

impl DirDevice {
    /// Creates the directory and its missing parents with access for their owner only.
    pub fn create_missing(path: &Path) -> Result<()> {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(path)
            .map_err(|e| Error::io("cannot make a directory for blocks", e).with("path", path.display()))
    }

    /// Opens an existing directory. If O_DIRECT should be used, probes its alignment here, and falls back to buffered
    /// I/O where it is not available; with a warning if `direct_use` is [`DirectUse::Always`].
    pub fn open(root: &Path, direct_use: DirectUse) -> Result<Self> {
        let found = std::fs::metadata(root).map_err(|e| {
            Error::new(
                ErrorKind::Config,
                "a tier's directory cannot be used; create it or correct the configuration",
            )
            .with("path", root.display())
            .with_source(e)
        })?;
        if !found.is_dir() {
            return Err(Error::new(ErrorKind::Config, "a tier's directory is not a directory")
                .with("path", root.display()));
        }
        let mut device = Self {
            root: root.to_owned(),
            identity: (found.dev(), found.ino()),
            writes_back_late: !is_local(root),
            resolves_at_once: AtomicBool::new(true),
            direct_use,
            align: None,
        };
        if direct_use != DirectUse::Never {
            device.align = device.probe_direct();
            if device.align.is_none() && direct_use == DirectUse::Always {
                tracing::warn!(path = %root.display(), "no O_DIRECT on this file system: using buffered I/O");
            }
        }
        Ok(device)
    }

    /// Returns STATX_DIOALIGN where the kernel has it (6.1 and later), else tries whole pages.
    fn probe_direct(&self) -> Option<DirectAlign> {
        let page = kvdepot_core::limits::BLOCK_ALIGN_BYTES as usize;
        let name =
            PathBuf::from(format!("{PROBE_PREFIX}{}-{:016x}", std::process::id(), crate::random::number()));
        let (file, _) = self.create_new(&name, OFlags::DIRECT, Mode::RUSR | Mode::WUSR).ok()?;
        // The open file outlives its name, so a kill from here on leaves nothing behind (P4).
        self.unlink(&name).ok()?;
        (&file).write_all(&AlignedBuf::zeroed(page)).ok()?;
        let known = rustix::fs::statx(&file, c"", AtFlags::EMPTY_PATH, rustix::fs::StatxFlags::DIOALIGN)
            .ok()
            .filter(|stat| stat.stx_dio_offset_align > 0 && stat.stx_dio_mem_align > 0)
            .map(|stat| DirectAlign {
                memory_bytes: stat.stx_dio_mem_align as usize,
                offset_bytes: stat.stx_dio_offset_align as usize,
            });
        let align = known.unwrap_or(DirectAlign { memory_bytes: page, offset_bytes: page });
        (align.memory_bytes <= page && align.offset_bytes <= page).then_some(align)
    }

    fn fail(&self, what: &str, path: &Path, source: impl Into<std::io::Error>) -> Error {
        fail(what, &self.root.join(path), source.into())
    }

    /// Opens the root, which must still be the directory opened at the start: after an unmount the mount point is
    /// another one.
    fn root_fd(&self) -> Result<OwnedFd> {
        let gone = |source: Option<Errno>| {
            let error = Error::new(
                ErrorKind::Unavailable,
                "a tier's directory is no longer the one that was opened: mount it again and restart the depot",
            )
            .with("path", self.root.display());
            match source {
                Some(source) => error.with_source(std::io::Error::from(source)),
                None => error,
            }
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(CWD, &self.root, flags, Mode::empty()).map_err(|e| gone(Some(e)))?;
        let stat = rustix::fs::fstat(&fd).map_err(|e| gone(Some(e)))?;
        if (stat.st_dev, stat.st_ino) == self.identity { Ok(fd) } else { Err(gone(None)) }
    }

    /// Opens a path's parent directory without following a symbolic link. Returns it with the last component.
    fn parent<'a>(&self, path: &'a Path) -> Result<(OwnedFd, &'a OsStr)> {
        let root = self.root_fd()?;
        let (dir, name) = self.enter(root.as_fd(), path)?;
        Ok((dir.unwrap_or(root), name))
    }

    /// Like `parent`, but starts at the caller's open root; `None` is the root itself.
    fn enter<'a>(&self, root: BorrowedFd<'_>, path: &'a Path) -> Result<(Option<OwnedFd>, &'a OsStr)> {
        let mut parts = path.iter();
        let name = parts.next_back().ok_or_else(|| {
            Error::new(ErrorKind::Config, "a path names no file").with("path", self.root.join(path).display())
        })?;
        let above = parts.as_path();
        if above.as_os_str().is_empty() {
            return Ok((None, name));
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let failed = |e| self.fail("cannot enter a directory", path, e);
        // Relaxed: nothing else is published by it.
        if self.resolves_at_once.load(Ordering::Relaxed) {
            let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
            match rustix::fs::openat2(root, above, flags, Mode::empty(), resolve) {
                // An old kernel, or a sandbox without the call. EAGAIN: a concurrent rename got in the way.
                Err(Errno::NOSYS | Errno::PERM) => self.resolves_at_once.store(false, Ordering::Relaxed),
                Err(Errno::AGAIN) => {}
                other => return other.map(|fd| (Some(fd), name)).map_err(failed),
            }
        }
        let mut dir: Option<OwnedFd> = None;
        for part in above {
            let at = dir.as_ref().map_or(root, OwnedFd::as_fd);
            dir = Some(rustix::fs::openat(at, part, flags, Mode::empty()).map_err(failed)?);
        }
        Ok((dir, name))
    }

    /// Creates a new file, and missing parent directories. Fails if the file exists.
    fn create_new(&self, path: &Path, more: OFlags, mode: Mode) -> Result<(File, PathBuf)> {
        let parent = match self.parent(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.make_dir(path.parent().unwrap_or_else(|| Path::new("")))?;
                self.parent(path)
            }
            other => other,
        };
        let (dir, name) = parent?;
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC | more;
        match rustix::fs::openat(&dir, name, flags, mode) {
            Ok(fd) => Ok((File::from(fd), self.root.join(path))),
            Err(e) => Err(self.fail("cannot create a file", path, e)),
        }
    }

    /// Opens a regular file for reading; see [`Device::open`].
    fn open_regular(&self, path: &Path, more: OFlags) -> Result<File> {
        let whole = self.root.join(path);
        let broken = |what: &str| Error::new(ErrorKind::Corrupt, what).with("path", whole.display());
        // O_NONBLOCK: never wait for a FIFO. It changes nothing for a regular file.
        let flags =
            OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC | more;
        let file = match rustix::fs::openat(CWD, &whole, flags, Mode::empty()) {
            Ok(fd) => File::from(fd),
            // There is a file where a directory belongs, so the path does not exist.
            Err(e @ Errno::NOTDIR) => {
                return Err(Error::new(ErrorKind::NotFound, "cannot open a file")
                    .with("path", whole.display())
                    .with_source(std::io::Error::from(e)));
            }
            Err(e @ (Errno::LOOP | Errno::NXIO | Errno::NODEV)) => {
                return Err(broken("a file is no regular file").with_source(std::io::Error::from(e)));
            }
            Err(e @ (Errno::ACCESS | Errno::PERM)) => {
                return Err(broken("a file may not be read").with_source(std::io::Error::from(e)));
            }
            // O_DIRECT on a FIFO or a directory.
            Err(e @ Errno::INVAL) if !self.is_regular(path) => {
                return Err(broken("a file is no regular file").with_source(std::io::Error::from(e)));
            }
            Err(e) => return Err(fail("cannot open a file", &whole, e.into())),
        };
        let meta = file.metadata().map_err(|e| fail("cannot look at a file", &whole, e))?;
        if meta.is_file() { Ok(file) } else { Err(broken("a file is no regular file")) }
    }

    fn is_regular(&self, path: &Path) -> bool {
        std::fs::symlink_metadata(self.root.join(path)).is_ok_and(|meta| meta.is_file())
    }
}

/// Returns whether a file is regular, of this length, readable and owned by this process's user, and has no other name.
fn is_plain(file: &OwnedFd, bytes: u64) -> bool {
    let Ok(stat) = rustix::fs::fstat(file) else { return false };
    let is_file = rustix::fs::FileType::from_raw_mode(stat.st_mode) == rustix::fs::FileType::RegularFile;
    let is_readable = Mode::from_raw_mode(stat.st_mode).contains(Mode::RUSR);
    let is_ours = is_readable && stat.st_uid == rustix::process::geteuid().as_raw();
    let is_whole = u64::try_from(stat.st_size).is_ok_and(|length| length == bytes);
    is_file && is_ours && is_whole && stat.st_nlink == 1
}

/// Makes an error about a file. ESTALE, the answer of NFS for a file that another node replaced or removed, becomes
/// `NotFound`.
pub(crate) fn fail(what: &str, path: &Path, source: std::io::Error) -> Error {
    const ESTALE: i32 = 116;
    let error = if source.raw_os_error() == Some(ESTALE) {
        Error::new(ErrorKind::NotFound, what).with_source(source)
    } else {
        Error::io(what, source)
    };
    error.with("path", path.display())
}

/// Returns whether a file system is known to report errors of writes immediately, or no later than close(2).
fn is_local(path: &Path) -> bool {
    // linux/magic.h; bcachefs and ZFS define theirs themselves.
    const LOCAL: [u32; 10] = [
        0xef53,      // ext2, ext3, ext4
        0x5846_5342, // XFS
        0x9123_683e, // btrfs
        0x0102_1994, // tmpfs
        0x8584_58f6, // ramfs
        0x794c_7630, // overlayfs
        0xf2f5_2010, // F2FS
        0xca45_1a4e, // bcachefs
        0x2fc1_2fc1, // ZFS
        0x5265_4973, // ReiserFS
    ];
    rustix::fs::statfs(path).is_ok_and(|stat| LOCAL.contains(&(stat.f_type as u32)))
}

/// Closes a file and checks the result: the standard library drops the error of close(2).
fn close_checked(file: File, path: &Path) -> Result<()> {
    let fd = file.into_raw_fd();
    // SAFETY: `fd` was just taken out of its owner, so no other code closes or uses it.
    let closed = unsafe { libc::close(fd) };
    // EINTR: Linux has closed the descriptor nevertheless.
    match closed {
        0 => Ok(()),
        _ => match std::io::Error::last_os_error() {
            e if e.kind() == std::io::ErrorKind::Interrupted => Ok(()),
            e => Err(fail("a block file was not written whole", path, e)),
        },
    }
}

#[derive(Debug)]
struct DirFile {
    file: File,
    path: PathBuf,
    writes_back_late: bool,
}

impl DeviceFile for DirFile {
    fn read_at(&self, buf: &mut IoBuf, skip: usize, offset: u64) -> Result<usize> {
        let mut slices = buf.slices_mut(skip);
        rustix::io::retry_on_intr(|| rustix::io::preadv(&self.file, &mut slices, offset))
            .map_err(|e| fail("cannot read a block file", &self.path, e.into()).with("offset_bytes", offset))
    }

    fn write_at(&self, buf: &IoBuf, skip: usize, offset: u64) -> Result<usize> {
        let slices = buf.slices(skip);
        rustix::io::retry_on_intr(|| rustix::io::pwritev(&self.file, &slices, offset))
            .map_err(|e| fail("cannot write a block file", &self.path, e.into()).with("offset_bytes", offset))
    }

    fn sync_data(&self) -> Result<()> {
        self.file.sync_data().map_err(|e| fail("cannot sync a block file", &self.path, e))
    }

    fn finish(self: Box<Self>) -> Result<()> {
        if self.writes_back_late {
            self.sync_data()?;
        }
        let Self { file, path, .. } = *self;
        close_checked(file, &path)
    }

    fn go_direct_if_cold(&self, bytes: u64) -> bool {
        let file = self.file.as_fd();
        let Some(cached) = cached_bytes(file, bytes) else { return false };
        // A compressed block's file is shorter than `bytes`: only if some of it is cached does that matter.
        let length = || rustix::fs::fstat(file).map_or(bytes, |stat| (stat.st_size as u64).min(bytes));
        let cold = cached < bytes / 2 && (cached == 0 || cached < length() / 2);
        cold && rustix::fs::fcntl_getfl(file)
            .and_then(|flags| rustix::fs::fcntl_setfl(file, flags | rustix::fs::OFlags::DIRECT))
            .is_ok()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.file.as_fd())
    }
}

impl Device for DirDevice {
    fn root(&self) -> &Path {
        &self.root
    }

    fn direct(&self) -> Option<DirectAlign> {
        self.align.filter(|_| self.direct_use == DirectUse::Always)
    }

    fn direct_when_cold(&self) -> Option<DirectAlign> {
        self.align.filter(|_| self.direct_use == DirectUse::ColdReads)
    }

    fn is_read_only(&self) -> bool {
        let flags = rustix::fs::statvfs(&self.root).map(|stat| stat.f_flag);
        flags.is_ok_and(|flags| flags.contains(rustix::fs::StatVfsMountFlags::RDONLY))
    }

    fn open(&self, path: &Path, direct: bool) -> Result<Box<dyn DeviceFile>> {
        let more = if direct { OFlags::DIRECT } else { OFlags::empty() };
        let file = self.open_regular(path, more)?;
        let path = self.root.join(path);
        Ok(Box::new(DirFile { file, path, writes_back_late: self.writes_back_late }))
    }

    fn create(&self, path: &Path, direct: bool) -> Result<Box<dyn DeviceFile>> {
        let more = if direct { OFlags::DIRECT } else { OFlags::empty() };
        let (file, path) = self.create_new(path, more, Mode::from_raw_mode(0o600))?;
        Ok(Box::new(DirFile { file, path, writes_back_late: self.writes_back_late }))
    }

    fn overwrites(&self) -> bool {
        !self.writes_back_late
    }

    fn take_over(
        &self,
        from: &Path,
        to: &Path,
        bytes: u64,
        direct: bool,
    ) -> Result<Option<Box<dyn DeviceFile>>> {
        let root = self.root_fd()?;
        let (from_dir, from_name) = self.enter(root.as_fd(), from)?;
        let (to_dir, to_name) = self.enter(root.as_fd(), to)?;
        let from_dir = from_dir.as_ref().map_or(root.as_fd(), OwnedFd::as_fd);
        let to_dir = to_dir.as_ref().map_or(root.as_fd(), OwnedFd::as_fd);
        rustix::fs::renameat(from_dir, from_name, to_dir, to_name)
            .map_err(|e| self.fail("cannot rename a file that is to be written over", from, e))?;
        // Check it under its new name, which no other caller hands out. O_NONBLOCK: never wait for a FIFO.
        let more = if direct { OFlags::DIRECT } else { OFlags::empty() };
        let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = rustix::fs::openat(to_dir, to_name, flags | more, Mode::empty());
        if let Some(file) = file.ok().filter(|file| is_plain(file, bytes)) {
            let (file, path) = (File::from(file), self.root.join(to));
            return Ok(Some(Box::new(DirFile { file, path, writes_back_late: self.writes_back_late })));
        }
        match rustix::fs::unlinkat(to_dir, to_name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(None),
            Err(e) => {
                // For example a directory: rename it back.
                let _ = rustix::fs::renameat(to_dir, to_name, from_dir, from_name);
                Err(self.fail("cannot remove a file", from, e))
            }
        }
    }

    fn publish(&self, from: &Path, to: &Path) -> Result<()> {
        let (from_dir, from_name) = self.parent(from)?;
        let (other_dir, to_name) = match to.file_name() {
            // The usual case: a block is published in the directory in which it was written.
            Some(name) if from.parent() == to.parent() => (None, name),
            _ => self.parent(to).map(|(dir, name)| (Some(dir), name))?,
        };
        let to_dir = other_dir.as_ref().unwrap_or(&from_dir);
        let renamed = or_took_effect((from_dir.as_fd(), from_name), (to_dir.as_fd(), to_name), || {
            rustix::fs::renameat(&from_dir, from_name, to_dir, to_name)
        });
        renamed.map_err(|e| self.fail("cannot rename a file into place", to, e))
    }

    fn rename_new(&self, from: &Path, to: &Path) -> Result<bool> {
        let ((from_dir, from_name), (to_dir, to_name)) = (self.parent(from)?, self.parent(to)?);
        let renamed =
            rustix::fs::renameat_with(&from_dir, from_name, &to_dir, to_name, RenameFlags::NOREPLACE);
        let renamed = match renamed {
            // This file system does not know the flag; NFS is one. Without it only an empty directory is replaced.
            Err(Errno::INVAL | Errno::NOSYS) => {
                match rustix::fs::statat(&to_dir, to_name, AtFlags::SYMLINK_NOFOLLOW) {
                    Err(Errno::NOENT) => rustix::fs::renameat(&from_dir, from_name, &to_dir, to_name),
                    Err(e) => Err(e),
                    Ok(_) => Err(Errno::EXIST),
                }
            }
            other => other,
        };
        match renamed {
            Ok(()) => Ok(true),
            Err(Errno::NOENT | Errno::EXIST | Errno::NOTEMPTY) => Ok(false),
            Err(e) => Err(self.fail("cannot rename a directory", to, e)),
        }
    }

    fn link_new(&self, from: &Path, to: &Path) -> Result<bool> {
        let ((from_dir, from_name), (to_dir, to_name)) = (self.parent(from)?, self.parent(to)?);
        let linked = rustix::fs::linkat(&from_dir, from_name, &to_dir, to_name, AtFlags::empty());
        match linked {
            Ok(()) => Ok(true),
            Err(Errno::EXIST) => {
                // The answer of a network file system to a repeated request may be that of the first one: then it is
                // this very file that has the name.
                match (identity(from_dir.as_fd(), from_name), identity(to_dir.as_fd(), to_name)) {
                    (Ok(mine), Ok(there)) => Ok(mine == there),
                    // The name is not free any more, and whose file has it is not known.
                    (Err(e), _) | (_, Err(e)) => {
                        Err(self.fail("cannot tell whether a file was linked", to, e))
                    }
                }
            }
            Err(e @ (Errno::PERM | Errno::NOTSUP | Errno::NOSYS)) => {
                Err(Error::new(ErrorKind::Unsupported, "this file system has no hard links")
                    .with("path", self.root.join(to).display())
                    .with_source(std::io::Error::from(e)))
            }
            Err(e) => Err(self.fail("cannot link a file", to, e)),
        }
    }

    fn unlink(&self, path: &Path) -> Result<bool> {
        let (dir, name) = match self.parent(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            parent => parent?,
        };
        match rustix::fs::unlinkat(&dir, name, AtFlags::empty()) {
            Ok(()) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(e) => Err(self.fail("cannot remove a file", path, e)),
        }
    }

    fn stat(&self, path: &Path) -> Result<Option<FileStat>> {
        match std::fs::symlink_metadata(self.root.join(path)) {
            Ok(meta) => {
                let modified = meta.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                Ok(Some(FileStat { bytes: meta.len(), modified, is_dir: meta.is_dir() }))
            }
            // There is a file where a directory belongs, so the path does not exist.
            Err(e) if e.kind() == std::io::ErrorKind::NotADirectory => Ok(None),
            Err(e) => match self.fail("cannot look at a file", path, e) {
                e if e.kind() == ErrorKind::NotFound => Ok(None),
                e => Err(e),
            },
        }
    }

    /// Works relative to an open directory, so that the kernel walks the path once and not for every name.
    fn stat_in(&self, directory: &Path, names: &[String]) -> Result<Vec<Option<FileStat>>> {
        use rustix::fs::{AtFlags, FileType, Mode, OFlags, open, statat};
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = match open(self.root.join(directory), flags, Mode::empty()) {
            Ok(dir) => dir,
            Err(rustix::io::Errno::NOENT) => return Ok(vec![None; names.len()]),
            Err(e) => return Err(self.fail("cannot open a directory", directory, e)),
        };
        let stat = |name: &String| match statat(&dir, name.as_str(), AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => {
                let seconds = u64::try_from(stat.st_mtime).unwrap_or(0);
                let nanoseconds = u32::try_from(stat.st_mtime_nsec).unwrap_or(0);
                let modified = SystemTime::UNIX_EPOCH + std::time::Duration::new(seconds, nanoseconds);
                let is_dir = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
                Ok(Some(FileStat { bytes: u64::try_from(stat.st_size).unwrap_or(0), modified, is_dir }))
            }
            Err(e) => match self.fail("cannot look at a file", &directory.join(name), e) {
                e if e.kind() == ErrorKind::NotFound => Ok(None),
                e => Err(e),
            },
        };
        names.iter().map(stat).collect()
    }

    fn list(&self, path: &Path, each: &mut dyn FnMut(ListEntry)) -> Result<()> {
        let broken = |e| self.fail("cannot list a directory", path, e);
        // An empty mount point must not look like a tier that has lost everything.
        self.root_fd()?;
        let entries = match std::fs::read_dir(self.root.join(path)) {
            Ok(entries) => entries,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(broken(e)),
        };
        for entry in entries {
            let entry = entry.map_err(broken)?;
            let is_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
            if let Ok(name) = entry.file_name().into_string() {
                each(ListEntry { name, is_dir });
            }
        }
        Ok(())
    }

    fn make_dir(&self, path: &Path) -> Result<()> {
        let failed = |e| self.fail("cannot create a directory", path, e);
        let mut fd = self.root_fd()?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        for part in path {
            match rustix::fs::mkdirat(&fd, part, Mode::from_raw_mode(0o700)) {
                Ok(()) | Err(Errno::EXIST) => {}
                // A read-only or full file system may report that error for an existing directory.
                Err(e) => match rustix::fs::openat(&fd, part, flags, Mode::empty()) {
                    Ok(_) => {}
                    Err(_) => return Err(failed(e)),
                },
            }
            fd = rustix::fs::openat(&fd, part, flags, Mode::empty()).map_err(failed)?;
        }
        Ok(())
    }

    fn create_dir(&self, path: &Path) -> Result<bool> {
        let (dir, name) = self.parent(path)?;
        match rustix::fs::mkdirat(&dir, name, Mode::from_raw_mode(0o700)) {
            Ok(()) => Ok(true),
            Err(Errno::EXIST) => Ok(false),
            Err(e) => Err(self.fail("cannot create a directory", path, e)),
        }
    }

    fn remove_dir(&self, path: &Path) -> Result<bool> {
        let (dir, name) = match self.parent(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            parent => parent?,
        };
        match rustix::fs::unlinkat(&dir, name, AtFlags::REMOVEDIR) {
            Ok(()) => Ok(true),
            Err(Errno::NOENT | Errno::NOTEMPTY | Errno::EXIST) => Ok(false),
            Err(e) => Err(self.fail("cannot remove a directory", path, e)),
        }
    }

    fn set_modified(&self, path: &Path, time: SystemTime) -> Result<()> {
        use rustix::fs::{Timespec, Timestamps, UTIME_OMIT, utimensat};
        let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let tv_sec = i64::try_from(since.as_secs()).unwrap_or(i64::MAX);
        let times = Timestamps {
            last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
            last_modification: Timespec { tv_sec, tv_nsec: since.subsec_nanos().into() },
        };
        utimensat(CWD, self.root.join(path), &times, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|e| self.fail("cannot set a file's time", path, e))
    }

    fn sync_dir(&self, path: &Path) -> Result<()> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::openat(CWD, self.root.join(path), flags, Mode::empty())
            .and_then(rustix::fs::fsync)
            .map_err(|e| self.fail("cannot sync a directory", path, e))
    }

    fn space(&self) -> Result<DeviceSpace> {
        let failed = |e| self.fail("cannot ask for free space", Path::new(""), e);
        let space = rustix::fs::statvfs(&self.root).map_err(failed)?;
        let file_system = rustix::fs::stat(&self.root).map_err(failed)?.st_dev;
        Ok(DeviceSpace {
            file_system,
            total_bytes: space.f_blocks.saturating_mul(space.f_frsize),
            used_bytes: space.f_blocks.saturating_sub(space.f_bfree).saturating_mul(space.f_frsize),
            free_bytes: space.f_bavail.saturating_mul(space.f_frsize),
        })
    }

    fn read_small(&self, path: &Path, bytes_max: usize) -> Result<Option<Vec<u8>>> {
        let file = match self.open_regular(path, OFlags::empty()) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut bytes = Vec::new();
        let read = file.take(bytes_max as u64 + 1).read_to_end(&mut bytes);
        read.map_err(|e| self.fail("cannot read a file", path, e))?;
        if bytes.len() > bytes_max {
            return Err(Error::new(ErrorKind::Corrupt, "a file is longer than it may be")
                .with("path", self.root.join(path).display())
                .with("bytes_max", bytes_max));
        }
        Ok(Some(bytes))
    }

    fn write_small(&self, path: &Path, temporary: &Path, bytes: &[u8]) -> Result<()> {
        let (mut file, whole) = self.create_new(temporary, OFlags::empty(), Mode::from_raw_mode(0o600))?;
        let written = file.write_all(bytes).and_then(|()| file.sync_data());
        let written = written.map_err(|e| self.fail("cannot write a file", temporary, e));
        let written = written.and_then(|()| close_checked(file, &whole));
        let published = written.and_then(|()| self.publish(temporary, path));
        if published.is_err() {
            // Best effort: the sweep finds leftovers.
            let _ = self.unlink(temporary);
        }
        published
    }
}

/// Identifies the file that has a name.
fn identity(dir: BorrowedFd<'_>, name: &OsStr) -> rustix::io::Result<(u64, u64)> {
    let stat = rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok((stat.st_dev, stat.st_ino))
}

/// Renames a file. An error does not count if the file has its new name: the answer of a network file system may be that to a
/// repeated request, or the first one came too late.
fn or_took_effect(
    from: (BorrowedFd<'_>, &OsStr),
    to: (BorrowedFd<'_>, &OsStr),
    rename: impl FnOnce() -> rustix::io::Result<()>,
) -> rustix::io::Result<()> {
    let mine = identity(from.0, from.1);
    rename().or_else(|error| match (mine, identity(to.0, to.1)) {
        (Ok(mine), Ok(there)) if mine == there => Ok(()),
        _ => Err(error),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_directory_is_a_configuration_error_that_names_it() {
        let error = DirDevice::open(Path::new("/nowhere/at/all"), DirectUse::Never).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("/nowhere/at/all"));
    }

    /// As the answers of an NFS server to a request that was repeated after its restart, and of one that came too late.
    #[test]
    fn a_rename_that_took_effect_is_none_that_failed() {
        let dir = tempfile::tempdir().unwrap();
        let device = DirDevice::open(dir.path(), DirectUse::Never).unwrap();
        let root = device.root_fd().unwrap();
        let (from, to) = (OsStr::new(".tmp-a"), OsStr::new("a"));
        let fails = |errno: Errno, takes_effect: bool| {
            std::fs::write(dir.path().join(from), b"new").unwrap();
            or_took_effect((root.as_fd(), from), (root.as_fd(), to), || {
                if takes_effect {
                    rustix::fs::renameat(&root, from, &root, to).unwrap();
                }
                Err(errno)
            })
        };
        assert_eq!(fails(Errno::IO, false), Err(Errno::IO), "there is no file of this name");
        for errno in [Errno::NOENT, Errno::TIMEDOUT, Errno::IO] {
            assert_eq!(fails(errno, true), Ok(()));
            assert_eq!(fails(errno, false), Err(errno), "another file has the name");
        }
    }

    #[test]
    fn small_files_are_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let device = DirDevice::open(dir.path(), DirectUse::Always).unwrap();
        device.write_small(Path::new("a"), Path::new(".tmp-a"), b"12345").unwrap();
        assert_eq!(device.read_small(Path::new("a"), 5).unwrap().unwrap(), b"12345");
        assert_eq!(device.read_small(Path::new("a"), 4).unwrap_err().kind(), ErrorKind::Corrupt);
        assert!(device.read_small(Path::new("b"), 4).unwrap().is_none());
        assert!(device.stat(Path::new(".tmp-a")).unwrap().is_none());
    }

    fn is_corrupt<T: std::fmt::Debug>(outcome: Result<T>) -> bool {
        outcome.unwrap_err().kind() == ErrorKind::Corrupt
    }

    #[test]
    fn nothing_is_created_through_a_link() {
        // Not in tmpfs, where the probe of O_DIRECT would not get as far as a file.
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let (inside, victim) = (dir.path().join("inside"), dir.path().join("victim"));
        std::fs::create_dir(&inside).unwrap();
        std::fs::write(&victim, [7; 8000]).unwrap();
        let link = |name: &str| std::os::unix::fs::symlink("../victim", inside.join(name)).unwrap();
        link(&format!("{PROBE_PREFIX}{}", std::process::id()));
        link(".tmp-a");
        link("block");
        std::os::unix::fs::symlink("..", inside.join("up")).unwrap();
        let device = DirDevice::open(&inside, DirectUse::Always).unwrap();
        assert!(device.write_small(Path::new("a"), Path::new(".tmp-a"), b"12345").is_err());
        assert!(device.create(Path::new(".tmp-a"), false).is_err());
        assert!(device.create(Path::new("up/new"), false).is_err());
        assert!(device.write_small(Path::new("up/new"), Path::new("up/.tmp"), b"1").is_err());
        assert!(
            device.make_dir(Path::new("up/new")).is_err() && device.unlink(Path::new("up/victim")).is_err()
        );
        assert!(is_corrupt(device.open(Path::new("block"), false)));
        assert!(is_corrupt(device.read_small(Path::new("block"), 10_000)));
        assert_eq!(std::fs::read(&victim).unwrap(), [7; 8000]);
        assert!(!dir.path().join("new").exists());
    }

    #[test]
    fn only_regular_files_are_read_and_none_is_waited_for() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        // Not with a child process, which for a moment would hold open files of the tests of forks.
        let (fifo, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR);
        rustix::fs::mknodat(rustix::fs::CWD, dir.path().join("fifo"), fifo, mode, 0).unwrap();
        // Fails if the path is longer than that of a socket may be.
        let bound = std::os::unix::net::UnixListener::bind(dir.path().join("s"));
        std::fs::create_dir(dir.path().join("dir")).unwrap();
        std::fs::write(dir.path().join("file"), b"x").unwrap();
        let device = DirDevice::open(dir.path(), DirectUse::Always).unwrap();
        for direct in [false, device.direct().is_some()] {
            assert!(is_corrupt(device.open(Path::new("fifo"), direct)));
            assert!(is_corrupt(device.open(Path::new("dir"), direct)));
            assert!(bound.is_err() || is_corrupt(device.open(Path::new("s"), direct)));
            assert_eq!(
                device.open(Path::new("file/x"), direct).unwrap_err().kind(),
                ErrorKind::NotFound,
                "a file where a directory belongs"
            );
        }
        assert!(is_corrupt(device.read_small(Path::new("fifo"), 10)));
        assert!(device.stat(Path::new("file/x")).unwrap().is_none());
    }

    #[test]
    fn a_directory_is_made_by_one_and_renamed_over_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let device = DirDevice::open(dir.path(), DirectUse::Never).unwrap();
        let (a, b) = (Path::new("a"), Path::new("b"));
        assert!(device.create_dir(a).unwrap() && !device.create_dir(a).unwrap());
        assert!(device.create_dir(b).unwrap());
        assert!(!device.rename_new(a, b).unwrap(), "an empty directory is not replaced");
        assert!(device.remove_dir(b).unwrap());
        assert!(device.rename_new(a, b).unwrap() && !device.rename_new(a, b).unwrap());
        assert!(device.stat(b).unwrap().is_some_and(|stat| stat.is_dir));
    }

    #[test]
    fn a_name_is_linked_once() {
        let dir = tempfile::tempdir().unwrap();
        let device = DirDevice::open(dir.path(), DirectUse::Never).unwrap();
        let (a, b, c) = (Path::new("a"), Path::new("b"), Path::new("c"));
        device.write_small(a, Path::new(".tmp"), b"1").unwrap();
        device.write_small(b, Path::new(".tmp"), b"2").unwrap();
        assert!(device.link_new(a, c).unwrap());
        assert!(device.link_new(a, c).unwrap(), "repeated: the name is already this file's");
        assert!(!device.link_new(b, c).unwrap());
        assert_eq!(device.read_small(c, 10).unwrap().unwrap(), b"1");
        assert_eq!(device.link_new(Path::new("d"), b).unwrap_err().kind(), ErrorKind::NotFound);
    }
}
