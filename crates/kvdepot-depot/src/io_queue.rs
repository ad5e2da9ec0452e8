//! Between the pool and the tiers: queued fetches and writes, handed over within bounds, loads before dumps.

use std::sync::Arc;
use std::time::Instant;

use kvdepot_core::eviction::SlotId;
use kvdepot_core::{BlockKey, Error, ErrorKind, Result};
use kvdepot_io::SlotBuf;
use kvdepot_tier::Written;

use crate::claim;
use crate::depot::Shared;
use crate::state::{Fetch, State, Write};
use crate::stats::Stats;

/// Fetches handed to the tiers at a time.
const FETCHES_IN_FLIGHT_MAX: usize = 256;
/// Writes handed to one tier at a time, while no fetch waits.
const WRITES_IN_FLIGHT_MAX: usize = 32;
/// Turns of the janitor that the write of a replaced value waits for its predecessor's removal.
const REPLACE_TRIES_MAX: u32 = 100;

enum Next {
    Fetch(Fetch, SlotBuf),
    Write(Write, SlotBuf),
}

/// Hands queued work to the tiers until the bounds are reached. One thread does it at a time; a tier that ends an
/// operation inside the call only updates the state, so the stack stays flat.
pub(crate) fn pump(shared: &Arc<Shared>) {
    let mut state = shared.state.lock();
    if state.pumping {
        return;
    }
    state.pumping = true;
    while let Some(next) = take(shared, &mut state) {
        drop(state);
        match next {
            Next::Fetch(fetch, buf) => begin_fetch(shared, fetch, buf),
            Next::Write(write, buf) => begin_write(shared, write, buf),
        }
        state = shared.state.lock();
    }
    state.pumping = false;
}

fn take(shared: &Shared, state: &mut State) -> Option<Next> {
    if state.fetches_in_flight < FETCHES_IN_FLIGHT_MAX
        && let Some(fetch) = state.fetches.pop_front()
    {
        let buf = buffer(shared, state, fetch.slot);
        state.fetches_in_flight += 1;
        return Some(Next::Fetch(fetch, buf));
    }
    let ready = |state: &State, tier: usize| {
        state.writes_in_flight[tier] < WRITES_IN_FLIGHT_MAX && !state.writes[tier].is_empty()
    };
    let tier = (0..state.writes.len()).find(|&tier| ready(state, tier))?;
    let write = state.writes[tier].pop_front()?;
    let slot = state.slot_mut(write.slot);
    if !slot.block.is_writing() {
        slot.block.write_begun();
    }
    state.writes_in_flight[tier] += 1;
    let buf = buffer(shared, state, write.slot);
    Some(Next::Write(write, buf))
}

fn buffer(shared: &Shared, state: &State, id: SlotId) -> SlotBuf {
    shared.pool.slot(&state.slot(id).runs).expect("the allocator hands out runs inside of the pool")
}

fn begin_fetch(shared: &Arc<Shared>, fetch: Fetch, buf: SlotBuf) {
    let (key, begun) = (shared.state.lock().slot(fetch.slot).key, Instant::now());
    let (task, bytes, tier) = (shared.next_task(), buf.len(), shared.tier_names[fetch.tier]);
    tracing::debug!("{tier} task({task},Backend2Cache,1,{bytes}) dispatching.");
    let again = Arc::clone(shared);
    let done = move |outcome: Result<()>| {
        let cost_ms = begun.elapsed().as_secs_f64() * 1e3;
        tracing::debug!("{tier} task({task},Backend2Cache,1,{bytes}) finished, cost {cost_ms:.3}ms.");
        fetch_ended(&again, fetch, bytes, outcome);
        pump(&again);
    };
    shared.tiers[fetch.tier].read(key, buf, attempt_ends(shared, &fetch), Box::new(done));
}

/// When a tier has to have answered: the one below it, which may hold the block, too, is left half of the time (P2).
fn attempt_ends(shared: &Shared, fetch: &Fetch) -> Instant {
    let now = Instant::now();
    let left = fetch.deadline.saturating_duration_since(now);
    now + if fetch.tier + 1 < shared.tiers.len() { left / 2 } else { left }
}

fn fetch_ended(shared: &Arc<Shared>, fetch: Fetch, bytes: usize, outcome: Result<()>) {
    let mut state = shared.state.lock();
    state.fetches_in_flight -= 1;
    match outcome {
        Ok(()) => {
            Stats::add(&shared.stats.fetch_blocks, 1);
            Stats::add(&shared.stats.fetch_bytes, bytes);
            let slot = state.slot_mut(fetch.slot);
            let (key, slot_bytes) = (slot.key, slot.bytes);
            let waiters = std::mem::take(&mut slot.waiters);
            slot.block.fill_ended_ok();
            state.held.fetching -= slot_bytes;
            state.policy.insert(fetch.slot, key);
            claim::fetch_ended(shared, &mut state, fetch.slot, waiters, true);
            // Only if it was doomed: where blocks are not kept, one that nobody leased stays for who asked for it.
            if state.slots[fetch.slot as usize].as_ref().is_some_and(|slot| slot.block.is_freeable()) {
                state.free(fetch.slot);
            }
        }
        Err(error) => {
            shared.stats.failed("fetch", &error);
            if !matches!(error.kind(), ErrorKind::NotFound) {
                tracing::debug!("fetch failed: {error}");
            }
            let next = fetch.tier + 1;
            if next < shared.tiers.len() && Instant::now() < fetch.deadline {
                state.fetches.push_front(Fetch { tier: next, ..fetch });
                return;
            }
            let slot = state.slot_mut(fetch.slot);
            let waiters = std::mem::take(&mut slot.waiters);
            slot.block.fill_failed();
            claim::fetch_ended(shared, &mut state, fetch.slot, waiters, false);
            state.free_if_over(fetch.slot);
        }
    }
    claim::admit_queued(shared, &mut state);
    drop(state);
    shared.changed.notify_all();
}

