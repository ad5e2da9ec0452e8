//! S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023).
//!
//! New blocks enter a small queue, which has a tenth of the slots. Blocks that are used again there move to the main
//! queue. The others are evicted early, but their keys are remembered for a while, and a block that returns enters the
//! main queue at once. So a prompt that occurs only once cannot evict blocks that many prompts share.

use super::chunked::Chunked;
use super::ghosts::Ghosts;
use super::list::SlotLists;
use super::policy::{EvictionPolicy, Search, SlotId};
use super::walk::Walk;

const SMALL: usize = 0;
const MAIN: usize = 1;
/// The small queue's share of all slots.
const SMALL_DIVISOR: usize = 10;
/// Maximum of the use counter: two bits, as in the paper.
const USES_MAX: u8 = 3;
/// Uses in the small queue that move a block to the main one: the paper's "more than once".
const PROMOTION_USES: u8 = 2;

/// Evicts the least used new block first, then the least used old one.
#[derive(Debug)]
pub struct S3Fifo {
    lists: SlotLists<2>,
    /// Uses of each slot since it was added or spared; valid only for slots in a list.
    uses: Chunked<u8>,
    /// Hash of each slot's key; valid only for slots in a list.
    fingerprints: Chunked<u32>,
    ghosts: Ghosts,
    /// The last slot that `victim` returned. Only an evicted block leaves a ghost, not one that leaves for another reason.
    chosen: Option<SlotId>,
    /// An interrupted search: the queues that are left, and its position in the first of them.
    search: Option<(&'static [usize], Walk)>,
}

impl S3Fifo {
    /// Makes an empty policy.
    pub fn new() -> Self {
        Self {
            lists: SlotLists::new(),
            uses: Chunked::new(0),
            fingerprints: Chunked::new(0),
            ghosts: Ghosts::new(),
            chosen: None,
            search: None,
        }
    }

    /// Returns whether the small queue has its full share. If so, its oldest slots are evicted before those of the main
    /// queue.
    fn small_is_full(&self) -> bool {
        self.lists.len(SMALL) >= (self.len() / SMALL_DIVISOR).max(1)
    }

    /// Returns the lists to search, in order. The walk over the small queue may promote every slot that it meets, so the
    /// main queue comes after it.
    fn order(&self) -> &'static [usize] {
        if self.small_is_full() { &[SMALL, MAIN] } else { &[MAIN, SMALL, MAIN] }
    }

    /// Walks over one queue, oldest first. Spares slots that were used often enough: those of the small queue move to the
    /// main queue, those of the main queue lose a use. The walk restarts for each slot that it spares, so it finds one in
    /// the end.
    fn walk(
        &mut self,
        list: usize,
        walk: &mut Walk,
        looks: &mut usize,
        may_evict: &mut dyn FnMut(SlotId) -> bool,
    ) -> Search {
        let mut next = None;
        while let Some(slot) = next.or_else(|| self.lists.oldest(list)) {
            if *looks == 0 {
                walk.cut();
                return Search::Later;
            }
            if !walk.next() {
                break;
            }
            *looks -= 1;
            next = self.lists.newer(slot);
            if !may_evict(slot) {
                if walk.pass_over() {
                    self.lists.move_to(list, slot);
                }
            } else if list == SMALL && self.uses[slot] >= PROMOTION_USES {
                self.uses[slot] = 0;
                self.lists.move_to(MAIN, slot);
            } else if list == MAIN && self.uses[slot] > 0 && walk.reprieve(self.lists.len(MAIN)) {
                self.uses[slot] -= 1;
                self.lists.move_to(MAIN, slot);
            } else {
                return Search::Found(slot);
            }
        }
        Search::Nothing
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

    fn victim(&mut self, looks: &mut usize, may_evict: &mut dyn FnMut(SlotId) -> bool) -> Search {
        self.chosen = None;
        let (mut lists, mut going_on) = match self.search.take() {
            Some((lists, walk)) => (lists, Some(walk)),
            None => (self.order(), None),
        };
        while let Some(&list) = lists.first() {
            let mut walk = going_on.take().unwrap_or_else(|| Walk::over(self.lists.len(list), USES_MAX));
            match self.walk(list, &mut walk, looks, may_evict) {
                Search::Found(slot) => {
                    self.chosen = Some(slot);
                    return Search::Found(slot);
                }
                Search::Later => {
                    self.search = Some((lists, walk));
                    return Search::Later;
                }
                Search::Nothing => lists = &lists[1..],
            }
        }
        Search::Nothing
    }

    fn choose(&mut self, slot: SlotId) {
        self.chosen = Some(slot);
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
