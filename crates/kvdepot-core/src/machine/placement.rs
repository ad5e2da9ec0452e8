//! Which tiers get a block, and when. A write that may come late never makes a block dirty: the block can be evicted
//! before, and its queue entry then names no block.

use super::Machine;
use super::tiers::{TierMask, bit};

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
}

/// What a tier is given. Values, which can be replaced, go to every tier when they are sealed: a tier that was left out
/// could show the value before (P1). So do blocks of a pool that keeps nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// When it is given blocks that were dumped.
    pub write: WriteWhen,
    /// Whether it is given blocks that were read from a tier below it, too.
    pub promote: bool,
}

/// Tiers by their placement.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Placements {
    pub(crate) through: TierMask,
    pub(crate) second_use: TierMask,
    pub(crate) cold: TierMask,
    pub(crate) promote: TierMask,
}

impl Placements {
    pub(crate) fn new(tiers: &[Placement], keeps: bool) -> Self {
        let mut all = Self::default();
        for (tier, placement) in tiers.iter().enumerate() {
            let mask = match placement.write {
                WriteWhen::OnSecondUse if keeps => &mut all.second_use,
                WriteWhen::WhenCold if keeps => &mut all.cold,
                _ => &mut all.through,
            };
            *mask |= bit(tier);
            all.promote |= if placement.promote { bit(tier) } else { 0 };
        }
        all
    }
}

impl Machine {
    /// Sets which tiers get a block, and when: one placement for each tier. Without it all are written through. To be
    /// called before the first event.
    #[must_use]
    pub fn with_placements(mut self, tiers: &[Placement]) -> Self {
        debug_assert_eq!(tiers.len(), self.flow.tier_count(), "one placement for each tier");
        let placements = Placements::new(tiers, self.pool.keeps());
        self.flow.placements = placements;
        self.pool.set_placements(placements.cold, placements.second_use);
        self
    }
}
