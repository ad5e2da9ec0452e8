//! A replay: a pool and the tiers below it, with the depot's placement.

use super::level::{Level, LevelReport, TIERS_MAX};
use super::levels::{Levels, Store};
use super::trace::Trace;
use crate::error::{Error, ErrorKind, Result};

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
    let tiers = levels[1..].iter().map(Store::own);
    let stores: Result<Vec<Store>> = std::iter::once(Store::pool(&levels[0])).chain(tiers).collect();
    let mut state = Levels::new(stores?, levels);
    for request in trace.requests() {
        state.request(request.timestamp_ms, trace.blocks(request));
    }
    Ok(Report { references: trace.references(), levels: state.reports().to_vec() })
}
