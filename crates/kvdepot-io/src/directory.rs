//! The device that is a directory of a file system.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use kvdepot_core::{Error, ErrorKind, Result};

use crate::aligned::AlignedBuf;
use crate::cached::cached_bytes;
use crate::device::{Device, DeviceFile, DirectAlign, DirectUse, FileStat, ListEntry};
use crate::iobuf::IoBuf;

/// Prefix of the file that finds out about O_DIRECT: gone at once, unless its process died in that moment.
pub const PROBE_PREFIX: &str = ".probe-";

/// A directory of a local or network file system.
#[derive(Debug)]
pub struct DirDevice {
    root: PathBuf,
    direct_use: DirectUse,
    align: Option<DirectAlign>,
}

impl DirDevice {
    /// Makes the directory and its parents for their owner alone, where they are not there yet.
    pub fn create_missing(path: &Path) -> Result<()> {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(path)
            .map_err(|e| Error::io("cannot make a directory for blocks", e).with("path", path.display()))
    }

    /// Opens a directory that must be there. Where O_DIRECT shall be used, finds out what it asks for here, and falls
    /// back to buffered I/O where it cannot be had; with a warning if it shall be used always.
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
        let mut device = Self { root: root.to_owned(), direct_use, align: None };
        if direct_use != DirectUse::Never {
            device.align = device.probe_direct();
            if device.align.is_none() && direct_use == DirectUse::Always {
                tracing::warn!(path = %root.display(), "no O_DIRECT on this file system: using buffered I/O");
            }
        }
        Ok(device)
    }

    fn probe_direct(&self) -> Option<DirectAlign> {
        probe_direct_at(&self.root.join(format!("{PROBE_PREFIX}{}", std::process::id())))
    }

    fn fail(&self, what: &str, path: &Path, source: impl Into<std::io::Error>) -> Error {
        fail(what, &self.root.join(path), source.into())
    }
}

/// A file of an NFS mount that another node replaced or removed answers ESTALE: to us it is gone.
fn fail(what: &str, path: &Path, source: std::io::Error) -> Error {
    const ESTALE: i32 = 116;
    let error = if source.raw_os_error() == Some(ESTALE) {
        Error::new(ErrorKind::NotFound, what).with_source(source)
    } else {
        Error::io(what, source)
    };
    error.with("path", path.display())
}

/// STATX_DIOALIGN where the kernel knows it (6.1 and later), else a trial with whole pages.
fn probe_direct_at(path: &Path) -> Option<DirectAlign> {
    let page = kvdepot_core::limits::BLOCK_ALIGN_BYTES as usize;
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600).custom_flags(libc::O_DIRECT);
    let mut file = options.open(path).ok()?;
    // The open file outlives its name, and a kill from here on leaves nothing (P4).
    std::fs::remove_file(path).ok()?;
    let page_of_zeros = AlignedBuf::zeroed(page);
    file.write_all(&page_of_zeros).ok()?;
    let flags = rustix::fs::AtFlags::EMPTY_PATH;
    let known = rustix::fs::statx(&file, c"", flags, rustix::fs::StatxFlags::DIOALIGN)
        .ok()
        .filter(|stat| stat.stx_dio_offset_align > 0 && stat.stx_dio_mem_align > 0)
        .map(|stat| DirectAlign {
            memory_bytes: stat.stx_dio_mem_align as usize,
            offset_bytes: stat.stx_dio_offset_align as usize,
        });
    let align = known.unwrap_or(DirectAlign { memory_bytes: page, offset_bytes: page });
    (align.memory_bytes <= page && align.offset_bytes <= page).then_some(align)
}

#[derive(Debug)]
struct DirFile {
    file: File,
    path: PathBuf,
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

    fn go_direct_if_cold(&self, bytes: u64) -> bool {
        let file = self.file.as_fd();
        let cold = cached_bytes(file, bytes).is_some_and(|cached| cached < bytes / 2);
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

    fn open(&self, path: &Path, direct: bool) -> Result<Box<dyn DeviceFile>> {
        let whole = self.root.join(path);
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(if direct { libc::O_DIRECT } else { 0 } | libc::O_NOFOLLOW);
        match options.open(&whole) {
            Ok(file) => Ok(Box::new(DirFile { file, path: whole })),
            Err(e) => Err(fail("cannot open a block file", &whole, e)),
        }
    }

    fn create(&self, path: &Path, direct: bool) -> Result<Box<dyn DeviceFile>> {
        let whole = self.root.join(path);
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o644).custom_flags(if direct {
            libc::O_DIRECT
        } else {
            0
        });
        let mut opened = options.open(&whole);
        if matches!(&opened, Err(e) if e.kind() == std::io::ErrorKind::NotFound)
            && let Some(parent) = path.parent()
        {
            self.make_dir(parent)?;
            opened = options.open(&whole);
        }
        match opened {
            Ok(file) => Ok(Box::new(DirFile { file, path: whole })),
            Err(e) => Err(fail("cannot create a block file", &whole, e)),
        }
    }

