//! Totals of the pool's bytes by state. All changes of a slot go through [`Pool::edit`], which compares the slot's
//! state before and after, so the totals cannot drift from the slots.

use super::super::names::PoolKey;
#[cfg(any(test, feature = "model"))]
use super::super::names::SpaceId;
use super::super::proofs::Change;
use super::super::slots::{Slot, Standing};
#[cfg(any(test, feature = "model"))]
use super::Held;
use super::Pool;
use crate::eviction::SlotId;

impl Pool {
    /// Returns every total, recomputed from the slots. For tests: it must equal the counted ones.
    #[cfg(any(test, feature = "model"))]
    pub(crate) fn recount(&self) -> (Held, u64) {
        let mut held = Held::default();
        let mut used = 0;
        for slot in (0..self.slots.numbers()).filter_map(|id| self.slots.get(id as SlotId)) {
            let (standing, bytes) = (slot.standing(), slot.pool_bytes());
            let share = |is: bool| if is { bytes } else { 0 };
            held.filling += share(standing.filling);
            held.fetching += share(standing.fetching);
            held.dirty += share(standing.dirty);
            held.leased += share(standing.leased);
            held.pinned += share(standing.pinned);
            used += bytes;
        }
        (held, used)
    }

    /// Returns the number of slots of each space, and of its pinned slots, recounted. For tests.
    #[cfg(any(test, feature = "model"))]
    pub(crate) fn recount_spaces(&self) -> hashbrown::HashMap<SpaceId, (u32, u32)> {
        let mut spaces: hashbrown::HashMap<SpaceId, (u32, u32)> = hashbrown::HashMap::new();
        for slot in (0..self.slots.numbers()).filter_map(|id| self.slots.get(id as SlotId)) {
            let counted = spaces.entry(slot.key.space).or_default();
            counted.0 += 1;
            counted.1 += u32::from(slot.standing().pinned);
        }
        spaces
    }

    /// Changes a slot, and updates all totals.
    pub(crate) fn edit<R>(&mut self, id: SlotId, change: impl FnOnce(&mut Slot) -> R) -> R {
        let slot = self.slots.at_mut(id);
        let before = slot.standing();
        let out = change(slot);
        let (after, bytes, key) = (slot.standing(), slot.pool_bytes(), slot.key);
        let in_place = slot.is_in_place().then(|| slot.bytes());
        self.count(id, before, after, bytes, key);
        if before.fetching && !after.fetching {
            in_place.into_iter().for_each(|bytes| self.lease_came(bytes));
        }
        if before.pinned != after.pinned {
            self.uses.set_pinned(key.space, after.pinned);
            if before.listed {
                self.policy.set_pinned(id, after.pinned);
            }
            in_place.into_iter().for_each(|bytes| self.set_idle_in_place(id, bytes, !after.pinned));
        }
        if before.listed != after.listed {
            debug_assert!(after.listed, "a sealed block stays sealed until it is freed");
            self.policy.insert(id, self.index.hash(&key), bytes, after.pinned);
        }
        out
    }

    /// Counts a slot anew that takes so many bytes of the pool: none if its block is leased in place.
    pub(super) fn count(&mut self, id: SlotId, before: Standing, after: Standing, bytes: u64, key: PoolKey) {
        let total = |total: &mut u64, was: bool, is: bool| match (was, is) {
            (false, true) => *total += bytes,
            (true, false) => *total -= bytes,
            _ => {}
        };
        total(&mut self.held.filling, before.filling, after.filling);
        total(&mut self.held.fetching, before.fetching, after.fetching);
        total(&mut self.held.dirty, before.dirty, after.dirty);
        total(&mut self.held.leased, before.leased, after.leased);
        total(&mut self.held.pinned, before.pinned, after.pinned);
        self.dirty_blocks += u64::from(after.dirty);
        self.dirty_blocks -= u64::from(before.dirty);
        if before.pinned && !after.pinned && bytes > 0 {
            self.room_came = true;
            self.released += 1;
            self.last_released = Some(id);
        }
        if before.visible != after.visible {
            self.changes.push((key, after.visible));
            // A block in a tier's memory is none that a ledger of the pool could prove.
            if bytes > 0 {
                let change = if after.visible { Change::Visible } else { Change::Gone };
                self.proofs.note(id, change, self.flaws);
            }
        }
    }
}
