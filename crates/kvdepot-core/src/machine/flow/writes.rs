//! Writes: which tiers get a block, and the effects of a write's end.

use super::super::catalog::Catalog;
use super::super::counters::Counters;
use super::super::event::{Command, Effects, Stored, TierIndex};
use super::super::flaw::Flaw;
use super::super::names::PoolKey;
use super::super::pool::Pool;
use super::super::slots::Slot;
use super::super::tiers::{TierMask, bit};
use super::Flow;
use super::queues::{Begun, Write};
use super::turns::{Next, Until};
use crate::error::{Error, ErrorKind, Result};
use crate::eviction::SlotId;
use crate::misses::Fate;
use crate::priority::Priority;

/// Returns whether a write's outcome says that its tier wrote nothing. `NotFound` does not: a namespace may be reset after
/// its block was written.
fn wrote_nothing(outcome: &Result<Stored>) -> bool {
    use ErrorKind::{Busy, Closed, Unavailable};
    match outcome {
        Ok(Stored::New) => false,
        Ok(Stored::AlreadyThere) => true,
        Err(error) => matches!(error.kind(), Busy | Closed | Unavailable),
    }
}

impl Flow {
    /// Queues writes of a sealed block, in its key's turn.
    pub(crate) fn write(&mut self, pool: &mut Pool, slot: SlotId, replaces: bool) {
        let (key, serial) = (pool.slot(slot).key, pool.slot(slot).serial);
        if self.turns.contains_key(&key) {
            // Any tier may have an earlier block under the key, and this write replaces its removal.
            pool.edit(slot, |slot| slot.set_value(true));
        }
        let tiers = self.at_seal(pool, slot);
        if tiers == 0 {
            pool.edit(slot, |slot| slot.block.seal_clean());
        } else if self.turns.contains_key(&key) {
            let drain = self.drain;
            *self.undrained.entry(drain).or_default() += 1;
            self.set_next(key, Next::Write { slot, serial, drain });
        } else {
            self.queue_writes(pool, slot, tiers, replaces, self.drain);
        }
    }

    /// Returns the tiers that should get a block as soon as it is sealed: none if its priority is low, until it is used.
    pub(super) fn at_seal(&self, pool: &Pool, slot: SlotId) -> TierMask {
        let all = pool.slot(slot).is_value() || self.flaws.has(Flaw::PlacementIgnored);
        let none = pool.priority(slot) == Priority::Low && !self.flaws.has(Flaw::LowPriorityWritten);
        match (all, none) {
            (true, _) => self.all(),
            (false, true) => 0,
            (false, false) => self.placements.through,
        }
    }

    /// Returns the set of all tiers.
    pub(crate) const fn all(&self) -> TierMask {
        TierMask::MAX >> (TierMask::BITS as usize - self.tiers.len())
    }

    /// Returns the tiers that must write a block again that none of them has.
    pub(crate) fn to_write_again(&self, pool: &Pool, slot: SlotId) -> TierMask {
        self.at_seal(pool, slot) & !pool.slot(slot).to_write & !pool.slot(slot).writing
    }

    /// Returns whether a tier gets this block late, if at all.
    pub(crate) fn is_late(&self, pool: &Pool, slot: SlotId, tier: TierIndex) -> bool {
        self.at_seal(pool, slot) & bit(tier) == 0
    }

    /// Queues writes of a block to tiers that no longer have it.
    pub(crate) fn write_again(&mut self, pool: &mut Pool, slot: SlotId, tiers: TierMask) {
        if !self.is_leaving(&pool.slot(slot).key) {
            let replaces = pool.slot(slot).is_value();
            self.queue_writes(pool, slot, tiers, replaces, self.drain);
        }
    }

    pub(super) fn queue_writes(
        &mut self,
        pool: &mut Pool,
        slot: SlotId,
        tiers: TierMask,
        replaces: bool,
        drain: u64,
    ) {
        let serial = pool.slot(slot).serial;
        pool.edit(slot, |slot| {
            slot.to_write |= tiers;
            slot.saved &= !tiers;
            slot.late &= !tiers;
            slot.block.dirty_again();
        });
        for tier in (0..self.tiers.len()).filter(|&tier| tiers & bit(tier) != 0) {
            let write = Write { slot, serial, replaces, tries: 0, drain, late: false };
            self.tiers[tier].writes.push_back(write);
            *self.undrained.entry(drain).or_default() += 1;
        }
    }

    /// Queues a late write. Returns whether there was space in the queue: blocks that are evicted in the meantime leave
    /// entries behind.
    pub(crate) fn queue_late(&mut self, tier: TierIndex, slot: SlotId, serial: u32) -> bool {
        let queue = &mut self.tiers[tier].late;
        if queue.len() >= self.pace.late_writes {
            return false;
        }
        let drain = self.drain;
        queue.push_back(Write { slot, serial, replaces: false, tries: 0, drain, late: true });
        *self.undrained.entry(drain).or_default() += 1;
        true
    }

