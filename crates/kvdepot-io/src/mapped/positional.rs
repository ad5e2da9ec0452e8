//! A medium in a plain file. Accesses are positional calls, so a truncated file causes short reads. If it is mapped, blocks
//! are read from the mapping. A write past the end of a truncated file would make it long again, with zeros in between that
//! nobody could tell from blocks, so each write checks the length first.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use kvdepot_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use rustix::fs::{fdatasync, fstat};
use rustix::io::{preadv, pwrite, pwritev};

use super::copy::{Sum, steps, within};
use super::device::{MappedMedium, Use};
use super::{Medium, Piece, in_memory, reopened};
use crate::buf::MemRun;
use crate::fork::Private;

/// Number of memory runs in one call.
const RUNS_MAX: usize = 64;
/// Number of bytes in one call: small enough to be still in the cache when their checksum is computed.
const CALL_BYTES: usize = 256 << 10;

/// A plain file of fixed size.
#[derive(Debug)]
pub struct FileMedium {
    path: PathBuf,
    bytes: u64,
    // Declared before the descriptor: see `Private`.
    _private: Private,
    file: OwnedFd,
    /// `fdatasync`, except in tests.
    pub(super) flush: fn(&OwnedFd) -> rustix::io::Result<()>,
    /// The first flush that failed. Linux reports a write-back error once per open file, to the thread that flushes
    /// next: the others would take lost bytes for written. Locked while a flush runs.
    failed: Mutex<Option<Error>>,
    /// Whether the file was found truncated.
    is_short: AtomicBool,
    /// Where blocks are read.
    mapping: Option<MappedMedium>,
}

impl FileMedium {
    pub(super) fn new(path: &Path, file: OwnedFd, bytes: u64) -> Self {
        let private = Private::of(file.as_fd());
        let flush = |file: &OwnedFd| fdatasync(file);
        Self {
            path: path.to_owned(),
            bytes,
            _private: private,
            file,
            flush,
            failed: Mutex::new(None),
            is_short: AtomicBool::new(false),
            mapping: None,
        }
    }

    /// Maps the file: from here on blocks are read from the mapping.
    pub(super) fn map(&mut self) -> Result<()> {
        let file = reopened(self.file.as_fd(), &self.path)?;
        self.mapping = Some(MappedMedium::new(&self.path, file, self.bytes, Use::Read)?);
        Ok(())
    }

    fn flush(&self) -> Result<()> {
        let mut failed = self.failed.lock();
        if let Some(error) = &*failed {
            return Err(error.clone());
        }
        loop {
            match (self.flush)(&self.file) {
                Ok(()) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    let what =
                        "cannot flush a medium: nothing more is written to it until the depot is restarted";
                    return Err(failed.insert(self.failed(what, 0, error)).clone());
                }
            }
        }
    }

    fn failed(&self, what: &str, at: u64, source: rustix::io::Errno) -> Error {
        Error::io(what.to_owned(), source.into()).with("path", self.path.display()).with("offset_bytes", at)
    }

    fn ended(&self, at: u64) -> Error {
        self.is_short.store(true, Ordering::Release);
        Error::new(
            ErrorKind::Io,
            "a medium's file has become shorter: it was truncated while it was in use; restart the depot with the complete file",
        )
        .with("path", self.path.display())
        .with("offset_bytes", at)
        .with("medium_bytes", self.bytes)
    }

    /// Checks that nothing was cut off.
    fn check_length(&self) -> Result<()> {
        let stat = fstat(&self.file).map_err(|error| self.failed("cannot look at a medium", 0, error))?;
        if stat.st_nlink == 0 {
            return Err(Error::new(ErrorKind::Io, "a medium's file was removed while it was in use")
                .with("path", self.path.display()));
        }
        let now = u64::try_from(stat.st_size).unwrap_or(0);
        if now < self.bytes { Err(self.ended(now)) } else { Ok(()) }
    }

    /// Fills the runs with the bytes from `at` on.
    fn fill(&self, mut at: u64, runs: &[MemRun]) -> Result<()> {
        let (mut first, mut skip) = (0, 0);
        while first < runs.len() {
            let mut vectors: Vec<IoSliceMut<'_>> = runs[first..]
                .iter()
                .take(RUNS_MAX)
                .enumerate()
                .map(|(n, run)| {
                    let skip = if n == 0 { skip } else { 0 };
                    // SAFETY: the run lies in a slot that the caller holds, writable by the contract of `SlotBuf::new`, and
                    // `skip` is less than its length.
                    IoSliceMut::new(unsafe {
                        std::slice::from_raw_parts_mut(run.ptr.add(skip), run.len - skip)
                    })
                })
                .collect();
            let mut came = match preadv(&self.file, &mut vectors, at) {
                Ok(0) => return Err(self.ended(at)),
                Ok(came) => came,
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => return Err(self.failed("cannot read a medium", at, error)),
            };
            at += came as u64;
            while first < runs.len() && came >= runs[first].len - skip {
                came -= runs[first].len - skip;
                (first, skip) = (first + 1, 0);
            }
            skip += came;
        }
        Ok(())
    }
}

