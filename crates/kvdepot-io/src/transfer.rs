//! Transfers complete files: the steps of a read and of a write, and how a thread runs all of them by plain calls.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvdepot_core::{Error, ErrorKind, Result};

use crate::device::{Device, DeviceFile};
use crate::engine::{Ended, FileWritten, Op, Prepared, Request, WriteFile};
use crate::iobuf::IoBuf;
use crate::progress::{ReadNext, ReadProgress, WriteNext, WriteProgress};

/// Runs a request to completion on this thread.
pub fn run(request: Request) {
    match request.op {
        Op::Read(mut read) => {
            let outcome = open_for_read(&*read.device, &read.path, &read.buf).and_then(|(file, progress)| {
                read_rest(&*read.device, &read.path, &mut read.buf, file, progress, read.fewest_bytes)
            });
            (read.done)(outcome.map(|()| read.buf));
        }
        Op::Write(write) => {
            if let Some((writing, over)) = Writing::prepare(write) {
                writing.run(over);
            }
        }
        Op::Call(call) => (call.run)(Ok(())),
    }
}

/// Fills `buf` with the first bytes of a file; `Corrupt` if the file is shorter.
pub fn read_file(device: &dyn Device, path: &Path, buf: &mut IoBuf) -> Result<()> {
    let (file, progress) = open_for_read(device, path, buf)?;
    let whole = buf.len();
    read_rest(device, path, buf, file, progress, whole)
}

/// Opens a file, with O_DIRECT if the device wants it for this file.
pub(crate) fn open_for_read(
    device: &dyn Device,
    path: &Path,
    buf: &IoBuf,
) -> Result<(Box<dyn DeviceFile>, ReadProgress)> {
    let whole = buf.len();
    let always = device.direct().filter(|align| buf.fits(*align));
    let when_cold = device.direct_when_cold().filter(|align| buf.fits(*align));
    let file = device.open(path, always.is_some())?;
    let is_direct = always.is_some() || (when_cold.is_some() && file.go_direct_if_cold(whole as u64));
    let step = always.or(when_cold).filter(|_| is_direct).map(|align| align.offset_bytes);
    Ok((file, ReadProgress::new(whole, step)))
}

/// Finishes a read by plain calls.
pub(crate) fn read_rest(
    device: &dyn Device,
    path: &Path,
    buf: &mut IoBuf,
    mut file: Box<dyn DeviceFile>,
    mut progress: ReadProgress,
    fewest_bytes: usize,
) -> Result<()> {
    while progress.done() < progress.whole() {
        let came = file.read_at(buf, progress.done(), progress.done() as u64)?;
        match progress.came(came) {
            ReadNext::More | ReadNext::Whole => {}
            ReadNext::MoreBuffered => file = device.open(path, false)?,
            ReadNext::EndsEarly => return end_early(device, path, buf, progress, fewest_bytes),
        }
    }
    Ok(())
}

/// Ends a read at the end of a file that does not fill the buffer.
pub(crate) fn end_early(
    device: &dyn Device,
    path: &Path,
    buf: &mut IoBuf,
    progress: ReadProgress,
    fewest_bytes: usize,
) -> Result<()> {
    if progress.done() < fewest_bytes {
        return Err(ends_early(device, path, progress));
    }
    buf.set_filled(progress.done());
    Ok(())
}

fn ends_early(device: &dyn Device, path: &Path, progress: ReadProgress) -> Error {
    Error::new(ErrorKind::Corrupt, "a block file ends early")
        .with("path", device.root().join(path).display())
        .with("bytes", progress.done())
        .with("bytes_expected", progress.whole())
}

/// A file write whose bytes are ready.
pub(crate) struct Writing {
    device: Arc<dyn Device>,
    temporary: PathBuf,
    target: PathBuf,
    pub(crate) durable: bool,
    /// `None` after it was called.
    make_room: Option<Box<dyn FnOnce() -> Result<bool> + Send>>,
    done: Ended<FileWritten>,
    pub(crate) buf: IoBuf,
    /// Whether the rename has failed.
    is_rename_failed: Cell<bool>,
}

/// The file to overwrite, if any.
pub(crate) type Over = Option<Box<dyn DeviceFile>>;

impl Writing {
    /// Makes the bytes. Returns `None` if the request has completed.
    pub(crate) fn prepare(write: WriteFile) -> Option<(Self, Over)> {
        let WriteFile { device, temporary, target, durable, prepare, make_room, done } = write;
        let (buf, over) = match prepare() {
            Ok(Prepared::Buf(buf)) => (buf, None),
            Ok(Prepared::Over(buf, file)) => (buf, Some(file)),
            Ok(Prepared::Skip) => {
                done(Ok(FileWritten::Skipped));
                return None;
            }
            Err(error) => {
                done(Err(error));
                return None;
            }
        };
        let make_room = Some(make_room);
        let is_rename_failed = Cell::new(false);
        Some((Self { device, temporary, target, durable, make_room, done, buf, is_rename_failed }, over))
    }

    /// Creates the file under its temporary name, unless there is one to overwrite.
    pub(crate) fn open(&self, over: Over) -> Result<(Box<dyn DeviceFile>, WriteProgress)> {
        let direct = self.device.direct().filter(|align| self.buf.fits(*align));
        let file = over.map_or_else(|| self.device.create(&self.temporary, direct.is_some()), Ok)?;
        Ok((file, WriteProgress::new(self.buf.len(), direct.map_or(1, |align| align.offset_bytes))))
    }

    pub(crate) fn is_direct(&self) -> bool {
        self.device.direct().is_some_and(|align| self.buf.fits(align))
    }

