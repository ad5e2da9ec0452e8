//! Shared memory of atomic 64-bit words, for a ledger: it is written while its depot may be killed at any instruction,
//! and read by the next depot.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use kvdepot_core::{Error, ErrorKind, Result};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

/// The mapping of a memfd of words. Untouched memory costs nothing.
#[derive(Debug)]
pub(crate) struct SharedWords {
    base: NonNull<AtomicU64>,
    words: usize,
    fd: OwnedFd,
}

// SAFETY: all of the memory is accessed as atomics only.
unsafe impl Send for SharedWords {}
// SAFETY: as for Send.
unsafe impl Sync for SharedWords {}

impl SharedWords {
    /// Makes memory for this many words, all of them zero.
    pub(crate) fn create(name: &str, words: usize) -> Result<Self> {
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(|e| Error::io("cannot make the ledger's memory", e.into()))?;
        rustix::fs::ftruncate(&fd, words as u64 * 8)
            .map_err(|e| Error::io("cannot size the ledger", e.into()).with("words", words))?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(|e| Error::io("cannot seal the ledger's size", e.into()))?;
        Self::map(fd)
    }

    /// Maps words made by another process. Refuses memory that could be shrunk below the mapping.
    pub(crate) fn map(fd: OwnedFd) -> Result<Self> {
        let failed = |e: rustix::io::Errno| Error::io("cannot look at the ledger", e.into());
        let real = rustix::fs::fstat(&fd).map_err(failed)?.st_size;
        let bytes = usize::try_from(real).ok().filter(|&bytes| bytes >= 8 && bytes.is_multiple_of(8));
        let is_sealed = rustix::fs::fcntl_get_seals(&fd).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        let Some(bytes) = bytes.filter(|_| is_sealed) else {
            return Err(Error::new(ErrorKind::Corrupt, "this is not a ledger's memory").with("bytes", real));
        };
        // SAFETY: a fresh shared mapping at an address of the kernel's choice replaces nothing.
        let base = unsafe {
            let access = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, &fd, 0)
        };
        let base = base.map_err(|e| Error::io("cannot map the ledger", e.into()).with("bytes", bytes))?;
        let base = NonNull::new(base.cast()).ok_or_else(|| {
            Error::new(ErrorKind::Io, "the kernel mapped the ledger at address zero").with("bytes", bytes)
        })?;
        Ok(Self { base, words: bytes / 8, fd })
    }

    /// Returns all words.
    pub(crate) const fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping has so many words, is aligned to pages, cannot shrink (it is sealed), and is read and written as
        // atomics only; any bits are a valid word. It stays mapped as long as `self`.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.words) }
    }

    /// Returns the descriptor, for the keeper.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for SharedWords {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length; no borrow of the words is left.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.words * 8) };
    }
}
