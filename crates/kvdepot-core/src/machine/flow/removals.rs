//! Removals: commands to tiers to forget blocks, and their outcomes. Each has a number that identifies its end, so an
//! end that comes late or twice ends nothing else.

use super::super::catalog::Catalog;
use super::super::event::{Closed, Command, Discarded, Effects, RemovalId, TierIndex, Token};
use super::super::flaw::Flaw;
use super::super::names::PoolKey;
use super::super::owed::{Change, Debts, Place};
use super::super::pool::Pool;
use super::super::tiers::{TierMask, bit};
use super::Flow;
use super::turns::{Apart, Next, Turn, Until};
use crate::error::Result;
use crate::key::BlockHash;

impl Flow {
    /// Returns the number of removals that tiers owe.
    pub(crate) fn removals_owed(&self) -> usize {
        self.owed.len()
    }

    /// Returns the number of parts of tiers that are closed for a space.
    pub(crate) const fn places_closed(&self) -> usize {
        self.owed.closed_len()
    }

    /// Returns the tiers that must neither be asked for a block nor be given it, because they owe too many removals.
    pub(super) fn closed(&self, catalog: &Catalog, key: &PoolKey) -> TierMask {
        self.owed.closed(&self.parts, key.space, || catalog.block_key(key))
    }

    /// Returns whether a tier, or the part of it that the block belongs to, is closed for the block.
    pub(crate) fn is_closed(&self, catalog: &Catalog, key: &PoolKey) -> bool {
        self.closed(catalog, key) != 0
    }

