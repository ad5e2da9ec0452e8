//! Probes that tiers have not answered, so that one that hangs is abandoned in time.

use std::collections::BTreeMap;
use std::time::Instant;

use kvdepot_core::machine::Ask;
use parking_lot::Mutex;

/// Unanswered probes by deadline: a tier that hangs must leave the others their time (P2).
#[derive(Debug, Default)]
pub(crate) struct Probes {
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    numbers_ever: u64,
    /// By deadline and number.
    asks: BTreeMap<(Instant, u64), Ask>,
}

impl Probes {
    pub(crate) fn begin(&self, deadline: Instant, ask: Ask) -> (Instant, u64) {
        let mut open = self.open.lock();
        open.numbers_ever += 1;
        let probe = (deadline, open.numbers_ever);
        open.asks.insert(probe, ask);
        probe
    }

    /// Ends a probe. Returns whether it had not ended before.
    pub(crate) fn end(&self, probe: (Instant, u64)) -> bool {
        self.open.lock().asks.remove(&probe).is_some()
    }

    pub(crate) fn overdue(&self, now: Instant) -> Option<Ask> {
        let mut open = self.open.lock();
        let entry = open.asks.first_entry()?;
        (entry.key().0 <= now).then(|| entry.remove())
    }
}
