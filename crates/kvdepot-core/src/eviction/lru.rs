//! Eviction of the least recently used block.

use super::list::SlotLists;
use super::policy::{EvictionPolicy, Search, SlotId};
use super::walk::Walk;

const RECENCY: usize = 0;

/// Evicts the least recently used slot.
#[derive(Debug)]
pub struct Lru {
    lists: SlotLists<1>,
    /// An interrupted search.
    walk: Option<Walk>,
}

impl Lru {
    /// Makes an empty policy.
    pub fn new() -> Self {
        Self { lists: SlotLists::new(), walk: None }
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

    fn victim(&mut self, looks: &mut usize, may_evict: &mut dyn FnMut(SlotId) -> bool) -> Search {
        let mut walk = self.walk.take().unwrap_or_else(|| Walk::over(self.lists.len(RECENCY), 0));
        let mut next = None;
        while let Some(slot) = next.or_else(|| self.lists.oldest(RECENCY)) {
            if *looks == 0 {
                walk.cut();
                self.walk = Some(walk);
                return Search::Later;
            }
            if !walk.next() {
                break;
            }
            *looks -= 1;
            if may_evict(slot) {
                return Search::Found(slot);
            }
            next = self.lists.newer(slot);
            if walk.pass_over() {
                self.lists.move_to(RECENCY, slot);
            }
        }
        Search::Nothing
    }

    fn choose(&mut self, _slot: SlotId) {}

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
