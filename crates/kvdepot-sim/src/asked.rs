//! What requests asked for, until their replies come.

use kvdepot_core::machine::{Owner, TierSet};
use kvdepot_core::{BlockKey, LeaseId};

use crate::client::Wish;

/// A request without a reply so far.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) owner: Owner,
    pub(crate) asked: Asked,
}

/// Kind of a request.
#[derive(Debug)]
pub(crate) enum Asked {
    /// A request whose reply only says that it is done.
    Done,
    Reserve {
        keys: Vec<BlockKey>,
        pages: usize,
        value: bool,
    },
    /// Shards of each lease; `true`: all of them.
    Commit {
        leases: Vec<LeaseId>,
        shards: Vec<usize>,
        all: bool,
    },
    Publish {
        lease: LeaseId,
        others: Vec<BlockKey>,
    },
    Load {
        keys: Vec<BlockKey>,
    },
    LeaseNow {
        keys: Vec<BlockKey>,
    },
    /// Keys, and whether a tier was writing each at that time.
    Remove {
        keys: Vec<(BlockKey, bool)>,
        gone: Vec<usize>,
    },
    Claim(Wish),
    /// A claim, and the time of the request: its patience counts from then, however late the reply comes.
    Poll(u64, u64),
    /// When a claim that may be loaded from these tiers got how far.
    Times(TierSet),
    Drain {
        writes: Vec<u64>,
    },
    Keys {
        from: usize,
    },
    /// A request that must be refused.
    Refusal,
    /// A request for a forgotten namespace, under the number that it had: it must be refused or miss (P1).
    Forgotten,
    /// A client opens a namespace: allowed up to its limit.
    Use,
    /// A request that may have any reply.
    Odd,
}

impl Asked {
    /// Returns whether it stores a value.
    pub(crate) const fn publishes(&self) -> bool {
        matches!(self, Self::Publish { .. })
    }

    /// Returns the pages of each slot that it reserves.
    pub(crate) const fn pages(&self) -> Option<usize> {
        match self {
            Self::Reserve { pages, .. } => Some(*pages),
            _ => None,
        }
    }

    /// Returns whether the reply may come later.
    pub(crate) const fn waits(&self) -> bool {
        matches!(
            self,
            Self::Load { .. }
                | Self::Remove { .. }
                | Self::Claim(_)
                | Self::Poll(..)
                | Self::Drain { .. }
                | Self::Odd
        )
    }

    /// Returns the request for the blocks after the first `taken`.
    pub(crate) fn of_rest(&self, taken: usize) -> Self {
        match self {
            Self::Reserve { keys, pages, value } => {
                Self::Reserve { keys: keys[taken..].to_vec(), pages: *pages, value: *value }
            }
            Self::Commit { leases, shards, all } => {
                Self::Commit { leases: leases[taken..].to_vec(), shards: shards.clone(), all: *all }
            }
            Self::LeaseNow { keys } => Self::LeaseNow { keys: keys[taken..].to_vec() },
            Self::Refusal => Self::Refusal,
            Self::Forgotten => Self::Forgotten,
            Self::Odd => Self::Odd,
            _ => Self::Done,
        }
    }
}
