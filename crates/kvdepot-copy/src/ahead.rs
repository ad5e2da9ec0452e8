//! Fills this process's page tables for a pool that another process makes resident, ahead of the first copies: a page
//! that is met for the first time costs a copy about as much as its bytes do (figures in docs/benchmarks.md).

use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvdepot_core::{Error, Result};
use kvdepot_io::aligned::page_bytes;
use parking_lot::{Condvar, Mutex};

use crate::pool::Registration;

/// What is looked at and mapped as one.
const PIECE_BYTES: usize = 64 << 20;
/// How long until a piece that was not resident is looked at again.
const RETRY: Duration = Duration::from_millis(100);
/// A pool that does not grow for as long is mapped on first use from there on.
const GIVE_UP_AFTER: Duration = Duration::from_mins(1);

/// A pool that is being mapped; dropping it ends that.
pub(crate) struct MapAhead {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    base: usize,
    len: usize,
    progress: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Default)]
struct Progress {
    mapped_bytes: usize,
    stop: bool,
    ended: bool,
    failure: Option<Error>,
}

impl MapAhead {
    /// Starts to map what is resident of `base..base + len`. Nothing becomes resident by it.
    ///
    /// # Safety
    /// The range begins at a page and stays mapped, readable, until this is dropped.
    pub(crate) unsafe fn start(base: *mut u8, len: usize) -> Result<Self> {
        let shared =
            Arc::new(Shared { base: base.addr(), len, progress: Mutex::default(), changed: Condvar::new() });
        let ours = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("kvdepot-map".to_owned())
            .spawn(move || ours.map_all())
            .map_err(|e| Error::io("cannot start the thread that maps the pool", e))?;
        Ok(Self { shared, thread: Some(thread) })
    }
}

impl Shared {
    fn map_all(&self) {
        let mut failure = None;
        let mut at = 0;
        let mut moved = Instant::now();
        while at < self.len && moved.elapsed() < GIVE_UP_AFTER {
            let len = PIECE_BYTES.min(self.len - at);
            // A pool may be populated in part and then left alone: what comes later is for the first use.
            match self.map_resident(at, len) {
                Ok(true) => {
                    at += len;
                    moved = Instant::now();
                }
                Ok(false) => {}
                Err(error) => {
                    failure = Some(error);
                    break;
                }
            }
            let mut progress = self.progress.lock();
            if progress.mapped_bytes == at && !progress.stop {
                self.changed.wait_for(&mut progress, RETRY);
            }
            progress.mapped_bytes = at;
            self.changed.notify_all();
            if progress.stop {
                break;
            }
        }
        let mut progress = self.progress.lock();
        (progress.ended, progress.failure) = (true, failure);
        self.changed.notify_all();
    }

    /// Maps a piece if all of it is resident; whether it was.
    fn map_resident(&self, at: usize, len: usize) -> Result<bool> {
        let start: *mut libc::c_void = std::ptr::with_exposed_provenance_mut(self.base + at);
        let failed = |what: &str| {
            Error::io(what, std::io::Error::last_os_error()).with("offset_bytes", at).with("bytes", len)
        };
        let mut resident = vec![0u8; len.div_ceil(page_bytes())];
        // SAFETY: `start`'s contract: the range is mapped; the vector has a byte for each of its pages.
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
}

impl Registration for MapAhead {
    fn registered_bytes(&self) -> u64 {
        self.shared.progress.lock().mapped_bytes as u64
    }

    fn wait(&self, timeout: Duration) -> bool {
        let mut progress = self.shared.progress.lock();
        self.shared.changed.wait_while_for(&mut progress, |progress| !progress.ended, timeout);
        progress.mapped_bytes == self.shared.len
    }

    fn failure(&self) -> Option<Error> {
        self.shared.progress.lock().failure.clone()
    }
}

impl Drop for MapAhead {
    fn drop(&mut self) {
        self.shared.progress.lock().stop = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for MapAhead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MapAhead({} of {} bytes)", self.registered_bytes(), self.shared.len)
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
        let mut progress = ahead.shared.progress.lock();
        ahead.shared.changed.wait_while_for(&mut progress, |progress| progress.mapped_bytes == 0, LONG);
        drop(progress);
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
