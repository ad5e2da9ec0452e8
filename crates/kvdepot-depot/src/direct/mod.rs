//! A depot used inside of its own process, slot by slot: what the wire door stands on. Bytes go straight between a
//! socket and a slot; nothing here waits, but for the calls that say so.

mod slots;

use std::sync::Arc;
use std::time::Duration;

use kvdepot_core::block::Block;
use kvdepot_core::lease::LeaseId;
use kvdepot_core::{BlockHash, BlockKey, Error, ErrorKind, NamespaceId, Result};

use crate::message::{Grant, Hashes, NamespaceHandle};
use crate::resolver::Known;
use crate::state::State;
use crate::stats::Stats;
use crate::{Depot, Session, acquire, ops};

pub use slots::{ReadSlot, WriteSlot};

/// A namespace as this depot knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenNamespace {
    /// Its number at this depot.
    pub handle: NamespaceHandle,
    /// What keys carry now.
    pub id: NamespaceId,
    /// Its epoch.
    pub epoch: u32,
    /// Bytes of one of its blocks.
    pub block_bytes: u64,
}

/// What can be said of a block without waiting.
#[derive(Debug)]
pub enum Now {
    /// It is in the pool, and leased.
    Here(ReadSlot),
    /// Neither pool nor tiers have it.
    Absent,
    /// A tier has it or may have it, or it is on its way: [`Direct::read`] finds out.
    Ask,
}

/// One owner of slots, as a connection is. Clones are the same owner.
#[derive(Clone, Debug)]
pub struct Direct {
    session: Arc<Session>,
}

impl Depot {
    /// A new owner of slots inside of this process.
    pub fn direct(&self) -> Direct {
        Direct { session: Arc::new(self.session()) }
    }
}

impl Direct {
    /// Makes a namespace known; may wait for a tier's disk.
    pub fn open_namespace(&self, canonical: &str) -> Result<OpenNamespace> {
        let (handle, ..) = ops::open_namespace(self.session.shared(), canonical)?;
        self.describe(handle)
    }

    /// The namespace whose keys carry `id` now; `NotFound` when it was not opened here, or its epoch has passed.
    pub fn namespace(&self, id: NamespaceId) -> Result<OpenNamespace> {
        let handle = self.session.shared().state.lock().namespaces.handle_of(id);
        let handle = handle.ok_or_else(|| {
            Error::new(
                ErrorKind::NotFound,
                "the namespace is not open here, or its epoch has passed: open it",
            )
        })?;
        self.describe(handle)
    }

    pub(crate) fn describe(&self, handle: NamespaceHandle) -> Result<OpenNamespace> {
        let state = self.session.shared().state.lock();
        let entry = state.namespaces.get(handle)?;
        let block_bytes = entry.spec.layout().block_bytes();
        Ok(OpenNamespace { handle, id: entry.id, epoch: entry.epoch, block_bytes })
    }

    /// Moves a namespace to an epoch, never back; may wait for a tier's disk.
    pub fn set_epoch(&self, handle: NamespaceHandle, epoch: u32) -> Result<OpenNamespace> {
        ops::set_epoch(self.session.shared(), handle, epoch)?;
        self.describe(handle)
    }

    /// Moves namespaces to their next epochs; may wait for a tier's disk.
    pub fn reset(&self, handles: &[NamespaceHandle]) -> Result<()> {
        ops::reset(self.session.shared(), handles).map(drop)
    }

    /// Which blocks are there, where that is known without waiting.
    pub fn exist_now(&self, keys: &[BlockKey]) -> Option<Vec<bool>> {
        let shared = self.session.shared();
        let mut there: Vec<bool> = {
            let state = shared.state.lock();
            keys.iter().map(|key| state.readable(key).is_some()).collect()
        };
        Stats::add(&shared.stats.lookup_blocks, keys.len());
        if shared.tiers.is_empty() || there.iter().all(|there| *there) {
            return Some(there);
        }
        let absent = keys.iter().zip(&there).filter(|(_, there)| !**there).map(|(key, _)| *key);
        let known = Known::peek(shared, absent);
        for (key, there) in keys.iter().zip(&mut there) {
            if !*there && known.is_unknown(key) && known.tier_of(key).is_none() {
                return None;
            }
            *there |= known.tier_of(key).is_some();
        }
        Some(there)
    }

    /// Which blocks are there; waits for tiers that cannot tell without I/O, within bounds.
    pub fn exist(&self, keys: &[BlockKey]) -> Vec<bool> {
        ops::lookup_keys(self.session.shared(), keys).into_iter().map(|there| there == 1).collect()
    }

