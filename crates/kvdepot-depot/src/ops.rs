//! What clients ask of a depot, but for claims: lookups, slots to dump into, leases to load from, resets.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::block::Block;
use kvdepot_core::lease::LeaseId;
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceSpec, Result, epoch_moves};

use crate::depot::Shared;
use crate::message::{Grant, Hashes, NamespaceHandle, Shards};
use crate::resolver::{Job, Known};
use crate::state::State;
use crate::stats::Stats;
use crate::{claim, io_queue};

/// Most runs that one answer names, so that it fits a frame (P7); what is beyond is refused and asked for again.
const RUNS_PER_ANSWER_MAX: usize = 4096;
/// Longest wait of a lookup for tiers that cannot tell without I/O.
const LOOKUP_WAIT: Duration = Duration::from_secs(2);

/// Makes a namespace known to the depot and its tiers; its epoch is the newest that any tier knows.
pub(crate) fn open_namespace(shared: &Shared, canonical: &str) -> Result<(NamespaceHandle, [u8; 16], u32)> {
    let spec = NamespaceSpec::from_canonical(canonical)?;
    if spec.layout().slot_bytes() > shared.pool.bytes() {
        return Err(Error::new(ErrorKind::Config, "a block of this namespace is larger than the pool")
            .with("block_bytes", spec.layout().block_bytes())
            .with("pool_bytes", shared.pool.bytes()));
    }
    let known = shared.state.lock().namespaces.find(&spec);
    let handle = match known {
        Some(handle) => handle,
        None => {
            let mut epoch = 0;
            for tier in &shared.tiers {
                epoch = epoch.max(tier.open_namespace(&spec)?);
            }
            let mut state = shared.state.lock();
            match state.namespaces.find(&spec) {
                Some(handle) => handle,
                None => state.namespaces.add(spec, epoch)?,
            }
        }
    };
    let state = shared.state.lock();
    let namespace = state.namespaces.get(handle)?;
    Ok((handle, namespace.id.0, namespace.epoch))
}

pub(crate) fn keys(state: &State, namespace: NamespaceHandle, hashes: &Hashes<'_>) -> Result<Vec<BlockKey>> {
    hashes.count()?;
    let namespace = state.namespaces.get(namespace)?;
    Ok(hashes.iter().map(|hash| namespace.key(hash)).collect())
}

/// Which blocks are there: one byte each.
pub(crate) fn lookup(shared: &Shared, namespace: NamespaceHandle, hashes: &Hashes<'_>) -> Result<Vec<u8>> {
    let keys = keys(&shared.state.lock(), namespace, hashes)?;
    Ok(lookup_keys(shared, &keys))
}

/// Which blocks are there, of whatever namespaces: one byte each.
pub(crate) fn lookup_keys(shared: &Shared, keys: &[BlockKey]) -> Vec<u8> {
    let mut present: Vec<u8> = {
        let state = shared.state.lock();
        keys.iter().map(|key| u8::from(state.readable(key).is_some())).collect()
    };
    Stats::add(&shared.stats.lookup_blocks, keys.len());
    let absent: Vec<usize> = (0..keys.len()).filter(|&i| present[i] == 0).collect();
    if absent.is_empty() || shared.tiers.is_empty() {
        return present;
    }
    let known = Known::peek(shared, absent.iter().map(|&i| keys[i]));
    let (sender, receiver) = crossbeam_channel::unbounded();
    let deadline = Instant::now() + LOOKUP_WAIT;
    let mut asked = 0;
    for &i in &absent {
        if known.tier_of(&keys[i]).is_some() {
            present[i] = 1;
        } else if known.is_unknown(&keys[i]) {
            for tier in &shared.tiers {
                let sender = sender.clone();
                let done = move |count: Result<usize>| {
                    let _ = sender.send((i, count.is_ok_and(|n| n == 1)));
                };
                tier.probe(vec![keys[i]], deadline, Box::new(done));
                asked += 1;
            }
        }
    }
    for _ in 0..asked {
        match receiver.recv_deadline(deadline) {
            Ok((i, there)) => present[i] |= u8::from(there),
            Err(_) => break,
        }
    }
    present
}