    /// Records that a write that counted for a drain has completed or was abandoned.
    pub(super) fn write_over(&mut self, drain: u64) {
        if let Some(left) = self.undrained.get_mut(&drain) {
            *left -= 1;
            if *left == 0 {
                self.undrained.remove(&drain);
            }
        }
    }

    /// Records that a tier has completed a write.
    #[expect(clippy::too_many_arguments, reason = "rooms are passed one by one, so that each borrow is seen")]
    pub(crate) fn write_ended(
        &mut self,
        pool: &mut Pool,
        catalog: &Catalog,
        counters: &mut Counters,
        tier: TierIndex,
        slot: SlotId,
        outcome: &Result<Stored>,
        out: &mut Effects,
    ) {
        let Some((write, had_hung)) = self.tiers[tier].take_write(slot) else {
            debug_assert!(false, "a write ends once");
            return;
        };
        let (key, bytes) = (pool.slot(slot).key, pool.slot(slot).bytes());
        if wrote_nothing(outcome) || (outcome.is_err() && self.flaws.has(Flaw::BudgetRefundsErrors)) {
            self.budgets.refund(tier, bytes);
        }
        let wanted = !pool.slot(slot).block.is_doomed();
        if !had_hung {
            if self.try_again(pool, catalog, tier, &write, key, wanted, outcome, out) {
                return;
            }
            self.write_over(write.drain);
        }
        match outcome {
            Ok(Stored::New) => {
                counters.write_blocks += 1;
                counters.write_bytes += pool.slot(slot).bytes();
                counters.late_write_blocks += u64::from(write.late);
            }
            Ok(Stored::AlreadyThere) => {}
            // It was counted when it hung.
            Err(_) if had_hung => {}
            Err(error) => {
                counters.failed("write", error);
                counters.late_write_blocks_dropped += u64::from(write.late);
            }
        }
        let stored = matches!(outcome, Ok(Stored::New))
            || (matches!(outcome, Ok(Stored::AlreadyThere))
                && (!write.replaces || self.flaws.has(Flaw::AlreadyThereIsStored)));
        let dropped = pool.edit(slot, |slot| {
            slot.writing &= !bit(tier);
            if !had_hung || stored {
                slot.to_write &= !bit(tier);
                slot.late &= !bit(tier);
            }
            if stored {
                slot.saved |= bit(tier);
            } else if write.late {
                slot.refused |= bit(tier);
            }
            slot.set_unreplaced(slot.is_unreplaced() || (write.replaces && !stored));
            slot.settle_writes();
            !had_hung && !write.late && !slot.is_pressing() && slot.saved == 0
        });
        counters.write_blocks_dropped += u64::from(dropped);
        if dropped && wanted {
            pool.went(key, Fate::WriteFailed, Some(tier));
        }
        if pool.slot(slot).writing == 0
            && self.turns.get(&key).is_some_and(|turn| turn.until == Until::Written(slot))
        {
            self.end_turn(pool, catalog, key, out);
        } else if wanted {
            self.remove_unreplaced(pool, catalog, slot, out);
        }
        pool.free_if_over(slot);
    }

    /// Gives up the writes that have not ended long after their deadline, so that they keep their blocks dirty no longer and
    /// take no turn of others. The tier may still read their slots, which stay pinned until the writes end (P4).
    pub(crate) fn note_hung_writes(&mut self, pool: &mut Pool, counters: &mut Counters) {
        for tier in 0..self.tiers.len() {
            for write in self.tiers[tier].take_hung(self.now) {
                self.write_over(write.drain);
                counters.failed("write", &Error::new(ErrorKind::Timeout, "a write has hung"));
                counters.late_write_blocks_dropped += u64::from(write.late);
                let let_go = self.flaws.has(Flaw::HungWriteLetGo);
                let (key, dropped) = pool.edit(write.slot, |slot| {
                    slot.to_write &= !bit(tier);
                    slot.late &= !bit(tier);
                    if let_go {
                        slot.writing &= !bit(tier);
                    }
                    slot.settle_writes();
                    let dropped = !write.late && !slot.is_pressing() && slot.saved == 0;
                    (slot.key, dropped && !slot.block.is_doomed())
                });
                counters.write_blocks_dropped += u64::from(dropped);
                if dropped {
                    pool.went(key, Fate::WriteFailed, Some(tier));
                }
            }
        }
    }

    /// Removes a value if a tier may still have its predecessor: an empty key is better than one with the earlier value
    /// (P1). It waits until all tiers have completed, because a write in flight at another tier could land after the
    /// removal, and the next removal would take this one's end for its own.
    fn remove_unreplaced(&mut self, pool: &mut Pool, catalog: &Catalog, slot: SlotId, out: &mut Effects) {
        let found = pool.slot(slot);
        if found.is_unreplaced() && found.to_write == 0 && found.writing == 0 {
            let key = found.key;
            pool.edit(slot, |slot| {
                slot.set_unreplaced(false);
                slot.saved = 0;
            });
            self.remove(catalog, key, None, out);
        }
    }

