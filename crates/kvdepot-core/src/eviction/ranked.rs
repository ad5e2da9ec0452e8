//! The pool's eviction order: slots of low priority first, then those that the policy orders, then those of high priority.

use std::collections::BTreeMap;

use super::lane::Lane;
use super::policy::{EvictionPolicy, Search, SlotId};
use crate::priority::Priority;

/// One search over the slots of each priority, in turn.
type Order = [Priority; 3];

/// An eviction policy, and the slots that it does not order.
#[derive(Debug)]
pub(crate) struct Ranked {
    policy: Box<dyn EvictionPolicy>,
    low: Lane,
    high: Lane,
    /// Priorities of slots that are being filled, other than the usual one.
    filling: BTreeMap<SlotId, Priority>,
    /// An interrupted search: its order, and how many priorities it is done with.
    search: Option<(Order, usize)>,
}

impl Ranked {
    pub(crate) fn new(policy: Box<dyn EvictionPolicy>) -> Self {
        Self { policy, low: Lane::default(), high: Lane::default(), filling: BTreeMap::new(), search: None }
    }

    /// Returns the priority of a slot.
    pub(crate) fn priority(&self, slot: SlotId) -> Priority {
        if self.low.is_empty() && self.high.is_empty() && self.filling.is_empty() {
            Priority::Normal
        } else if self.low.has(slot) {
            Priority::Low
        } else if self.high.has(slot) {
            Priority::High
        } else {
            self.filling.get(&slot).copied().unwrap_or_default()
        }
    }

    /// Returns how many blocks of low and of high priority there are.
    pub(crate) fn special(&self) -> (usize, usize) {
        (self.low.len(), self.high.len())
    }

    /// Sets the priority of a slot that is being filled.
    pub(crate) fn set_filling(&mut self, slot: SlotId, priority: Priority) {
        if priority == Priority::Normal {
            self.filling.remove(&slot);
        } else {
            self.filling.insert(slot, priority);
        }
    }

    /// As `EvictionPolicy::begin_row`.
    pub(crate) fn begin_row(&mut self) {
        self.policy.begin_row();
    }

    /// As `EvictionPolicy::insert`.
    pub(crate) fn insert(&mut self, slot: SlotId, fingerprint: u64, bytes: u64, pinned: bool) {
        match self.filling.remove(&slot).unwrap_or_default() {
            Priority::Low => self.low.insert(slot, bytes, pinned),
            Priority::Normal => self.policy.insert(slot, fingerprint),
            Priority::High => self.high.insert(slot, bytes, pinned),
        }
    }

    /// Records that a slot can no longer be evicted, or can be again.
    pub(crate) fn set_pinned(&mut self, slot: SlotId, pinned: bool) {
        self.low.set_pinned(slot, pinned);
        self.high.set_pinned(slot, pinned);
    }

    /// Records a use of the slot's block. A block of low priority has the usual one from then on: whether it did.
    pub(crate) fn touch(&mut self, slot: SlotId, fingerprint: impl FnOnce() -> u64) -> bool {
        let was_low = self.low.remove(slot).is_some();
        if was_low {
            self.policy.insert(slot, fingerprint());
        } else if self.high.has(slot) {
            self.high.touch(slot);
        } else {
            self.policy.touch(slot);
        }
        was_low
    }

    /// Gives a slot that is in the order another priority.
    pub(crate) fn rank(
        &mut self,
        slot: SlotId,
        priority: Priority,
        fingerprint: u64,
        bytes: u64,
        pinned: bool,
    ) {
        self.remove(slot);
        self.set_filling(slot, priority);
        self.insert(slot, fingerprint, bytes, pinned);
    }

    /// As `EvictionPolicy::remove`, also for a slot that is being filled.
    pub(crate) fn remove(&mut self, slot: SlotId) {
        self.filling.remove(&slot);
        if self.low.remove(slot).is_none() && self.high.remove(slot).is_none() {
            self.policy.remove(slot);
        }
    }

    /// Returns the priorities in the order in which their slots are evicted. Those of high priority are not spared while they
    /// take more than half of the pool.
    fn order(&self, pool_bytes: u64) -> Order {
        if self.high.bytes() > pool_bytes / 2 {
            [Priority::Low, Priority::High, Priority::Normal]
        } else {
            [Priority::Low, Priority::Normal, Priority::High]
        }
    }

    /// As `EvictionPolicy::victim`.
    pub(crate) fn victim(
        &mut self,
        pool_bytes: u64,
        looks: &mut usize,
        may_evict: &mut dyn FnMut(SlotId) -> bool,
    ) -> Search {
        let (order, done) = self.search.take().unwrap_or_else(|| (self.order(pool_bytes), 0));
        for (at, priority) in order.into_iter().enumerate().skip(done) {
            let found = match priority {
                Priority::Low => self.low.victim(looks, may_evict),
                Priority::Normal => self.policy.victim(looks, may_evict),
                Priority::High => self.high.victim(looks, may_evict),
            };
            match found {
                Search::Nothing => {}
                Search::Later => {
                    self.search = Some((order, at));
                    return Search::Later;
                }
                Search::Found(_) => return found,
            }
        }
        Search::Nothing
    }

    /// As `EvictionPolicy::choose`.
    pub(crate) fn choose(&mut self, slot: SlotId) {
        if !self.low.has(slot) && !self.high.has(slot) {
            self.policy.choose(slot);
        }
    }

    /// As `EvictionPolicy::coldest`.
    pub(crate) fn coldest(&self, pool_bytes: u64, look: &mut dyn FnMut(SlotId, bool) -> bool) {
        for priority in self.order(pool_bytes) {
            let mut goes_on = true;
            match priority {
                Priority::Low => goes_on = self.low.coldest(look),
                Priority::High => goes_on = self.high.coldest(look),
                Priority::Normal => self.policy.coldest(&mut |slot, goes| {
                    goes_on = look(slot, goes);
                    goes_on
                }),
            }
            if !goes_on {
                return;
            }
        }
    }
}
