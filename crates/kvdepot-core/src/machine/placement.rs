//! Placement: which tiers get a block, and when. A late write never makes a block dirty: the block can be evicted
//! before the write, and then the queue entry names no block.

use super::tiers::{TierIndex, TierMask, bit};

/// When a tier is given a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WriteWhen {
    /// When it is sealed. Until the tier has it, it is dirty and stays in the pool.
    #[default]
    Through,
    /// When it is used again.
    OnSecondUse,
    /// When it is about to be evicted from the pool.
    WhenCold,
    /// When a tier above is about to evict it.
    OnDemotion,
}

/// Placement of a tier. Values, which can be replaced, are written to every tier when they are sealed, because a tier
/// without the new value could return the earlier one (P1). So are blocks of a pool that keeps nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// When it gets blocks that were dumped.
    pub write: WriteWhen,
    /// Whether it also gets blocks that were read from a tier below it.
    pub promote: bool,
}

/// Tiers by their placement.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Placements {
    pub(crate) through: TierMask,
    pub(crate) second_use: TierMask,
    pub(crate) cold: TierMask,
    pub(crate) demotion: TierMask,
    pub(crate) promote: TierMask,
}

impl Placements {
    pub(crate) fn new(tiers: &[Placement], keeps: bool) -> Self {
        let mut all = Self::default();
        for (tier, placement) in tiers.iter().enumerate() {
            let mask = match placement.write {
                WriteWhen::OnSecondUse if keeps => &mut all.second_use,
                WriteWhen::WhenCold if keeps => &mut all.cold,
                WriteWhen::OnDemotion if keeps => &mut all.demotion,
                _ => &mut all.through,
            };
            *mask |= bit(tier);
            all.promote |= if placement.promote { bit(tier) } else { 0 };
        }
        all
    }

    /// Returns the tier that gets the blocks that this one evicts: the next one below it that gets such blocks.
    pub(crate) fn demotes_to(&self, tier: TierIndex) -> Option<TierIndex> {
        let below = self.demotion & TierMask::MAX.checked_shl(tier as u32 + 1).unwrap_or(0);
        (below != 0).then(|| below.trailing_zeros() as TierIndex)
    }
}