/// The checksums of pieces, one after another.
struct Sums<'a> {
    into: &'a mut Vec<u64>,
    /// That of the current piece, as far as it has been read, and the piece's number.
    sum: Sum,
    piece: usize,
}

impl Sums<'_> {
    /// Begins a piece: those before it have ended.
    fn begin(&mut self, piece: usize) {
        while self.piece < piece {
            self.into.push(std::mem::replace(&mut self.sum, Sum::new()).end());
            self.piece += 1;
        }
    }
}

impl Medium for FileMedium {
    fn path(&self) -> &Path {
        &self.path
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn is_memory(&self) -> bool {
        false
    }

    fn rests_in_memory(&self) -> bool {
        in_memory::holds(&self.file)
    }

    fn read(&self, at: u64, out: &mut [u8]) -> Result<()> {
        within(self.bytes, at, out.len())?;
        self.fill(at, &[MemRun { ptr: out.as_mut_ptr(), len: out.len() }])
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Result<()> {
        within(self.bytes, at, bytes.len())?;
        self.check_length()?;
        let mut done = 0;
        while done < bytes.len() {
            match pwrite(&self.file, &bytes[done..], at + done as u64) {
                Ok(went) => done += went,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(self.failed("cannot write a medium", at, error)),
            }
        }
        Ok(())
    }

    /// Reads from the mapping, or neighbouring pieces with one call, up to 256 KiB, whatever their slots.
    fn read_pieces(&self, at: u64, pieces: &[Piece<'_>], checksums: Option<&mut Vec<u64>>) -> Result<()> {
        if let Some(mapping) = &self.mapping {
            return mapping.read_pieces(at, pieces, checksums);
        }
        within(self.bytes, at, pieces.iter().map(|piece| piece.bytes).sum())?;
        let mut cut = Vec::new();
        for (number, piece) in pieces.iter().enumerate() {
            cut.extend(steps(*piece)?.into_iter().map(|step| (number, step)));
        }
        let (mut at, mut rest) = (at, &cut[..]);
        let mut sums = checksums.map(|into| Sums { into, sum: Sum::new(), piece: 0 });
        while !rest.is_empty() {
            let mut bytes = 0;
            let fits = |(_, step): &&(usize, MemRun)| {
                bytes += step.len;
                bytes <= CALL_BYTES
            };
            let count = rest.iter().take(RUNS_MAX).take_while(fits).count().max(1);
            let (now, later) = rest.split_at(count);
            let runs: Vec<MemRun> = now.iter().map(|(_, step)| *step).collect();
            self.fill(at, &runs)?;
            at += now.iter().map(|(_, step)| step.len as u64).sum::<u64>();
            if let Some(sums) = &mut sums {
                for (number, step) in now {
                    sums.begin(*number);
                    sums.sum.add(*step);
                }
            }
            rest = later;
        }
        if let Some(sums) = &mut sums {
            sums.begin(pieces.len());
        }
        Ok(())
    }

    fn write_piece(&self, at: u64, piece: Piece<'_>) -> Result<u64> {
        within(self.bytes, at, piece.bytes)?;
        self.check_length()?;
        let (mut sum, mut at) = (Sum::new(), at);
        for step in steps(piece)? {
            sum.add(step);
            let mut done = 0;
            while done < step.len {
                // SAFETY: the step lies in a slot that the caller holds, readable by the contract of `SlotBuf::new`.
                let bytes = unsafe { std::slice::from_raw_parts(step.ptr.add(done), step.len - done) };
                match pwritev(&self.file, &[IoSlice::new(bytes)], at) {
                    Ok(went) => (done, at) = (done + went, at + went as u64),
                    Err(rustix::io::Errno::INTR) => {}
                    Err(error) => return Err(self.failed("cannot write a medium", at, error)),
                }
            }
        }
        Ok(sum.end())
    }

    /// Flushes the file and checks its length before anything written counts.
    fn persist(&self) -> Result<()> {
        self.flush()?;
        self.check_length()
    }

    fn is_lost(&self) -> bool {
        self.is_short.load(Ordering::Acquire) || self.mapping.as_ref().is_some_and(Medium::is_lost)
    }

    /// Pages of a file on a disk would be read from it, and push others out of the page cache.
    fn is_read_from_memory(&self) -> bool {
        self.mapping.is_some() && self.rests_in_memory()
    }

    fn map_ahead(&self, at: u64, bytes: usize) -> bool {
        match &self.mapping {
            Some(mapping) if self.is_read_from_memory() => {
                let is_there = in_memory::is_dax(&self.file) || mapping.is_resident(at, bytes);
                !is_there || mapping.map_ahead(at, bytes)
            }
            _ => false,
        }
    }

    fn lend(&self) -> Result<Option<OwnedFd>> {
        reopened(self.file.as_fd(), &self.path).map(Some)
    }
}
