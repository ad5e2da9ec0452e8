//! Late writes: to tiers that get blocks on the second use, to tiers that get cold blocks or what a tier above them
//! evicts, and to tiers above the one that a block was read from.

use super::super::counters::Counters;
use super::super::event::TierIndex;
use super::super::pool::Pool;
use super::super::tiers::{TierMask, bit};
use super::Flow;
use crate::eviction::SlotId;

impl Flow {
    /// Queues writes to the tiers above `tier`, which has read this block.
    pub(crate) fn promote(
        &mut self,
        pool: &mut Pool,
        counters: &mut Counters,
        tier: TierIndex,
        slot: SlotId,
    ) {
        let above = self.placements.promote & (bit(tier) - 1);
        self.write_late(pool, counters, slot, above);
    }

    /// Records a use of a block: queues it for tiers that should have got it when it was sealed, and could not or were out
    /// of budget, and for those that wait for a second use.
    pub(crate) fn used(&mut self, pool: &mut Pool, counters: &mut Counters, slot: SlotId) {
        let refused = pool.slot(slot).refused;
        if refused != 0 {
            pool.edit(slot, |slot| slot.refused = 0);
            let again = refused & self.placements.through;
            self.write_late(pool, counters, slot, again);
            // A queue that is full leaves some for the next use.
            pool.edit(slot, |slot| slot.refused = again & !slot.saved & !slot.to_write);
        }
        if pool.slot(slot).is_used_again() {
            self.write_late(pool, counters, slot, self.placements.second_use);
        }
    }

    /// Queues writes of the blocks that are about to be evicted.
    pub(crate) fn write_cold(&mut self, pool: &mut Pool, counters: &mut Counters) {
        let cold = self.placements.cold;
        for slot in pool.take_cold(self.pace.cold_slots) {
            if pool.get(slot).is_some_and(|slot| slot.owes(cold)) {
                self.write_late(pool, counters, slot, cold);
            }
        }
    }

    /// Queues writes to those of the tiers that neither have the block nor are about to get it, without making it
    /// dirty. A tier whose budget is used up is asked again when the block is used next.
    pub(crate) fn write_late(
        &mut self,
        pool: &mut Pool,
        counters: &mut Counters,
        id: SlotId,
        tiers: TierMask,
    ) {
        let slot = pool.slot(id);
        let wanted = tiers & !slot.saved & !slot.to_write & !slot.writing & !slot.refused;
        if wanted == 0 || slot.is_value() || !slot.block.is_readable() || self.is_leaving(&slot.key) {
            return;
        }
        let (mut queued, mut refused) = (0, 0);
        let serial = slot.serial;
        for tier in (0..self.tier_count()).filter(|&tier| wanted & bit(tier) != 0) {
            if !self.may_queue_late(tier) {
                refused |= bit(tier);
                counters.over_budget_blocks += 1;
            } else if self.queue_late(tier, id, serial) {
                queued |= bit(tier);
            } else {
                counters.late_write_blocks_dropped += 1;
            }
        }
        pool.edit(id, |slot| {
            slot.to_write |= queued;
            slot.late |= queued;
            slot.refused |= refused;
        });
    }
}
