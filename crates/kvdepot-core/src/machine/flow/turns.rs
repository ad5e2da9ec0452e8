//! Turns of keys: what a key waits for, and what comes after it. There may be as many as blocks are removed at a time.

use std::hash::BuildHasher;

use foldhash::fast::RandomState;
use hashbrown::HashMap;

use super::super::event::{RemovalId, TierIndex, Token};
use super::super::names::PoolKey;
use super::super::owed::Place;
use super::super::tiers::TierMask;
use crate::eviction::SlotId;

/// The event that a key waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Until {
    /// Tiers complete their writes of a displaced slot.
    Written(SlotId),
    /// Tiers complete the removal `id` of the block.
    Removed { id: RemovalId, left: TierMask },
}

/// The next operation after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Nothing,
    Remove,
    /// `drain`: the drain that it counts for, like a queued write.
    Write {
        slot: SlotId,
        serial: u32,
        drain: u64,
    },
}

#[derive(Clone, Debug)]
pub(super) struct Turn {
    pub(super) until: Until,
    pub(super) next: Next,
    /// Requests that wait for the removal.
    pub(super) tokens: Vec<Token>,
    /// Whether a tier has failed to remove the block.
    pub(super) failed: bool,
}

impl Turn {
    pub(super) const fn new(until: Until) -> Self {
        Self { until, next: Next::Nothing, tokens: Vec::new(), failed: false }
    }
}

/// Number of tables of turns. It is large, so that the growth of one holds the depot's lock only briefly.
const TABLES: usize = 256;

/// The turn of each key that has one.
#[derive(Clone, Debug)]
pub(super) struct Turns {
    tables: Vec<HashMap<PoolKey, Turn>>,
    hasher: RandomState,
    len: usize,
}

impl Turns {
    pub(super) fn new() -> Self {
        Self { tables: vec![HashMap::new(); TABLES], hasher: RandomState::default(), len: 0 }
    }

    pub(super) const fn len(&self) -> usize {
        self.len
    }

    fn table_of(&self, key: &PoolKey) -> usize {
        self.hasher.hash_one(key) as usize % TABLES
    }

    pub(super) fn contains_key(&self, key: &PoolKey) -> bool {
        self.len > 0 && self.get(key).is_some()
    }

    pub(super) fn get(&self, key: &PoolKey) -> Option<&Turn> {
        self.tables[self.table_of(key)].get(key)
    }

    pub(super) fn get_mut(&mut self, key: &PoolKey) -> Option<&mut Turn> {
        let table = self.table_of(key);
        self.tables[table].get_mut(key)
    }

    pub(super) fn insert(&mut self, key: PoolKey, turn: Turn) -> Option<Turn> {
        let table = self.table_of(&key);
        let before = self.tables[table].insert(key, turn);
        self.len += usize::from(before.is_none());
        before
    }

    pub(super) fn remove(&mut self, key: &PoolKey) -> Option<Turn> {
        let table = self.table_of(key);
        let turn = self.tables[table].remove(key);
        self.len -= usize::from(turn.is_some());
        turn
    }
}

/// A removal that no turn waits for: of a value's predecessor, or one that is owed and retried.
#[derive(Clone, Copy, Debug)]
pub(super) struct Apart {
    pub(super) tier: TierIndex,
    pub(super) key: PoolKey,
    /// The place that owes it.
    pub(super) owed: Option<Place>,
}
