//! Whether a tier is given a block only as its placement has it, as far as it shows from outside of the machine.

use std::collections::{BTreeMap, BTreeSet};

use kvdepot_core::BlockKey;
use kvdepot_core::machine::{Gauges, WriteWhen};

use crate::fail::{Fail, Rule, fail};
use crate::model::name;
use crate::world::World;

/// Bytes of the largest block of `specs`.
const LARGEST_BLOCK: u64 = 3 * 4096;

/// What the placements look at. Never forgotten: what was used once may be given to a tier twice.
#[derive(Debug, Default)]
pub(crate) struct Placed {
    used: BTreeSet<BlockKey>,
    values: BTreeSet<BlockKey>,
    /// The lowest tier that each block was read from.
    fetched: BTreeMap<BlockKey, usize>,
    /// Whether the pool was ever short of room.
    short: bool,
}

impl Placed {
    /// Leased for a request, or its reply will say so.
    pub(crate) fn used(&mut self, keys: &[BlockKey]) {
        self.used.extend(keys);
    }

    /// Stored as a value, or removed: what is stored under the key after that may go to every tier.
    pub(crate) fn replaced(&mut self, keys: impl IntoIterator<Item = BlockKey>) {
        self.values.extend(keys);
    }

    /// Blocks are to be evicted. A step may look for them, and have what is cold written, before any has gone.
    pub(crate) const fn evictions_asked(&mut self) {
        self.short = true;
    }

    pub(crate) fn fetched(&mut self, key: BlockKey, tier: usize) {
        let lowest = self.fetched.entry(key).or_default();
        *lowest = tier.max(*lowest);
    }
}

impl World {
    /// Notes, after every step, whether the pool is short: what became cold may be written much later, when a reset has
    /// made room again. The machine begins at an eighth; within a step it may have been shorter than it shows.
    pub(crate) fn note_room(&mut self, gauges: &Gauges) {
        // A step may look for a block to evict, and have what is cold written, before any has gone.
        let short = gauges.pool_free_bytes < LARGEST_BLOCK || gauges.pool_free_bytes * 2 < gauges.pool_bytes;
        self.placed.short |= short || gauges.evicted > 0;
    }

    /// A tier is to write a block.
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
            when => return fail(Rule::Placement, format!("tier {tier} is given {} {when:?}", name(key))),
        };
        Ok(())
    }

    /// Tiers that are to have a block, or a value, as soon as it is sealed; a bit each.
    pub(crate) fn at_seal(&self, value: bool) -> u8 {
        let tiers = self.plan.shape.tiers.iter().enumerate();
        let at_once = |tier: &crate::plan::TierShape| {
            value || !self.plan.shape.keeps || tier.placement.write == WriteWhen::Through
        };
        tiers.filter(|(_, tier)| at_once(tier)).fold(0, |mask, (number, _)| mask | 1 << number)
    }

    /// Only a tier that is written through makes blocks dirty, and a value.
    pub(crate) fn check_dirty(&self, dirty: u64) -> Result<(), Fail> {
        let through = |tier: &crate::plan::TierShape| tier.placement.write == WriteWhen::Through;
        let shape = &self.plan.shape;
        if dirty == 0 || !shape.keeps || shape.tiers.iter().any(through) || !self.placed.values.is_empty() {
            return Ok(());
        }
        // A value that is sealed in this step is noted when its reply comes, after this.
        if self.waiting.values().any(|waiting| waiting.asked.publishes()) {
            return Ok(());
        }
        fail(Rule::Placement, format!("{dirty} bytes are dirty, and no tier is written through"))
    }
}