/// How many leading blocks are there in all of the namespaces.
pub(crate) fn lookup_prefix(
    shared: &Shared,
    namespaces: &[NamespaceHandle],
    hashes: &Hashes<'_>,
) -> Result<u32> {
    let mut prefix = hashes.count()?;
    for &namespace in namespaces {
        let (in_pool, rest) = {
            let state = shared.state.lock();
            let entry = state.namespaces.get(namespace)?;
            let in_pool =
                hashes.iter().take(prefix).take_while(|&h| state.readable(&entry.key(h)).is_some()).count();
            let rest: Vec<BlockKey> =
                hashes.iter().take(prefix).skip(in_pool).map(|h| entry.key(h)).collect();
            (in_pool, rest)
        };
        prefix = in_pool;
        if !rest.is_empty() && !shared.tiers.is_empty() {
            let mut known = Known::peek(shared, rest.iter().copied());
            known.probe(shared, &rest);
            let state = shared.state.lock();
            let there = |key: &BlockKey| known.tier_of(key).is_some() || state.readable(key).is_some();
            prefix += rest.iter().take_while(|key| there(key)).count();
        }
    }
    Stats::add(&shared.stats.lookup_blocks, hashes.count()? * namespaces.len());
    Ok(u32::try_from(prefix).unwrap_or(u32::MAX))
}

/// Asks for blocks to be brought into the pool; what only I/O can tell of is found out in the background.
pub(crate) fn prefetch(shared: &Shared, namespace: NamespaceHandle, hashes: &Hashes<'_>) -> Result<()> {
    let keys: Vec<BlockKey> = {
        let state = shared.state.lock();
        keys(&state, namespace, hashes)?.into_iter().filter(|key| !state.index.contains_key(key)).collect()
    };
    if !keys.is_empty() && !shared.tiers.is_empty() {
        let _ = shared.jobs.send(Job::Prefetch(namespace, keys));
    }
    Ok(())
}

/// Starts fetching blocks whose tier is known, as far as the pool has room.
pub(crate) fn fetch_all(shared: &Arc<Shared>, namespace: NamespaceHandle, blocks: &[(BlockKey, usize)]) {
    let mut state = shared.state.lock();
    let Ok(spec) = state.namespaces.get(namespace).map(|entry| Arc::clone(&entry.spec)) else { return };
    for &(key, tier) in blocks {
        if !state.index.contains_key(&key)
            && !state.is_leaving(&key)
            && io_queue::fetch(&mut state, key, &spec, tier, shared.config.deadline()).is_err()
        {
            break;
        }
    }
    drop(state);
    shared.kick();
}

/// Slots for blocks about to be dumped.
pub(crate) fn reserve(
    shared: &Arc<Shared>,
    owner: u64,
    namespace: NamespaceHandle,
    hashes: &Hashes<'_>,
) -> Result<Vec<Grant>> {
    let mut state = shared.state.lock();
    let keys = keys(&state, namespace, hashes)?;
    let spec = Arc::clone(&state.namespaces.get(namespace)?.spec);
    Stats::add(&shared.stats.dump_blocks, keys.len());
    let mut grants = Vec::with_capacity(keys.len());
    let mut runs_named = 0;
    for key in keys {
        if state.index.contains_key(&key) {
            Stats::add(&shared.stats.dump_blocks_had, 1);
            grants.push(Grant::Have);
            continue;
        }
        let slot = if runs_named < RUNS_PER_ANSWER_MAX {
            state.insert(key, &spec, Block::dumping(spec.layout().shard_count()))
        } else {
            Err(Error::new(ErrorKind::Busy, "too many pieces for one answer"))
        };
        match slot.and_then(|slot| state.leases.grant(owner, slot).map(|lease| (slot, lease))) {
            Ok((slot, lease)) => {
                let runs = state.slot(slot).runs.clone();
                runs_named += runs.len();
                grants.push(Grant::Leased { lease: lease.0, runs });
            }
            Err(error) => {
                Stats::add(&shared.stats.dump_blocks_dropped, 1);
                shared.stats.failed("dump", &error);
                grants.push(Grant::Refused { kind: error.kind().as_str().into() });
            }
        }
    }
    Ok(grants)
}

/// Shards of reserved blocks are in their slots. A block with all its shards is sealed; its lease ends.
pub(crate) fn commit(shared: &Arc<Shared>, owner: u64, leases: &[u64], shards: &Shards) -> Result<()> {
    let mut state = shared.state.lock();
    for &lease in leases {
        let id = state.leases.slot_of(owner, LeaseId(lease))?;
        let slot = state.slot_mut(id);
        let count = slot.spec.layout().shard_count();
        let mut sealed = false;
        match shards {
            Shards::All => {
                for shard in 0..count {
                    sealed |= slot.block.shard_filled(shard)?;
                }
            }
            Shards::Some(some) => {
                for &shard in some {
                    sealed |= slot.block.shard_filled(shard as usize)?;
                }
            }
        }
        if sealed {
            state.leases.release(owner, LeaseId(lease))?;
            state.sealed(id);
            Stats::add(&shared.stats.dump_blocks_sealed, 1);
        }
    }
    drop(state);
    shared.changed.notify_all();
    shared.kick();
    Ok(())
}

