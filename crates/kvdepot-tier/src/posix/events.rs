//! Events for the depot above: files that were evicted, and files found to be missing or corrupt.

use std::sync::{Arc, Weak};

use kvdepot_core::BlockKey;
use kvdepot_core::limits::TIER_EVENTS_MAX;

use super::state::{Shared, State};
use crate::TierEvents;

/// Events waiting to be delivered; nothing is collected before a listener is attached.
#[derive(Debug, Default)]
pub(super) struct Events {
    attached: bool,
    evicted: Vec<BlockKey>,
    lost: Vec<BlockKey>,
}

impl Events {
    pub(super) fn evicted(&mut self, key: BlockKey) {
        if self.attached && self.evicted.len() < TIER_EVENTS_MAX {
            self.evicted.push(key);
        }
    }

    pub(super) fn lost(&mut self, key: BlockKey) {
        if self.attached && self.lost.len() < TIER_EVENTS_MAX {
            self.lost.push(key);
        }
    }

    const fn is_empty(&self) -> bool {
        self.evicted.is_empty() && self.lost.is_empty()
    }

    fn take(&mut self) -> (Vec<BlockKey>, Vec<BlockKey>) {
        (std::mem::take(&mut self.evicted), std::mem::take(&mut self.lost))
    }
}

impl Shared {
    pub(super) fn attach(&self, listener: Weak<dyn TierEvents>) {
        *self.listener.lock() = Some(listener);
        self.lock().events.attached = true;
    }

    /// Delivers the collected events. The caller must not hold a lock of the tier.
    pub(super) fn deliver_events(&self) {
        let (evicted, lost) = {
            let mut state = self.lock();
            if state.events.is_empty() {
                return;
            }
            state.events.take()
        };
        // The clone releases the lock before the call.
        let listener = self.listener.lock().as_ref().and_then(Weak::upgrade);
        let Some(listener): Option<Arc<dyn TierEvents>> = listener else {
            self.lock().events.attached = false;
            return;
        };
        if !evicted.is_empty() {
            listener.evicted(&evicted);
        }
        if !lost.is_empty() {
            listener.lost(&lost);
        }
    }
}

impl State {
    /// Forgets a file that was found to be missing or corrupt, unless it is younger than `generation`.
    pub(super) fn lose(&mut self, key: &BlockKey, generation: u64) {
        if self.index.get(key).is_some_and(|entry| entry.generation <= generation)
            && let Some(taken) = self.take(key)
        {
            self.uncharge_missing(taken.entry.bytes);
            self.events.lost(*key);
        }
        if self.index.get(key).is_none() {
            self.note_absent(*key);
        }
    }
}
