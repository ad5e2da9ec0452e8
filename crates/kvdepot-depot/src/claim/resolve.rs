//! Finding out what only I/O can tell about a claim's blocks.

use std::sync::Arc;

use kvdepot_core::BlockKey;
use kvdepot_core::hit::longest_hit;

use super::{Claim, admit};
use crate::depot::Shared;
use crate::io_queue;
use crate::state::State;

/// The first block after the reachable hit that only I/O can tell of, if that could make the hit longer.
pub(super) fn first_unknown(claim: &Claim, state: &State) -> Option<BlockKey> {
    let hit = claim.reachable(state, claim.limit);
    claim
        .needed_everywhere()
        .filter(|&(group, _, block)| {
            (block as usize + 1) * claim.groups[group as usize].shape.units_per_block > hit
        })
        .filter_map(|(group, rank, block)| claim.key(state, group as usize, rank as usize, block as usize))
        .find(|key| claim.known.is_unknown(key))
}

/// Asks the tiers about a claim's unknown blocks: full-attention groups first, then the windows at the end of what
/// they allow. Runs on a resolver's thread.
pub(crate) fn resolve(shared: &Arc<Shared>, id: u64) {
    for windows in [false, true] {
        let (mut known, asks) = {
            let mut state = shared.state.lock();
            let Some(mut claim) = state.claims.map.remove(&id) else { return };
            let full_only: Vec<usize> = (0..claim.groups.len())
                .filter(|&g| (claim.groups[g].shape.window_blocks > 0) == windows)
                .collect();
            let upto = if windows { full_groups_hit(&claim, &state) } else { claim.limit };
            let asks: Vec<Vec<BlockKey>> = full_only
                .into_iter()
                .flat_map(|group| (0..claim.groups[group].namespaces.len()).map(move |rank| (group, rank)))
                .map(|(group, rank)| claim.keys_of(&state, group, rank, upto))
                .collect();
            let known = std::mem::take(&mut claim.known);
            state.claims.map.insert(id, claim);
            (known, asks)
        };
        for keys in asks.iter().filter(|keys| !keys.is_empty()) {
            known.probe(shared, keys);
        }
        match shared.state.lock().claims.map.get_mut(&id) {
            Some(claim) => claim.known = known,
            None => return,
        }
    }
    let mut state = shared.state.lock();
    admit::admit_or_queue(shared, &mut state, id);
    drop(state);
    io_queue::pump(shared);
    shared.changed.notify_all();
}

/// How far the full-attention groups alone would let the hit go.
fn full_groups_hit(claim: &Claim, state: &State) -> usize {
    let shapes = claim.shapes();
    longest_hit(&shapes, claim.skip, claim.limit, &mut |group, block| {
        shapes[group].window_blocks > 0
            || (0..claim.groups[group].namespaces.len()).all(|rank| {
                claim
                    .key(state, group, rank, block)
                    .is_some_and(|key| state.index.contains_key(&key) || claim.known.tier_of(&key).is_some())
            })
    })
}
