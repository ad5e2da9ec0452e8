//! Finding out what only I/O can tell about a claim's blocks.

use std::sync::Arc;

use kvdepot_core::BlockKey;
use kvdepot_core::hit::{longest_hit, needed_blocks};

use super::{Claim, admit};
use crate::depot::Shared;
use crate::io_queue;
use crate::resolver::Known;
use crate::state::State;

/// Rounds of questions for one claim. Each shortens the hit that is hoped for by a block at least; a window with that many
/// gaps in a slow tier is not worth more.
const ROUNDS_MAX: usize = 256;

/// Whether only I/O can tell if the hit is longer than what is known to be there.
pub(super) fn must_ask(claim: &Claim, state: &State) -> bool {
    hoped_for(claim, state, true) > claim.reachable(state, claim.limit)
}

/// Asks the tiers about a claim's unknown blocks: full-attention groups first, then the windows at the end of what
/// they allow, until nothing that the hit needs is unknown. Runs on a resolver's thread.
pub(crate) fn resolve(shared: &Arc<Shared>, id: u64) {
    let mut windows = false;
    for _ in 0..ROUNDS_MAX {
        let (mut known, asks) = {
            let mut state = shared.state.lock();
            let Some(mut claim) = state.claims.map.remove(&id) else { return };
            let mut asks = questions(&claim, &state, windows);
            if asks.is_empty() && !windows {
                windows = true;
                asks = questions(&claim, &state, windows);
            }
            let known = std::mem::take(&mut claim.known);
            state.claims.map.insert(id, claim);
            (known, asks)
        };
        for keys in &asks {
            known.probe(shared, keys);
        }
        let more = give_back(shared, id, known) && !asks.is_empty();
        if !more {
            break;
        }
    }
    let mut state = shared.state.lock();
    admit::admit_or_queue(shared, &mut state, id);
    drop(state);
    io_queue::pump(shared);
    shared.changed.notify_all();
}

/// Whether the claim is still there to take what was learnt.
fn give_back(shared: &Shared, id: u64, known: Known) -> bool {
    match shared.state.lock().claims.map.get_mut(&id) {
        Some(claim) => {
            claim.known = known;
            true
        }
        None => false,
    }
}

/// The longest hit if every block that only I/O can tell of were there.
fn hoped_for(claim: &Claim, state: &State, windows: bool) -> usize {
    let shapes = claim.shapes();
    longest_hit(&shapes, claim.skip, claim.limit, &mut |group, block| {
        (!windows && shapes[group].window_blocks > 0)
            || (0..claim.groups[group].namespaces.len()).all(|rank| {
                claim.key(state, group, rank, block).is_some_and(|key| {
                    state.index.contains_key(&key)
                        || claim.known.tier_of(&key).is_some()
                        || claim.known.is_unknown(&key)
                })
            })
    })
}

/// Runs of keys, one a group and rank, that the hoped-for hit needs and of which some are unknown.
fn questions(claim: &Claim, state: &State, windows: bool) -> Vec<Vec<BlockKey>> {
    let hit = hoped_for(claim, state, windows);
    let mut asks = Vec::new();
    for (group, entry) in claim.groups.iter().enumerate() {
        if !windows && entry.shape.window_blocks > 0 {
            continue;
        }
        for rank in 0..entry.namespaces.len() {
            let keys: Vec<BlockKey> = needed_blocks(&entry.shape, claim.skip, hit)
                .filter_map(|block| claim.key(state, group, rank, block))
                .filter(|key| !state.index.contains_key(key))
                .collect();
            if keys.iter().any(|key| claim.known.tier_of(key).is_none()) {
                asks.push(keys);
            }
        }
    }
    asks
}