    /// Returns whether the write of a value waits for the removal of its predecessor from the tier.
    #[expect(clippy::too_many_arguments, reason = "rooms are passed one by one, so that each borrow is seen")]
    pub(super) fn try_again(
        &mut self,
        pool: &mut Pool,
        catalog: &Catalog,
        tier: TierIndex,
        write: &Write,
        key: PoolKey,
        wanted: bool,
        outcome: &Result<Stored>,
        out: &mut Effects,
    ) -> bool {
        if !write.replaces || !wanted || write.tries >= self.pace.replace_tries {
            return false;
        }
        match outcome {
            // The tier has the previous value.
            Ok(Stored::AlreadyThere) if !self.flaws.has(Flaw::AlreadyThereIsStored) => {
                self.remove_predecessor(catalog, tier, key, out);
            }
            Err(error) if error.kind() == ErrorKind::Busy => {}
            _ => return false,
        }
        pool.edit(write.slot, |slot| slot.writing &= !bit(tier));
        self.delayed.push_back((tier, Write { tries: write.tries + 1, ..*write }));
        true
    }

    fn may_spend(&mut self, tier: TierIndex, bytes: u64, must: bool) -> bool {
        self.budgets.spend(tier, self.now, bytes, must || self.flaws.has(Flaw::BudgetIgnored))
    }

    /// Returns whether a tier's budget may have bytes for a late write.
    pub(crate) fn may_queue_late(&mut self, tier: TierIndex) -> bool {
        self.flaws.has(Flaw::BudgetIgnored) || self.budgets.is_open(tier, self.now)
    }

    /// Leaves a block out of a tier. If it is `refused`, the tier is asked again when the block is used.
    fn give_up_write(
        &mut self,
        pool: &mut Pool,
        catalog: &Catalog,
        tier: TierIndex,
        write: &Write,
        refused: bool,
        out: &mut Effects,
    ) {
        pool.edit(write.slot, |slot| {
            slot.to_write &= !bit(tier);
            slot.late &= !bit(tier);
            if refused {
                slot.refused |= bit(tier);
            }
            slot.settle_writes();
        });
        self.remove_unreplaced(pool, catalog, write.slot, out);
        pool.free_if_over(write.slot);
    }

    /// Sends a write to its tier. Returns false if it is not to be made any more.
    pub(super) fn begin_write(
        &mut self,
        tier: TierIndex,
        write: Write,
        pool: &mut Pool,
        catalog: &Catalog,
        counters: &mut Counters,
        out: &mut Effects,
    ) -> bool {
        let wanted = |slot: &Slot| slot.serial == write.serial && slot.to_write & bit(tier) != 0;
        let Some(slot) = pool.get(write.slot).filter(|slot| wanted(slot)) else { return false };
        let key = slot.key;
        if (self.owed.tiers(&key) | self.closed(catalog, &key)) & bit(tier) != 0 {
            // The tier may have a removed block under the key, and could mistake that for this one (P1).
            self.give_up_write(pool, catalog, tier, &write, write.late, out);
            return false;
        }
        if slot.writing & bit(tier) != 0 {
            // An earlier write of it hangs in the tier.
            self.give_up_write(pool, catalog, tier, &write, write.late, out);
            return false;
        }
        if !catalog.is_live(key.space) {
            // The sweep has not reached it yet.
            pool.doom(write.slot);
            return false;
        }
        if catalog.stays_in_pool(key.space) {
            self.give_up_write(pool, catalog, tier, &write, false, out);
            return false;
        }
        let is_alone = slot.saved == 0 && slot.to_write == bit(tier);
        if !self.may_spend(tier, slot.bytes(), slot.is_value()) {
            counters.over_budget_blocks += 1;
            if is_alone && !write.late {
                pool.went(key, Fate::OverBudget, Some(tier));
            }
            self.give_up_write(pool, catalog, tier, &write, true, out);
            return false;
        }
        let (key, runs, bytes) = (catalog.block_key(&key), slot.runs(), slot.bytes());
        pool.edit(write.slot, |slot| {
            if !slot.block.is_writing() {
                slot.block.write_begun();
            }
            slot.writing |= bit(tier);
        });
        let begun = Begun { write, bytes, until: self.now.saturating_add(self.write_patience) };
        self.tiers[tier].writes_in_flight.insert(write.slot, begun);
        self.tiers[tier].bytes_in_flight += bytes;
        if self.tiers[tier].writes_hung.is_clogged(self.pace.writes_in_flight, pool.bytes()) {
            let outcome = Err(Error::new(ErrorKind::Unavailable, "too many writes hang in the tier"));
            self.write_ended(pool, catalog, counters, tier, write.slot, &outcome, out);
        } else {
            out.commands.push(Command::Write { tier, slot: write.slot, key, runs });
        }
        true
    }
}
