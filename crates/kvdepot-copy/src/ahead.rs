//! Fills this process's page tables for a pool that another process makes resident, ahead of the first copies: a page
//! that is met for the first time costs a copy about as much as its bytes do (figures in docs/benchmarks.md).

use std::fmt;
use std::time::{Duration, Instant};

use kvdepot_core::{Error, Result};
use kvdepot_io::aligned::page_bytes;

use crate::background::{Background, Progress};
use crate::pool::Registration;

/// What is looked at and mapped as one.
const PIECE_BYTES: usize = 64 << 20;
/// How long until a piece that was not resident is looked at again.
const RETRY: Duration = Duration::from_millis(100);
/// A pool that does not grow for as long is mapped on first use from there on.
const GIVE_UP_AFTER: Duration = Duration::from_mins(1);

/// A pool that is being mapped; dropping it ends that.
pub(crate) struct MapAhead {
    len: usize,
    thread: Background,
}

impl MapAhead {
    /// Starts to map what is resident of `base..base + len`. Nothing becomes resident by it.
    ///
    /// # Safety
    /// The range begins at a page and stays mapped, readable, until this is dropped.
    pub(crate) unsafe fn start(base: *mut u8, len: usize) -> Result<Self> {
        let base = base.addr();
        // SAFETY: the caller's contract; dropping this waits for the thread.
        let thread =
            Background::start("kvdepot-map", move |progress| unsafe { map_all(base, len, progress) })?;
        Ok(Self { len, thread })
    }
}

/// A pool may be populated in part and then left alone: what comes later is for the first use.
///
/// # Safety
/// As for `MapAhead::start`.
unsafe fn map_all(base: usize, len: usize, progress: &Progress) -> Result<()> {
    let mut at = 0;
    let mut moved = Instant::now();
    while at < len && moved.elapsed() < GIVE_UP_AFTER && progress.goes_on() {
        let piece = PIECE_BYTES.min(len - at);
        // SAFETY: the caller's contract.
        if unsafe { map_resident(base + at, piece) }.map_err(|e| e.with("offset_bytes", at))? {
            at += piece;
            moved = Instant::now();
            progress.add(piece);
        } else {
            progress.pause(RETRY);
        }
    }
    Ok(())
}

/// Maps a piece if all of it is resident; whether it was.
///
/// # Safety
/// The range is mapped and readable.
unsafe fn map_resident(address: usize, len: usize) -> Result<bool> {
    let start: *mut libc::c_void = std::ptr::with_exposed_provenance_mut(address);
    let failed = |what: &str| Error::io(what, std::io::Error::last_os_error()).with("bytes", len);
    let mut resident = vec![0u8; len.div_ceil(page_bytes())];
    // SAFETY: the caller's contract; the vector has a byte for each of its pages.
    if unsafe { libc::mincore(start, len, resident.as_mut_ptr()) } != 0 {
        return Err(failed("cannot ask which pages of the pool are resident"));
    }
    if resident.iter().any(|page| page & 1 == 0) {
        return Ok(false);
    }
    // SAFETY: as above; this reads pages, as any load would.
    if unsafe { libc::madvise(start, len, libc::MADV_POPULATE_READ) } != 0 {
        return Err(failed("cannot map the pool ahead"));
    }
    Ok(true)
}

impl Registration for MapAhead {
    fn registered_bytes(&self) -> u64 {
        self.thread.bytes()
    }

    fn wait(&self, timeout: Duration) -> bool {
        self.thread.wait(timeout) && self.registered_bytes() == self.len as u64
    }

    fn failure(&self) -> Option<Error> {
        self.thread.failure()
    }
}

