//! Removals that a tier could not carry out. The tier may still have the block, so until a later try succeeds, or nobody can
//! ask for the block any more, no tier is asked for it and the tier is not given what is stored under its key (P1).

use std::collections::VecDeque;

use hashbrown::HashMap;

use crate::error::{Error, ErrorKind, Result};

use super::catalog::Catalog;
use super::event::{Command, Effects, TierIndex};
use super::flaw::Flaw;
use super::flow::{Flow, bit};
use super::names::PoolKey;
use super::slots::TierMask;

/// What tiers owe of one key.
#[derive(Clone, Copy, Debug, Default)]
struct Debt {
    /// Tiers that may still have the block.
    tiers: TierMask,
    /// Of these, those that are asked again now.
    asked: TierMask,
}

/// All of it. Bounded: while there is too much, removals are refused.
#[derive(Clone, Debug, Default)]
pub(super) struct Owed {
    keys: HashMap<PoolKey, Debt>,
    /// The keys, in the order in which they are tried again.
    order: VecDeque<PoolKey>,
    /// Ticks since the last tries.
    ticks: u32,
}

impl Owed {
    pub(super) fn len(&self) -> usize {
        self.keys.len()
    }

    pub(super) fn has(&self, key: &PoolKey) -> bool {
        self.keys.contains_key(key)
    }

    /// Tiers that may still have what was removed under a key.
    pub(super) fn tiers(&self, key: &PoolKey) -> TierMask {
        self.keys.get(key).map_or(0, |debt| debt.tiers)
    }
}

impl Flow {
    /// Removals that tiers owe.
    pub(crate) fn removals_owed(&self) -> usize {
        self.owed.len()
    }

    /// Whether a removal may begin, or a value be replaced: `Busy` while so many removals are owed.
    pub(crate) fn may_remove(&self) -> Result<()> {
        if self.owed.len() < self.pace.removals_owed {
            return Ok(());
        }
        let what = "tiers owe too many removals that they could not carry out: look why they fail";
        Err(Error::new(ErrorKind::Busy, what).with("removals_owed", self.owed.len()))
    }

    /// A tier has carried a removal out, or could not.
    pub(super) fn note_removal(&mut self, key: PoolKey, tier: TierIndex, is_made: bool) {
        if is_made || self.flaws.has(Flaw::FailedRemovalCounts) {
            let Some(debt) = self.owed.keys.get_mut(&key) else { return };
            debt.tiers &= !bit(tier);
            self.forgive_if_paid(key);
            return;
        }
        if !self.owed.has(&key) {
            self.owed.order.push_back(key);
            self.uses.hold(key.space);
        }
        self.owed.keys.entry(key).or_default().tiers |= bit(tier);
    }

    /// Takes the end of a removal that was tried again: whether it was one.
    pub(super) fn retry_ended(&mut self, key: PoolKey, tier: TierIndex, is_made: bool) -> bool {
        let Some(debt) = self.owed.keys.get_mut(&key).filter(|debt| debt.asked & bit(tier) != 0) else {
            return false;
        };
        debt.asked &= !bit(tier);
        if is_made {
            debt.tiers &= !bit(tier);
        }
        self.forgive_if_paid(key);
        true
    }

    fn forgive_if_paid(&mut self, key: PoolKey) {
        if self.owed.keys.get(&key).is_some_and(|debt| debt.tiers == 0 && debt.asked == 0) {
            self.owed.keys.remove(&key);
            self.uses.let_go(key.space);
        }
    }

    /// Asks tiers again, every few ticks and for some keys at a time. What nobody can ask for any more is let go.
    pub(super) fn retry_removals(&mut self, catalog: &Catalog, out: &mut Effects) {
        self.owed.ticks += 1;
        if self.owed.ticks < self.pace.removal_retry_ticks {
            return;
        }
        self.owed.ticks = 0;
        for _ in 0..self.owed.order.len().min(self.pace.queue_entries) {
            let Some(key) = self.owed.order.pop_front() else { return };
            let is_leaving = self.has_turn(&key);
            let Some(debt) = self.owed.keys.get_mut(&key) else { continue };
            self.owed.order.push_back(key);
            if debt.asked != 0 || is_leaving {
                continue;
            }
            if !catalog.is_live(key.space) {
                debt.tiers = 0;
                self.forgive_if_paid(key);
                continue;
            }
            debt.asked = debt.tiers;
            for tier in (0..TierMask::BITS as TierIndex).filter(|&tier| debt.tiers & bit(tier) != 0) {
                out.commands.push(Command::Remove { tier, key: catalog.block_key(&key) });
            }
        }
    }
}
