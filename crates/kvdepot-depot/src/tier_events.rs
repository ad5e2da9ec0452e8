//! Unsolicited reports of tiers, as events for the machine.

use std::fmt;
use std::sync::{Arc, Weak};

use kvdepot_core::BlockKey;
use kvdepot_core::machine::{Event, TierIndex};
use kvdepot_tier::TierEvents;

use crate::death::DeathGuard;
use crate::runner::Runner;

/// Number of blocks in one event, which bounds a step of the machine.
const KEYS_PER_EVENT: usize = 128;

/// Receives the reports of one tier. Tiers hold it weakly, and the depot keeps it.
pub(crate) struct Listener {
    runner: Weak<Runner>,
    tier: TierIndex,
}

impl Listener {
    /// Makes every tier of a runner report to it.
    pub(crate) fn attach_all(runner: &Arc<Runner>) -> Vec<Arc<Self>> {
        let listeners = runner.locator.tiers.iter().enumerate().map(|(tier, attached)| {
            let listener = Arc::new(Self { runner: Arc::downgrade(runner), tier });
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
        locator.events.tier_changed(self.tier, &*locator.tiers[self.tier], keys, false);
        for keys in keys.chunks(KEYS_PER_EVENT) {
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