/// Ends leases: of blocks that were read, or of reserved blocks that will not come.
pub(crate) fn release(shared: &Arc<Shared>, owner: u64, leases: &[u64]) -> Result<()> {
    let mut state = shared.state.lock();
    for &lease in leases {
        let slot = state.leases.release(owner, LeaseId(lease))?;
        state.lease_ended(slot);
    }
    claim::admit_queued(shared, &mut state);
    drop(state);
    shared.changed.notify_all();
    shared.kick();
    Ok(())
}

/// Moves namespaces to their next epoch, in every tier before the pool: no block dumped before is served again.
pub(crate) fn reset(shared: &Arc<Shared>, namespaces: &[NamespaceHandle]) -> Result<Vec<[u8; 16]>> {
    let mut ids = Vec::with_capacity(namespaces.len());
    for &handle in namespaces {
        let (spec, epoch) = {
            let state = shared.state.lock();
            let namespace = state.namespaces.get(handle)?;
            let epoch = namespace.epoch.checked_add(1);
            let epoch = epoch
                .ok_or_else(|| Error::new(ErrorKind::Unsupported, "the namespace has no more epochs"))?;
            (Arc::clone(&namespace.spec), epoch)
        };
        ids.push(enter_epoch(shared, handle, &spec, epoch)?);
    }
    shared.changed.notify_all();
    Ok(ids)
}

/// Moves a namespace to `epoch` or leaves it there; never back. What its keys carry from then on.
pub(crate) fn set_epoch(shared: &Arc<Shared>, handle: NamespaceHandle, epoch: u32) -> Result<[u8; 16]> {
    let (spec, current, id) = {
        let state = shared.state.lock();
        let namespace = state.namespaces.get(handle)?;
        (Arc::clone(&namespace.spec), namespace.epoch, namespace.id.0)
    };
    if !epoch_moves(current, epoch)? {
        return Ok(id);
    }
    let id = enter_epoch(shared, handle, &spec, epoch)?;
    shared.changed.notify_all();
    Ok(id)
}

fn enter_epoch(
    shared: &Shared,
    handle: NamespaceHandle,
    spec: &NamespaceSpec,
    epoch: u32,
) -> Result<[u8; 16]> {
    // The pool first: from here on nothing old is served from memory, and nothing old is written any more.
    let mut state = shared.state.lock();
    let old = state.namespaces.set_epoch(handle, epoch)?;
    state.doom_namespace(old);
    let id = state.namespaces.get(handle)?.id.0;
    drop(state);
    // A tier that cannot be told must not keep the others from it.
    let mut outcome = Ok(id);
    for tier in &shared.tiers {
        if let Err(error) = tier.set_epoch(spec, epoch) {
            outcome = Err(error);
        }
    }
    outcome
}

/// Forgets blocks in pool and tiers: whether each was there, as far as the pool and what tiers know without I/O tell.
pub(crate) fn remove(shared: &Arc<Shared>, keys: &[BlockKey]) -> Vec<bool> {
    let mut state = shared.state.lock();
    let known = Known::peek(shared, keys.iter().copied());
    let mut tell = Vec::new();
    let mut was_there = Vec::with_capacity(keys.len());
    for key in keys {
        let (in_pool, now) = state.forget(key);
        was_there.push(in_pool || known.tier_of(key).is_some());
        if now && (known.tier_of(key).is_some() || known.is_unknown(key)) {
            tell.push(*key);
        }
    }
    io_queue::remove_everywhere(shared, &state, &tell);
    claim::admit_queued(shared, &mut state);
    drop(state);
    shared.changed.notify_all();
    was_there
}

/// Ends everything an owner holds (P4).
pub(crate) fn end_owner(shared: &Arc<Shared>, owner: u64) {
    let mut state = shared.state.lock();
    claim::end_owner(&mut state, owner);
    let slots = state.leases.end_owner(owner);
    if !slots.is_empty() {
        Stats::add(&shared.stats.owners_ended_holding, 1);
    }
    for slot in slots {
        state.lease_ended(slot);
    }
    claim::admit_queued(shared, &mut state);
    drop(state);
    shared.changed.notify_all();
    shared.kick();
}
