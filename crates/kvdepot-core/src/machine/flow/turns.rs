//! Turns of keys: the order of operations under one key. There may be as many as blocks are removed at a time.

use std::hash::BuildHasher;

use foldhash::fast::RandomState;
use hashbrown::HashMap;

use super::super::catalog::Catalog;
use super::super::event::{Effects, RemovalId, Token};
use super::super::flaw::Flaw;
use super::super::names::PoolKey;
use super::super::pool::Pool;
use super::super::tiers::TierMask;
use super::Flow;
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

    fn insert(&mut self, key: PoolKey, turn: Turn) -> Option<Turn> {
        let table = self.table_of(&key);
        let before = self.tables[table].insert(key, turn);
        self.len += usize::from(before.is_none());
        before
    }

    fn remove(&mut self, key: &PoolKey) -> Option<Turn> {
        let table = self.table_of(key);
        let turn = self.tables[table].remove(key);
        self.len -= usize::from(turn.is_some());
        turn
    }
}

impl Flow {
    /// Returns whether tiers may still have a block under this key that was removed or replaced.
    pub(crate) fn is_leaving(&self, key: &PoolKey) -> bool {
        self.turns.contains_key(key) || self.owed.tiers(key) != 0
    }

    /// Sets the operation after a key's turn, in place of the previous one.
    pub(super) fn set_next(&mut self, key: PoolKey, next: Next) {
        if let Some(turn) = self.turns.get_mut(&key)
            && let Next::Write { drain, .. } = std::mem::replace(&mut turn.next, next)
        {
            self.write_over(drain);
        }
    }

    /// Removes a slot from the pool's view after the index has ceased to name it: cancels its queued writes, and waits
    /// for those in flight.
    pub(crate) fn displace(&mut self, pool: &mut Pool, slot: SlotId) {
        let (key, writing) = (pool.slot(slot).key, pool.slot(slot).writing != 0);
        let writing = writing && !self.flaws.has(Flaw::NoTurnBehindWrite);
        self.set_next(key, Next::Nothing);
        if writing && !self.turns.contains_key(&key) {
            self.begin_turn(key, Turn::new(Until::Written(slot)));
        }
        pool.doom(slot);
    }

    pub(super) fn begin_turn(&mut self, key: PoolKey, turn: Turn) {
        if self.turns.insert(key, turn).is_none() {
            self.uses.hold(key.space);
        }
    }

    pub(super) fn end_turn(&mut self, pool: &mut Pool, catalog: &Catalog, key: PoolKey, out: &mut Effects) {
        let Some(turn) = self.turns.remove(&key) else { return };
        self.uses.let_go(key.space);
        self.removed.extend(turn.tokens.into_iter().map(|token| (token, turn.failed)));
        match turn.next {
            Next::Nothing => {}
            Next::Remove => {
                self.send_removal(catalog, key, None, out);
            }
            Next::Write { slot, serial, drain } => {
                if pool.get(slot).is_some_and(|slot| slot.serial == serial && slot.block.is_readable()) {
                    self.queue_writes(pool, slot, self.at_seal(pool, slot), true, drain);
                }
                self.write_over(drain);
            }
        }
    }
}
