//! Syncs of one volume by several threads, none of which takes lost bytes for written (P1).
//!
//! Linux reports a write-back error once per open file, to the thread that syncs next, and what was to be written counts as
//! clean from then on: another thread, whose bytes were among them, would see its own sync succeed. So one thread syncs at
//! a time, and a sync that fails also fails those whose bytes may have been written before its end. A retry writes again what
//! it syncs, so an error that has passed leaves nothing behind.

use std::sync::atomic::{AtomicU64, Ordering};

use kvdepot_core::{Error, Result};
use kvdepot_io::Volume;
use parking_lot::Mutex;

/// A moment before something was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark(u64);

/// The syncs of a volume.
#[derive(Debug, Default)]
pub(super) struct Syncs {
    /// The number of syncs that failed. Read without the lock, which may be held for as long as a medium hangs.
    failures: AtomicU64,
    /// The error of the last of them. Locked while a sync runs.
    last: Mutex<Option<Error>>,
}

impl Syncs {
    /// Returns the present moment, which has to be before the write that is synced later.
    pub(super) fn mark(&self) -> Mark {
        Mark(self.failures.load(Ordering::SeqCst))
    }

    /// Waits until all that was written after this mark survives a power loss. Fails if it may not, whoever found out.
    pub(super) fn sync(&self, volume: &dyn Volume, since: Mark) -> Result<()> {
        let mut last = self.last.lock();
        let missed = last.clone().filter(|_| self.mark() != since);
        // Also if it has failed: what others wrote is synced all the same, by a tier that syncs a segment at a time.
        let synced = volume.sync().inspect_err(|error| {
            *last = Some(error.clone());
            self.failures.fetch_add(1, Ordering::SeqCst);
        });
        missed.map_or(synced, Err)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kvdepot_io::faults::{Fault, FaultOp, FaultVolume, Faults, MemoryVolume};

    use super::*;

    #[test]
    fn a_failure_fails_what_was_written_before_it_and_is_synced_all_the_same() {
        let (memory, faults) = (MemoryVolume::new(vec![0; 4096]), Faults::default());
        let volume = FaultVolume::new(Arc::new(memory.clone()), faults.clone());
        let syncs = Syncs::default();
        let before = syncs.mark();
        faults.at(FaultOp::Flush, 0, Fault::Eio);
        assert!(syncs.sync(&volume, syncs.mark()).is_err());
        let operations = memory.operations();
        assert!(syncs.sync(&volume, before).is_err(), "its bytes may be lost");
        assert!(memory.operations() > operations, "later bytes reach the medium");
        assert!(syncs.sync(&volume, syncs.mark()).is_ok());
    }
}
