//! Slots of one priority other than the usual one, least recently used first. Their memory grows with their number, not
//! with the highest slot number: often there are none.

use std::collections::BTreeMap;
use std::ops::Bound;

use super::policy::{Search, SlotId};
use crate::limits::EVICTION_PASSED_OVER_MAX;

/// An interrupted or running search.
#[derive(Clone, Copy, Debug)]
struct Walk {
    /// The last turn that it has examined.
    after: Option<u64>,
    /// It ends before this turn: slots that were added or used since it began come later.
    end: u64,
    passed_over: usize,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Lane {
    slots: BTreeMap<SlotId, u64>,
    /// Slots by the number of their last use.
    turns: BTreeMap<u64, SlotId>,
    next_turn: u64,
    walk: Option<Walk>,
}

impl Lane {
    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(super) fn has(&self, slot: SlotId) -> bool {
        self.slots.contains_key(&slot)
    }

    /// Makes a slot the most recently used one, and adds it if it is not there.
    pub(super) fn use_now(&mut self, slot: SlotId) {
        if let Some(turn) = self.slots.insert(slot, self.next_turn) {
            self.turns.remove(&turn);
        }
        self.turns.insert(self.next_turn, slot);
        self.next_turn += 1;
    }

    /// Removes a slot. Returns whether it was there.
    pub(super) fn remove(&mut self, slot: SlotId) -> bool {
        let turn = self.slots.remove(&slot);
        turn.is_some_and(|turn| self.turns.remove(&turn).is_some())
    }

    /// As `EvictionPolicy::victim`.
    pub(super) fn victim(&mut self, looks: &mut usize, may_evict: &mut dyn FnMut(SlotId) -> bool) -> Search {
        let begin = Walk { after: None, end: self.next_turn, passed_over: 0 };
        let mut walk = self.walk.take().unwrap_or(begin);
        loop {
            let from = walk.after.map_or(Bound::Unbounded, Bound::Excluded);
            let next = self.turns.range((from, Bound::Excluded(walk.end))).next();
            let Some((&turn, &slot)) = next else { return Search::Nothing };
            if *looks == 0 {
                self.walk = Some(walk);
                return Search::Later;
            }
            *looks -= 1;
            if may_evict(slot) {
                return Search::Found(slot);
            }
            walk.after = Some(turn);
            walk.passed_over += 1;
            if walk.passed_over > EVICTION_PASSED_OVER_MAX {
                self.use_now(slot);
            }
        }
    }

    /// As `EvictionPolicy::coldest`. Returns whether it saw all slots.
    pub(super) fn coldest(&self, look: &mut dyn FnMut(SlotId, bool) -> bool) -> bool {
        self.turns.values().all(|&slot| look(slot, true))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lane(slots: std::ops::Range<SlotId>) -> Lane {
        let mut lane = Lane::default();
        slots.for_each(|slot| lane.use_now(slot));
        lane
    }

    #[test]
    fn the_least_recently_used_slot_goes_first() {
        let mut lane = lane(0..4);
        lane.use_now(0);
        assert!(lane.remove(2) && !lane.remove(2));
        let mut gone = Vec::new();
        while let Search::Found(slot) = lane.victim(&mut 10, &mut |_| true) {
            lane.remove(slot);
            gone.push(slot);
        }
        assert_eq!((gone, lane.len()), (vec![1, 3, 0], 0));
    }

    #[test]
    fn an_interrupted_search_resumes_and_ends() {
        let mut lane = lane(0..10);
        let mut looked = Vec::new();
        let mut look = |slot| {
            looked.push(slot);
            false
        };
        assert_eq!(lane.victim(&mut 6, &mut look), Search::Later);
        assert_eq!(lane.victim(&mut 6, &mut look), Search::Nothing);
        assert_eq!(looked, (0..10).collect::<Vec<_>>());
    }

    #[test]
    fn a_long_run_of_leased_slots_is_passed_over_once() {
        let count = EVICTION_PASSED_OVER_MAX as SlotId + 50;
        let mut lane = lane(0..count + 1);
        let mut looks = usize::MAX;
        let may_evict = &mut |slot| slot == count;
        assert_eq!(lane.victim(&mut looks, may_evict), Search::Found(count));
        let mut looks = 2 * EVICTION_PASSED_OVER_MAX;
        assert_eq!(lane.victim(&mut looks, may_evict), Search::Found(count));
        assert_eq!(looks, EVICTION_PASSED_OVER_MAX - 1, "the further ones count as just used");
    }
}
