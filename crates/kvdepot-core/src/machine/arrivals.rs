//! Blocks that have arrived from a tier, or could not be read, and the requests that wait for them.

use hashbrown::HashMap;

use super::slots::Waiter;
use crate::eviction::SlotId;

/// A block that has arrived, or could not be read, and the requests that wait for it.
#[derive(Debug)]
pub(super) struct Arrival {
    /// The pinned slot of a block that has arrived.
    pub(super) slot: Option<SlotId>,
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
