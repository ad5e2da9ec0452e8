//! A replay: a pool and the tiers below it, with the depot's placement.

use super::simulated::SimulatedCache;
use super::trace::Trace;
use crate::error::{Error, ErrorKind, Result};
use crate::machine::placement::{Placement, Placements};
use crate::machine::tiers::{TierMask, bit};

/// Larger than the number of tiers of any pipeline.
const TIERS_MAX: usize = 8;

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

struct Levels {
    caches: Vec<SimulatedCache>,
    reports: Vec<LevelReport>,
    placements: Placements,
}

impl Levels {
    /// Returns the nearest level that has the block.
    fn find(&self, block: u64) -> Option<usize> {
        self.caches.iter().position(|cache| cache.contains(block))
    }

    fn insert(&mut self, level: usize, block: u64) -> Option<u64> {
        let evicted = self.caches[level].insert(block);
        self.reports[level].written += 1;
        self.reports[level].evicted += u64::from(evicted.is_some());
        evicted
    }

    /// Uses the block in the tiers that have it, and stores it in those of `mask` that do not.
    fn tiers(&mut self, block: u64, mask: TierMask) {
        for level in 1..self.caches.len() {
            if !self.caches[level].touch(block) && mask & bit(level - 1) != 0 {
                self.insert(level, block);
            }
        }
    }

    fn store_in_pool(&mut self, block: u64) {
        let Some(evicted) = self.insert(0, block) else { return };
        for level in 1..self.caches.len() {
            if self.placements.cold & bit(level - 1) != 0 && !self.caches[level].contains(evicted) {
                self.insert(level, evicted);
            }
        }
    }

    fn request(&mut self, blocks: &[u64]) {
        self.caches.iter_mut().for_each(SimulatedCache::begin_request);
        let mut hits = 0;
        while let Some(level) = blocks.get(hits).and_then(|&block| self.find(block)) {
            self.reports[level].hits += 1;
            hits += 1;
        }
        for (index, &block) in blocks.iter().enumerate() {
            if self.caches[0].contains(block) {
                // Beyond the end of the hit it is not a use: a dump of a stored block changes nothing.
                if index < hits && self.caches[0].touch(block) {
                    self.tiers(block, self.placements.second_use);
                }
            } else if let Some(level) = self.find(block).filter(|_| index < hits) {
                // A load from tier `level - 1`: the tiers above it that promote get the block.
                self.tiers(block, self.placements.promote & (bit(level - 1) - 1));
                self.store_in_pool(block);
            } else {
                self.tiers(block, self.placements.through);
                self.store_in_pool(block);
            }
        }
    }
}

/// Replays the requests in order over a pool and tiers, nearest first.
pub fn replay(trace: &Trace, levels: &[Level]) -> Result<Report> {
    if levels.is_empty() || levels.len() > 1 + TIERS_MAX {
        return Err(Error::new(ErrorKind::Config, "a replay has a pool and up to 8 tiers")
            .with("levels", levels.len()));
    }
    let caches: Result<Vec<_>> =
        levels.iter().map(|level| SimulatedCache::new(&level.policy, level.capacity)).collect();
    let tiers: Vec<Placement> = levels[1..].iter().map(|level| level.placement).collect();
    let mut state = Levels {
        caches: caches?,
        reports: vec![LevelReport::default(); levels.len()],
        placements: Placements::new(&tiers, true),
    };
    for request in trace.requests() {
        state.request(trace.blocks(request));
    }
    Ok(Report { references: trace.references(), levels: state.reports })
}
