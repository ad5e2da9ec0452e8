//! Counts what depots of several sizes would give an engine that has none, while it runs.

use super::ceiling::Ceiling;
use super::simulated::SimulatedCache;
use crate::error::Result;

/// What a depot of one size would have given so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeReport {
    /// Blocks that it has room for.
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
    /// Depots of so many blocks each.
    pub fn new(policy: &str, capacities: &[u64]) -> Result<Self> {
        let caches: Result<Vec<_>> =
            capacities.iter().map(|&capacity| Ok((SimulatedCache::new(policy, capacity)?, 0))).collect();
        Ok(Self { caches: caches?, ceiling: Ceiling::new(), asked: 0, new: 0.0 })
    }

    /// A request asks for these blocks, which follow one another and begin where the engine's own cache ends.
    pub fn look_up(&mut self, blocks: &[u64]) {
        self.asked += blocks.len() as u64;
        for (cache, hits) in &mut self.caches {
            *hits += blocks.iter().take_while(|&&block| cache.touch(block)).count() as u64;
        }
        for &block in blocks {
            self.new += self.ceiling.see(block);
        }
    }

    /// The engine has computed these blocks; those that are there already stay as they are.
    pub fn store(&mut self, blocks: &[u64]) {
        for (cache, _) in &mut self.caches {
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

    /// Blocks that were asked for.
    pub const fn asked(&self) -> u64 {
        self.asked
    }

    /// Blocks that an endless depot would have had, approximately.
    pub fn ceiling(&self) -> u64 {
        // Rounding never makes it less than nothing or more than all.
        (self.asked as f64 - self.new).round().clamp(0.0, self.asked as f64) as u64
    }

    /// What came of each size, in the order that was asked for.
    pub fn sizes(&self) -> impl Iterator<Item = SizeReport> + '_ {
        self.caches.iter().map(|(cache, hits)| SizeReport {
            capacity: cache.capacity() as u64,
            held: cache.len() as u64,
            hits: *hits,
        })
    }
}
