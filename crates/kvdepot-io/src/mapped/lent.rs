//! A medium of another process, mapped to read blocks where they lie.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use kvdepot_core::{Error, ErrorKind, Result};

use super::sigbus::Guard;
use crate::buf::MemRun;
use crate::fork::OfProcess;

/// A medium that this process reads and never writes. Its owner decides what may be read, and for how long.
#[derive(Debug)]
pub struct LentMedium {
    start: usize,
    bytes: usize,
    /// The first bytes of the medium, which change when it gets another owner.
    head: Vec<u8>,
    /// Whether a check has failed.
    is_lost: AtomicBool,
    // Dropped explicitly before the memory is unmapped.
    guard: Option<Guard>,
    /// In a child of `fork`, other memory may lie where this was mapped.
    mapping: OfProcess<()>,
}

impl LentMedium {
    /// Maps the first `bytes` of a medium that its owner has lent ([`super::Medium::lend`]). `head` is what the medium
    /// begins with for as long as it has that owner.
    pub fn map(file: &OwnedFd, bytes: u64, head: Vec<u8>) -> Result<Self> {
        let len = usize::try_from(bytes).ok().filter(|&len| len >= head.len().max(1)).ok_or_else(|| {
            Error::new(ErrorKind::Protocol, "a medium of this size cannot be mapped").with("bytes", bytes)
        })?;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe {
            let (protection, flags) = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::SHARED);
            rustix::mm::mmap(std::ptr::null_mut(), len, protection, flags, file, 0)
        };
        let start = start.map_err(|error| {
            Error::io("cannot map a medium of the depot", error.into()).with("bytes", bytes)
        })?;
        let is_lost = AtomicBool::new(false);
        let mut lent = Self {
            start: start as usize,
            bytes: len,
            head,
            is_lost,
            guard: None,
            mapping: OfProcess::new(()),
        };
        // SAFETY: our own mapping. A child of `fork` must not keep the medium.
        let hidden = unsafe { rustix::mm::madvise(start, len, rustix::mm::Advice::LinuxDontFork) };
        if let Err(error) = hidden {
            tracing::warn!(%error, "cannot hide a mapped medium from forked children (MADV_DONTFORK)");
        }
        lent.guard = Some(Guard::new(lent.start, len, false)?);
        lent.check()?;
        Ok(lent)
    }

    /// Returns the memory of `len` bytes from `at` on. It must not be written.
    pub fn resolve(&self, at: u64, len: u64) -> Result<MemRun> {
        let end = at.checked_add(len).filter(|&end| end <= self.bytes as u64);
        if end.is_none() {
            return Err(Error::new(ErrorKind::Protocol, "a block lies outside of the depot's medium")
                .with("offset_bytes", at)
                .with("bytes", len)
                .with("medium_bytes", self.bytes));
        }
        // Both are below the length of the mapping, so they fit an address.
        Ok(MemRun { ptr: (self.start + at as usize) as *mut u8, len: len as usize })
    }

    /// Reads from `at` on until `out` is full, and checks that what was read counts.
    pub fn read(&self, at: u64, out: &mut [u8]) -> Result<()> {
        let run = self.resolve(at, out.len() as u64)?;
        // SAFETY: within the mapping. Another process may write there: then `check` fails, or the caller has no lease.
        unsafe { std::ptr::copy(run.ptr.cast_const(), out.as_mut_ptr(), run.len) };
        self.check()
    }

    /// Fails if what was read before this call may not be what the owner promised: pages were lost, or the medium has
    /// another owner, who may have written to any block. Once it has failed, it always fails.
    pub fn check(&self) -> Result<()> {
        self.mapping.or_inherited()?;
        // The bytes were read before the head is.
        fence(Ordering::Acquire);
        let mut head = vec![0_u8; self.head.len()];
        // SAFETY: `map` has checked that the mapping is at least as long. Another process may write there at the same
        // time: then the bytes are any, and differ from the expected ones in the end.
        unsafe { std::ptr::copy(self.start as *const u8, head.as_mut_ptr(), head.len()) };
        if head != self.head {
            self.is_lost.store(true, Ordering::Release);
        }
        let has_pages = self.guard.as_ref().is_some_and(|guard| !guard.is_lost());
        if has_pages && !self.is_lost.load(Ordering::Acquire) {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Io,
            "the depot's medium is lost: another depot has opened it, it was taken away, its memory is bad, or its file \
             was truncated; what was read from it is discarded",
        ))
    }
}

