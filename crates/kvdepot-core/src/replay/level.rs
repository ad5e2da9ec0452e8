//! One level of a replay: the pool or a tier.

use crate::machine::placement::Placement;

/// Larger than the number of tiers of any pipeline.
pub(super) const TIERS_MAX: usize = 8;

/// A level to simulate: the pool, or a tier below it.
#[derive(Clone, Debug)]
pub struct Level {
    /// Name of its eviction policy.
    pub policy: String,
    /// Its capacity in blocks. A pool of 0 keeps nothing: every block goes to every tier.
    pub capacity: u64,
    /// Its placement; not used for the pool.
    pub placement: Placement,
    /// Blocks that it is given a day at most; 0 = no limit. Not used for the pool.
    pub writes_per_day: u64,
}

/// Result of one level.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LevelReport {
    /// Blocks of hits that it had and that no level above it had.
    pub hits: u64,
    /// Blocks stored in it.
    pub written: u64,
    /// Blocks evicted from it.
    pub evicted: u64,
    /// Blocks that it did not get because its budget was used up.
    pub over_budget: u64,
}
