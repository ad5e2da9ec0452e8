//! The memory between pool and helper, in extents.
//!
//! The helper never sees the pool. A call of Mooncake's that hangs, and may still write, keeps its extent until it has
//! ended or the helper is dead; the pool's slot is free at the caller's deadline (P1, P4).

use std::sync::Arc;
use std::time::Instant;

use kvdepot_core::limits::BLOCK_ALIGN_BYTES;
use kvdepot_core::runs::{Run, RunAllocator};
use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_io::SharedMemory;
use parking_lot::{Condvar, Mutex};

/// The staging memory of one tier.
#[derive(Debug)]
pub(super) struct Staging {
    pub(super) memory: Arc<SharedMemory>,
    free: Mutex<RunAllocator>,
    freed: Condvar,
}

impl Staging {
    pub(super) fn new(bytes: usize) -> Result<Arc<Self>> {
        let memory = Arc::new(SharedMemory::create("kvdepot-mooncake", bytes)?);
        let mut free = RunAllocator::new(bytes as u64);
        free.add_extent(0, bytes as u64);
        Ok(Arc::new(Self { memory, free: Mutex::new(free), freed: Condvar::new() }))
    }

    /// Takes contiguous bytes. Waits until enough are free, or the deadline.
    pub(super) fn take(self: &Arc<Self>, bytes: usize, deadline: Instant) -> Result<Extent> {
        let whole = (bytes as u64).next_multiple_of(BLOCK_ALIGN_BYTES);
        if bytes == 0 || whole > self.memory.bytes() as u64 {
            let what = "a block does not fit into the staging memory of the Mooncake tier: raise mooncake_staging_mb";
            return Err(Error::new(ErrorKind::Config, what)
                .with("bytes", bytes)
                .with("staging_bytes", self.memory.bytes()));
        }
        let mut free = self.free.lock();
        loop {
            match free.alloc(whole).as_deref() {
                Some(&[run]) => return Ok(Extent { staging: Arc::clone(self), run }),
                Some(pieces) => free.free(pieces),
                None => {}
            }
            if self.freed.wait_until(&mut free, deadline).timed_out() {
                let what = "the staging memory of the Mooncake tier was in use until the deadline";
                return Err(Error::new(ErrorKind::Busy, what).with("bytes", bytes));
            }
        }
    }
}

/// A part of the staging memory, given back when it is dropped.
#[derive(Debug)]
pub(super) struct Extent {
    staging: Arc<Staging>,
    run: Run,
}

impl Extent {
    pub(super) fn memory(&self) -> &SharedMemory {
        &self.staging.memory
    }

    /// Returns the offset of its first byte.
    pub(super) const fn at(&self) -> usize {
        // The memory's size fitted a usize.
        self.run.offset as usize
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        self.staging.free.lock().free(&[self.run]);
        self.staging.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn an_extent_is_contiguous_and_the_next_waits_for_it() {
        let staging = Staging::new(16 << 12).unwrap();
        let now = Instant::now();
        let all: Vec<Extent> = (0..16).map(|_| staging.take(4096, now).unwrap()).collect();
        assert_eq!(staging.take(1, now).unwrap_err().kind(), ErrorKind::Busy);
        let mut kept: Vec<Extent> =
            all.into_iter().enumerate().filter(|(n, _)| n % 2 == 0).map(|(_, e)| e).collect();
        // Eight pages are free, but no two of them are neighbours.
        assert_eq!(staging.take(8192, now).unwrap_err().kind(), ErrorKind::Busy);
        let waiting = std::thread::spawn({
            let staging = Arc::clone(&staging);
            move || staging.take(5000, Instant::now() + Duration::from_secs(60)).map(|extent| extent.at())
        });
        kept.pop();
        assert_eq!(waiting.join().unwrap().unwrap(), 13 << 12);
        assert_eq!(staging.take((16 << 12) + 1, now).unwrap_err().kind(), ErrorKind::Config);
    }
}
