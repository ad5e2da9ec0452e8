//! Demotion: a block that a tier is about to evict is read into the pool and written to the next tier below that gets
//! such blocks. It takes only room of the pool that no claim was promised or waits for.

use hashbrown::HashMap;

use super::Machine;
use super::event::{Effects, Job, Nanos, TierIndex};
use super::flaw::Flaw;
use super::pool::NoRoom;
use super::queue::Queue;
use super::tiers::{TierMask, bit};
use crate::eviction::SlotId;
use crate::key::BlockKey;

/// Part of the pool that such reads may take at a time; one block always may.
const READ_DIVISOR: u64 = 8;
/// How long the read of such a block may take.
const READ_NS: Nanos = 30_000_000_000;

/// Blocks to demote.
#[derive(Debug, Default)]
pub(super) struct Demotions {
    /// Blocks that tiers are about to evict, and their tiers: the oldest report first.
    cooling: Queue<(TierIndex, BlockKey)>,
    /// Slots that such blocks are being read into, and the tiers that are to get them.
    reading: HashMap<SlotId, TierIndex>,
    /// Tiers that are switched off.
    down: TierMask,
}

impl Demotions {
    /// Returns the number of blocks that wait to be read, or that are being read.
    pub(super) fn len(&self) -> usize {
        self.cooling.len() + self.reading.len()
    }

    /// Records that a tier is switched off, or works again.
    pub(super) const fn set_down(&mut self, tier: TierIndex, down: bool) {
        self.down = if down { self.down | bit(tier) } else { self.down & !bit(tier) };
    }

    /// Returns whether a slot is being filled for demotion.
    pub(super) fn is_reading(&self, slot: SlotId) -> bool {
        self.reading.contains_key(&slot)
    }

    /// Records that a read is over. Returns the tier that is to get the block, if it was read for demotion.
    pub(super) fn read_over(&mut self, slot: SlotId) -> Option<TierIndex> {
        self.reading.remove(&slot)
    }
}

/// How far the demotion of a block got in this step.
enum Begun {
    /// It is being read or written, or needs no demotion.
    Done,
    /// It waits for room, or for the tier that is to get it.
    Waits,
    /// The search for room continues in the next step.
    Continues,
}

impl Machine {
    /// Records that a tier is about to evict these blocks.
    pub(super) fn tier_cooling(&mut self, tier: TierIndex, keys: Vec<BlockKey>) {
        if self.demotes_to(tier).is_none() {
            return;
        }
        for key in keys {
            // The oldest one is probably gone.
            if self.demotions.cooling.len() >= self.pace.demotions_queued {
                self.demotions.cooling.pop_front();
                self.counters.demote_blocks_dropped += 1;
            }
            self.demotions.cooling.push_back((tier, key));
        }
    }

    /// Returns the tier that gets the blocks that this one evicts.
    pub fn demotes_to(&self, tier: TierIndex) -> Option<TierIndex> {
        let placements = &self.flow.placements;
        if self.flaws.has(Flaw::DemotedUpwards) && placements.demotion != 0 {
            return Some(placements.demotion.trailing_zeros() as TierIndex);
        }
        placements.demotes_to(tier)
    }

    /// Demotes a block that the pool has, and that `tier` evicts.
    pub(super) fn demote_slot(&mut self, tier: TierIndex, key: &BlockKey, slot: SlotId) {
        if let Some(to) = self.demotes_to(tier).filter(|_| self.may_demote(key)) {
            self.write_demoted(to, slot);
        }
    }

    /// Writes a block of the pool to the tier that is to get it.
    pub(super) fn write_demoted(&mut self, to: TierIndex, slot: SlotId) {
        let Self { flow, pool, counters, .. } = self;
        let had = pool.slot(slot).to_write;
        flow.write_late(pool, counters, slot, bit(to));
        counters.demote_blocks += u64::from(pool.slot(slot).to_write & !had != 0);
    }

    /// Continues with the blocks that tiers are about to evict.
    pub(super) fn demote(&mut self, out: &mut Effects) {
        let mut looks = self.pace.queue_entries;
        while self.demotions.reading.len() < self.pace.demotions_in_flight {
            if looks == 0 {
                out.again.push(Job::Emit);
                return;
            }
            looks -= 1;
            let Some((tier, key)) = self.demotions.cooling.pop_front() else { return };
            let begun = self.begin_demotion(tier, &key);
            if matches!(begun, Begun::Done) {
                continue;
            }
            self.demotions.cooling.push_front((tier, key));
            if matches!(begun, Begun::Continues) {
                out.again.push(Job::Emit);
            }
            return;
        }
    }

    /// Returns whether a block is one that never changes. Another depot may have replaced or removed a value in the tier
    /// below meanwhile, if they share it (P1).
    fn may_demote(&self, key: &BlockKey) -> bool {
        self.catalog.by_id(key.namespace).is_some_and(|namespace| !namespace.spec.holds_values())
    }

    fn begin_demotion(&mut self, tier: TierIndex, block: &BlockKey) -> Begun {
        let Some(to) = self.demotes_to(tier).filter(|_| self.may_demote(block)) else { return Begun::Done };
        let Some(namespace) = self.catalog.by_id(block.namespace) else { return Begun::Done };
        let (key, bytes, near) = (namespace.pool_key(block.hash), namespace.slot_bytes(), namespace.near);
        if let Some(slot) = self.pool.find(&key) {
            let found = self.pool.slot(slot);
            // A block that is leased in the tier's memory is in use there, and one that is being read is in use, too.
            if found.block.is_readable() && !found.is_in_place() {
                self.write_demoted(to, slot);
            }
            return Begun::Done;
        }
        if self.demotions.down & (bit(tier) | bit(to)) != 0 || self.flow.is_leaving(&key) {
            self.counters.demote_blocks_dropped += 1;
            return Begun::Done;
        }
        if !self.flow.may_queue_late(to) {
            self.counters.over_budget_blocks += 1;
            return Begun::Done;
        }
        let is_reading = self.demotions.reading.len() as u64;
        if self.flow.late_writes_left(to) >= self.pace.demotions_in_flight
            || (is_reading > 0 && (is_reading + 1) * bytes > self.pool.bytes() / READ_DIVISOR)
            || !self.claims.leave_room(&self.pool, bytes)
        {
            return Begun::Waits;
        }
        match self.pool.insert_fetching(key, bytes, near, (tier, false)) {
            Ok(slot) => {
                self.flow.read_unused(slot, tier, self.now.saturating_add(READ_NS));
                self.demotions.reading.insert(slot, to);
                Begun::Done
            }
            Err(NoRoom::Later) => Begun::Continues,
            Err(NoRoom::Full(_)) => {
                self.counters.demote_blocks_dropped += 1;
                Begun::Done
            }
        }
    }
}
