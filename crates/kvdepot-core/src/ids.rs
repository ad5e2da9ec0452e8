//! Numbers that the machine shares with the accounts outside of it.

/// A tier's position in the pipeline.
pub type TierIndex = usize;
/// Owner of leases: a connection.
pub type Owner = u64;

/// A set of tiers, such as those that a claim's blocks may come from. A pipeline has at most eight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierSet(u8);

impl TierSet {
    /// Every tier.
    pub const ALL: Self = Self(u8::MAX);
    /// None: the pool alone.
    pub const NONE: Self = Self(0);

    /// Returns whether a tier is in the set.
    pub const fn has(self, tier: TierIndex) -> bool {
        self.0 & 1 << tier != 0
    }

    /// Returns the set with one more tier.
    #[must_use]
    pub const fn with(self, tier: TierIndex) -> Self {
        Self(self.0 | 1 << tier)
    }

    /// Returns the set of the tiers that are in either set.
    #[must_use]
    pub const fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns the first tier of the set from `tier` on, of a pipeline of `count` tiers.
    pub fn next(self, tier: TierIndex, count: usize) -> Option<TierIndex> {
        (tier..count).find(|&tier| self.has(tier))
    }

    /// Returns whether it has every tier of a pipeline of `count` tiers.
    pub fn has_all(self, count: usize) -> bool {
        (0..count).all(|tier| self.has(tier))
    }
}
