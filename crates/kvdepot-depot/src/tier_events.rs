//! Unsolicited reports of tiers, as events for the machine.

use std::fmt;
use std::sync::{Arc, Weak};

use kvdepot_core::BlockKey;
use kvdepot_core::machine::{Event, TierIndex};
use kvdepot_tier::{Presence, TierEvents};

use crate::death::DeathGuard;
use crate::runner::Runner;

/// Number of blocks in one event, which bounds a step of the machine.
const KEYS_PER_EVENT: usize = 128;

/// Receives the reports of one tier. Tiers hold it weakly, and the depot keeps it.
pub(crate) struct Listener {
    runner: Weak<Runner>,
    tier: TierIndex,
    /// The tier that gets the blocks that this one evicts.
    demotes_to: Option<TierIndex>,
}

impl Listener {
    /// Makes every tier of a runner report to it. `demotes_to`: for each, the tier that gets the blocks that it evicts.
    pub(crate) fn attach_all(runner: &Arc<Runner>, demotes_to: Vec<Option<TierIndex>>) -> Vec<Arc<Self>> {
        let tiers = runner.locator.tiers.iter().enumerate().zip(demotes_to);
        let listeners = tiers.map(|((tier, attached), demotes_to)| {
            let listener = Arc::new(Self { runner: Arc::downgrade(runner), tier, demotes_to });
            let weak: Weak<Self> = Arc::downgrade(&listener);
            attached.attach(weak);
            listener
        });
        listeners.collect()
    }

    fn forgot(&self, keys: &[BlockKey], lost: bool) {
        let Some(runner) = self.runner.upgrade() else { return };
        let _guard = DeathGuard(&runner.life);
        let locator = &runner.locator;
        for keys in keys.chunks(KEYS_PER_EVENT) {
            locator.events.tier_changed(self.tier, &*locator.tiers[self.tier], keys, false);
            // A tier's own thread must not wait for the tiers.
            runner.tell_and_leave(Event::TierForgot { tier: self.tier, keys: keys.to_vec(), lost });
        }
    }

    fn changed(&self, event: Event) {
        let Some(runner) = self.runner.upgrade() else { return };
        let _guard = DeathGuard(&runner.life);
        runner.locator.events.look_anew();
        runner.tell_and_leave(event);
    }
}

impl TierEvents for Listener {
    fn evicted(&self, keys: &[BlockKey]) {
        self.forgot(keys, false);
    }

    fn asks_for_cooling(&self) -> bool {
        self.demotes_to.is_some()
    }

    fn cooling(&self, keys: &[BlockKey]) {
        let (Some(to), Some(runner)) = (self.demotes_to, self.runner.upgrade()) else { return };
        let _guard = DeathGuard(&runner.life);
        let mut there = Vec::new();
        for keys in keys.chunks(KEYS_PER_EVENT) {
            runner.locator.tiers[to].peek(keys, &mut there);
            let absent = keys.iter().zip(&there).filter(|(_, there)| **there != Presence::Present);
            let keys: Vec<BlockKey> = absent.map(|(key, _)| *key).collect();
            if !keys.is_empty() {
                runner.tell_and_leave(Event::TierCooling { tier: self.tier, keys });
            }
        }
    }

    fn lost(&self, keys: &[BlockKey]) {
        self.forgot(keys, true);
    }

    /// The tier's guard logs it and answers for the tier meanwhile.
    fn went_down(&self) {
        self.changed(Event::WentDown { tier: self.tier });
    }

    fn came_back(&self) {
        self.changed(Event::CameBack { tier: self.tier });
    }

    fn lost_memory(&self) {
        self.changed(Event::LostMemory { tier: self.tier });
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Listener(tier {})", self.tier)
    }
}