    /// How many leading blocks are there; waits as `exist` does.
    pub fn prefix(&self, handle: NamespaceHandle, hashes: &[u8]) -> Result<u32> {
        ops::lookup_prefix(self.session.shared(), &[handle], &Hashes(hashes.into()))
    }

    /// What can be said of each block without waiting; what is in the pool is leased.
    pub fn read_now(&self, keys: &[BlockKey]) -> Vec<Now> {
        let shared = self.session.shared();
        let mut out: Vec<Now> = Vec::with_capacity(keys.len());
        let mut missed = Vec::new();
        {
            let mut state = shared.state.lock();
            for key in keys {
                if let Some(slot) = self.lease(&mut state, key) {
                    out.push(Now::Here(slot));
                    continue;
                }
                // A block that could not be leased, or is on its way.
                let arriving = state.readable(key).is_some() || state.index.contains_key(key);
                missed.push(out.len());
                out.push(if arriving { Now::Ask } else { Now::Absent });
            }
        }
        Stats::add(&shared.stats.load_blocks, keys.len());
        if !shared.tiers.is_empty() && !missed.is_empty() {
            let known = Known::peek(shared, missed.iter().map(|&i| keys[i]));
            for i in missed {
                if known.tier_of(&keys[i]).is_some() || known.is_unknown(&keys[i]) {
                    out[i] = Now::Ask;
                }
            }
        }
        Stats::add(
            &shared.stats.load_blocks_missed,
            out.iter().filter(|now| matches!(now, Now::Absent)).count(),
        );
        out
    }

    /// Leases those blocks that are in the pool, by their place in `keys`.
    pub(crate) fn read_pool(&self, keys: &[BlockKey]) -> Vec<(usize, ReadSlot)> {
        let shared = self.session.shared();
        let mut out = Vec::new();
        let mut state = shared.state.lock();
        for (index, key) in keys.iter().enumerate() {
            if let Some(slot) = self.lease(&mut state, key) {
                out.push((index, slot));
            }
        }
        out
    }

    fn lease(&self, state: &mut State, key: &BlockKey) -> Option<ReadSlot> {
        let id = state.readable(key)?;
        state.policy.touch(id);
        let lease = state.lease(self.session.owner(), id).ok()?;
        let slot = state.slot(id);
        let (block_bytes, crc64) = (slot.spec.layout().block_bytes() as usize, slot.crc64);
        let pool = &self.session.shared().pool;
        let buf = pool.slot(&slot.runs).expect("the allocator hands out runs inside of the pool");
        // SAFETY: readable means sealed, and the lease was granted just now.
        Some(unsafe { ReadSlot::new(Arc::clone(&self.session), lease, id, buf, block_bytes, crc64) })
    }

    /// Leases blocks, brought up from tiers where needed; waits up to `wait`. Blocks that found no room while others
    /// were leased are `NoSpace`: asked for again once those are let go, they find it.
    pub fn read(
        &self,
        handle: NamespaceHandle,
        hashes: &[BlockHash],
        wait: Duration,
    ) -> Result<Vec<Result<ReadSlot, ErrorKind>>> {
        let shared = self.session.shared();
        let bytes: Vec<u8> = hashes.iter().flat_map(|hash| hash.0).collect();
        let owner = self.session.owner();
        let grants = acquire::acquire(shared, owner, handle, &Hashes(bytes.into()), wait, true)?;
        let mut state = shared.state.lock();
        let mut out = Vec::with_capacity(grants.len());
        for grant in grants {
            out.push(match grant {
                Grant::Leased { lease, .. } => {
                    // No early return here: a `ReadSlot` that ends takes the lock that is held.
                    let id = state.leases.slot_of(owner, LeaseId(lease)).expect("granted just now");
                    let slot = state.slot_mut(id);
                    let (block_bytes, crc64) = (slot.spec.layout().block_bytes() as usize, slot.crc64);
                    let runs = slot.runs.clone();
                    let buf =
                        shared.pool.slot(&runs).expect("the allocator hands out runs inside of the pool");
                    let session = Arc::clone(&self.session);
                    // SAFETY: `acquire` leases what is sealed, to this owner.
                    Ok(unsafe { ReadSlot::new(session, LeaseId(lease), id, buf, block_bytes, crc64) })
                }
                Grant::Have => Err(ErrorKind::NotFound),
                Grant::Refused { kind } => Err(ErrorKind::from_name(&kind).unwrap_or(ErrorKind::Unavailable)),
            });
        }
        Ok(out)
    }

    /// A slot for a block; None when the depot has the block already, or somebody is storing it.
    pub fn reserve(&self, handle: NamespaceHandle, hash: BlockHash) -> Result<Option<WriteSlot>> {
        self.reserve_for(handle, hash, false)
    }

