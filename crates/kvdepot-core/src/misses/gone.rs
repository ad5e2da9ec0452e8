//! What went, and what a claim did not find.

use std::sync::Arc;

use crate::ids::{Owner, TierIndex, TierSet};
use crate::key::{BlockKey, NamespaceId};

/// What became of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Fate {
    /// It made room for others.
    Evicted = 1,
    /// A tier found it damaged, or does not have it any more.
    Lost = 2,
    /// It was never taken: its dump found the pool full, or too full of blocks that tiers had not written.
    Dropped = 3,
    /// No tier could write it, so that only the pool had it.
    WriteFailed = 4,
    /// A tier could not read it.
    ReadFailed = 5,
    /// A tier read it, and its checksum differed.
    Checksum = 6,
    /// A tier did not read it in time.
    TooSlow = 7,
    /// Its namespace was reset.
    Reset = 8,
    /// Its namespace was forgotten for another one, and no tier had it.
    Forgotten = 9,
    /// A client removed it.
    Removed = 10,
    /// It was not written because the budget of written bytes was used up, so that only the pool had it.
    OverBudget = 11,
}

impl Fate {
    pub(super) const ALL: [Self; 11] = [
        Self::Evicted,
        Self::Lost,
        Self::Dropped,
        Self::WriteFailed,
        Self::ReadFailed,
        Self::Checksum,
        Self::TooSlow,
        Self::Reset,
        Self::Forgotten,
        Self::Removed,
        Self::OverBudget,
    ];

    pub(super) fn from_byte(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|fate| *fate as u8 == byte)
    }

    /// Returns whether this says more about a block than `next`, which follows `after_s` seconds later. `in_pool`: the pool
    /// lost it then, not a tier.
    pub(super) const fn outlives(self, next: Self, in_pool: bool, after_s: u32) -> bool {
        match (self, next) {
            // The pool reports evictions only of blocks that no tier has: the reason is why none has it. A tier that
            // evicts a block did have it.
            (Self::WriteFailed | Self::OverBudget, Self::Evicted) => in_pool,
            // One event: the tier reports it in two ways, or the tier that is asked next does not have the block either.
            (Self::Checksum | Self::ReadFailed | Self::TooSlow | Self::Lost, Self::Lost) => {
                after_s <= SAME_EVENT_S
            }
            _ => false,
        }
    }
}

/// How far apart a tier's two words about one block may come.
const SAME_EVENT_S: u32 = 60;

/// A block that is not there any more, or not in a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gone {
    /// The block. Of a namespace that was reset, the namespace's root stands in place of the id that keys carried.
    pub key: BlockKey,
    /// What became of it.
    pub fate: Fate,
    /// The tier that it is gone from; None: the pool.
    pub tier: Option<TierIndex>,
    /// How long it had been in the pool, in seconds, about; None where that is not known.
    pub kept_s: Option<u32>,
}

/// What kept a claim's hit from being longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Short {
    /// The block was neither in the pool nor in a tier that the claim may be loaded from, or was lost on its way: the ghosts
    /// know more.
    Absent,
    /// A client was storing it.
    BeingStored,
    /// It had not come, or no tier had said whether it has it, when the claim's time was over.
    TooSlow,
    /// As `TooSlow`; the client would compute it sooner than wait.
    NotWorthIt,
    /// The pool had no room for it.
    NoRoom,
    /// A tier that the claim may not be loaded from had it in its memory, or was reading it.
    Excluded,
}

/// A claim that found less than it asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missed {
    /// The claim's connection.
    pub owner: Owner,
    /// What its client calls it.
    pub label: Option<Box<str>>,
    /// The first block that it did not get.
    pub key: BlockKey,
    /// What keys of all its namespaces carried when it was opened.
    pub namespaces: Arc<[NamespaceId]>,
    /// Hash units that it asked for.
    pub asked: usize,
    /// Leading ones of them that it got.
    pub hit: usize,
    /// Why no more.
    pub short: Short,
    /// The tiers that it may be loaded from.
    pub tiers: TierSet,
}
