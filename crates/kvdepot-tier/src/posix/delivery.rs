//! Delivers the events to the depot above.

use std::sync::{Arc, Weak};

use super::shared::Shared;
use crate::TierEvents;

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
