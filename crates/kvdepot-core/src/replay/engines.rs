//! The prefix caches of one node's engines in a replay: each engine sees its own only, and asks the depot for the rest.

use super::simulated::SimulatedCache;
use crate::error::Result;

/// vLLM evicts the block that has been free for the longest time.
const POLICY: &str = "lru";

/// The engines of one node.
pub(super) struct Engines {
    /// One cache for each engine; none if engines keep nothing.
    caches: Vec<SimulatedCache>,
}

impl Engines {
    /// Makes this many engines, each with an empty cache of this many blocks. With 0 blocks they keep nothing.
    pub(super) fn new(engines: usize, capacity: u64) -> Result<Self> {
        let count = if capacity == 0 { 0 } else { engines };
        let caches = (0..count).map(|_| SimulatedCache::new(POLICY, capacity)).collect::<Result<_>>()?;
        Ok(Self { caches })
    }

    /// Returns how many leading blocks an engine's cache has.
    pub(super) fn prefix(&self, engine: usize, blocks: &[u64]) -> usize {
        let Some(cache) = self.caches.get(engine) else { return 0 };
        blocks.iter().take_while(|block| cache.contains(**block)).count()
    }

    /// Serves a request in an engine. Returns how many leading blocks its cache had.
    pub(super) fn request(&mut self, engine: usize, blocks: &[u64]) -> usize {
        let hits = self.prefix(engine, blocks);
        let Some(cache) = self.caches.get_mut(engine) else { return 0 };
        // No engine keeps a prompt that is larger than its cache.
        let kept = &blocks[..blocks.len().min(cache.capacity())];
        cache.begin_request();
        // First the blocks that are there: none of the request's own may be evicted for the others.
        for &block in kept {
            cache.touch(block);
        }
        for &block in kept {
            if !cache.contains(block) {
                cache.insert(block);
            }
        }
        // vLLM frees a request's blocks from the last to the first, so that heads outlive tails.
        for &block in kept.iter().rev() {
            cache.touch(block);
        }
        hits
    }

    /// Removes the blocks that are no longer valid.
    pub(super) fn remove(&mut self, is_past: &impl Fn(u64) -> bool) {
        self.caches.iter_mut().for_each(|cache| cache.remove(is_past));
    }
}
