//! Descriptions of slots for the machine of another depot and for a ledger. All of it is plain data.

use serde::{Deserialize, Serialize};

use super::tiers::TierMask;
use crate::eviction::SlotId;
use crate::key::BlockKey;
use crate::priority::Priority;
use crate::runs::Runs;

pub use crate::ids::Owner;

/// A slot as a machine hands it over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handed {
    /// Its memory in the pool.
    pub runs: Runs,
    /// Its state.
    pub state: HandedState,
    /// The holders that have it leased, as indexes into the list that the machine got.
    pub holders: Vec<u32>,
}

/// State of a slot that is handed over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HandedState {
    /// A complete block.
    Block {
        /// Its key, with the epoch under which it was sealed.
        key: BlockKey,
        /// Tiers that have it, one bit each.
        saved: TierMask,
        /// Tiers that have yet to get it. Of these, only those with write-through get it immediately.
        to_write: TierMask,
        /// Whether it is a value, which can be replaced.
        value: bool,
        /// Its CRC-64/NVME, if known.
        crc64: Option<u64>,
        /// Its priority. A block of low priority is written to no tier before its next use.
        priority: Priority,
    },
    /// Nothing that may be read, but a holder may still copy into it or out of it.
    Busy,
}

/// A slot to adopt.
#[derive(Clone, Debug)]
pub struct Adopt {
    /// The slot.
    pub handed: Handed,
    /// Its owners here, in place of the holders.
    pub owners: Vec<Owner>,
}

/// A record for the ledger.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Proof {
    /// A block became readable, but its checksum is unknown: compute it, and report it by `SetChecksum`.
    Wanted(BlockKey),
    /// A complete block.
    Whole(Whole),
    /// The contents of a slot are no longer readable.
    Gone(SlotId),
}

/// A block that can be proved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Whole {
    /// Its slot.
    pub slot: SlotId,
    /// Its key.
    pub key: BlockKey,
    /// Its memory in the pool.
    pub runs: Runs,
    /// Number of bytes that the checksum covers.
    pub block_bytes: u64,
    /// Its CRC-64/NVME.
    pub crc64: u64,
}