    /// Writes the rest of the file by plain calls.
    pub(crate) fn write_rest(&self, file: &dyn DeviceFile, mut progress: WriteProgress) -> Result<()> {
        while progress.done() < progress.whole() {
            let went = file.write_at(&self.buf, progress.done(), progress.done() as u64)?;
            if progress.went(went) == WriteNext::Stuck {
                return Err(Self::stuck(progress));
            }
        }
        Ok(())
    }

    pub(crate) fn stuck(progress: WriteProgress) -> Error {
        Error::new(ErrorKind::Io, "the system took no more of a block file")
            .with("bytes", progress.done())
            .with("bytes_expected", progress.whole())
    }

    /// Makes an error from a system error about this file.
    pub(crate) fn error(&self, what: &str, source: std::io::Error) -> Error {
        crate::directory::fail(what, &self.device.root().join(&self.temporary), source)
    }

    /// Gives a complete file its name.
    pub(crate) fn publish(&self, file: Box<dyn DeviceFile>) -> Result<()> {
        // The rename publishes the file, so an error that the system delayed must surface first.
        file.finish()?;
        let renamed = self.device.publish(&self.temporary, &self.target);
        self.is_rename_failed.set(renamed.is_err());
        renamed
    }

    /// Ends a failed attempt. Returns the write if it should be retried.
    pub(crate) fn failed(mut self, error: Error) -> Option<Self> {
        let is_full = error.kind() == ErrorKind::NoSpace;
        let error =
            if is_full { error.with("free_bytes", self.device.free_bytes().unwrap_or(0)) } else { error };
        // What was still there under its temporary name was not renamed, and cannot be any more.
        if !self.unlink() && self.is_rename_failed.get() {
            self.end(Ok(FileWritten::InDoubt(error)));
            return None;
        }
        let made = if is_full { self.make_room.take().map(|make_room| make_room()) } else { None };
        match made {
            Some(Ok(true)) => return Some(self),
            Some(Err(instead)) => self.end(Err(instead)),
            Some(Ok(false)) | None => self.end(Err(error)),
        }
        None
    }

    /// Fails the write without a retry.
    pub(crate) fn abandon(self, error: Error) {
        self.unlink();
        self.end(Err(error));
    }

    /// Removes the temporary file. Returns whether it was there and is gone.
    fn unlink(&self) -> bool {
        // Best effort: the sweep finds leftovers (P4).
        self.device.unlink(&self.temporary).unwrap_or(false)
    }

    pub(crate) fn end(self, outcome: Result<FileWritten>) {
        // Borrowed memory is returned before the caller is notified.
        let Self { buf, done, .. } = self;
        drop(buf);
        done(outcome);
    }

    /// Runs the complete write by plain calls.
    pub(crate) fn run(mut self, mut over: Over) {
        loop {
            match self.attempt(over.take()) {
                Ok(()) => return self.end(Ok(FileWritten::Published)),
                Err(error) => match self.failed(error) {
                    Some(again) => self = again,
                    None => return,
                },
            }
        }
    }

    fn attempt(&self, over: Over) -> Result<()> {
        let (file, progress) = self.open(over)?;
        self.complete(file, progress)
    }

    /// Finishes a file by plain calls, from the remaining bytes to the rename.
    pub(crate) fn complete(&self, file: Box<dyn DeviceFile>, progress: WriteProgress) -> Result<()> {
        self.write_rest(&*file, progress)?;
        if self.durable {
            file.sync_data()?;
        }
        self.publish(file)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::{AsFd, AsRawFd};

    use super::*;
    use crate::buf::SlotBuf;
    use crate::cached::cached_bytes;
    use crate::device::DirectUse;
    use crate::directory::DirDevice;

    const BYTES: usize = 1 << 20;

    fn read(device: &DirDevice) -> Vec<u8> {
        let slot = SlotBuf::anonymous(BYTES);
        let mut buf = IoBuf::payload(slot.clone(), BYTES).unwrap();
        read_file(device, Path::new("block"), &mut buf).unwrap();
        let mut bytes = vec![0; BYTES];
        slot.read_at(0, &mut bytes);
        bytes
    }

    /// A cold read through the page cache would leave the file there.
    #[test]
    fn a_file_that_is_not_cached_is_read_past_the_cache_and_one_that_is_from_it() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let bytes: Vec<u8> = (0..BYTES).map(|i| (i / 4096 + i) as u8).collect();
        std::fs::write(dir.path().join("block"), &bytes).unwrap();
        let file = File::open(dir.path().join("block")).unwrap();
        let cached = || cached_bytes(file.as_fd(), BYTES as u64);
        let drop_from_cache = || {
            file.sync_all().unwrap();
            // SAFETY: advice about a file touches no memory.
            unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
        };
        let when_cold = DirDevice::open(dir.path(), DirectUse::ColdReads).unwrap();
        let never = DirDevice::open(dir.path(), DirectUse::Never).unwrap();
        drop_from_cache();
        if when_cold.direct_when_cold().is_none() || cached() != Some(0) {
            // No O_DIRECT, no cachestat(2), or a file system that is only cache: then reads are plain.
            assert!(read(&when_cold) == bytes);
            return;
        }
        assert!(read(&when_cold) == bytes);
        assert_eq!(cached(), Some(0), "the read went through the page cache");
        assert!(read(&never) == bytes);
        // Not all of it: the system may reclaim pages at any time.
        assert_ne!(cached(), Some(0), "the read went past the page cache");
        assert!(read(&when_cold) == bytes);
        // A shorter file than asked for, all of which is cached, is not cold.
        let file = when_cold.open(Path::new("block"), false).unwrap();
        if cached() == Some(BYTES as u64) {
            assert!(!file.go_direct_if_cold(3 * BYTES as u64));
        }
    }
}
