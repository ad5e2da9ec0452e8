//! A volume in a regular file or on a block device.

use std::fs::{File, OpenOptions};
use std::io::{IoSlice, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvdepot_core::limits::{BLOCK_ALIGN_BYTES, IO_VECTORS_MAX};
use kvdepot_core::{Error, ErrorKind, Result};
use rustix::fs::{AtFlags, FallocateFlags, FlockOperation, Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use smallvec::SmallVec;

use super::Volume;
use crate::aligned::AlignedBuf;
use crate::device::DirectAlign;
use crate::fork::Private;
use crate::iobuf::IoBuf;

/// Pause between attempts to take a lock held by another process.
const LOCK_POLL: Duration = Duration::from_millis(50);

/// A file or block device opened exclusively as a volume.
#[derive(Debug)]
pub struct FileVolume {
    path: PathBuf,
    // Declared before the file, because it names an open descriptor. Otherwise a forked child would keep the lock after
    // this process's end.
    _private: Private,
    file: File,
    is_file: bool,
    bytes: AtomicU64,
    align: Option<DirectAlign>,
}

impl FileVolume {
    /// Opens the volume and locks it against other owners, waiting up to `lock_wait` for one that is ending. A missing
    /// file is created empty, with access for its owner only, in an existing directory.
    pub fn open(path: &Path, lock_wait: Duration) -> Result<Self> {
        let config = |what: &str| Error::new(ErrorKind::Config, what.to_owned()).with("path", path.display());
        let open = |create: bool| {
            let mut options = OpenOptions::new();
            // O_NONBLOCK: never wait for a FIFO. It changes nothing for files and block devices.
            options.read(true).write(true).mode(0o600).custom_flags(OFlags::NONBLOCK.bits() as i32);
            options.create_new(create).open(path)
        };
        let file = match open(false) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => open(true),
            other => other,
        };
        let file = file.map_err(|e| {
            config("a tier's file or block device cannot be opened; correct its path, its owner or its mode")
                .with_source(e)
        })?;
        let kind = file.metadata().map_err(|e| fail("cannot look at a tier's file", path, e))?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(config("a tier's path is neither a file nor a block device"));
        }
        let until = Instant::now() + lock_wait;
        let file = match kind.is_block_device() {
            true => claim(path, until, lock_wait)?,
            false => file,
        };
        lock(&file, path, until, lock_wait)?;
        let volume = Self::of(path, file, kind.is_file())?;
        if volume.align.is_none() {
            tracing::warn!(path = %path.display(), "no O_DIRECT here: a tier's file goes through the page cache");
        }
        Ok(volume)
    }

    /// Opens the volume only to read it, whoever owns it: nothing is locked, claimed or created, and writes fail.
    pub fn open_to_read(path: &Path) -> Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(OFlags::NONBLOCK.bits() as i32);
        let file =
            options.open(path).map_err(|e| fail("cannot open a tier's file or block device", path, e))?;
        let kind = file.metadata().map_err(|e| fail("cannot look at a tier's file", path, e))?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(Error::new(ErrorKind::Config, "a tier's path is neither a file nor a block device")
                .with("path", path.display()));
        }
        Self::of(path, file, kind.is_file())
    }

    /// Measures an open file, and makes it bypass the page cache where that is possible.
    fn of(path: &Path, file: File, is_file: bool) -> Result<Self> {
        let end =
            (&file).seek(SeekFrom::End(0)).map_err(|e| fail("cannot measure a tier's file", path, e))?;
        let align = go_direct(&file);
        let bytes = AtomicU64::new(end);
        let (path, _private) = (path.to_owned(), Private::of(file.as_fd()));
        Ok(Self { path, _private, file, is_file, bytes, align })
    }

    fn fail(&self, what: &str, offset: u64, e: Errno) -> Error {
        fail(what, &self.path, e.into()).with("offset_bytes", offset)
    }

    /// Reads the end of a file whose length O_DIRECT does not allow.
    fn read_odd(&self, buf: &mut IoBuf, offset: u64) -> Result<()> {
        let mut pages = AlignedBuf::zeroed(buf.len().next_multiple_of(BLOCK_ALIGN_BYTES as usize));
        let came = rustix::io::retry_on_intr(|| rustix::io::pread(&self.file, &mut pages[..], offset))
            .map_err(|e| self.fail("cannot read a tier's file", offset, e))?;
        if came < buf.len() {
            self.check_device(offset)?;
            return Err(self.ends_early(offset + came as u64));
        }
        let mut from = 0;
        for mut slice in buf.slices_mut(0) {
            let bytes = slice.len();
            slice.copy_from_slice(&pages[from..from + bytes]);
            from += bytes;
        }
        Ok(())
    }

    fn ends_early(&self, at: u64) -> Error {
        Error::new(ErrorKind::Corrupt, "a tier's file ends early")
            .with("path", self.path.display())
            .with("offset_bytes", at)
    }

    /// Returns an error if the device is shorter than it was. The kernel gives one that was taken away no length: reads end
    /// there, as if bytes of the medium were damaged, and writes find no space.
    fn check_device(&self, offset: u64) -> Result<()> {
        let end = (&self.file).seek(SeekFrom::End(0)).unwrap_or(0);
        if self.is_file || end >= self.bytes() {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Io, "a tier's block device was taken away, or made shorter")
            .with("path", self.path.display())
            .with("offset_bytes", offset))
    }
}