    /// Makes the tiers forget a key, in its turn. Returns whether `token` will be notified when they have.
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
            // The write may take long, so the removal does not wait for it. A tier that owes an earlier removal, or is
            // closed, may still have the block.
            self.set_next(key, Next::Remove);
            if self.owed.tiers(&key) | self.closed(catalog, &key) == 0 {
                return false;
            }
            self.removed.extend(token.map(|token| (token, true)));
            return token.is_some();
        }
        turn.tokens.extend(token);
        self.set_next(key, Next::Nothing);
        token.is_some()
    }

    pub(super) fn send_removal(
        &mut self,
        catalog: &Catalog,
        key: PoolKey,
        token: Option<Token>,
        out: &mut Effects,
    ) -> bool {
        if self.tiers.is_empty() {
            return false;
        }
        let closed = self.closed(catalog, &key);
        let left = self.all() & !closed;
        if left == 0 {
            self.removed.extend(token.map(|token| (token, true)));
            return token.is_some();
        }
        let id = self.next_removal();
        self.command_removals(catalog, left, id, &key, out);
        let turn = Turn::new(Until::Removed { id, left });
        self.begin_turn(key, Turn { tokens: token.into_iter().collect(), failed: closed != 0, ..turn });
        token.is_some()
    }

    /// Makes one tier forget the predecessor of a value before the value is written again.
    pub(super) fn remove_predecessor(
        &mut self,
        catalog: &Catalog,
        tier: TierIndex,
        key: PoolKey,
        out: &mut Effects,
    ) {
        let id = self.next_removal();
        self.command_removals(catalog, bit(tier), id, &key, out);
        self.begin_apart(id, Apart { tier, key, owed: None });
    }

    const fn next_removal(&mut self) -> RemovalId {
        self.removals_ever += 1;
        self.removals_ever
    }

    fn command_removals(
        &self,
        catalog: &Catalog,
        tiers: TierMask,
        id: RemovalId,
        key: &PoolKey,
        out: &mut Effects,
    ) {
        let key = catalog.block_key(key);
        let asked = (0..self.tiers.len()).filter(|&tier| tiers & bit(tier) != 0);
        out.commands.extend(asked.map(|tier| Command::Remove { id, tier, key }));
    }

    fn begin_apart(&mut self, id: RemovalId, apart: Apart) {
        self.uses.hold(apart.key.space);
        self.apart.insert(id, apart);
    }

    /// Records that a tier has ended a removal.
    #[expect(clippy::too_many_arguments, reason = "rooms are passed one by one, so that each borrow is seen")]
    pub(crate) fn removal_ended(
        &mut self,
        pool: &mut Pool,
        catalog: &Catalog,
        tier: TierIndex,
        id: RemovalId,
        key: PoolKey,
        outcome: &Result<()>,
        out: &mut Effects,
    ) {
        let is_made = outcome.is_ok() || self.flaws.has(Flaw::FailedRemovalCounts);
        let ended = if self.flaws.has(Flaw::RemovalsByOrder) { self.oldest_apart(tier, &key) } else { id };
        if let Some(apart) = self.apart.remove(&ended) {
            if let Some(place) = apart.owed {
                let change = self.owed.tried(place, &apart.key.hash, ended, is_made);
                self.note_change(place, change);
            }
            self.uses.let_go(apart.key.space);
            return;
        }
        let Some(turn) = self.turns.get(&key) else { return };
        let is_of = |until| match until {
            Until::Removed { id: other, left } => {
                (other == id || self.flaws.has(Flaw::RemovalsByOrder)) && left & bit(tier) != 0
            }
            Until::Written(_) => false,
        };
        if !is_of(turn.until) {
            return;
        }
        self.note_removal(catalog, key, tier, is_made, out);
        let is_owed = self.owed.tiers(&key) != 0;
        let Some(turn) = self.turns.get_mut(&key) else { return };
        if let Until::Removed { left, .. } = &mut turn.until {
            turn.failed |= is_owed || !is_made;
            *left &= !bit(tier);
            if *left == 0 {
                self.end_turn(pool, catalog, key, out);
            }
        }
    }

    /// Records that a tier has completed a removal, or has failed to.
    fn note_removal(
        &mut self,
        catalog: &Catalog,
        key: PoolKey,
        tier: TierIndex,
        is_made: bool,
        out: &mut Effects,
    ) {
        if is_made && self.owed.is_empty() {
            return;
        }
        let block_key = catalog.block_key(&key);
        let part = self.parts.of(tier, &block_key);
        let place = Place { space: key.space, tier, part };
        if is_made {
            let change = self.owed.pay(place, &key.hash);
            return self.note_change(place, change);
        }
        // At most twice: closing or forgiving a place makes space.
        let change = loop {
            if let Some(change) = self.owed.owe(place, key.hash, self.pace.removals_owed) {
                break change;
            }
            let largest = self.owed.largest(place);
            if catalog.is_live(largest.space) {
                self.close(catalog, largest, out);
            } else {
                self.forgive(largest, out);
            }
        };
        self.note_change(place, change);
    }

    /// Closes the space with the most owed removals of a part of a tier that owes too many.
    fn close(&mut self, catalog: &Catalog, place: Place, out: &mut Effects) {
        let (change, debts) = self.owed.close(place);
        self.note_change(place, change);
        discard(debts, out);
        let any = PoolKey { space: place.space, hash: BlockHash([0; 16]) };
        let namespace = catalog.block_key(&any).namespace;
        out.closed.push(Closed { tier: place.tier, part: place.part, namespace });
        if self.flaws.has(Flaw::ClosedTierUsed) {
            self.forgive(place, out);
        }
    }

    fn note_change(&mut self, place: Place, change: Change) {
        match change {
            Change::Began => self.uses.hold(place.space),
            Change::Ended => self.uses.let_go(place.space),
            Change::Neither => {}
        }
    }

    fn forgive(&mut self, place: Place, out: &mut Effects) {
        if let Some(debts) = self.owed.forgive(place) {
            discard(debts, out);
            self.uses.let_go(place.space);
        }
    }

    /// Retries owed removals every few ticks, some keys at a time. Removals of blocks that can no longer be requested
    /// are dropped.
    pub(super) fn retry_removals(&mut self, catalog: &Catalog, out: &mut Effects) {
        self.owed.ticks += 1;
        if self.owed.ticks < self.pace.removal_retry_ticks {
            return;
        }
        self.owed.ticks = 0;
        let mut looks = self.pace.queue_entries;
        for _ in 0..self.owed.places().min(looks) {
            let Some(place) = self.owed.next_place().filter(|_| looks > 0) else { return };
            looks -= 1;
            if !catalog.is_live(place.space) {
                self.forgive(place, out);
                continue;
            }
            for hash in self.owed.next_blocks(place, looks.max(1)) {
                looks = looks.saturating_sub(1);
                let key = PoolKey { space: place.space, hash };
                if self.turns.contains_key(&key) {
                    continue;
                }
                let id = self.next_removal();
                if self.owed.try_again(place, &hash, id) {
                    self.command_removals(catalog, bit(place.tier), id, &key, out);
                    self.begin_apart(id, Apart { tier: place.tier, key, owed: Some(place) });
                }
            }
        }
    }

    /// Returns the requests whose removals have ended since the last call.
    pub(crate) fn take_removed(&mut self) -> Vec<(Token, bool)> {
        std::mem::take(&mut self.removed)
    }

    /// The mistake: ends are assumed to come in the order in which removals were sent.
    fn oldest_apart(&self, tier: TierIndex, key: &PoolKey) -> RemovalId {
        let mine = |apart: &Apart| apart.key == *key && apart.tier == tier;
        self.apart.iter().filter(|(_, apart)| mine(apart)).map(|(&id, _)| id).min().unwrap_or(0)
    }
}

/// Passes memory on, to be freed outside of the step.
fn discard(debts: Debts, out: &mut Effects) {
    if !debts.is_empty() {
        out.discarded.push(Discarded::new(Box::new(debts)));
    }
}
