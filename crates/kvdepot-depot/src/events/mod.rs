//! Events: which blocks become readable where, and stop being so, for clients that follow. docs/design.md describes how a
//! reader keeps in step.
//!
//! Nothing is recorded until a client follows. Changes of the pool come from the machine, in its order. A tier's reports
//! come from its own threads in any order, so a report only triggers a look at the tier's index, one look at a time, and
//! the event records what the index says. So the last event of a block is newer than its last change.

mod answer;
mod following;
#[cfg(test)]
mod model_tests;
pub(crate) mod packed;
mod ring;

use std::sync::atomic::{AtomicUsize, Ordering};

use kvdepot_core::BlockKey;
use kvdepot_core::limits::EVENTS_KEPT_MAX;
use kvdepot_core::machine::TierIndex;
use kvdepot_tier::{Presence, Tier};
use parking_lot::Mutex;

pub(crate) use following::Following;
pub(crate) use ring::Event;
use ring::{Change, Place, Ring};

/// Events of a depot.
#[derive(Debug)]
pub(crate) struct Events {
    /// Number of connections that follow.
    followers: AtomicUsize,
    ring: Mutex<Ring>,
    /// One per tier, held during a look at the tier and its recording, so that looks are recorded in their order.
    looks: Vec<Mutex<()>>,
}

impl Events {
    pub(crate) fn new(tiers: usize) -> Self {
        Self {
            followers: AtomicUsize::new(0),
            ring: Mutex::new(Ring::new(EVENTS_KEPT_MAX)),
            looks: (0..tiers).map(|_| Mutex::default()).collect(),
        }
    }

    /// Returns whether a client follows.
    pub(crate) fn is_on(&self) -> bool {
        self.followers.load(Ordering::SeqCst) > 0
    }

    /// Records a new follower.
    fn begin(&self) {
        let mut ring = self.ring.lock();
        if self.followers.fetch_add(1, Ordering::SeqCst) == 0 {
            // Changes without a follower were not recorded, which is a gap.
            ring.cut();
        }
    }

    /// Records that a follower has gone. Without followers nothing is kept.
    fn end(&self) {
        let mut ring = self.ring.lock();
        if self.followers.fetch_sub(1, Ordering::SeqCst) == 1 {
            ring.cut();
        }
    }

    /// Records changes of the pool. The caller holds the machine's lock.
    pub(crate) fn pool_changed(&self, changes: &[(BlockKey, bool)]) {
        if changes.is_empty() || !self.is_on() {
            return;
        }
        let mut ring = self.ring.lock();
        for &(key, is_stored) in changes {
            ring.push(Change { key, place: 0, is_stored });
        }
    }

    /// Looks up blocks in a tier's index and records the result. `said` is what the tier reported; it is used if only I/O
    /// could answer. The caller must not hold a lock of the tier.
    pub(crate) fn tier_changed(&self, index: TierIndex, tier: &dyn Tier, keys: &[BlockKey], said: bool) {
        if keys.is_empty() || !self.is_on() {
            return;
        }
        let Ok(place) = Place::try_from(index + 1) else { return };
        let mut found = Vec::with_capacity(keys.len());
        let _look = self.looks[index].lock();
        tier.peek(keys, &mut found);
        let mut ring = self.ring.lock();
        for (&key, presence) in keys.iter().zip(found) {
            let is_stored = match presence {
                Presence::Present => true,
                Presence::Absent => false,
                Presence::Unknown => said,
            };
            ring.push(Change { key, place, is_stored });
        }
    }

    /// A tier has gained or lost blocks without reporting each of them, so every follower reads new snapshots.
    pub(crate) fn look_anew(&self) {
        if self.is_on() {
            self.ring.lock().cut();
        }
    }
}
