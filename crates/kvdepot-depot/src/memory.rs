//! Memory of a tier that clients map to read blocks where they lie.

use std::sync::Arc;

use kvdepot_core::machine::TierIndex;
use kvdepot_core::runs::IN_PLACE_AT;
use kvdepot_tier::{Tier, TierMemory};

/// Returns the first tier whose blocks can be leased in place, with its memory.
pub(crate) fn find(tiers: &[Arc<dyn Tier>], pool_bytes_max: u64) -> Option<(TierIndex, TierMemory)> {
    // Offsets of the pool must not reach those of the tier's memory.
    if pool_bytes_max > IN_PLACE_AT {
        return None;
    }
    tiers.iter().enumerate().find_map(|(index, tier)| {
        let memory = tier.memory().unwrap_or_else(|error| {
            tracing::warn!(
                tier = tier.name(), %error,
                "blocks of a tier are read through the pool: its memory cannot be lent to engines"
            );
            None
        });
        memory.map(|memory| (index, memory))
    })
}
