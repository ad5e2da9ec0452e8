//! Tiers by their positions in the pipeline, and sets of them.

pub use crate::ids::{TierIndex, TierSet};

/// A set of tiers, one bit for each. A pipeline has at most eight.
pub(crate) type TierMask = u8;

/// Returns the set with one tier.
pub(crate) const fn bit(tier: TierIndex) -> TierMask {
    1 << tier
}
