//! The common part of taking in another depot's blocks from this one's pool, after a hand-over or a crash.

use hashbrown::HashSet;
use kvdepot_core::machine::{Adopt, Event, HandedState};
use kvdepot_core::{BlockKey, NamespaceId};

use crate::depot::Depot;
use crate::epochs;

/// A pool that is being taken in, before there is any request for its space.
pub(crate) struct TakingIn<'a> {
    depot: &'a Depot,
    /// Bytes that the other depot had in use.
    pool_bytes: u64,
    /// The current namespace ids, which blocks may have.
    current: HashSet<NamespaceId>,
}

impl<'a> TakingIn<'a> {
    /// Opens the namespaces of the other depot, at no less than these epochs.
    pub(crate) fn begin(depot: &'a Depot, pool_bytes: u64, namespaces: &[(String, u32)]) -> Self {
        let mut current = HashSet::new();
        for outcome in epochs::reopen(&depot.runner, namespaces) {
            match outcome {
                Ok(opened) => drop(current.insert(opened.id)),
                Err(error) => tracing::warn!(
                    "the blocks of a namespace from another depot are not taken over: the namespace cannot be opened: \
                     {error}"
                ),
            }
        }
        Self { depot, pool_bytes, current }
    }

    /// Returns whether a block is current, according to all tiers.
    pub(crate) fn is_current(&self, key: &BlockKey) -> bool {
        self.current.contains(&key.namespace)
    }

    /// Takes in some slots, under one hold of the lock. For a block that is not current only its place is kept, for
    /// clients that still copy.
    pub(crate) fn take(&self, mut slots: Vec<Adopt>) {
        for slot in &mut slots {
            if matches!(&slot.handed.state, HandedState::Block { key, .. } if !self.is_current(key)) {
                slot.handed.state = HandedState::Busy;
            }
        }
        self.depot.runner.tell_and_leave(Event::Adopt { pool_bytes: self.pool_bytes, slots });
    }

    /// Returns the number of visible blocks.
    pub(crate) fn blocks(&self) -> usize {
        self.depot.runner.look(|machine| machine.gauges().pool_blocks)
    }
}
