//! What a ledger of the pool is told. A ledger is memory that outlives the depot's process; the next depot takes over
//! what it proves, and nothing else.
//!
//! A block's record comes with its checksum, and goes before anybody can learn that the block is gone, or reuse its place:
//! both are effects of the same step, and whoever runs the machine applies them before anything else of that step (P1).
//! Values have no record: one that was replaced looks as whole as the one that replaced it.

use super::Machine;
use super::flaw::{Flaw, Flaws};
use super::records::{Proof, Whole};
use crate::eviction::SlotId;

/// What became of a slot, for the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// Lookups find it.
    Visible,
    /// Its checksum was told.
    Proven,
    /// Lookups do not find it any more.
    Gone,
}

/// Changes since the last look; none where no ledger is kept.
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

impl Machine {
    /// From now on steps say what a ledger is to be told.
    pub const fn keep_ledger(&mut self) {
        self.pool.proofs.keep();
    }

    /// What the ledger is told of a step: each change, as the slot stands at the step's end.
    pub(super) fn prove(&mut self, out: &mut Vec<Proof>) {
        for (id, change) in self.pool.proofs.take() {
            if change == Change::Gone {
                out.push(Proof::Gone(id));
                continue;
            }
            let Some(slot) = self.pool.get(id).filter(|slot| slot.standing().visible && !slot.is_value())
            else {
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
                // A checksum of 0 counts as not known: that block is not recorded.
                None => {}
            }
        }
    }
}
