//! Taking in what another depot left in this one's pool, one that handed it over or one that crashed: what both ways have
//! in common.

use hashbrown::HashSet;
use kvdepot_core::machine::{Adopt, Event, HandedState};
use kvdepot_core::{BlockKey, NamespaceId};

use crate::depot::Depot;
use crate::epochs;

/// A pool that is being taken in, before anybody else asks for room in it.
pub(crate) struct TakingIn<'a> {
    depot: &'a Depot,
    /// Bytes that the other depot had taken in use.
    pool_bytes: u64,
    /// What blocks may carry.
    current: HashSet<NamespaceId>,
}

impl<'a> TakingIn<'a> {
    /// Opens the namespaces of the other depot, which had them in these epochs at least.
    pub(crate) fn begin(depot: &'a Depot, pool_bytes: u64, namespaces: &[(String, u32)]) -> Self {
        let mut current = HashSet::new();
        for outcome in epochs::reopen(&depot.runner, namespaces) {
            match outcome {
                Ok(opened) => drop(current.insert(opened.id)),
                Err(error) => tracing::warn!(
                    "the blocks that another depot left of a namespace are not taken in: the namespace cannot be opened: \
                     {error}"
                ),
            }
        }
        Self { depot, pool_bytes, current }
    }

    /// Whether a block is current, as far as all tiers say.
    pub(crate) fn is_current(&self, key: &BlockKey) -> bool {
        self.current.contains(&key.namespace)
    }

    /// Takes some slots in, under one hold of the lock. Of a block that is not current only its place is left, for who
    /// still copies.
    pub(crate) fn take(&self, mut slots: Vec<Adopt>) {
        for slot in &mut slots {
            if matches!(&slot.handed.state, HandedState::Block { key, .. } if !self.is_current(key)) {
                slot.handed.state = HandedState::Busy;
            }
        }
        self.depot.runner.tell_and_leave(Event::Adopt { pool_bytes: self.pool_bytes, slots });
    }

    /// Blocks that are visible now.
    pub(crate) fn blocks(&self) -> usize {
        self.depot.runner.look(|machine| machine.gauges().pool_blocks)
    }
}
