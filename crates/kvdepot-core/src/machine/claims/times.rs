//! When a claim got how far, for who traces its request.

use smallvec::SmallVec;

use super::super::event::Nanos;
use super::super::tiers::TierIndex;

/// When a claim got how far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimTimes {
    /// It was opened.
    pub opened: Nanos,
    /// It was known what the hit would be, and there was room for all of it; None: not yet.
    pub admitted: Option<Nanos>,
    /// The hit was final; None: not yet.
    pub settled: Option<Nanos>,
    /// Whether it has waited for room.
    pub queued: bool,
    /// What came for it from each tier, in the order of their first blocks.
    pub tiers: SmallVec<[CameFrom; 2]>,
}

/// Blocks that came from a tier for a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CameFrom {
    /// The tier.
    pub tier: TierIndex,
    /// Number of blocks.
    pub blocks: usize,
    /// When the first one was there.
    pub first: Nanos,
    /// When the last one was there.
    pub last: Nanos,
}

impl ClaimTimes {
    pub(super) fn opened_at(now: Nanos) -> Self {
        Self { opened: now, ..Self::default() }
    }

    pub(super) fn admitted_at(&mut self, now: Nanos) {
        self.admitted.get_or_insert(now);
    }

    /// A hit is settled anew if something was lost before its client knew of it.
    pub(super) const fn settled_at(&mut self, now: Nanos) {
        self.settled = Some(now);
    }

    /// Notes that a block came from a tier.
    pub(super) fn came(&mut self, tier: TierIndex, now: Nanos) {
        match self.tiers.iter_mut().find(|came| came.tier == tier) {
            Some(came) => (came.blocks, came.last) = (came.blocks + 1, now),
            None => self.tiers.push(CameFrom { tier, blocks: 1, first: now, last: now }),
        }
    }
}
