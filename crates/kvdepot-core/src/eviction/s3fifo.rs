//! S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023).
//!
//! New blocks enter a small queue of a tenth of the slots. Those used again there move to the main queue, the
//! others leave early, and their keys are remembered for a while: a block that comes back goes to the main queue
//! at once. So a prompt that is seen once cannot push out what many prompts share.

use super::chunked::Chunked;
use super::ghosts::Ghosts;
use super::list::SlotLists;
use super::{EvictionPolicy, SlotId};
use crate::limits::EVICTION_PASSED_OVER_MAX;

const SMALL: usize = 0;
const MAIN: usize = 1;
/// The small queue's share of all slots.
const SMALL_DIVISOR: usize = 10;
/// Uses are counted up to here: two bits, as in the paper.
const USES_MAX: u8 = 3;
/// Uses in the small queue that earn a place in the main one: the paper's "more than once".
const PROMOTION_USES: u8 = 2;

/// Evicts what was used least among the new, then among the old.
#[derive(Debug)]
pub struct S3Fifo {
    lists: SlotLists<2>,
    /// Uses of each slot since it came or was reprieved; meaningful only for slots in a list.
    uses: Chunked<u8>,
    /// A hash of the key of each slot; meaningful only for slots in a list.
    fingerprints: Chunked<u32>,
    ghosts: Ghosts,
    /// The last answer of `victim`: only an eviction leaves a ghost, a doomed block does not.
    chosen: Option<SlotId>,
}

impl S3Fifo {
    /// An empty policy.
    pub fn new() -> Self {
        Self {
            lists: SlotLists::new(),
            uses: Chunked::new(0),
            fingerprints: Chunked::new(0),
            ghosts: Ghosts::new(),
            chosen: None,
        }
    }

    /// Whether the small queue has its share, so that its oldest slots go before those of the main queue.
    fn small_is_full(&self) -> bool {
        self.lists.len(SMALL) >= (self.len() / SMALL_DIVISOR).max(1)
    }

    /// One walk over the small queue, oldest first. Evictable slots used often enough move to the main queue.
    fn victim_in_small(&mut self, may_evict: &mut dyn FnMut(SlotId) -> bool) -> Option<SlotId> {
        let mut next = self.lists.oldest(SMALL);
        let mut passed_over = 0;
        for _ in 0..self.lists.len(SMALL) {
            let slot = next?;
            next = self.lists.newer(slot);
            if !may_evict(slot) {
                self.pass_over(SMALL, slot, &mut passed_over);
            } else if self.uses[slot] >= PROMOTION_USES {
                self.uses[slot] = 0;
                self.lists.move_to(MAIN, slot);
            } else {
                return Some(slot);
            }
        }
        None
    }

    /// Walks over the main queue, oldest first; each walk costs the evictable slots one use, so the last walk
    /// finds one if there is any.
    fn victim_in_main(&mut self, may_evict: &mut dyn FnMut(SlotId) -> bool) -> Option<SlotId> {
        for _walk in 0..=USES_MAX {
            let mut next = self.lists.oldest(MAIN);
            let mut passed_over = 0;
            let mut reprieved = false;
            for _ in 0..self.lists.len(MAIN) {
                let slot = next?;
                next = self.lists.newer(slot);
                if !may_evict(slot) {
                    self.pass_over(MAIN, slot, &mut passed_over);
                } else if self.uses[slot] > 0 {
                    self.uses[slot] -= 1;
                    self.lists.move_to(MAIN, slot);
                    reprieved = true;
                } else {
                    return Some(slot);
                }
            }
            if !reprieved {
                break;
            }
        }
        None
    }

    fn pass_over(&mut self, list: usize, slot: SlotId, passed_over: &mut usize) {
        *passed_over += 1;
        if *passed_over > EVICTION_PASSED_OVER_MAX {
            self.lists.move_to(list, slot);
        }
    }
}

impl Default for S3Fifo {
    fn default() -> Self {
        Self::new()
    }
}

impl EvictionPolicy for S3Fifo {
    fn insert(&mut self, slot: SlotId, fingerprint: u64) {
        debug_assert!(self.lists.list_of(slot).is_none(), "slot {slot} was inserted twice");
        self.uses.reach(slot);
        self.fingerprints.reach(slot);
        let fingerprint = (fingerprint ^ (fingerprint >> 32)) as u32;
        (self.uses[slot], self.fingerprints[slot]) = (0, fingerprint);
        let list = if self.ghosts.forget(fingerprint) { MAIN } else { SMALL };
        self.lists.move_to(list, slot);
    }

    fn touch(&mut self, slot: SlotId) {
        if self.lists.list_of(slot).is_some() {
            self.uses[slot] = (self.uses[slot] + 1).min(USES_MAX);
        }
    }

    fn remove(&mut self, slot: SlotId) {
        let len = self.len();
        let list = self.lists.unlink(slot);
        let evicted = self.chosen == Some(slot);
        if evicted {
            self.chosen = None;
        }
        if evicted && list == Some(SMALL) {
            self.ghosts.remember(self.fingerprints[slot], len);
        }
    }

    fn victim(&mut self, may_evict: &mut dyn FnMut(SlotId) -> bool) -> Option<SlotId> {
        self.chosen = None;
        if !self.small_is_full() {
            self.chosen = self.victim_in_main(may_evict);
        }
        // The walk over the small queue may promote all that it finds, so the main queue comes after it.
        if self.chosen.is_none() {
            self.chosen = self.victim_in_small(may_evict).or_else(|| self.victim_in_main(may_evict));
        }
        self.chosen
    }

    fn coldest(&self, look: &mut dyn FnMut(SlotId, bool) -> bool) {
        let order = if self.small_is_full() { [SMALL, MAIN] } else { [MAIN, SMALL] };
        for list in order {
            let kept_from = if list == SMALL { PROMOTION_USES } else { 1 };
            let mut next = self.lists.oldest(list);
            while let Some(slot) = next {
                if !look(slot, self.uses[slot] < kept_from) {
                    return;
                }
                next = self.lists.newer(slot);
            }
        }
    }

    fn len(&self) -> usize {
        self.lists.len(SMALL) + self.lists.len(MAIN)
    }
}
