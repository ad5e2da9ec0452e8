//! Least recently used.

use super::list::SlotLists;
use super::{EvictionPolicy, SlotId};
use crate::limits::EVICTION_PASSED_OVER_MAX;

const RECENCY: usize = 0;

/// Evicts the slot whose last use is the longest ago.
#[derive(Debug)]
pub struct Lru {
    lists: SlotLists<1>,
}

impl Lru {
    /// An empty policy.
    pub fn new() -> Self {
        Self { lists: SlotLists::new() }
    }
}

impl Default for Lru {
    fn default() -> Self {
        Self::new()
    }
}

impl EvictionPolicy for Lru {
    fn insert(&mut self, slot: SlotId, _fingerprint: u64) {
        debug_assert!(self.lists.list_of(slot).is_none(), "slot {slot} was inserted twice");
        self.lists.move_to(RECENCY, slot);
    }

    fn touch(&mut self, slot: SlotId) {
        if self.lists.list_of(slot).is_some() {
            self.lists.move_to(RECENCY, slot);
        }
    }

    fn remove(&mut self, slot: SlotId) {
        self.lists.unlink(slot);
    }

    fn victim(&mut self, may_evict: &mut dyn FnMut(SlotId) -> bool) -> Option<SlotId> {
        let mut next = self.lists.oldest(RECENCY);
        // Counted, because slots that are passed over late come round again at the newest end.
        for passed_over in 0..self.lists.len(RECENCY) {
            let slot = next?;
            if may_evict(slot) {
                return Some(slot);
            }
            next = self.lists.newer(slot);
            if passed_over >= EVICTION_PASSED_OVER_MAX {
                self.lists.move_to(RECENCY, slot);
            }
        }
        None
    }

    fn coldest(&self, look: &mut dyn FnMut(SlotId, bool) -> bool) {
        let mut next = self.lists.oldest(RECENCY);
        while let Some(slot) = next.filter(|&slot| look(slot, true)) {
            next = self.lists.newer(slot);
        }
    }

    fn len(&self) -> usize {
        self.lists.len(RECENCY)
    }
}
