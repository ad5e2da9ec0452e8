//! Which tiers get a block, and when. A write that may come late never makes a block dirty: the block can be evicted
//! before, and its queue entry then names no block.

use super::Machine;
use super::counters::Counters;
use super::event::TierIndex;
use super::flow::{Flow, bit};
use super::pool::Pool;
use super::slots::TierMask;
use crate::eviction::SlotId;

/// When a tier is given a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WriteWhen {
    /// When it is sealed. Until the tier has it, it is dirty and stays in the pool.
    #[default]
    Through,
    /// When it is used again.
    OnSecondUse,
    /// When it is about to be evicted from the pool.
    WhenCold,
}

/// What a tier is given. Values, which can be replaced, go to every tier when they are sealed: a tier that was left out
/// could show the value before (P1). So do blocks of a pool that keeps nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// When it is given blocks that were dumped.
    pub write: WriteWhen,
    /// Whether it is given blocks that were read from a tier below it, too.
    pub promote: bool,
}

/// Tiers by their placement.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Placements {
    pub(crate) through: TierMask,
    pub(crate) second_use: TierMask,
    pub(crate) cold: TierMask,
    pub(crate) promote: TierMask,
}

impl Placements {
    pub(crate) fn new(tiers: &[Placement], keeps: bool) -> Self {
        let mut all = Self::default();
        for (tier, placement) in tiers.iter().enumerate() {
            let mask = match placement.write {
                WriteWhen::OnSecondUse if keeps => &mut all.second_use,
                WriteWhen::WhenCold if keeps => &mut all.cold,
                _ => &mut all.through,
            };
            *mask |= bit(tier);
            all.promote |= if placement.promote { bit(tier) } else { 0 };
        }
        all
    }
}

impl Flow {
    /// Has tiers above write a block that `tier` has read.
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

    /// A block was used: tiers that could not write it before are asked again, and those that wait for a second use.
    pub(crate) fn used(&mut self, pool: &mut Pool, counters: &mut Counters, slot: SlotId) {
        if pool.slot(slot).refused != 0 {
            pool.edit(slot, |slot| slot.refused = 0);
        }
        if pool.slot(slot).is_used_again() {
            self.write_late(pool, counters, slot, self.placements.second_use);
        }
    }

    /// Has tiers write what is about to be evicted.
    pub(crate) fn demote(&mut self, pool: &mut Pool, counters: &mut Counters) {
        let cold = self.placements.cold;
        for slot in pool.take_cold(self.pace.cold_slots) {
            if pool.get(slot).is_some_and(|slot| slot.owes(cold)) {
                self.write_late(pool, counters, slot, cold);
            }
        }
    }

    /// Has those of the tiers write a block that neither have it nor are about to, without making it dirty.
    pub(crate) fn write_late(
        &mut self,
        pool: &mut Pool,
        counters: &mut Counters,
        id: SlotId,
        tiers: TierMask,
    ) {
        let slot = pool.slot(id);
        let wanted = tiers & !slot.saved & !slot.to_write & !slot.refused;
        if wanted == 0 || slot.is_value() || !slot.block.is_readable() || self.is_leaving(&slot.key) {
            return;
        }
        let mut queued = 0;
        for tier in (0..self.tier_count()).filter(|&tier| wanted & bit(tier) != 0) {
            if self.queue_late(tier, id, slot.serial) {
                queued |= bit(tier);
            } else {
                counters.late_write_blocks_dropped += 1;
            }
        }
        pool.edit(id, |slot| {
            slot.to_write |= queued;
            slot.late |= queued;
        });
    }
}

impl Machine {
    /// Sets which tiers get a block, and when: one placement for each tier. Without it all are written through. To be
    /// called before the first event.
    #[must_use]
    pub fn with_placements(mut self, tiers: &[Placement]) -> Self {
        debug_assert_eq!(tiers.len(), self.flow.tier_count(), "one placement for each tier");
        let placements = Placements::new(tiers, self.pool.keeps());
        self.flow.placements = placements;
        self.pool.set_placements(placements.cold, placements.second_use);
        self
    }
}
