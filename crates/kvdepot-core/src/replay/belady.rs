//! Belady's optimal policy: knows the future, and evicts the block whose next use is farthest away.

use std::collections::BTreeSet;

use foldhash::fast::FixedState;
use hashbrown::HashMap;

use super::trace::Trace;

const NEVER: usize = usize::MAX;

/// Returns the blocks of hits of a pool with `capacity` blocks. It is the optimum for single blocks, and close to it
/// for hits without a gap.
pub fn belady(trace: &Trace, capacity: u64) -> u64 {
    let mut later: HashMap<u64, usize, FixedState> = HashMap::with_hasher(FixedState::default());
    let mut next = Vec::with_capacity(trace.references() as usize);
    let in_order: Vec<u64> =
        trace.requests().iter().flat_map(|request| trace.blocks(request).iter().copied()).collect();
    for (at, &block) in in_order.iter().enumerate().rev() {
        next.push(later.insert(block, at).unwrap_or(NEVER));
    }
    next.reverse();
    let mut held: HashMap<u64, usize, FixedState> = HashMap::with_hasher(FixedState::default());
    let mut order: BTreeSet<(usize, u64)> = BTreeSet::new();
    let (mut at, mut hits) = (0, 0);
    for request in trace.requests() {
        let blocks = trace.blocks(request);
        hits += blocks.iter().take_while(|block| held.contains_key(*block)).count() as u64;
        for &block in blocks {
            if let Some(due) = held.insert(block, next[at]) {
                order.remove(&(due, block));
            }
            order.insert((next[at], block));
            if held.len() as u64 > capacity
                && let Some((_, evicted)) = order.pop_last()
            {
                held.remove(&evicted);
            }
            at += 1;
        }
    }
    hits
}