fn begin_write(shared: &Arc<Shared>, write: Write, buf: SlotBuf) {
    let (key, begun) = (shared.state.lock().slot(write.slot).key, Instant::now());
    let (task, bytes, tier) = (shared.next_task(), buf.len(), shared.tier_names[write.tier]);
    tracing::debug!("{tier} task({task},Cache2Backend,1,{bytes}) dispatching.");
    let again = Arc::clone(shared);
    let done = move |outcome: Result<Written>| {
        let cost_ms = begun.elapsed().as_secs_f64() * 1e3;
        tracing::debug!("{tier} task({task},Cache2Backend,1,{bytes}) finished, cost {cost_ms:.3}ms.");
        write_ended(&again, write, bytes, outcome);
        pump(&again);
    };
    shared.tiers[write.tier].write(key, buf, shared.config.deadline(), Box::new(done));
}

fn write_ended(shared: &Arc<Shared>, write: Write, bytes: usize, outcome: Result<Written>) {
    let mut state = shared.state.lock();
    state.writes_in_flight[write.tier] -= 1;
    let key = state.slot(write.slot).key;
    if write.replaces && write.tries < REPLACE_TRIES_MAX {
        let again = match &outcome {
            // What the tier has is the value before this one.
            Ok(Written::AlreadyThere) => {
                shared.tiers[write.tier].remove(key);
                true
            }
            Err(error) => error.kind() == ErrorKind::Busy,
            Ok(Written::New) => false,
        };
        if again {
            state.delayed.push(Write { tries: write.tries + 1, ..write });
            return;
        }
    }
    match &outcome {
        Ok(Written::New) => {
            Stats::add(&shared.stats.write_blocks, 1);
            Stats::add(&shared.stats.write_bytes, bytes);
        }
        Ok(Written::AlreadyThere) => {}
        Err(error) => shared.stats.failed("write", error),
    }
    let stored = match &outcome {
        Ok(written) => *written == Written::New || !write.replaces,
        Err(_) => false,
    };
    if write.replaces && !stored {
        // Better nothing under this key than the value before (P1).
        shared.tiers[write.tier].remove(key);
    }
    let slot = state.slot_mut(write.slot);
    slot.saved |= stored;
    slot.writes_left -= 1;
    if slot.writes_left > 0 {
        return;
    }
    let saved = slot.saved;
    if !saved {
        Stats::add(&shared.stats.write_blocks_dropped, 1);
    }
    let slot = state.slot_mut(write.slot);
    let (was_dirty, slot_bytes) = (slot.block.is_dirty(), slot.bytes);
    slot.block.write_ended(saved);
    if was_dirty {
        state.held.dirty -= slot_bytes;
    }
    match state.successors.remove(&key) {
        None => {}
        Some(None) => remove_everywhere(shared, &state, &[key]),
        Some(Some(slot)) => state.queue_writes(Write { slot, tier: 0, replaces: true, tries: 0 }),
    }
    state.free_if_over(write.slot);
    claim::admit_queued(shared, &mut state);
    drop(state);
    shared.changed.notify_all();
}

/// Has the tiers forget blocks. Under the lock under which the pool forgot them: a block that is stored under the same
/// key right after would be removed in their place.
pub(crate) fn remove_everywhere(shared: &Shared, _held: &State, keys: &[BlockKey]) {
    for tier in &shared.tiers {
        keys.iter().for_each(|key| tier.remove(*key));
    }
}

/// Queues a read of a block that is in no slot; `NoSpace` when the pool has no room for it.
pub(crate) fn fetch(
    state: &mut State,
    key: BlockKey,
    spec: &Arc<kvdepot_core::NamespaceSpec>,
    tier: usize,
    deadline: Instant,
) -> Result<SlotId> {
    let slot = state.insert(key, spec, kvdepot_core::block::Block::fetching())?;
    state.fetches.push_back(Fetch { slot, tier, deadline });
    Ok(slot)
}

/// Waits until nothing is dirty and the tiers have ended what they were given.
pub(crate) fn drain(shared: &Arc<Shared>, deadline: Instant) -> bool {
    pump(shared);
    let mut state = shared.state.lock();
    while state.writes_left() > 0 {
        if shared.changed.wait_until(&mut state, deadline).timed_out() {
            return state.writes_left() == 0;
        }
    }
    drop(state);
    shared.tiers.iter().all(|tier| tier.drain(deadline))
}

/// The error of a deadline that passed.
pub(crate) fn timed_out(what: &str) -> Error {
    Error::new(ErrorKind::Timeout, what.to_owned())
}
