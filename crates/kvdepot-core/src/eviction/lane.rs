//! Slots of one priority other than the usual one, least recently used first. Their memory grows with their number, not
//! with the highest slot number: often there are none.

use std::collections::BTreeMap;

use super::policy::{Search, SlotId};

/// A slot of a lane.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// Number of its last use.
    turn: u64,
    bytes: u64,
    pinned: bool,
}

/// An interrupted search.
#[derive(Clone, Copy, Debug)]
struct Walk {
    /// The next turn to examine.
    from: u64,
    /// It ends before this turn: slots that were added or used since it began come later.
    end: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Lane {
    slots: BTreeMap<SlotId, Entry>,
    /// Those that are not pinned, by their turns. A search would meet the others for nothing, each time.
    turns: BTreeMap<u64, SlotId>,
    bytes: u64,
    next_turn: u64,
    walk: Option<Walk>,
}

impl Lane {
    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Returns the bytes of all slots.
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn has(&self, slot: SlotId) -> bool {
        self.slots.contains_key(&slot)
    }

    /// Adds a slot, as the most recently used one.
    pub(super) fn insert(&mut self, slot: SlotId, bytes: u64, pinned: bool) {
        let before = self.slots.insert(slot, Entry { turn: self.next_turn, bytes, pinned });
        debug_assert!(before.is_none(), "slot {slot} was inserted twice");
        self.bytes += bytes;
        if !pinned {
            self.turns.insert(self.next_turn, slot);
        }
        self.next_turn += 1;
    }

    /// Records that a slot can no longer be evicted, or can be again. It keeps its place. Ignores unknown slots.
    pub(super) fn set_pinned(&mut self, slot: SlotId, pinned: bool) {
        let Some(entry) = self.slots.get_mut(&slot) else { return };
        entry.pinned = pinned;
        if pinned {
            self.turns.remove(&entry.turn);
        } else {
            self.turns.insert(entry.turn, slot);
        }
    }

    /// Makes a slot the most recently used one. Ignores unknown slots.
    pub(super) fn touch(&mut self, slot: SlotId) {
        let Some(entry) = self.slots.get_mut(&slot) else { return };
        self.turns.remove(&entry.turn);
        entry.turn = self.next_turn;
        if !entry.pinned {
            self.turns.insert(self.next_turn, slot);
        }
        self.next_turn += 1;
    }

    /// Removes a slot. Returns whether it was pinned, if it was there.
    pub(super) fn remove(&mut self, slot: SlotId) -> Option<bool> {
        let entry = self.slots.remove(&slot)?;
        self.turns.remove(&entry.turn);
        self.bytes -= entry.bytes;
        Some(entry.pinned)
    }

    /// As `EvictionPolicy::victim`. It meets only slots that are not pinned.
    pub(super) fn victim(&mut self, looks: &mut usize, may_evict: &mut dyn FnMut(SlotId) -> bool) -> Search {
        let Walk { from, end } = self.walk.take().unwrap_or(Walk { from: 0, end: self.next_turn });
        for (&turn, &slot) in self.turns.range(from..end) {
            if *looks == 0 {
                self.walk = Some(Walk { from: turn, end });
                return Search::Later;
            }
            *looks -= 1;
            if may_evict(slot) {
                return Search::Found(slot);
            }
        }
        Search::Nothing
    }

    /// As `EvictionPolicy::coldest`. Returns whether `look` wants more.
    pub(super) fn coldest(&self, look: &mut dyn FnMut(SlotId, bool) -> bool) -> bool {
        self.turns.values().all(|&slot| look(slot, true))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lane(slots: std::ops::Range<SlotId>) -> Lane {
        let mut lane = Lane::default();
        slots.for_each(|slot| lane.insert(slot, 10, false));
        lane
    }

    fn evict_all(lane: &mut Lane) -> Vec<SlotId> {
        let mut gone = Vec::new();
        while let Search::Found(slot) = lane.victim(&mut 10, &mut |_| true) {
            assert_eq!(lane.remove(slot), Some(false));
            gone.push(slot);
        }
        gone
    }

    #[test]
    fn the_least_recently_used_slot_goes_first() {
        let mut lane = lane(0..4);
        lane.touch(0);
        assert_eq!((lane.remove(2), lane.remove(2), lane.bytes()), (Some(false), None, 30));
        assert_eq!(evict_all(&mut lane), [1, 3, 0]);
        assert_eq!((lane.len(), lane.bytes()), (0, 0));
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
    fn a_search_that_is_interrupted_before_its_first_slot_finds_that() {
        let mut lane = lane(0..1);
        assert_eq!(lane.victim(&mut 0, &mut |_| true), Search::Later);
        assert_eq!(lane.victim(&mut 1, &mut |_| true), Search::Found(0));
    }

    #[test]
    fn pinned_slots_cost_a_search_nothing_and_keep_their_places() {
        let mut lane = lane(0..1000);
        (0..999).for_each(|slot| lane.set_pinned(slot, true));
        let mut looks = 1;
        assert_eq!(lane.victim(&mut looks, &mut |_| true), Search::Found(999));
        lane.touch(1);
        lane.insert(1000, 10, true);
        [1000, 2, 1, 0].iter().for_each(|&slot| lane.set_pinned(slot, false));
        assert_eq!(evict_all(&mut lane), [0, 2, 999, 1, 1000]);
        assert_eq!((lane.len(), lane.remove(3)), (996, Some(true)));
    }
}
