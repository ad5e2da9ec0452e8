//! Memory that another process may map and write at any time, for bytes on their way to and from that process.
//!
//! Nothing here hands out a reference into the memory: bytes are copied in and out, and a reader checks its own copy.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use kvdepot_core::{Error, ErrorKind, Result};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::SlotBuf;
use crate::fork::Private;

/// A mapped memfd of fixed size.
pub struct SharedMemory {
    base: NonNull<u8>,
    bytes: usize,
    /// Dropped before the descriptor.
    _private: Private,
    fd: OwnedFd,
}

// SAFETY: plain shared memory, which is only copied from and to, by address.
unsafe impl Send for SharedMemory {}
// SAFETY: as for Send. Copies of one range by several threads or processes give unspecified bytes and no reference.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Makes zeroed memory of `bytes` bytes. Pages are allocated at first use.
    pub fn create(name: &str, bytes: usize) -> Result<Self> {
        let failed = |what: &str, errno: rustix::io::Errno| {
            Error::io(what.to_owned(), errno.into()).with("memory", name).with("bytes", bytes)
        };
        let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(|e| failed("cannot make shared memory", e))?;
        rustix::fs::ftruncate(&fd, bytes as u64).map_err(|e| failed("cannot size shared memory", e))?;
        // A peer that shrank it would kill this process by SIGBUS.
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(|e| failed("cannot seal the size of shared memory", e))?;
        // SAFETY: a fresh shared mapping at an address of the kernel's choice replaces nothing.
        let base = unsafe {
            let access = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, &fd, 0)
        };
        let base = base.map_err(|e| failed("cannot map shared memory", e))?;
        let base = NonNull::new(base.cast::<u8>())
            .ok_or_else(|| Error::new(ErrorKind::Io, "shared memory was mapped at address 0"))?;
        // SAFETY: the range is the mapping just made. A forked child must not keep it.
        let _ = unsafe { rustix::mm::madvise(base.as_ptr().cast(), bytes, Advice::LinuxDontFork) };
        let private = Private::of(fd.as_fd());
        Ok(Self { base, bytes, _private: private, fd })
    }

    /// Returns the size in bytes.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the descriptor to pass to the other process.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Returns the address of `len` bytes from `at` on.
    fn place(&self, at: usize, len: usize) -> Result<*mut u8> {
        if at.checked_add(len).is_none_or(|end| end > self.bytes) {
            return Err(Error::new(ErrorKind::Config, "a range lies outside of shared memory")
                .with("offset_bytes", at)
                .with("bytes", len)
                .with("memory_bytes", self.bytes));
        }
        // SAFETY: `at + len <= bytes`, so the address lies in the mapping.
        Ok(unsafe { self.base.as_ptr().add(at) })
    }

    /// Copies bytes in.
    pub fn write(&self, at: usize, from: &[u8]) -> Result<()> {
        let to = self.place(at, from.len())?;
        // SAFETY: `place` checked the range, and `from` cannot overlap it, because nobody has a reference into it.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
        Ok(())
    }

    /// Copies bytes out.
    pub fn read(&self, at: usize, into: &mut [u8]) -> Result<()> {
        let from = self.place(at, into.len())?;
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Copies the first `len` bytes of a slot in.
    pub fn write_slot(&self, at: usize, from: &SlotBuf, len: usize) -> Result<()> {
        let mut to = self.place(at, len)?;
        for run in whole(from, len)? {
            // SAFETY: the runs have `len` bytes in total, as the checked range. A slot is readable by the contract of
            // `SlotBuf::new`, and lies in other memory.
            unsafe {
                std::ptr::copy_nonoverlapping(run.ptr, to, run.len);
                to = to.add(run.len);
            }
        }
        Ok(())
    }

    /// Copies bytes out into the first `len` bytes of a slot.
    pub fn read_slot(&self, at: usize, into: &SlotBuf, len: usize) -> Result<()> {
        let mut from = self.place(at, len)?;
        for run in whole(into, len)? {
            // SAFETY: as in `write_slot`; the slot is writable by the contract of `SlotBuf::new`.
            unsafe {
                std::ptr::copy_nonoverlapping(from, run.ptr, run.len);
                from = from.add(run.len);
            }
        }
        Ok(())
    }
}

/// Returns the pieces of the first `len` bytes of a slot.
fn whole(slot: &SlotBuf, len: usize) -> Result<smallvec::SmallVec<[crate::MemRun; 2]>> {
    let runs = slot.slice(0, len);
    if runs.iter().map(|run| run.len).sum::<usize>() == len {
        return Ok(runs);
    }
    Err(Error::new(ErrorKind::Config, "a slot is smaller than its block")
        .with("slot_bytes", slot.len())
        .with("block_bytes", len))
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: mapped by `create` with this length, and nothing refers to it.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

impl fmt::Debug for SharedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedMemory({} bytes)", self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_go_in_and_out_and_never_past_the_end() {
        let memory = SharedMemory::create("kvdepot-test", 3 * 4096).unwrap();
        let slot = SlotBuf::anonymous(8192);
        slot.write_at(0, &[7; 8192]);
        memory.write_slot(4096, &slot, 5000).unwrap();
        memory.write(4096 + 5000, b"end").unwrap();
        let mut out = [0; 8];
        memory.read(4096 + 4995, &mut out).unwrap();
        assert_eq!(&out, b"\x07\x07\x07\x07\x07end");
        let back = SlotBuf::anonymous(8192);
        memory.read_slot(4097, &back, 4999).unwrap();
        let mut bytes = vec![0; 5000];
        back.read_at(0, &mut bytes);
        assert!(bytes[..4999].iter().all(|&byte| byte == 7) && bytes[4999] == 0);
        for (at, len) in [(4097, 8192), (3 * 4096, 1), (usize::MAX, 2)] {
            assert_eq!(memory.read_slot(at, &slot, len).unwrap_err().kind(), ErrorKind::Config, "{at}");
            assert_eq!(memory.write_slot(at, &slot, len).unwrap_err().kind(), ErrorKind::Config, "{at}");
        }
        assert_eq!(memory.write_slot(0, &slot, 8193).unwrap_err().kind(), ErrorKind::Config);
    }
}
