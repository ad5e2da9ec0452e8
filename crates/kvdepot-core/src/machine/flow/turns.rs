//! Turns of keys: what waits for what under one key. There may be as many as blocks are removed at a time.

use std::hash::BuildHasher;

use foldhash::fast::RandomState;
use hashbrown::HashMap;

use super::super::catalog::Catalog;
use super::super::event::{Command, Effects, TierIndex, Token};
use super::super::flaw::Flaw;
use super::super::names::PoolKey;
use super::super::pool::Pool;
use super::Flow;
use crate::error::Result;
use crate::eviction::SlotId;

/// What a key waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Until {
    /// Tiers that write a displaced slot.
    Written(SlotId),
    /// So many tiers that are to forget the block.
    Removed(usize),
}

/// What comes after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Nothing,
    Remove,
    /// `drain`: the drain that it counts for, as a queued write does.
    Write {
        slot: SlotId,
        serial: u32,
        drain: u64,
    },
}

#[derive(Clone, Debug)]
pub(super) struct Turn {
    pub(super) until: Until,
    next: Next,
    /// Requests that wait for the removal.
    tokens: Vec<Token>,
    /// Whether a tier could not remove the block.
    failed: bool,
}

impl Turn {
    const fn new(until: Until) -> Self {
        Self { until, next: Next::Nothing, tokens: Vec::new(), failed: false }
    }
}

/// Tables of turns, so that the growth of one is a short hold of the depot's lock.
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

    fn get_mut(&mut self, key: &PoolKey) -> Option<&mut Turn> {
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
    /// Whether tiers may still show a block under this key that was removed or replaced.
    pub(crate) fn is_leaving(&self, key: &PoolKey) -> bool {
        self.has_turn(key) || self.owed.has(key)
    }

    pub(in super::super) fn has_turn(&self, key: &PoolKey) -> bool {
        self.turns.contains_key(key)
    }

    /// What comes after a key's turn; what was to come before is given up.
    pub(super) fn set_next(&mut self, key: PoolKey, next: Next) {
        if let Some(turn) = self.turns.get_mut(&key)
            && let Next::Write { drain, .. } = std::mem::replace(&mut turn.next, next)
        {
            self.write_over(drain);
        }
    }

    /// Takes a slot out of the pool's view after the index has ceased to name it: calls off its writes, and waits for
    /// those that are under way.
    pub(crate) fn displace(&mut self, pool: &mut Pool, slot: SlotId) {
        let (key, writing) = (pool.slot(slot).key, pool.slot(slot).writing != 0);
        let writing = writing && !self.flaws.has(Flaw::NoTurnBehindWrite);
        self.set_next(key, Next::Nothing);
        if writing && !self.turns.contains_key(&key) {
            self.begin_turn(key, Turn::new(Until::Written(slot)));
        }
        pool.doom(slot);
    }

    /// Has the tiers forget a key, in its turn. Whether `token` will be told when they have.
    pub(crate) fn remove(
        &mut self,
        catalog: &Catalog,
        key: PoolKey,
        token: Option<Token>,
        out: &mut Effects,
    ) -> bool {
        let Some(turn) = self.turns.get_mut(&key) else {
            return self.send_removal(catalog, key, token, out);
        };
        if matches!(turn.until, Until::Written(_)) {
            // The write may take long: nobody waits for it.
            self.set_next(key, Next::Remove);
            return false;
        }
        turn.tokens.extend(token);
        self.set_next(key, Next::Nothing);
        token.is_some()
    }

    pub(super) fn begin_turn(&mut self, key: PoolKey, turn: Turn) {
        if self.turns.insert(key, turn).is_none() {
            self.uses.hold(key.space);
        }
    }

    pub(super) fn send_removal(
        &mut self,
        catalog: &Catalog,
        key: PoolKey,
        token: Option<Token>,
        out: &mut Effects,
    ) -> bool {
        let block_key = catalog.block_key(&key);
        if self.tiers.is_empty() {
            return false;
        }
        for tier in 0..self.tiers.len() {
            out.commands.push(Command::Remove { tier, key: block_key });
        }
        let until = Until::Removed(self.tiers.len());
        self.begin_turn(key, Turn { tokens: token.into_iter().collect(), ..Turn::new(until) });
        token.is_some()
    }

    /// A tier has ended a removal.
    pub(crate) fn removal_ended(
        &mut self,
        pool: &mut Pool,
        catalog: &Catalog,
        tier: TierIndex,
        key: PoolKey,
        outcome: &Result<()>,
        out: &mut Effects,
    ) {
        // Those of one tier and key end in the order in which they were sent.
        if let Some(left) = self.predecessors.get_mut(&(key, tier)) {
            *left -= 1;
            if *left == 0 {
                self.predecessors.remove(&(key, tier));
                self.uses.let_go(key.space);
            }
            return;
        }
        if self.retry_ended(key, tier, outcome.is_ok()) {
            return;
        }
        self.note_removal(key, tier, outcome.is_ok());
        let is_owed = self.owed.has(&key);
        let Some(turn) = self.turns.get_mut(&key) else { return };
        if let Until::Removed(left) = &mut turn.until {
            turn.failed |= is_owed;
            *left -= 1;
            if *left == 0 {
                self.end_turn(pool, catalog, key, out);
            }
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

    /// Requests whose removals have ended since the last call.
    pub(crate) fn take_removed(&mut self) -> Vec<(Token, bool)> {
        std::mem::take(&mut self.removed)
    }
}
