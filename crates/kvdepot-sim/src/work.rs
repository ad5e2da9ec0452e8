//! What tiers are doing.

use kvdepot_core::machine::{Ask, Nanos, RemovalId};
use kvdepot_core::runs::Runs;
use kvdepot_core::{BlockKey, SlotId};

/// An operation that a tier has begun.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) number: u64,
    pub(crate) tier: usize,
    pub(crate) work: Work,
    /// It hangs until this operation of the plan.
    pub(crate) until: usize,
}

#[derive(Debug)]
pub(crate) enum Work {
    Read {
        slot: SlotId,
        key: BlockKey,
        runs: Runs,
        deadline: Nanos,
        begun: Option<Vec<u64>>,
    },
    Lease {
        slot: SlotId,
        key: BlockKey,
        deadline: Nanos,
        begun: Option<Vec<u64>>,
    },
    /// `half`: the part of the slot that the tier has read so far.
    Write {
        slot: SlotId,
        key: BlockKey,
        runs: Runs,
        half: Vec<u64>,
    },
    Remove {
        id: RemovalId,
        key: BlockKey,
    },
    Probe {
        ask: Ask,
        keys: Vec<BlockKey>,
    },
}
