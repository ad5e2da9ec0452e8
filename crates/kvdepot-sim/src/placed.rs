//! Checks that tiers get blocks only as their placements demand, as far as that is visible from outside of the machine.

use std::collections::{BTreeMap, BTreeSet};

use kvdepot_core::eviction::SlotId;
use kvdepot_core::machine::{Gauges, Nanos, Stored, WriteWhen};
use kvdepot_core::{BlockKey, Error, ErrorKind};

use crate::fail::{Fail, Rule, fail};
use crate::model::name;
use crate::world::World;

/// Bytes of the largest block of `specs`.
const LARGEST_BLOCK: u64 = 3 * 4096;

/// State that the placements depend on. It is never forgotten: a block that was used once may be written to a tier
/// twice.
#[derive(Debug, Default)]
pub(crate) struct Placed {
    used: BTreeSet<BlockKey>,
    values: BTreeSet<BlockKey>,
    /// The lowest tier that each block was read from.
    fetched: BTreeMap<BlockKey, usize>,
    /// Whether the pool ever lacked space.
    short: bool,
}

impl Placed {
    /// Records blocks that were leased for a request, or whose reply will lease them.
    pub(crate) fn used(&mut self, keys: &[BlockKey]) {
        self.used.extend(keys);
    }

    /// Records keys that were stored as a value, or removed: later blocks under them may go to every tier.
    pub(crate) fn replaced(&mut self, keys: impl IntoIterator<Item = BlockKey>) {
        self.values.extend(keys);
    }

    /// Records that blocks will be evicted. A step may search for them, and queue writes of cold blocks, before any has
    /// left.
    pub(crate) const fn evictions_asked(&mut self) {
        self.short = true;
    }

    pub(crate) fn fetched(&mut self, key: BlockKey, tier: usize) {
        let lowest = self.fetched.entry(key).or_default();
        *lowest = tier.max(*lowest);
    }
}

/// Bytes that tiers were given.
#[derive(Debug)]
pub(crate) struct Given {
    bytes: Vec<u64>,
    /// The writes that have not ended, by tier and slot.
    in_flight: BTreeMap<(usize, SlotId), u64>,
    /// When the machine began.
    since: Nanos,
}

impl Given {
    pub(crate) fn new(tiers: usize, since: Nanos) -> Self {
        Self { bytes: vec![0; tiers], in_flight: BTreeMap::new(), since }
    }
}

impl Given {
    /// Records the end of a write: what a tier did not write does not count.
    pub(crate) fn ended(&mut self, tier: usize, slot: SlotId, outcome: &Result<Stored, Error>) {
        use ErrorKind::{Busy, Closed, Unavailable};
        let bytes = self.in_flight.remove(&(tier, slot)).unwrap_or(0);
        let wrote = match outcome {
            Ok(stored) => *stored == Stored::New,
            Err(error) => !matches!(error.kind(), Busy | Closed | Unavailable),
        };
        if !wrote {
            self.bytes[tier] -= bytes;
        }
    }
}

/// Nanoseconds of a day.
const DAY_NS: u128 = 24 * 3_600_000_000_000;

impl World {
    /// Checks a tier's budget of written bytes: an hour's, those of the time since then, and one block more. Values are
    /// written anyway, and count.
    pub(crate) fn check_budget(
        &mut self,
        tier: usize,
        slot: SlotId,
        key: &BlockKey,
        bytes: u64,
    ) -> Result<(), Fail> {
        let before = self.given.bytes[tier];
        self.given.bytes[tier] += bytes;
        self.given.in_flight.insert((tier, slot), bytes);
        let per_day = self.plan.shape.tiers[tier].write_bytes_per_day;
        if per_day == 0 || self.placed.values.contains(key) {
            return Ok(());
        }
        let time = u128::from(self.now - self.given.since) + DAY_NS / 24;
        if u128::from(before) * DAY_NS > u128::from(per_day) * time {
            return fail(Rule::Budget, format!("tier {tier} is given {} beyond its budget", name(key)));
        }
        Ok(())
    }

    /// Records, after every step, whether the pool lacks space: blocks that became cold may be written much later, when
    /// a reset has freed space again. The machine begins at an eighth; within a step it may have had less space than it
    /// shows.
    pub(crate) fn note_room(&mut self, gauges: &Gauges) {
        // A step may search for a block to evict, and queue writes of cold blocks, before any has left.
        let short = gauges.pool_free_bytes < LARGEST_BLOCK || gauges.pool_free_bytes * 2 < gauges.pool_bytes;
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