    /// A slot for a block that is to take the place of what is there under its key.
    pub(crate) fn reserve_apart(&self, handle: NamespaceHandle, hash: BlockHash) -> Result<WriteSlot> {
        let slot = self.reserve_for(handle, hash, true)?;
        slot.ok_or_else(|| Error::new(ErrorKind::Busy, "the block is being stored"))
    }

    fn reserve_for(
        &self,
        handle: NamespaceHandle,
        hash: BlockHash,
        apart: bool,
    ) -> Result<Option<WriteSlot>> {
        let shared = self.session.shared();
        let mut state = shared.state.lock();
        let entry = state.namespaces.get(handle)?;
        let (key, spec) = (entry.key(hash), Arc::clone(&entry.spec));
        Stats::add(&shared.stats.dump_blocks, 1);
        if !apart && state.index.contains_key(&key) {
            Stats::add(&shared.stats.dump_blocks_had, 1);
            return Ok(None);
        }
        state.may_fill(spec.layout().slot_bytes()).inspect_err(|error| {
            Stats::add(&shared.stats.dump_blocks_dropped, 1);
            shared.stats.failed("dump", error);
        })?;
        let shards = if apart { 1 } else { spec.layout().shard_count() };
        let block = Block::dumping(shards);
        let slot =
            if apart { state.insert_apart(key, &spec, block) } else { state.insert(key, &spec, block) };
        let leased = slot.and_then(|slot| {
            let lease = state.leases.grant(self.session.owner(), slot);
            if lease.is_err() {
                state.lease_ended(slot);
            }
            lease.map(|lease| (slot, lease))
        });
        let (slot, lease) = leased.inspect_err(|error| {
            Stats::add(&shared.stats.dump_blocks_dropped, 1);
            shared.stats.failed("dump", error);
        })?;
        let buf = shared.pool.slot(&state.slot(slot).runs)?;
        drop(state);
        let (session, block_bytes) = (Arc::clone(&self.session), spec.layout().block_bytes() as usize);
        // SAFETY: inserted for filling above, and leased to this owner.
        Ok(Some(unsafe { WriteSlot::new(session, lease, slot, key, buf, block_bytes) }))
    }

    /// Forgets blocks: whether each was there, as far as that is known without I/O.
    pub fn remove(&self, keys: &[BlockKey]) -> Vec<bool> {
        ops::remove(self.session.shared(), keys)
    }

    /// Evicts what is cold until no more than `percent` of the pool is in use; how many blocks went.
    pub fn evict_to_percent(&self, percent: f64) -> u64 {
        /// Blocks evicted under one hold of the lock.
        const AT_A_TIME: usize = 256;
        let mut gone = 0;
        loop {
            let mut state = self.session.shared().state.lock();
            let bytes = (state.pool_bytes() as f64 * percent / 100.0) as u64;
            let now = state.evict_to(bytes, AT_A_TIME);
            gone += now as u64;
            if now < AT_A_TIME {
                return gone;
            }
        }
    }

    /// Share of the pool that is in use, in percent.
    pub fn used_percent(&self) -> f64 {
        let state = self.session.shared().state.lock();
        let used = state.pool_bytes() - state.free_bytes();
        used as f64 * 100.0 / state.pool_bytes().max(1) as f64
    }

    /// Blocks of these namespaces in pool and tiers, each counted once. Looks at all of them: for administrators.
    pub fn count(&self, handles: &[NamespaceHandle]) -> Result<u64> {
        let shared = self.session.shared();
        let mut keys = hashbrown::HashSet::<BlockKey>::new();
        let ids: Vec<NamespaceId> = {
            let state = shared.state.lock();
            let ids = handles.iter().map(|&handle| state.namespaces.get(handle).map(|entry| entry.id));
            let ids: Vec<NamespaceId> = ids.collect::<Result<_>>()?;
            keys.extend(
                state
                    .index
                    .iter()
                    .filter(|(key, id)| ids.contains(&key.namespace) && state.slot(**id).block.is_readable())
                    .map(|(key, _)| *key),
            );
            ids
        };
        for tier in &shared.tiers {
            ids.iter().for_each(|id| keys.extend(tier.keys(*id)));
        }
        Ok(keys.len() as u64)
    }

    /// Counters and gauges.
    pub fn stats(&self) -> serde_json::Value {
        self.session.stats()
    }

    /// Whether the depot has tiers below its pool.
    pub fn has_tiers(&self) -> bool {
        !self.session.shared().tiers.is_empty()
    }
}
