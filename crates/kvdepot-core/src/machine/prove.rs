//! Records for a ledger of the pool. A ledger is memory that outlives the depot's process. The next depot takes over
//! the blocks that it proves, and nothing else.
//!
//! A block's record is added with its checksum. It is removed before anybody can learn that the block has left, or
//! reuse its memory: both are effects of the same step, and the runner of the machine applies them before any other
//! effect of that step (P1). Values have no record, because a value that was replaced looks as complete as its
//! replacement. Neither have blocks of low priority that nobody has used: the next depot would write them to its tiers.

use super::Machine;
use super::proofs::Change;
use super::records::{Proof, Whole};
use super::slots::Slot;
use crate::priority::Priority;

impl Machine {
    /// Makes steps report the changes for a ledger from now on.
    pub const fn keep_ledger(&mut self) {
        self.pool.proofs.keep();
    }

    /// Reports a step's changes to the ledger, each with the state of the slot at the step's end.
    pub(super) fn prove(&mut self, out: &mut Vec<Proof>) {
        for (id, change) in self.pool.proofs.take() {
            if change == Change::Gone {
                out.push(Proof::Gone(id));
                continue;
            }
            let is_low = self.pool.priority(id) == Priority::Low;
            let is_recorded =
                |slot: &&Slot| slot.standing().visible && !slot.is_value() && !slot.is_in_place() && !is_low;
            let Some(slot) = self.pool.get(id).filter(is_recorded) else {
                continue;
            };
            let key = self.catalog.block_key(&slot.key);
            let Some(namespace) = self.catalog.by_id(key.namespace) else { continue };
            match slot.crc64() {
                Some(crc64) => out.push(Proof::Whole(Whole {
                    slot: id,
                    key,
                    runs: slot.runs(),
                    block_bytes: namespace.spec.layout().block_bytes(),
                    crc64,
                })),
                None if change == Change::Visible => out.push(Proof::Wanted(key)),
                // A checksum of 0 counts as unknown: that block is not recorded.
                None => {}
            }
        }
    }
}