impl fmt::Debug for MapAhead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MapAhead({} of {} bytes)", self.registered_bytes(), self.len)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Seek, SeekFrom};
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

    use super::*;

    const LONG: Duration = Duration::from_secs(30);
    const LEN: usize = 2 * PIECE_BYTES;

    /// Shared memory, mapped twice as a depot and its client do.
    struct Twice {
        depot: *mut u8,
        client: *mut u8,
        _fd: OwnedFd,
    }

    impl Twice {
        fn new() -> Self {
            // SAFETY: a name that ends in zero; the descriptor is checked.
            let fd = unsafe { libc::memfd_create(c"kvdepot-test".as_ptr(), libc::MFD_CLOEXEC) };
            assert!(fd >= 0);
            // SAFETY: just made, and nobody else's.
            let fd = unsafe { OwnedFd::from_raw_fd(fd) };
            // SAFETY: a descriptor of ours.
            assert_eq!(unsafe { libc::ftruncate(fd.as_raw_fd(), LEN as i64) }, 0);
            let map = || {
                let access = libc::PROT_READ | libc::PROT_WRITE;
                // SAFETY: a fresh mapping at an address of the kernel's choice.
                let base = unsafe {
                    libc::mmap(std::ptr::null_mut(), LEN, access, libc::MAP_SHARED, fd.as_raw_fd(), 0)
                };
                assert_ne!(base, libc::MAP_FAILED);
                base.cast::<u8>()
            };
            Self { depot: map(), client: map(), _fd: fd }
        }

        fn populate(&self, at: usize) {
            // SAFETY: inside of the mapping.
            let done =
                unsafe { libc::madvise(self.depot.add(at).cast(), PIECE_BYTES, libc::MADV_POPULATE_WRITE) };
            assert_eq!(done, 0);
        }

        /// Pages of the client's mapping that its page tables hold.
        fn mapped_pages(&self) -> usize {
            const PRESENT: u64 = 1 << 63;
            let mut map = File::open("/proc/self/pagemap").unwrap();
            map.seek(SeekFrom::Start((self.client.addr() / page_bytes() * 8) as u64)).unwrap();
            let mut entries = vec![0; LEN / page_bytes() * 8];
            map.read_exact(&mut entries).unwrap();
            entries
                .chunks_exact(8)
                .filter(|entry| u64::from_le_bytes((*entry).try_into().unwrap()) & PRESENT != 0)
                .count()
        }
    }

    impl Drop for Twice {
        fn drop(&mut self) {
            // SAFETY: mapped by `new`, and no registration is left.
            unsafe {
                libc::munmap(self.depot.cast(), LEN);
                libc::munmap(self.client.cast(), LEN);
            }
        }
    }

    #[test]
    fn what_another_made_resident_is_mapped_and_nothing_else() {
        let memory = Twice::new();
        memory.populate(0);
        assert_eq!(memory.mapped_pages(), 0);
        // SAFETY: `memory` outlives it.
        let ahead = unsafe { MapAhead::start(memory.client, LEN) }.unwrap();
        assert!(ahead.thread.wait_for_bytes(1, LONG), "{ahead:?}");
        assert_eq!(memory.mapped_pages() * page_bytes(), PIECE_BYTES);
        memory.populate(PIECE_BYTES);
        assert!(ahead.wait(LONG), "{ahead:?}");
        assert_eq!(memory.mapped_pages() * page_bytes(), LEN);
        assert_eq!(ahead.registered_bytes(), LEN as u64);
        assert!(ahead.failure().is_none());
    }

    #[test]
    fn a_pool_that_never_grows_keeps_nobody_from_leaving() {
        let memory = Twice::new();
        // SAFETY: `memory` outlives it.
        let ahead = unsafe { MapAhead::start(memory.client, LEN) }.unwrap();
        assert!(!ahead.wait(Duration::ZERO));
        drop(ahead);
        assert_eq!(memory.mapped_pages(), 0);
    }

    #[test]
    fn memory_that_cannot_be_mapped_ahead_is_said_and_left() {
        let memory = Twice::new();
        // SAFETY: the range is never read: asking about it fails, for it does not begin at a page.
        let ahead = unsafe { MapAhead::start(memory.client.wrapping_add(1), LEN - page_bytes()) }.unwrap();
        assert!(!ahead.wait(LONG));
        assert!(ahead.failure().is_some());
    }
}