fn fail(what: &str, path: &Path, e: std::io::Error) -> Error {
    Error::io(what, e).with("path", path.display())
}

fn busy(path: &Path, wait: Duration) -> Error {
    Error::new(
        ErrorKind::Busy,
        "another process uses a tier's file or block device, or the device is mounted: it has one owner at a time; end that \
         process or name another path",
    )
    .with("path", path.display())
    .with("waited_ms", wait.as_millis())
}

/// Opens a block device exclusively. A lock belongs to a device node, of which a device can have many, and neither
/// mounts nor volume managers check it; this claims the device itself.
fn claim(path: &Path, until: Instant, wait: Duration) -> Result<File> {
    loop {
        let flags = OFlags::RDWR | OFlags::EXCL | OFlags::NONBLOCK | OFlags::CLOEXEC;
        match rustix::fs::open(path, flags, Mode::empty()) {
            Ok(fd) => {
                let file = File::from(fd);
                let is_device = file.metadata().is_ok_and(|meta| meta.file_type().is_block_device());
                return match is_device {
                    true => Ok(file),
                    false => Err(Error::new(
                        ErrorKind::Busy,
                        "a tier's block device was replaced while it was opened",
                    )
                    .with("path", path.display())),
                };
            }
            Err(Errno::BUSY) if Instant::now() < until => std::thread::sleep(LOCK_POLL),
            Err(Errno::BUSY) => return Err(busy(path, wait)),
            Err(e) => return Err(fail("cannot claim a tier's block device", path, e.into())),
        }
    }
}

/// Locks the file for one owner. The kernel releases the lock when the process ends, however it ends.
fn lock(file: &File, path: &Path, until: Instant, wait: Duration) -> Result<()> {
    loop {
        match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(()),
            Err(Errno::WOULDBLOCK) if Instant::now() < until => std::thread::sleep(LOCK_POLL),
            Err(Errno::WOULDBLOCK) => return Err(busy(path, wait)),
            Err(e) => return Err(fail("cannot lock a tier's file", path, e.into())),
        }
    }
}

/// Enables O_DIRECT if the file system supports it and whole pages meet its alignment.
fn go_direct(file: &File) -> Option<DirectAlign> {
    let page = BLOCK_ALIGN_BYTES as usize;
    let known = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)
        .ok()
        .filter(|stat| stat.stx_dio_offset_align > 0 && stat.stx_dio_mem_align > 0)
        .map(|stat| DirectAlign {
            memory_bytes: stat.stx_dio_mem_align as usize,
            offset_bytes: stat.stx_dio_offset_align as usize,
        });
    let align = known.unwrap_or(DirectAlign { memory_bytes: page, offset_bytes: page });
    if align.memory_bytes > page || align.offset_bytes > page {
        return None;
    }
    let flags = rustix::fs::fcntl_getfl(file).ok()?;
    rustix::fs::fcntl_setfl(file, flags | OFlags::DIRECT).ok()?;
    // An overlay takes the flag in any case, and refuses every call if the file system below lacks O_DIRECT.
    let mut first = AlignedBuf::zeroed(page);
    if rustix::io::retry_on_intr(|| rustix::io::pread(file, &mut first[..], 0)) == Err(Errno::INVAL) {
        rustix::fs::fcntl_setfl(file, flags).ok();
        return None;
    }
    Some(align)
}

impl Volume for FileVolume {
    fn path(&self) -> &Path {
        &self.path
    }

    fn bytes(&self) -> u64 {
        // Relaxed: changed only while the volume has one user.
        self.bytes.load(Ordering::Relaxed)
    }

    fn can_grow(&self) -> bool {
        self.is_file
    }