impl Drop for LentMedium {
    fn drop(&mut self) {
        self.guard = None;
        if self.mapping.get().is_none() {
            return;
        }
        // SAFETY: mapped by `map`, and whoever got an address holds this value.
        let gone = unsafe { rustix::mm::munmap(self.start as *mut _, self.bytes) };
        if let Err(error) = gone {
            tracing::warn!(%error, "cannot unmap a medium");
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // a failing test panics

    use std::time::Duration;

    use super::*;
    use crate::fork::testing::{Child, ONE_AT_A_TIME};
    use crate::mapped::{Access, open};

    /// The mapping is hidden from children of `fork`, which may map something else there.
    #[test]
    fn a_forked_child_leaves_alone_what_lies_where_its_parent_mapped_a_medium() {
        let _alone = ONE_AT_A_TIME.lock();
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let medium = open(file.path(), 0, Access::AsDevice, Duration::ZERO).unwrap();
        medium.write(0, b"head").unwrap();
        let fd = medium.lend().unwrap().unwrap();
        let lent = LentMedium::map(&fd, 1 << 20, b"head".to_vec()).unwrap();
        let (mut lent, mut medium) = (Some(lent), Some(medium));
        let at = lent.as_ref().unwrap().start;
        let mut child = Child::fork(|| {
            let is_refused = lent.as_ref().is_some_and(|lent| lent.mapping.get().is_none());
            // SAFETY: nothing is mapped there in the child.
            let own = unsafe {
                let (protection, flags) = (
                    rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE,
                    rustix::mm::MapFlags::PRIVATE | rustix::mm::MapFlags::FIXED,
                );
                rustix::mm::mmap_anonymous(at as *mut _, 4096, protection, flags)
            };
            let Ok(own) = own else { return 0 };
            (lent, medium) = (None, None);
            // SAFETY: mapped above. If that was unmapped, this ends the child.
            unsafe { own.cast::<u8>().write_volatile(7) };
            1 + 2 * u8::from(is_refused)
        });
        assert_eq!(child.said(), 3, "1: its own memory is there, 2: nothing is read in the parent's");
        lent.unwrap().check().unwrap();
        drop(medium);
    }

    #[test]
    fn what_is_read_counts_until_the_head_changes() {
        for access in [Access::AsDevice, Access::Auto] {
            let file = tempfile::NamedTempFile::new().unwrap();
            file.as_file().set_len(1 << 20).unwrap();
            let medium = open(file.path(), 0, access, Duration::ZERO).unwrap();
            medium.write(0, b"head").unwrap();
            medium.write(8192, b"block").unwrap();
            let fd = medium.lend().unwrap().unwrap();
            let lent = LentMedium::map(&fd, 1 << 20, b"head".to_vec()).unwrap();
            drop(fd);
            let run = lent.resolve(8192, 5).unwrap();
            // SAFETY: within the mapping, and nobody writes there now.
            assert_eq!(unsafe { std::slice::from_raw_parts(run.ptr, run.len) }, b"block");
            lent.check().unwrap();
            for (at, len) in [(1 << 20, 1), (0, (1 << 20) + 1), (u64::MAX, 2)] {
                assert_eq!(lent.resolve(at, len).unwrap_err().kind(), ErrorKind::Protocol);
            }
            medium.write(1, b"E").unwrap();
            assert_eq!(lent.check().unwrap_err().kind(), ErrorKind::Io);
            medium.write(1, b"e").unwrap();
            assert_eq!(lent.check().unwrap_err().kind(), ErrorKind::Io, "it stays lost");
        }
    }

    #[test]
    fn a_lent_medium_is_not_locked_for_its_owner_and_cannot_be_written() {
        let _alone = crate::fork::testing::ONE_AT_A_TIME.lock();
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let medium = open(file.path(), 0, Access::Auto, Duration::ZERO).unwrap();
        let fd = medium.lend().unwrap().unwrap();
        assert_eq!(rustix::io::pwrite(&fd, b"x", 0), Err(rustix::io::Errno::BADF));
        let lent = LentMedium::map(&fd, 1 << 20, vec![0; 4]).unwrap();
        drop(medium);
        // The next owner gets the lock although the medium is still mapped and its descriptor open.
        open(file.path(), 0, Access::Auto, Duration::ZERO).unwrap();
        lent.check().unwrap();
    }

    #[test]
    fn lost_pages_are_zeros_that_do_not_count() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let medium = open(file.path(), 0, Access::Auto, Duration::ZERO).unwrap();
        medium.write(512 << 10, b"block").unwrap();
        let lent = LentMedium::map(&medium.lend().unwrap().unwrap(), 1 << 20, vec![0; 4]).unwrap();
        file.as_file().set_len(4096).unwrap();
        let run = lent.resolve(512 << 10, 5).unwrap();
        // SAFETY: within the mapping, whose lost pages the guard replaces.
        assert_eq!(unsafe { std::slice::from_raw_parts(run.ptr, run.len) }, [0; 5]);
        assert_eq!(lent.check().unwrap_err().kind(), ErrorKind::Io);
    }
}
