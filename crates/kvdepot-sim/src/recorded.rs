//! The ledger of a pool that outlives its depot. A crash may come at any moment, so after every step, whatever is in
//! flight, each record that a next depot would take over must be of a block that lookups find now, in the memory where
//! its bytes are.

use kvdepot_core::machine::Proof;

use crate::fail::{Fail, Rule, fail};
use crate::memory::POISON;
use crate::mistakes::Mistake;
use crate::model::{crc_of, name};
use crate::world::World;

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
            if self.presence.contains(&block.key) && tags.first() != Some(&POISON) && is_proven {
                self.reached.insert("recorded");
            }
        }
        Ok(())
    }
}
