//! Leases on slots, and the effects of their ends.

use super::super::flaw::Flaw;
use super::Pool;
use super::births::{BEHIND_MAX, Births};
use crate::block::Phase;
use crate::error::Result;
use crate::eviction::SlotId;
use crate::lease::LeaseId;

/// Returns the number of a lease as [`Births`](super::births::Births) count: it wraps.
const fn serial(lease: LeaseId) -> u32 {
    lease.0 as u32
}

/// Returns the age of a lease, given the newest number. Shortened numbers that are further apart say nothing: such a lease
/// counts as old as the depot.
fn age_s(births: &Births, newest: u64, lease: LeaseId, now_s: u32) -> u32 {
    let is_known = newest - lease.0 < u64::from(BEHIND_MAX);
    is_known.then(|| births.age_s(serial(lease), now_s)).flatten().unwrap_or(now_s)
}

impl Pool {
    /// Pins a readable block for a claim, which unpins it itself.
    pub(crate) fn pin(&mut self, id: SlotId) {
        self.end_ahead(id);
        self.edit(id, |slot| slot.block.lease());
    }

    /// Ends a pin or a reader's lease.
    pub(crate) fn unpin(&mut self, id: SlotId) {
        self.edit(id, |slot| slot.block.unlease());
        self.free_if_over(id);
    }

    #[cfg(any(test, feature = "model"))]
    pub(crate) const fn leases_granted(&self) -> u64 {
        self.leases.granted_ever()
    }

    /// Gives a reader a lease on a readable slot.
    pub(crate) fn lease(&mut self, owner: u64, id: SlotId) -> Result<LeaseId> {
        let lease = self.grant(owner, id)?;
        self.pin(id);
        if self.flaws.has(Flaw::LeaseEndedEarly) {
            self.end_lease_in_place(id);
        }
        Ok(lease)
    }

    /// Gives a dumper a lease on a slot that it is about to fill.
    pub(crate) fn lease_for_filling(&mut self, owner: u64, id: SlotId) -> Result<LeaseId> {
        debug_assert_eq!(self.slots.at(id).block.phase(), Phase::Filling, "only what is new is filled");
        self.grant(owner, id)
    }

    fn grant(&mut self, owner: u64, id: SlotId) -> Result<LeaseId> {
        let lease = self.leases.grant(owner, id)?;
        self.lease_births.came(serial(lease), self.now_s);
        Ok(lease)
    }

    /// Returns the number of leases, and the age of the oldest one in seconds, about: not less.
    pub(crate) fn lease_gauges(&self) -> (u64, u32) {
        let age = |oldest| age_s(&self.lease_births, self.leases.granted_ever(), oldest, self.now_s);
        (self.leases.len() as u64, self.leases.oldest().map_or(0, age))
    }

    /// Records that an owner got slots of `bytes` to fill in this step.
    pub(crate) fn filling_begun(&mut self, owner: u64, bytes: u64) {
        if bytes > 0 {
            self.fills.begun(owner, bytes, self.now_s);
        }
    }

    /// Records that an owner has filled slots of `bytes` in this step.
    pub(crate) fn filling_ended(&mut self, owner: u64, bytes: u64) {
        if bytes > 0 {
            self.fills.ended(owner, bytes, self.now_s);
        }
    }

    /// Records that an owner requests slots to fill.
    pub(crate) fn seen(&mut self, owner: u64) {
        self.fills.seen(owner, self.now_s);
    }

    /// Returns the number of bytes that stopped owners are filling.
    pub(crate) const fn stopped_bytes(&self) -> u64 {
        self.fills.stopped_bytes()
    }

    /// Finds the owners that have stopped in the middle of a dump.
    pub(crate) fn look_who_stopped(&mut self) {
        self.fills.look(self.now_s);
    }

    pub(crate) fn leased_slot(&self, owner: u64, lease: LeaseId) -> Result<SlotId> {
        self.leases.slot_of(owner, lease)
    }

    /// Removes a dumper's lease from the table, without an effect on its slot. Returns the slot's bytes, for
    /// `filling_ended`.
    pub(crate) fn forget_lease(&mut self, owner: u64, lease: LeaseId) -> Result<u64> {
        let id = self.leases.release(owner, lease)?;
        Ok(self.slots.at(id).bytes())
    }

    /// Ends a lease by its number.
    pub(crate) fn release(&mut self, owner: u64, lease: LeaseId) -> Result<()> {
        let id = self.leases.release(owner, lease)?;
        self.lease_ended(owner, id);
        Ok(())
    }

    /// Handles the end of a lease of a reader, or of a dumper that did not finish.
    pub(crate) fn lease_ended(&mut self, owner: u64, id: SlotId) {
        if self.slots.at(id).block.phase() == Phase::Filling {
            self.fills.ended(owner, self.slots.at(id).bytes(), self.now_s);
            self.abandon(id);
        } else {
            self.unpin(id);
        }
    }

    /// Abandons a slot: it is not filled any more. Only the dumper holds a lease on a slot that is being filled, and it
    /// can no longer write: it released the lease itself, or its connection has ended. The runner ensures that all
    /// copies of a connection end with it (P4).
    pub(crate) fn abandon(&mut self, id: SlotId) {
        self.edit(id, |slot| {
            slot.block.abandon();
            slot.block.quarantine_ended();
        });
        self.free_if_over(id);
    }

    /// Ends up to `max` leases of an owner. Returns how many ended, and whether the owner has none left.
    pub(crate) fn end_owner(&mut self, owner: u64, max: usize) -> (usize, bool) {
        let slots = self.leases.end_some(owner, max);
        for &slot in &slots {
            self.lease_ended(owner, slot);
        }
        (slots.len(), self.leases.count(owner) == 0)
    }

    /// Iterates over the leases of an owner from `from` on, in the order of their numbers.
    pub(crate) fn leases_of(
        &self,
        owner: u64,
        from: LeaseId,
    ) -> impl Iterator<Item = (LeaseId, SlotId)> + '_ {
        self.leases.of(owner, from)
    }

    /// Returns the number of owners that hold leases.
    pub(crate) fn holders(&self) -> usize {
        self.leases.owners()
    }

    /// Returns whether an owner has leases.
    pub(crate) fn holds(&self, owner: u64) -> bool {
        self.leases.count(owner) > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_that_numbers_went_around_since_is_as_old_as_the_depot() {
        let mut births = Births::default();
        let (held, newest) = (LeaseId(7), (1 << 32) + 9);
        births.came(serial(held), 10);
        assert_eq!(age_s(&births, 9, held, 1_000), 990);
        births.came(serial(LeaseId(newest)), 990);
        assert_eq!(age_s(&births, newest, held, 1_000), 1_000);
        assert_eq!(age_s(&births, newest, LeaseId(newest), 1_000), 10);
    }
}
