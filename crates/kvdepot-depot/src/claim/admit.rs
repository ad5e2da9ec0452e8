//! Admission: a claim goes ahead only when all that it needs finds room.

use std::sync::Arc;

use kvdepot_core::BlockKey;
use kvdepot_core::block::Phase as BlockPhase;

use super::{Claim, Phase, Place, keys_not_in_pool, settle};
use crate::depot::Shared;
use crate::io_queue;
use crate::state::State;
use crate::stats::Stats;

/// Share of the pool that one claim may take.
const CLAIM_SHARE_PERCENT: u64 = 90;

/// Admits a claim, or lets it wait behind the others: one that needs nothing fetched passes them, because it takes no
/// room that they wait for.
pub(super) fn admit_or_queue(shared: &Arc<Shared>, state: &mut State, id: u64) {
    let Some(claim) = state.claims.map.get(&id) else { return };
    let turn = state.claims.queue.is_empty() || keys_not_in_pool(claim, state).is_empty();
    if !turn || !admit(shared, state, id) {
        if let Some(claim) = state.claims.map.get_mut(&id) {
            claim.phase = Phase::Queued;
        }
        state.claims.queue.push_back(id);
    }
}

/// Admits waiting claims in order, as far as there is room; called when leases, fetches or writes have ended.
pub(crate) fn admit_queued(shared: &Arc<Shared>, state: &mut State) {
    while let Some(&id) = state.claims.queue.front() {
        if state.claims.map.contains_key(&id) && !admit(shared, state, id) {
            return;
        }
        state.claims.queue.pop_front();
    }
}

/// Leases what is in the pool and starts fetching the rest, if all of it fits now. False: it has to wait.
fn admit(shared: &Arc<Shared>, state: &mut State, id: u64) -> bool {
    let Some(mut claim) = state.claims.map.remove(&id) else { return true };
    if claim.phase == Phase::Settled {
        state.claims.map.insert(id, claim);
        return true;
    }
    // A block that was in the pool when the claim was opened may be in a tier only by now.
    let missing: Vec<BlockKey> = keys_not_in_pool(&claim, state);
    claim.known.peek_again(shared, missing.into_iter());
    let mut hit = claim.reachable(state, claim.limit);
    let mut places = claim.needed(hit);
    let (mut new_pins, mut total) = need(&claim, state, &places);
    let share = state.pool_bytes() * CLAIM_SHARE_PERCENT / 100;
    while hit > claim.skip && total > share {
        let shorter =
            claim.skip + ((hit - claim.skip) as u128 * u128::from(share) / u128::from(total)) as usize;
        hit = claim.reachable(state, shorter.min(hit - 1));
        places = claim.needed(hit);
        (new_pins, total) = need(&claim, state, &places);
        if !std::mem::replace(&mut claim.cut, true) {
            Stats::add(&shared.stats.claims_cut, 1);
        }
    }
    // What is pinned comes back: leases end, fetches and writes do. Without any, the share is there.
    if new_pins > state.pool_bytes().saturating_sub(state.pinned_bytes()) && state.pinned_bytes() > 0 {
        state.claims.map.insert(id, claim);
        return false;
    }
    claim.hit = hit;
    claim.needed_blocks = places.len();
    claim.phase = Phase::Filling;
    // What is there first, so that no fetch of this claim evicts a block that it wants, too.
    for &place in &places {
        lease_place(state, &mut claim, place);
    }
    for place in places {
        fetch_place(shared, state, &mut claim, id, place);
    }
    if claim.waiting.is_empty() {
        settle(state, &mut claim);
    }
    state.claims.map.insert(id, claim);
    true
}

/// Bytes that admitting these blocks would pin anew, and bytes of all of them.
fn need(claim: &Claim, state: &State, places: &[Place]) -> (u64, u64) {
    let (mut new_pins, mut total) = (0, 0);
    for &(group, rank, block) in places {
        let Some(key) = claim.key(state, group as usize, rank as usize, block as usize) else { continue };
        let handle = claim.groups[group as usize].namespaces[rank as usize];
        let bytes = state.namespaces.get(handle).map_or(0, crate::namespace::Namespace::slot_bytes);
        total += bytes;
        let pinned = state.index.get(&key).is_some_and(|&slot| !state.slot(slot).block.is_evictable());
        if !pinned {
            new_pins += bytes;
        }
    }
    (new_pins, total)
}

fn lease_place(state: &mut State, claim: &mut Claim, place: Place) {
    let (group, rank, block) = place;
    let Some(key) = claim.key(state, group as usize, rank as usize, block as usize) else { return };
    if let Some(slot) = state.readable(&key)
        && let Ok(lease) = state.lease(claim.owner, slot)
    {
        claim.leases.insert(place, (lease, slot));
    }
}

fn fetch_place(shared: &Shared, state: &mut State, claim: &mut Claim, id: u64, place: Place) {
    let (group, rank, block) = place;
    if claim.leases.contains_key(&place) {
        return;
    }
    let Some(key) = claim.key(state, group as usize, rank as usize, block as usize) else { return };
    let slot = match state.index.get(&key) {
        Some(&slot) => Some(slot).filter(|&s| state.slot(s).block.phase() == BlockPhase::Fetching),
        None if state.is_leaving(&key) => None,
        None => {
            let handle = claim.groups[group as usize].namespaces[rank as usize];
            let spec = state.namespaces.get(handle).map(|namespace| Arc::clone(&namespace.spec));
            match (claim.known.tier_of(&key), spec) {
                (Some(tier), Ok(spec)) => match io_queue::fetch(state, key, &spec, tier, claim.deadline) {
                    Ok(slot) => Some(slot),
                    Err(error) => {
                        shared.stats.failed("claim", &error);
                        None
                    }
                },
                _ => None,
            }
        }
    };
    if let Some(slot) = slot {
        state.slot_mut(slot).waiters.push(id);
        claim.waiting.entry(slot).or_default().push(place);
    }
}
