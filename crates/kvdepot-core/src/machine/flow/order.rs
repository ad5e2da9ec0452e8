//! The order of operations under one key: how a turn begins, what comes after it, and how it ends.

use super::super::catalog::Catalog;
use super::super::event::Effects;
use super::super::flaw::Flaw;
use super::super::names::PoolKey;
use super::super::pool::Pool;
use super::Flow;
use super::turns::{Next, Turn, Until};
use crate::eviction::SlotId;

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