    fn allocate(&self, bytes: u64) -> Result<()> {
        if !self.is_file {
            return Err(Error::new(ErrorKind::Config, "a block device cannot be resized")
                .with("path", self.path.display()));
        }
        let before =
            self.file.metadata().map_err(|e| fail("cannot look at a tier's file", &self.path, e))?.len();
        match rustix::fs::fallocate(&self.file, FallocateFlags::empty(), 0, bytes) {
            Ok(()) => {}
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
                tracing::warn!(path = %self.path.display(), "this file system cannot preallocate: it may run full later");
                self.file.set_len(bytes).map_err(|e| fail("cannot make a tier's file", &self.path, e))?;
            }
            Err(e) => {
                // Gives back what was allocated before the disk was full; earlier bytes stay.
                let _ = self.file.set_len(before);
                let error = fail(
                    "a tier's file cannot be allocated: give it a smaller capacity, or free space on its file system",
                    &self.path,
                    e.into(),
                );
                return Err(error.with("capacity_bytes", bytes));
            }
        }
        // Relaxed: as in `bytes`.
        self.bytes.store(bytes, Ordering::Relaxed);
        self.sync()
    }

    fn direct(&self) -> Option<DirectAlign> {
        self.align
    }

    fn read_at(&self, buf: &mut IoBuf, offset: u64) -> Result<()> {
        let (mut done, whole) = (0, buf.len());
        if self.align.is_some_and(|align| !whole.is_multiple_of(align.offset_bytes)) {
            return self.read_odd(buf, offset);
        }
        while done < whole {
            let at = offset + done as u64;
            let mut slices = buf.slices_mut(done);
            let came = rustix::io::retry_on_intr(|| rustix::io::preadv(&self.file, &mut slices, at))
                .map_err(|e| self.fail("cannot read a tier's file", at, e))?;
            if came == 0 {
                self.check_device(at)?;
                return Err(self.ends_early(at));
            }
            done += came;
        }
        Ok(())
    }

    fn write_at(&self, bufs: &[IoBuf], offset: u64) -> Result<()> {
        let step = self.align.map_or(1, |align| align.offset_bytes);
        let whole: usize = bufs.iter().map(IoBuf::len).sum();
        let mut done = 0;
        while done < whole {
            let at = offset + done as u64;
            let slices = slices_from(bufs, done);
            let went = match rustix::io::retry_on_intr(|| rustix::io::pwritev(&self.file, &slices, at)) {
                Ok(went) => went,
                Err(e) => {
                    self.check_device(at)?;
                    return Err(self.fail("cannot write a tier's file", at, e));
                }
            };
            let next = if done + went >= whole { whole } else { (done + went) / step * step };
            if next <= done {
                return Err(Error::new(ErrorKind::Io, "the system took no more of a tier's file")
                    .with("path", self.path.display())
                    .with("offset_bytes", at));
            }
            done = next;
        }
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(|e| fail("cannot sync a tier's file", &self.path, e))
    }
}

/// Returns the pieces of several buffers from byte `skip` of all of them on, as many as one call takes.
fn slices_from(bufs: &[IoBuf], mut skip: usize) -> SmallVec<[IoSlice<'_>; 64]> {
    let mut out: SmallVec<[IoSlice<'_>; 64]> = SmallVec::new();
    for buf in bufs {
        if skip >= buf.len() {
            skip -= buf.len();
            continue;
        }
        out.extend(buf.slices(skip));
        skip = 0;
        if out.len() >= IO_VECTORS_MAX {
            out.truncate(IO_VECTORS_MAX);
            break;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fork::testing::{Child, ONE_AT_A_TIME};

    #[test]
    fn a_forked_child_does_not_keep_the_lock() {
        let _alone = ONE_AT_A_TIME.lock();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("medium");
        let volume = FileVolume::open(&path, Duration::ZERO).unwrap();
        let mut child = Child::fork(|| 1);
        assert_eq!(child.said(), 1);
        assert_eq!(FileVolume::open(&path, Duration::ZERO).unwrap_err().kind(), ErrorKind::Busy);
        drop(volume);
        assert!(FileVolume::open(&path, Duration::ZERO).is_ok(), "the child holds it");
    }

    #[test]
    fn a_volume_that_is_read_is_not_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("medium");
        assert_eq!(FileVolume::open_to_read(&path).unwrap_err().kind(), ErrorKind::NotFound);
        assert!(!path.exists());
        std::fs::write(&path, [7; 8192]).unwrap();
        let volume = FileVolume::open_to_read(&path).unwrap();
        let page = || IoBuf::payload(crate::SlotBuf::anonymous(4096), 4096).unwrap();
        let mut read = page();
        volume.read_at(&mut read, 4096).unwrap();
        assert!(read.slices(0).iter().all(|slice| slice.iter().all(|&byte| byte == 7)));
        assert!(volume.write_at(&[page()], 0).is_err());
        assert!(volume.allocate(1 << 20).is_err());
        assert!(std::fs::read(&path).unwrap() == [7; 8192]);
        assert_eq!(FileVolume::open_to_read(dir.path()).unwrap_err().kind(), ErrorKind::Config);
    }

    #[test]
    fn a_file_that_cannot_be_allocated_keeps_its_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("medium");
        std::fs::write(&path, [7; 9000]).unwrap();
        let volume = FileVolume::open(&path, Duration::ZERO).unwrap();
        assert!(volume.allocate(1 << 60).is_err());
        assert!(std::fs::read(&path).unwrap() == [7; 9000]);
    }
}
