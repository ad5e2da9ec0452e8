//! What is said of slots to those outside: to the machine of another depot, and to a ledger. All of it is data.

use serde::{Deserialize, Serialize};

use super::tiers::TierMask;
use crate::eviction::SlotId;
use crate::key::BlockKey;
use crate::runs::Runs;

/// Who leases slots: a connection.
pub type Owner = u64;

/// A slot as a machine hands it over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handed {
    /// Its place in the pool.
    pub runs: Runs,
    /// What is in it.
    pub state: HandedState,
    /// Which holders have it leased, by their places in the list that the machine was given.
    pub holders: Vec<u32>,
}

/// What is in a slot that is handed over.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HandedState {
    /// A whole block.
    Block {
        /// Its key, with the epoch under which it was sealed.
        key: BlockKey,
        /// Tiers that hold it, a bit each.
        saved: TierMask,
        /// Tiers that are to have it still. Of these, only those that are written through are told at once.
        to_write: TierMask,
        /// Whether it is a value, which can be replaced.
        value: bool,
        /// Its CRC-64/NVME, where it is known.
        crc64: Option<u64>,
    },
    /// Nothing that anybody may read, but a holder may still copy into it or out of it.
    Busy,
}

/// A slot to be taken in.
#[derive(Clone, Debug)]
pub struct Adopt {
    /// The slot.
    pub handed: Handed,
    /// Who holds it now, in place of the holders.
    pub owners: Vec<Owner>,
}

/// A line for the ledger.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Proof {
    /// A block can be read whose checksum nobody knows yet: to be found out, and told by `SetChecksum`.
    Wanted(BlockKey),
    /// A whole block.
    Whole(Whole),
    /// What a slot held cannot be read any more.
    Gone(SlotId),
}

/// A block that can be proved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Whole {
    /// Its slot.
    pub slot: SlotId,
    /// Its key.
    pub key: BlockKey,
    /// Its place in the pool.
    pub runs: Runs,
    /// Its bytes, which the checksum is of.
    pub block_bytes: u64,
    /// Its CRC-64/NVME.
    pub crc64: u64,
}
