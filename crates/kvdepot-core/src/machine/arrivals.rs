//! Blocks that have arrived from a tier, or could not be read, and the requests that wait for them.

use hashbrown::HashMap;

use super::slots::Waiter;
use super::tiers::TierIndex;
use crate::eviction::SlotId;

/// A block that has come from a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Come {
    /// Its slot.
    pub(crate) slot: SlotId,
    /// The tier that it came from.
    pub(crate) tier: TierIndex,
}

/// A block that has arrived, or could not be read, and the requests that wait for it.
#[derive(Debug)]
pub(super) struct Arrival {
    /// A block that has arrived, in a pinned slot.
    pub(super) come: Option<Come>,
    pub(super) waiters: Vec<Waiter>,
    /// Number of waiters that know.
    pub(super) told: usize,
}

/// Blocks that not all of their waiters know of.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    pub(super) map: HashMap<u64, Arrival>,
    pub(super) ever: u64,
}
