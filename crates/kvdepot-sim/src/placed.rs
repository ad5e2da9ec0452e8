//! Checks that tiers get blocks only as their placements demand, as far as that is visible from outside of the machine.

use kvdepot_core::BlockKey;
use kvdepot_core::eviction::SlotId;
use kvdepot_core::machine::{Gauges, Nanos, WriteWhen};

use crate::fail::{Fail, Rule, fail};
use crate::model::name;
use crate::world::World;

/// Bytes of the largest block of `specs`.
const LARGEST_BLOCK: u64 = 3 * 4096;

/// Nanoseconds of a day.
const DAY_NS: u128 = 24 * 3_600_000_000_000;

impl World {
    /// Checks a tier's budget of written bytes: in any span of time it stores an hour's, those of that time, and one block
    /// more. Values are written anyway, and count.
    pub(crate) fn check_budget(
        &mut self,
        tier: usize,
        slot: SlotId,
        key: &BlockKey,
        bytes: u64,
    ) -> Result<(), Fail> {
        let per_day = u128::from(self.plan.shape.tiers[tier].write_bytes_per_day);
        if per_day == 0 {
            return Ok(());
        }
        let before = self.given.begin(tier, slot, bytes, self.now);
        let is_over = |&(since, bytes): &(Nanos, u64)| {
            u128::from(bytes) * DAY_NS > per_day * (u128::from(self.now - since) + DAY_NS / 24)
        };
        if before.iter().any(is_over) && !self.placed.values.contains(key) {
            return fail(Rule::Budget, format!("tier {tier} is given {} beyond its budget", name(key)));
        }
        Ok(())
    }

    /// Records, after every step, whether the pool lacks space: blocks that became cold may be written much later, when
    /// a reset has freed space again. The machine begins at an eighth; within a step it may have had less space than it
    /// shows.
    pub(crate) fn note_room(&mut self, gauges: &Gauges) {
        // A step may search for a block to evict, and queue writes of cold blocks, before any has left.
        let short = gauges.pool_free_bytes < LARGEST_BLOCK || gauges.pool_free_bytes * 2 <= gauges.pool_bytes;
        self.placed.short |= short || gauges.evicted > 0;
    }

    /// Checks a command to a tier to write a block.
    pub(crate) fn check_placed(&mut self, tier: usize, key: &BlockKey) -> Result<(), Fail> {
        let placement = self.plan.shape.tiers[tier].placement;
        let placed = &self.placed;
        let value = placed.values.contains(key);
        if placement.write == WriteWhen::Through || !self.plan.shape.keeps || value {
            return Ok(());
        }
        if placement.promote && placed.fetched.get(key).is_some_and(|&from| from > tier) {
            self.reached.insert("promoted");
            return Ok(());
        }
        match placement.write {
            WriteWhen::OnSecondUse if placed.used.contains(key) => self.reached.insert("second use"),
            WriteWhen::WhenCold if placed.short => self.reached.insert("cold"),
            WriteWhen::OnDemotion if placed.cooled.get(key).is_some_and(|&from| from < tier) => {
                self.reached.insert("demoted")
            }
            when => return fail(Rule::Placement, format!("tier {tier} is given {} {when:?}", name(key))),
        };
        Ok(())
    }

    /// Returns the tiers that get a block, or a value, as soon as it is sealed, one bit each.
    pub(crate) fn at_seal(&self, value: bool) -> u8 {
        let tiers = self.plan.shape.tiers.iter().enumerate();
        let at_once = |tier: &crate::plan::TierShape| {
            value || !self.plan.shape.keeps || tier.placement.write == WriteWhen::Through
        };
        tiers.filter(|(_, tier)| at_once(tier)).fold(0, |mask, (number, _)| mask | 1 << number)
    }

    /// Checks the dirty bytes: only write-through tiers and values make blocks dirty.
    pub(crate) fn check_dirty(&self, dirty: u64) -> Result<(), Fail> {
        let through = |tier: &crate::plan::TierShape| tier.placement.write == WriteWhen::Through;
        let shape = &self.plan.shape;
        if dirty == 0 || !shape.keeps || shape.tiers.iter().any(through) || !self.placed.values.is_empty() {
            return Ok(());
        }
        // A value that is sealed in this step is recorded when its reply arrives, which is later.
        if self.waiting.values().any(|waiting| waiting.asked.publishes()) {
            return Ok(());
        }
        fail(Rule::Placement, format!("{dirty} bytes are dirty, and no tier is written through"))
    }
}
