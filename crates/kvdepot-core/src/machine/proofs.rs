//! Changes of slots that a ledger of the pool must know.

use super::flaw::{Flaw, Flaws};
use crate::eviction::SlotId;

/// Change of a slot that a ledger must know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// Lookups find it.
    Visible,
    /// Its checksum is known.
    Proven,
    /// Lookups no longer find it.
    Gone,
}

/// Changes since the last call; empty if no ledger is kept.
#[derive(Debug, Default)]
pub(crate) struct Proofs {
    is_kept: bool,
    changes: Vec<(SlotId, Change)>,
}

impl Proofs {
    pub(crate) fn note(&mut self, id: SlotId, change: Change, flaws: Flaws) {
        if self.is_kept && !(change == Change::Gone && flaws.has(Flaw::RecordKept)) {
            self.changes.push((id, change));
        }
    }

    pub(crate) const fn keep(&mut self) {
        self.is_kept = true;
    }

    pub(crate) fn take(&mut self) -> Vec<(SlotId, Change)> {
        std::mem::take(&mut self.changes)
    }
}
