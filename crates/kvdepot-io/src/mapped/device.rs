//! A mapped medium, such as a DAX device. Every write is flushed out of the caches as it is made.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use kvdepot_core::{Error, ErrorKind, Result};

use super::copy::{Sum, steps, within};
use super::flush::{fence, flush};
use super::sigbus::Guard;
use super::{Medium, Piece, reopened};
use crate::buf::MemRun;
use crate::fork::{OfProcess, Private};

/// What a mapping is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// Only reads: the memory is protected, and `write` fails.
    Read,
    /// Reads and writes.
    Write,
}

/// A medium mapped into this process.
#[derive(Debug)]
pub struct MappedMedium {
    path: PathBuf,
    bytes: u64,
    start: usize,
    mapped: usize,
    used: Use,
    // Dropped explicitly before the memory is unmapped.
    guard: Option<Guard>,
    /// In a child of `fork`, other memory may lie where this was mapped.
    mapping: OfProcess<()>,
    // Declared before the descriptor: see `Private`.
    _private: Private,
    file: OwnedFd,
}

impl MappedMedium {
    /// Maps the first `bytes`, a multiple of the device's alignment.
    pub(super) fn new(path: &Path, file: OwnedFd, bytes: u64, used: Use) -> Result<Self> {
        let too_large = |_| {
            Error::new(ErrorKind::Unsupported, "a medium is larger than the address space")
                .with("bytes", bytes)
        };
        let mapped = usize::try_from(bytes).map_err(too_large)?;
        let protection = match used {
            Use::Read => rustix::mm::ProtFlags::READ,
            Use::Write => rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE,
        };
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe {
            let flags = rustix::mm::MapFlags::SHARED;
            rustix::mm::mmap(std::ptr::null_mut(), mapped, protection, flags, &file, 0)
        };
        let start = start.map_err(|error| {
            Error::io("cannot map a medium", error.into()).with("path", path.display()).with("bytes", bytes)
        })?;
        let private = Private::of(file.as_fd());
        let mut medium = Self {
            path: path.to_owned(),
            bytes,
            start: start as usize,
            mapped,
            used,
            guard: None,
            mapping: OfProcess::new(()),
            _private: private,
            file,
        };
        // SAFETY: our own mapping. A child of `fork` must not hold the device.
        let hidden = unsafe { rustix::mm::madvise(start, mapped, rustix::mm::Advice::LinuxDontFork) };
        if let Err(error) = hidden {
            tracing::warn!(path = %path.display(), %error, "cannot hide the mapped medium from forked children (MADV_DONTFORK)");
        }
        medium.guard = Some(Guard::new(medium.start, mapped, used == Use::Write)?);
        Ok(medium)
    }

    fn address(&self, at: u64, bytes: usize) -> Result<*mut u8> {
        within(self.bytes, at, bytes)?;
        self.whole()?;
        // `within` has compared it with the length of the mapping, so it fits an address.
        Ok((self.start + at as usize) as *mut u8)
    }

    /// Returns the pages that hold these bytes: their address and their length.
    fn pages(&self, at: u64, bytes: usize) -> Result<(*mut u8, usize)> {
        // A mapping begins with a page.
        let before = at as usize % rustix::param::page_size();
        let len = bytes.saturating_add(before);
        Ok((self.address(at - before as u64, len)?, len))
    }

    /// Returns whether all of these bytes are in the page cache, and not in swap space.
    pub(super) fn is_resident(&self, at: u64, bytes: usize) -> bool {
        let Ok((from, len)) = self.pages(at, bytes) else { return false };
        let mut pages = vec![0_u8; len.div_ceil(rustix::param::page_size())];
        // SAFETY: whole pages of our own mapping, and a byte for each of them.
        let asked = unsafe { libc::mincore(from.cast(), len, pages.as_mut_ptr()) } == 0;
        asked && pages.iter().all(|page| page & 1 == 1)
    }

    fn address_to_write(&self, at: u64, bytes: usize) -> Result<*mut u8> {
        if self.used == Use::Read {
            return Err(Error::new(ErrorKind::Unsupported, "a medium was opened only to be read")
                .with("path", self.path.display()));
        }
        self.address(at, bytes)
    }

    /// Fails if pages of the mapping were lost: what was read is not what the medium held.
    fn whole(&self) -> Result<()> {
        if !self.is_lost() {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Io,
            "a mapped medium has lost pages: the device was taken away, its memory is bad, or its file was truncated; \
             repair it and restart the depot",
        )
        .with("path", self.path.display()))
    }
}

impl Drop for MappedMedium {
    fn drop(&mut self) {
        self.guard = None;
        if self.mapping.get().is_none() {
            return;
        }
        // SAFETY: mapped by `new`, and every user borrowed this value.
        let gone = unsafe { rustix::mm::munmap(self.start as *mut _, self.mapped) };
        if let Err(error) = gone {
            tracing::warn!(path = %self.path.display(), %error, "cannot unmap a medium");
        }
    }
}

