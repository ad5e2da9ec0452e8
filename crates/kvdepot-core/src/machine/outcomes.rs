//! What a request for many blocks says of each of them.

use crate::error::ErrorKind;
use crate::eviction::SlotId;
use crate::lease::LeaseId;
use crate::runs::Runs;

/// A slot leased to a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leased {
    /// The lease on it.
    pub lease: LeaseId,
    /// Its number.
    pub slot: SlotId,
    /// Its memory in the pool.
    pub runs: Runs,
    /// Number of bytes of the block in it.
    pub block_bytes: u64,
    /// The block's CRC-64/NVME, if known.
    pub crc64: Option<u64>,
}

/// Outcome for one block of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The slot is leased: for writing, or for reading.
    Leased(Leased),
    /// The depot already has the block, or another client is dumping it.
    Have,
    /// Refused, with the reason.
    Refused(ErrorKind),
}

/// State of one block of a load.
#[derive(Clone, Debug)]
pub(crate) enum Want {
    /// Not in the pool; the tiers were not asked.
    Unlocated,
    /// A tier may have it, but there was no space in the pool.
    NoRoom(usize),
    /// A tier is reading it.
    Arriving,
    Leased(Leased),
    /// In the pool, but one answer cannot name more runs.
    Unnamed,
    Missed(ErrorKind),
}

/// What a load has got. The outcomes of its blocks are listed outside of the depot's lock.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// States of the first blocks; the load has not reached the others.
    wants: Vec<Want>,
    blocks: usize,
    /// Why blocks that have not arrived are refused.
    late: ErrorKind,
}

impl Loaded {
    pub(crate) const fn new(wants: Vec<Want>, blocks: usize, late: ErrorKind) -> Self {
        Self { wants, blocks, late }
    }

    /// Returns the outcome of each block, in the order of the request.
    pub fn outcomes(self) -> Vec<Outcome> {
        let Self { wants, blocks, late } = self;
        let mut outcomes = Vec::with_capacity(blocks);
        outcomes.extend(wants.into_iter().map(|want| match want {
            Want::Leased(leased) => Outcome::Leased(leased),
            Want::Missed(kind) => Outcome::Refused(kind),
            Want::Unnamed => Outcome::Refused(ErrorKind::NoSpace),
            Want::Unlocated | Want::NoRoom(_) | Want::Arriving => Outcome::Refused(late),
        }));
        outcomes.resize_with(blocks, || Outcome::Refused(late));
        outcomes
    }
}
