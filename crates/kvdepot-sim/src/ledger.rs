//! The simulated ledger of a pool that outlives its depot.

use std::collections::BTreeMap;

use kvdepot_core::SlotId;
use kvdepot_core::machine::{Proof, Whole};

/// The records that a next depot would find.
#[derive(Debug, Default)]
pub(crate) struct SimLedger {
    pub(crate) records: BTreeMap<SlotId, Whole>,
    /// Records that are written too late, by mistake.
    pub(crate) late: Vec<Proof>,
}

impl SimLedger {
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Returns the records that the next depot finds. The depot that wrote them has exited.
    pub(crate) fn take(&mut self) -> Vec<Whole> {
        std::mem::take(self).records.into_values().collect()
    }

    pub(crate) fn apply(&mut self, proofs: Vec<Proof>) {
        for proof in proofs {
            match proof {
                Proof::Whole(block) => drop(self.records.insert(block.slot, block)),
                Proof::Gone(slot) => drop(self.records.remove(&slot)),
                Proof::Wanted(_) => {}
            }
        }
    }
}