impl Medium for MappedMedium {
    fn path(&self) -> &Path {
        &self.path
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn is_memory(&self) -> bool {
        true
    }

    fn read(&self, at: u64, out: &mut [u8]) -> Result<()> {
        let from = self.address(at, out.len())?;
        // SAFETY: within the mapping. Another thread may write there: then the bytes are any, which the contract
        // allows.
        unsafe { std::ptr::copy(from, out.as_mut_ptr(), out.len()) };
        self.whole()
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Result<()> {
        let to = self.address_to_write(at, bytes.len())?;
        // SAFETY: within the mapping, which is no memory of Rust's own.
        unsafe {
            std::ptr::copy(bytes.as_ptr(), to, bytes.len());
            flush(to, bytes.len());
        }
        self.whole()
    }

    fn read_pieces(&self, at: u64, pieces: &[Piece<'_>], mut checksums: Option<&mut Vec<u64>>) -> Result<()> {
        let mut from = self.address(at, pieces.iter().map(|piece| piece.bytes).sum())?.cast_const();
        for piece in pieces {
            let mut sum = checksums.is_some().then(Sum::new);
            for step in steps(*piece)? {
                // SAFETY: `address` has checked the length of all pieces together; the step lies in a slot that the
                // caller holds, writable by the contract of `SlotBuf::new`, and not in this mapping.
                unsafe {
                    std::ptr::copy_nonoverlapping(from, step.ptr, step.len);
                    from = from.add(step.len);
                }
                if let Some(sum) = &mut sum {
                    sum.add(step);
                }
            }
            self.whole()?;
            if let Some((checksums, sum)) = checksums.as_mut().zip(sum) {
                checksums.push(sum.end());
            }
        }
        Ok(())
    }

    fn write_piece(&self, at: u64, piece: Piece<'_>) -> Result<u64> {
        let mut to = self.address_to_write(at, piece.bytes)?;
        let mut sum = Sum::new();
        for step in steps(piece)? {
            sum.add(step);
            // SAFETY: as in `read_pieces`, the other way round.
            unsafe {
                std::ptr::copy_nonoverlapping(step.ptr.cast_const(), to, step.len);
                flush(to, step.len);
                to = to.add(step.len);
            }
        }
        // Orders this thread's flushes before the publication of what it has written, by any thread.
        fence();
        self.whole()?;
        Ok(sum.end())
    }

    fn persist(&self) -> Result<()> {
        fence();
        self.whole()
    }

    fn checksum(&self, at: u64, bytes: usize) -> Result<u64> {
        let from = self.address(at, bytes)?;
        let mut sum = Sum::new();
        sum.add(MemRun { ptr: from, len: bytes });
        self.whole()?;
        Ok(sum.end())
    }

    fn is_lost(&self) -> bool {
        self.guard.as_ref().is_none_or(Guard::is_lost)
    }

    fn is_read_from_memory(&self) -> bool {
        true
    }

    fn map_ahead(&self, at: u64, bytes: usize) -> bool {
        let Ok((from, len)) = self.pages(at, bytes) else { return true };
        // SAFETY: whole pages of our own mapping, whose bytes do not change. Pages that are lost make it fail; they raise no
        // signal.
        let mapped = unsafe { rustix::mm::madvise(from.cast(), len, rustix::mm::Advice::LinuxPopulateRead) };
        if let Err(error) = mapped {
            tracing::debug!(path = %self.path.display(), %error, at, bytes, "cannot map pages of a medium ahead of their first read");
        }
        // Before Linux 5.14 there is no such call.
        mapped != Err(rustix::io::Errno::INVAL)
    }

    fn lend(&self) -> Result<Option<OwnedFd>> {
        reopened(self.file.as_fd(), &self.path).map(Some)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // a failing test panics

    use super::*;
    use crate::SlotBuf;
    use crate::cut::in_runs;
    use crate::mapped::flush::testing::{Noted, take};

    /// A power loss takes what is still in the caches, which no device of a test shows.
    #[test]
    fn every_written_byte_is_flushed_before_the_fence() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(4 << 20).unwrap();
        let fd = rustix::fs::open(file.path(), rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty()).unwrap();
        let medium = MappedMedium::new(file.path(), fd, 4 << 20, Use::Write).unwrap();
        let whole = SlotBuf::anonymous(1 << 20);
        let cut = in_runs(&whole, &[100, 4000, 300_000, 1, 95_899, 648_576]);
        let check = |at: u64, bytes: usize, write: &dyn Fn()| {
            take();
            write();
            medium.persist().unwrap();
            let noted = take();
            assert_eq!(noted.last(), Some(&Noted::Fence));
            let mut next = medium.start + at as usize;
            for one in noted {
                let Noted::Flush { start, bytes } = one else { continue };
                assert_eq!(start, next, "one after the other, without a gap");
                next += bytes;
            }
            assert_eq!(next, medium.start + at as usize + bytes);
        };
        check(70, 1, &|| medium.write(70, &[7]).unwrap());
        check(4095, 4098, &|| medium.write(4095, &[7; 4098]).unwrap());
        for slot in [&whole, &cut] {
            let piece = Piece { slot, from: 50, bytes: 900_001 };
            check(5000, piece.bytes, &|| {
                medium.write_piece(5000, piece).unwrap();
            });
        }
    }

    #[test]
    fn a_mapping_that_is_read_is_not_written() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [7; 8192]).unwrap();
        let fd =
            rustix::fs::open(file.path(), rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty()).unwrap();
        let medium = MappedMedium::new(file.path(), fd, 8192, Use::Read).unwrap();
        let mut read = [0; 100];
        medium.read(5000, &mut read).unwrap();
        assert_eq!((read, medium.checksum(0, 8192).unwrap()), ([7; 100], crate::checksum::crc64(&[7; 8192])));
        let slot = SlotBuf::anonymous(4096);
        assert_eq!(medium.write(0, &[1]).unwrap_err().kind(), ErrorKind::Unsupported);
        let piece = Piece { slot: &slot, from: 0, bytes: 4096 };
        assert_eq!(medium.write_piece(0, piece).unwrap_err().kind(), ErrorKind::Unsupported);
    }
}
