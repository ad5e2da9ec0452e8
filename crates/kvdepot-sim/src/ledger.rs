//! The ledger of a pool that outlives its depot. A crash may come at any moment, so after every step, whatever is in
//! flight, each record that a next depot would take over must be of a block that lookups find now, in the memory where
//! its bytes are.

use std::collections::BTreeMap;

use kvdepot_core::SlotId;
use kvdepot_core::machine::{Proof, Whole};

use crate::fail::{Fail, Rule, fail};
use crate::mistakes::Mistake;
use crate::model::{crc_of, name};
use crate::world::World;

/// The simulated ledger; see the module.
#[derive(Debug, Default)]
pub(crate) struct SimLedger {
    records: BTreeMap<SlotId, Whole>,
    /// Records that are written too late, by mistake.
    late: Vec<Proof>,
}

impl SimLedger {
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Returns the records that the next depot finds. The depot that wrote them has exited.
    pub(crate) fn take(&mut self) -> Vec<Whole> {
        std::mem::take(self).records.into_values().collect()
    }

    fn apply(&mut self, proofs: Vec<Proof>) {
        for proof in proofs {
            match proof {
                Proof::Whole(block) => drop(self.records.insert(block.slot, block)),
                Proof::Gone(slot) => drop(self.records.remove(&slot)),
                Proof::Wanted(_) => {}
            }
        }
    }
}

impl World {
    /// Writes a step's records, and checks what the next depot would find.
    pub(crate) fn write_ledger(&mut self, proofs: Vec<Proof>) -> Result<(), Fail> {
        let now = match self.mistake {
            Some(Mistake::LedgerLate) => std::mem::replace(&mut self.ledger.late, proofs),
            _ => proofs,
        };
        self.ledger.apply(now);
        for block in self.ledger.records.values() {
            if self.live_space(&block.key).is_none() {
                continue;
            }
            let tags = self.memory.tags(&block.runs);
            // Blocks that the checksum does not prove are left out.
            let is_proven = tags.first().is_some_and(|tag| block.crc64 == crc_of((tag >> 8) as usize))
                && self.model.version(&block.key, &tags).is_ok();
            if is_proven && !self.presence.contains(&block.key) {
                return fail(
                    Rule::Stale,
                    format!("the ledger has {} in slot {}, which is gone", name(&block.key), block.slot),
                );
            }
            if self.presence.contains(&block.key) && tags.first() != Some(&crate::memory::POISON) && is_proven
            {
                self.reached.insert("recorded");
            }
        }
        Ok(())
    }
}
