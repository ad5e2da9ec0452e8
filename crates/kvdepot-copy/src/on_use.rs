//! Fills the page tables of a pool that another process made resident, only where copies go: attaching costs the same
//! for a pool of any size.
//!
//! The kernel maps one page for each write fault, and a fault costs about as much as copying the page's bytes. So the
//! first copy into or out of a window of 2 MiB maps the complete window by one call, if all of it is resident.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use kvdepot_core::Error;
use parking_lot::RwLock;

use crate::pool::Registration;
use crate::resident::is_resident;

/// Size of a window, mapped by one call: what one page of page tables covers.
const WINDOW_BYTES: usize = 2 << 20;
/// Number of checks of a window that is not fully resident. After that its pages are mapped one by one by their faults.
const LOOKS_MAX: u8 = 4;
/// Marks a window that needs no further check.
const DONE: u8 = u8::MAX;

/// The pools registered with an engine.
#[derive(Debug, Default)]
pub(crate) struct Pools(RwLock<Vec<Arc<Windows>>>);

/// A pool, and which of its windows are mapped.
struct Windows {
    base: usize,
    len: usize,
    /// For each window `DONE`, or the number of checks so far.
    looks: Box<[AtomicU8]>,
    mapped: AtomicUsize,
}

/// Keeps a pool registered. Drop it before the pool is unmapped.
pub(crate) struct Known {
    pools: Weak<Pools>,
    windows: Arc<Windows>,
}

impl Pools {
    /// Adds a pool, without touching or mapping any of it.
    ///
    /// # Safety
    /// The range is a readable mapping that stays in place until the returned value was dropped, and no copy into or
    /// out of it is in flight then.
    pub(crate) unsafe fn add(self: &Arc<Self>, base: *mut u8, len: usize) -> Known {
        let windows = Arc::new(Windows {
            base: base.expose_provenance(),
            len,
            looks: (0..len.div_ceil(WINDOW_BYTES)).map(|_| AtomicU8::new(0)).collect(),
            mapped: AtomicUsize::new(0),
        });
        self.0.write().push(Arc::clone(&windows));
        Known { pools: Arc::downgrade(self), windows }
    }

    /// Maps the windows of pools touched by the upcoming copies `ranges` (address and length).
    pub(crate) fn about_to_copy(&self, ranges: impl Iterator<Item = (usize, usize)>) {
        let pools = self.0.read();
        if pools.is_empty() {
            return;
        }
        for (address, len) in ranges {
            let pool = pools.iter().find(|pool| pool.contains(address, len));
            if let Some(pool) = pool {
                pool.map(address - pool.base, len);
            }
        }
    }
}

impl Windows {
    fn contains(&self, address: usize, len: usize) -> bool {
        address.checked_sub(self.base).is_some_and(|at| at < self.len && len <= self.len - at)
    }

    fn map(&self, at: usize, len: usize) {
        for window in at / WINDOW_BYTES..(at + len).div_ceil(WINDOW_BYTES) {
            let looks = self.looks[window].load(Ordering::Relaxed);
            if looks == DONE {
                continue;
            }
            let start = window * WINDOW_BYTES;
            let range = start..(start + WINDOW_BYTES).min(self.len);
            let bytes = range.len();
            // Pages that are not resident must not become so by the check.
            // SAFETY: the range lies in the mapping (`Pools::add`).
            let mapped = unsafe { is_resident(self.base + range.start, range.len()) } && self.populate(range);
            // Threads that check at the same time do the work twice, which does no harm.
            let after = if mapped || looks + 1 >= LOOKS_MAX { DONE } else { looks + 1 };
            self.looks[window].store(after, Ordering::Relaxed);
            if mapped {
                self.mapped.fetch_add(bytes, Ordering::Relaxed);
            }
        }
    }

    fn pointer(&self, at: usize) -> *mut libc::c_void {
        std::ptr::with_exposed_provenance_mut(self.base + at)
    }

    /// Maps a range. A refusal only costs speed: then pages are mapped by their faults.
    fn populate(&self, range: Range<usize>) -> bool {
        // SAFETY: the range lies in the mapping (`Pools::add`); this reads pages, as any load would.
        unsafe { libc::madvise(self.pointer(range.start), range.len(), libc::MADV_POPULATE_READ) == 0 }
    }
}

impl fmt::Debug for Windows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Windows({} of {} bytes mapped)", self.mapped.load(Ordering::Relaxed), self.len)
    }
}

impl Registration for Known {
    /// Host copies need no registration.
    fn registered_bytes(&self) -> u64 {
        0
    }

    fn wait(&self, _timeout: Duration) -> bool {
        true
    }

    fn failure(&self) -> Option<Error> {
        None
    }
}

impl fmt::Debug for Known {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.windows.fmt(f)
    }
}

impl Drop for Known {
    fn drop(&mut self) {
        if let Some(pools) = self.pools.upgrade() {
            pools.0.write().retain(|pool| !Arc::ptr_eq(pool, &self.windows));
        }
    }
}

#[cfg(test)]
#[path = "on_use_tests.rs"]
mod tests;
