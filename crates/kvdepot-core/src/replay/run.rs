//! A replay: a pool and the tiers below it, with the depot's placement.

use super::levels::{Levels, Store};
use super::trace::Trace;
use crate::error::{Error, ErrorKind, Result};
use crate::machine::placement::Placement;

/// Larger than the number of tiers of any pipeline.
pub(super) const TIERS_MAX: usize = 8;

/// A level to simulate: the pool, or a tier below it.
#[derive(Clone, Debug)]
pub struct Level {
    /// Name of its eviction policy.
    pub policy: String,
    /// Its capacity in blocks.
    pub capacity: u64,
    /// Its placement; not used for the pool.
    pub placement: Placement,
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
}

/// Result of a replay.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Blocks named by all requests.
    pub references: u64,
    /// Result of each level, the pool first.
    pub levels: Vec<LevelReport>,
}

impl Report {
    /// Returns the blocks of hits in all levels.
    pub fn hits(&self) -> u64 {
        self.levels.iter().map(|level| level.hits).sum()
    }
}

/// Replays the requests in order over a pool and tiers, nearest first.
pub fn replay(trace: &Trace, levels: &[Level]) -> Result<Report> {
    if levels.is_empty() || levels.len() > 1 + TIERS_MAX {
        return Err(Error::new(ErrorKind::Config, "a replay has a pool and up to 8 tiers")
            .with("levels", levels.len()));
    }
    let stores: Result<Vec<Store>> = levels.iter().map(Store::own).collect();
    let mut state = Levels::new(stores?, levels);
    for request in trace.requests() {
        state.request(trace.blocks(request));
    }
    Ok(Report { references: trace.references(), levels: state.reports().to_vec() })
}
