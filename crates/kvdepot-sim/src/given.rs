//! What tiers were given, and what their placements depend on.

use std::collections::{BTreeMap, BTreeSet};

use kvdepot_core::BlockKey;
use kvdepot_core::eviction::SlotId;
use kvdepot_core::machine::Nanos;

/// State that the placements depend on. It is never forgotten: a block that was used once may be written to a tier
/// twice.
#[derive(Debug, Default)]
pub(crate) struct Placed {
    pub(crate) used: BTreeSet<BlockKey>,
    pub(crate) values: BTreeSet<BlockKey>,
    /// The lowest tier that each block was read from.
    pub(crate) fetched: BTreeMap<BlockKey, usize>,
    /// Blocks that the tier whose memory is leased was to read into the pool.
    pub(crate) copied: BTreeSet<BlockKey>,
    /// The uppermost tier that evicted each block, or was about to.
    pub(crate) cooled: BTreeMap<BlockKey, usize>,
    /// Whether the pool ever lacked space.
    pub(crate) short: bool,
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

    pub(crate) fn cooled(&mut self, keys: &[BlockKey], tier: usize) {
        for key in keys {
            let uppermost = self.cooled.entry(*key).or_insert(tier);
            *uppermost = tier.min(*uppermost);
        }
    }

    pub(crate) fn fetched(&mut self, key: BlockKey, tier: usize) {
        let lowest = self.fetched.entry(key).or_default();
        *lowest = tier.max(*lowest);
    }
}

/// Bytes that a tier stored from a moment on at which no write was in flight there; those in flight count.
#[derive(Debug)]
struct Window {
    since: Nanos,
    bytes: u64,
}

/// What tiers were given.
#[derive(Debug)]
pub(crate) struct Given {
    windows: Vec<Vec<Window>>,
    /// The writes that have not ended, by tier and slot.
    in_flight: BTreeMap<(usize, SlotId), u64>,
}

impl Given {
    pub(crate) fn new(tiers: usize) -> Self {
        Self { windows: (0..tiers).map(|_| Vec::new()).collect(), in_flight: BTreeMap::new() }
    }

    /// Records that a tier is given a write. Returns what it was given before in each window.
    pub(crate) fn begin(&mut self, tier: usize, slot: SlotId, bytes: u64, now: Nanos) -> Vec<(Nanos, u64)> {
        let windows = &mut self.windows[tier];
        // What is in flight belongs to all windows, so that one that was not stored can be taken out of them.
        if self.in_flight.range((tier, 0)..=(tier, SlotId::MAX)).next().is_none() {
            windows.push(Window { since: now, bytes: 0 });
        }
        self.in_flight.insert((tier, slot), bytes);
        let before = windows.iter().map(|window| (window.since, window.bytes)).collect();
        windows.iter_mut().for_each(|window| window.bytes += bytes);
        before
    }

    /// Records the end of a write; the tier tells whether it has stored it.
    pub(crate) fn ended(&mut self, tier: usize, slot: SlotId, stored: bool) {
        let bytes = self.in_flight.remove(&(tier, slot)).unwrap_or(0);
        if !stored {
            self.windows[tier].iter_mut().for_each(|window| window.bytes -= bytes);
        }
    }
}
