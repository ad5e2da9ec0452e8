//! Delivers the events to the depot above.

use std::sync::{Arc, Weak};

use super::shared::Shared;
use crate::TierEvents;
use crate::cooling::{AHEAD, Cooling};

impl Shared {
    pub(super) fn attach(&self, listener: Weak<dyn TierEvents>) {
        let cooling = Cooling::for_listener(&listener);
        *self.listener.lock() = Some(listener);
        let mut state = self.lock();
        state.events.attached = true;
        state.events.cooling = cooling;
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
            self.tell_cooling(&*listener, evicted.len());
        }
        if !lost.is_empty() {
            listener.lost(&lost);
        }
    }

    /// Reports what is evicted next, after some evictions.
    fn tell_cooling(&self, listener: &dyn TierEvents, evicted: usize) {
        let keys = {
            let state = &mut *self.lock();
            let Some(cooling) = &mut state.events.cooling else { return };
            cooling.evicted(evicted);
            let coldest = if cooling.is_due() { state.index.coldest_files(AHEAD) } else { return };
            cooling.report(coldest.into_iter())
        };
        if !keys.is_empty() {
            listener.cooling(&keys);
        }
    }
}
