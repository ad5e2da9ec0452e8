//! What a tier over a shared store believes about its blocks: recent answers, writes and removals in flight.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvdepot_core::{BlockKey, NamespaceId};
use parking_lot::Mutex;

use crate::known::{Known, PARTS};
use crate::writing::Writing;

/// Locks are taken in the order of the fields.
#[derive(Debug)]
pub(crate) struct Beliefs {
    pub(crate) writing: Mutex<Writing>,
    pub(crate) known: Mutex<Known>,
    /// Number of removals that have begun.
    removals: AtomicU64,
}

impl Beliefs {
    pub(crate) fn new(present_ttl: Duration, absent_ttl: Duration) -> Self {
        Self {
            writing: Mutex::default(),
            known: Mutex::new(Known::new(present_ttl, absent_ttl)),
            removals: AtomicU64::new(0),
        }
    }

    /// Forgets all blocks of a namespace that nobody may name any more. Lookups are answered in between.
    pub(crate) fn forget_namespace(&self, namespace: NamespaceId) {
        drop(self.forget_if(|key| key.namespace == namespace));
    }

    /// Forgets blocks; lookups are answered in between, since the lock is held for a bounded number of keys at a time.
    /// Returns those that were present, as far as known.
    pub(crate) fn forget_if(&self, is_meant: impl Fn(&BlockKey) -> bool) -> Vec<BlockKey> {
        (0..PARTS).flat_map(|part| self.known.lock().forget_in(part, &is_meant)).collect()
    }

    /// Returns a number that changes when a removal begins. Take it before the store is asked.
    pub(crate) fn removals(&self) -> u64 {
        self.removals.load(Ordering::Acquire)
    }

    /// Records the store's answer that the block is present, unless a removal has begun since [`Self::removals`].
    pub(crate) fn note_present(&self, key: BlockKey, bytes: u64, removals: u64) {
        let writing = self.writing.lock();
        if !writing.is_leaving(&key) && self.removals() == removals {
            self.known.lock().note(key, true, bytes);
        }
    }

    /// Records that the block was absent, unless it is being written.
    pub(crate) fn note_absent(&self, key: BlockKey) {
        let writing = self.writing.lock();
        if !writing.holds(&key) {
            self.known.lock().note(key, false, 0);
        }
    }

    /// Makes blocks absent for everyone here, and refuses writes of them, until [`Self::left`].
    pub(crate) fn leave(&self, keys: &[BlockKey]) {
        let mut writing = self.writing.lock();
        let mut known = self.known.lock();
        self.removals.fetch_add(1, Ordering::AcqRel);
        for key in keys {
            writing.leave(*key);
            known.forget(key);
        }
    }

    pub(crate) fn left(&self, keys: &[BlockKey]) {
        let mut writing = self.writing.lock();
        let mut known = self.known.lock();
        for key in keys {
            // An earlier answer may have been recorded before the block was removed.
            known.forget(key);
            writing.left(key);
        }
    }

    /// Does [`Self::leave`], and [`Self::left`] when the result is dropped.
    pub(crate) fn leaving(self: &Arc<Self>, keys: Vec<BlockKey>) -> Leaving {
        self.leave(&keys);
        Leaving { beliefs: Arc::clone(self), keys }
    }
}

/// Blocks that are being removed.
#[derive(Debug)]
pub(crate) struct Leaving {
    beliefs: Arc<Beliefs>,
    keys: Vec<BlockKey>,
}

impl Leaving {
    pub(crate) fn keys(&self) -> &[BlockKey] {
        &self.keys
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        self.beliefs.left(&self.keys);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use kvdepot_core::BlockHash;

    use super::*;
    use crate::Presence;

    #[test]
    fn answers_from_before_a_removal_are_not_believed_after_it() {
        let beliefs = Arc::new(Beliefs::new(Duration::from_secs(3600), Duration::from_secs(3600)));
        let key = BlockKey { namespace: NamespaceId([1; 16]), hash: BlockHash([2; 16]) };
        let presence = || beliefs.known.lock().presence(&key, Instant::now());
        let asked = beliefs.removals();
        beliefs.note_present(key, 10, asked);
        assert_eq!(presence(), Presence::Present);

        let leaving = beliefs.leaving(vec![key]);
        assert_eq!((presence(), leaving.keys()), (Presence::Unknown, &[key][..]));
        let during = beliefs.removals();
        beliefs.note_present(key, 10, during);
        assert_eq!(presence(), Presence::Unknown, "it is being removed");
        drop(leaving);
        beliefs.note_present(key, 10, asked);
        assert_eq!(presence(), Presence::Unknown, "the store was asked before the removal");
        beliefs.note_present(key, 10, beliefs.removals());
        assert_eq!(presence(), Presence::Present);
    }

    #[test]
    fn a_block_that_is_left_is_not_known_however_it_became_known() {
        let beliefs = Arc::new(Beliefs::new(Duration::from_secs(3600), Duration::from_secs(3600)));
        let key = BlockKey { namespace: NamespaceId([1; 16]), hash: BlockHash([2; 16]) };
        let leaving = beliefs.leaving(vec![key]);
        beliefs.note_absent(key);
        beliefs.known.lock().note(key, true, 10);
        drop(leaving);
        assert_eq!(beliefs.known.lock().presence(&key, Instant::now()), Presence::Unknown);
        beliefs.note_absent(key);
        assert_eq!(beliefs.known.lock().presence(&key, Instant::now()), Presence::Absent);
    }
}
