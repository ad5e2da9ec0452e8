//! What a claim knows of a place.

use super::super::event::Location;

/// What is known of one place of a claim. A byte, because a claim may have a hundred thousand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Known(u8);

impl Known {
    /// Not in the pool; the tiers have not been asked.
    pub(super) const UNLOCATED: Self = Self(0);
    /// Neither in the pool nor in a tier.
    pub(super) const ABSENT: Self = Self(1);
    /// Not in the pool; only I/O can tell whether a tier has it.
    pub(super) const UNKNOWN: Self = Self(2);
    /// In the pool, readable, and evictable: a lease pins it anew.
    pub(super) const HERE: Self = Self(3);
    /// In the pool or on its way there, and pinned already.
    pub(super) const PINNED: Self = Self(4);
    /// Pinned by this claim.
    pub(super) const LEASED: Self = Self(5);
    /// This claim waits for its fetch.
    pub(super) const WAITING: Self = Self(6);
    /// As `ABSENT`, as far as tiers have answered; one has not.
    pub(super) const UNTOLD: Self = Self(7);
    /// Leased in a tier's memory and not in use: whoever uses it takes its room.
    pub(super) const IN_PLACE: Self = Self(8);
    /// Leased in a tier's memory and in use, or about to be.
    pub(super) const PINNED_IN_PLACE: Self = Self(9);
    /// As `ABSENT`: a tier that the claim may not be loaded from leases it in its memory, or is reading it.
    pub(super) const EXCLUDED: Self = Self(10);
    const TIER: u8 = 16;

    pub(super) fn at(location: Location) -> Self {
        match location {
            Location::Tier(tier) => Self(Self::TIER + u8::try_from(tier).expect("a pipeline has few tiers")),
            Location::Unknown => Self::UNKNOWN,
            Location::Absent => Self::ABSENT,
        }
    }

    pub(super) fn tier(self) -> Option<usize> {
        self.0.checked_sub(Self::TIER).map(usize::from)
    }

    /// Whether it is in the pool, or a tier is known to have it.
    pub(super) fn is_within_reach(self) -> bool {
        self.is_in_pool() || self.tier().is_some()
    }

    /// Whether it had a slot, whoever may use that.
    pub(super) fn was_found(self) -> bool {
        self.is_in_pool() || self == Self::EXCLUDED
    }

    /// Whether it has a slot that the claim may use.
    pub(super) fn is_in_pool(self) -> bool {
        let is_in_place = matches!(self, Self::IN_PLACE | Self::PINNED_IN_PLACE);
        is_in_place || matches!(self, Self::HERE | Self::PINNED | Self::LEASED | Self::WAITING)
    }
}
