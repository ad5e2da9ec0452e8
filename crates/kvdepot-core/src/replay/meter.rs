//! Counts the hits that depots of several sizes would give an engine that has none, while it runs.

use super::ceiling::Ceiling;
use super::simulated::SimulatedCache;
use crate::error::Result;

/// Hits that a depot of one size would have given so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeReport {
    /// Its capacity in blocks.
    pub capacity: u64,
    /// Blocks that it holds.
    pub held: u64,
    /// Blocks of hits.
    pub hits: u64,
}

/// Simulated depots, and an endless one.
#[derive(Debug)]
pub struct Meter {
    caches: Vec<(SimulatedCache, u64)>,
    ceiling: Ceiling,
    asked: u64,
    new: f64,
}

impl Meter {
    /// Makes simulated depots of `capacities` blocks.
    pub fn new(policy: &str, capacities: &[u64]) -> Result<Self> {
        let caches: Result<Vec<_>> =
            capacities.iter().map(|&capacity| Ok((SimulatedCache::new(policy, capacity)?, 0))).collect();
        Ok(Self { caches: caches?, ceiling: Ceiling::new(), asked: 0, new: 0.0 })
    }

    /// Records a request for these blocks. They follow one another, and begin where the engine's own cache ends.
    pub fn look_up(&mut self, blocks: &[u64]) {
        self.asked += blocks.len() as u64;
        for (cache, hits) in &mut self.caches {
            cache.begin_request();
            *hits += blocks.iter().take_while(|&&block| cache.touch(block)).count() as u64;
        }
        for &block in blocks {
            self.new += self.ceiling.see(block);
        }
    }

    /// Records blocks that the engine has computed. Blocks that are already stored do not change.
    pub fn store(&mut self, blocks: &[u64]) {
        for (cache, _) in &mut self.caches {
            cache.begin_request();
            for &block in blocks {
                if !cache.contains(block) {
                    cache.insert(block);
                }
            }
        }
        for &block in blocks {
            self.ceiling.see(block);
        }
    }

    /// Returns the number of requested blocks.
    pub const fn asked(&self) -> u64 {
        self.asked
    }

    /// Returns the approximate number of blocks that an endless depot would have had.
    pub fn ceiling(&self) -> u64 {
        // Rounding keeps it between zero and all.
        (self.asked as f64 - self.new).round().clamp(0.0, self.asked as f64) as u64
    }

    /// Returns the report of each size, in the order of the request.
    pub fn sizes(&self) -> impl Iterator<Item = SizeReport> + '_ {
        self.caches.iter().map(|(cache, hits)| SizeReport {
            capacity: cache.capacity() as u64,
            held: cache.len() as u64,
            hits: *hits,
        })
    }
}