    fn publish(&self, from: &Path, to: &Path) -> Result<()> {
        std::fs::rename(self.root.join(from), self.root.join(to))
            .map_err(|e| self.fail("cannot rename a file into place", to, e))
    }

    fn unlink(&self, path: &Path) -> Result<bool> {
        match std::fs::remove_file(self.root.join(path)) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(self.fail("cannot remove a file", path, e)),
        }
    }

    fn stat(&self, path: &Path) -> Result<Option<FileStat>> {
        match std::fs::symlink_metadata(self.root.join(path)) {
            Ok(meta) => {
                let modified = meta.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                Ok(Some(FileStat { bytes: meta.len(), modified, is_dir: meta.is_dir() }))
            }
            Err(e) => match self.fail("cannot look at a file", path, e) {
                e if e.kind() == ErrorKind::NotFound => Ok(None),
                e => Err(e),
            },
        }
    }

    fn list(&self, path: &Path, each: &mut dyn FnMut(ListEntry)) -> Result<()> {
        let broken = |e| self.fail("cannot list a directory", path, e);
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
        std::fs::create_dir_all(self.root.join(path))
            .map_err(|e| self.fail("cannot create a directory", path, e))
    }

    fn remove_dir(&self, path: &Path) -> Result<bool> {
        use std::io::ErrorKind::{DirectoryNotEmpty, NotFound};
        match std::fs::remove_dir(self.root.join(path)) {
            Ok(()) => Ok(true),
            Err(e) if matches!(e.kind(), NotFound | DirectoryNotEmpty) => Ok(false),
            Err(e) => Err(self.fail("cannot remove a directory", path, e)),
        }
    }

    fn set_modified(&self, path: &Path, time: SystemTime) -> Result<()> {
        use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_OMIT, utimensat};
        let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let tv_sec = i64::try_from(since.as_secs()).unwrap_or(i64::MAX);
        let times = Timestamps {
            last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
            last_modification: Timespec { tv_sec, tv_nsec: since.subsec_nanos().into() },
        };
        utimensat(CWD, self.root.join(path), &times, AtFlags::empty())
            .map_err(|e| self.fail("cannot set a file's time", path, e))
    }

    fn sync_dir(&self, path: &Path) -> Result<()> {
        File::open(self.root.join(path))
            .and_then(|dir| dir.sync_all())
            .map_err(|e| self.fail("cannot sync a directory", path, e))
    }

    fn free_bytes(&self) -> Result<u64> {
        let stat = rustix::fs::statvfs(&self.root)
            .map_err(|e| self.fail("cannot ask for free space", Path::new(""), e))?;
        Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
    }

    fn read_small(&self, path: &Path, bytes_max: usize) -> Result<Option<Vec<u8>>> {
        let broken = |e| self.fail("cannot read a file", path, e);
        let file = match File::open(self.root.join(path)) {
            Ok(file) => file,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(broken(e)),
        };
        let mut bytes = Vec::new();
        file.take(bytes_max as u64 + 1).read_to_end(&mut bytes).map_err(broken)?;
        if bytes.len() > bytes_max {
            return Err(Error::new(ErrorKind::Corrupt, "a file is longer than it may be")
                .with("path", self.root.join(path).display())
                .with("bytes_max", bytes_max));
        }
        Ok(Some(bytes))
    }

    fn write_small(&self, path: &Path, temporary: &Path, bytes: &[u8]) -> Result<()> {
        let whole = self.root.join(temporary);
        let write = || {
            let mut file =
                OpenOptions::new().write(true).create(true).truncate(true).mode(0o644).open(&whole)?;
            file.write_all(bytes)?;
            file.sync_data()
        };
        let written = write().map_err(|e| self.fail("cannot write a file", temporary, e));
        let published = written.and_then(|()| self.publish(temporary, path));
        if published.is_err() {
            // Best effort: the sweep finds what stays.
            let _ = std::fs::remove_file(&whole);
        }
        published
    }
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
}
