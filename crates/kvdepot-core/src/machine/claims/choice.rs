//! What a claim that may be loaded from some tiers only leaves alone.

use super::super::rooms::Rooms;
use super::super::tiers::TierSet;
use super::claim::Claim;
use crate::block::Phase;
use crate::eviction::SlotId;

impl Claim {
    /// Returns whether it may be given the block in a slot: not one that a tier it excludes is reading or leases in its
    /// memory. Where a block in the pool came from does not matter.
    pub(super) fn may_use(&self, rooms: &Rooms<'_>, slot: SlotId) -> bool {
        if self.tiers == TierSet::ALL {
            return true;
        }
        let found = rooms.pool.slot(slot);
        let tier = match found.block.phase() {
            Phase::Fetching => rooms.flow.reader(slot),
            _ if found.is_in_place() => rooms.pool.in_place_tier(),
            _ => None,
        };
        tier.is_none_or(|tier| self.tiers.has(tier))
    }
}
