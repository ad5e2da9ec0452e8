//! What the depot knows, under one lock: slots, index, free space, leases, claims, queues. No I/O happens here.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use hashbrown::HashMap;
use kvdepot_core::block::{Block, Phase};
use kvdepot_core::eviction::{EvictionPolicy, SlotId};
use kvdepot_core::lease::{LeaseId, LeaseTable};
use kvdepot_core::limits::POOL_EXTENT_BYTES;
use kvdepot_core::runs::{RunAllocator, Runs};
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceSpec, Result};

use crate::claim::Claims;
use crate::namespace::Namespaces;

/// Space that the pool takes in use at a time, when it grows into memory not touched yet.
pub(crate) const GROW_BYTES: u64 = 64 << 20;
/// Share of the pool that bytes not yet in a tier may take: beyond it dumps are dropped, so that loads find room.
const DIRTY_SHARE_PERCENT: u64 = 70;

/// Share of the pool that connections to other machines may be filling at a time.
const FILLING_SHARE_PERCENT: u64 = 50;

/// One block in the pool.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) key: BlockKey,
    pub(crate) spec: Arc<NamespaceSpec>,
    pub(crate) block: Block,
    pub(crate) runs: Runs,
    pub(crate) bytes: u64,
    /// Whether a tier fills it, not a client.
    pub(crate) from_tier: bool,
    /// Tiers that have not ended writing it.
    pub(crate) writes_left: usize,
    /// Whether one of them took it.
    pub(crate) saved: bool,
    /// Claims that wait for this block to be fetched.
    pub(crate) waiters: Vec<u64>,
    /// CRC-64/NVME of the block's bytes, where somebody computed it already.
    pub(crate) crc64: Option<u64>,
}

/// A block that a tier is to read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fetch {
    pub(crate) slot: SlotId,
    pub(crate) tier: usize,
    pub(crate) deadline: Instant,
}

/// A block that a tier is to write.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Write {
    pub(crate) slot: SlotId,
    pub(crate) tier: usize,
    /// Whether what a tier has under this key is another value, which must go first.
    pub(crate) replaces: bool,
    /// How often the tier was asked before.
    pub(crate) tries: u32,
}

/// Bytes of the pool by what holds them; they overlap only where said.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Held {
    /// Being filled by clients.
    pub(crate) filling: u64,
    /// Being filled by tiers.
    pub(crate) fetching: u64,
    /// Sealed and not yet in a tier.
    pub(crate) dirty: u64,
    /// Leased by at least one reader (may also be dirty).
    pub(crate) leased: u64,
}

impl Held {
    /// What counts the bytes that are on their way into the pool.
    const fn arriving(&mut self, from_tier: bool) -> &mut u64 {
        if from_tier { &mut self.fetching } else { &mut self.filling }
    }
}

/// How a pool grows beyond the size that it began with.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Growth {
    pub(crate) pool_bytes_max: u64,
    pub(crate) step_bytes: u64,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) slots: Vec<Option<Slot>>,
    free_ids: Vec<SlotId>,
    pub(crate) index: HashMap<BlockKey, SlotId, foldhash::fast::RandomState>,
    alloc: RunAllocator,
    pub(crate) policy: Box<dyn EvictionPolicy>,
    pub(crate) leases: LeaseTable,
    pub(crate) namespaces: Namespaces,
    pub(crate) claims: Claims,
    pub(crate) fetches: VecDeque<Fetch>,
    pub(crate) fetches_in_flight: usize,
    /// One queue a tier, so that a slow one holds up no other.
    pub(crate) writes: Vec<VecDeque<Write>>,
    /// For each tier.
    pub(crate) writes_in_flight: Vec<usize>,
    /// Writes to be tried again at the janitor's next turn.
    pub(crate) delayed: Vec<Write>,
    /// Keys whose block tiers still write although the index names it no more, and what comes after that write: the
    /// block that took its place, or its removal.
    pub(crate) successors: HashMap<BlockKey, Option<SlotId>, foldhash::fast::RandomState>,
    /// Whether a thread is handing queued work to the tiers now.
    pub(crate) pumping: bool,
    pub(crate) held: Held,
    pool_bytes: u64,
    /// How far the pool may grow, and by how much at a time.
    growth: Growth,
    grown_bytes: u64,
    /// Whether sealed blocks are to be written to a tier.
    pub(crate) has_tiers: bool,
    /// Whether blocks stay in the pool after they were written or loaded.
    pub(crate) keeps: bool,
    pub(crate) evicted: u64,
}

impl State {
    pub(crate) fn new(
        pool_bytes: u64,
        growth: Growth,
        policy: Box<dyn EvictionPolicy>,
        tier_count: usize,
        keeps: bool,
    ) -> Self {
        Self {
            slots: Vec::new(),
            free_ids: Vec::new(),
            index: HashMap::default(),
            alloc: RunAllocator::new(POOL_EXTENT_BYTES),
            policy,
            leases: LeaseTable::new(),
            namespaces: Namespaces::default(),
            claims: Claims::default(),
            fetches: VecDeque::new(),
            fetches_in_flight: 0,
            writes: vec![VecDeque::new(); tier_count],
            writes_in_flight: vec![0; tier_count],
            delayed: Vec::new(),
            successors: HashMap::default(),
            pumping: false,
            held: Held::default(),
            pool_bytes,
            growth,
            grown_bytes: 0,
            has_tiers: tier_count > 0,
            keeps,
            evicted: 0,
        }
    }

    pub(crate) fn slot(&self, id: SlotId) -> &Slot {
        self.slots[id as usize].as_ref().expect("a slot id in use names a slot")
    }

    pub(crate) fn slot_mut(&mut self, id: SlotId) -> &mut Slot {
        self.slots[id as usize].as_mut().expect("a slot id in use names a slot")
    }

    /// The slot of a block that may be read now.
    pub(crate) fn readable(&self, key: &BlockKey) -> Option<SlotId> {
        self.index.get(key).copied().filter(|&id| self.slot(id).block.is_readable())
    }

    /// Bytes that no eviction can free now.
    pub(crate) const fn pinned_bytes(&self) -> u64 {
        self.held.filling + self.held.fetching + self.held.dirty + self.held.leased
    }

    pub(crate) const fn pool_bytes(&self) -> u64 {
        self.pool_bytes
    }

    pub(crate) fn free_bytes(&self) -> u64 {
        self.alloc.free_bytes() + (self.pool_bytes - self.grown_bytes)
    }

    /// Takes the next piece of the pool in use; `upto` is where a background thread has populated to.
    pub(crate) fn grow(&mut self, upto: Option<u64>) -> bool {
        let start = self.grown_bytes;
        let end = upto.unwrap_or(start + GROW_BYTES).min(self.pool_bytes);
        if end <= start {
            return false;
        }
        self.alloc.add_extent(start, end - start);
        self.grown_bytes = end;
        true
    }

    /// Whether strangers may have so many bytes more to fill. What they announce and never send must not push out what
    /// is there; one slot at a time may be of any size.
    pub(crate) fn may_fill(&self, bytes: u64) -> Result<()> {
        let pool_bytes = self.pool_bytes.max(self.growth.pool_bytes_max);
        if self.held.filling == 0 || self.held.filling + bytes <= pool_bytes * FILLING_SHARE_PERCENT / 100 {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Busy, "too much of the pool is being filled already")
            .with("filling_bytes", self.held.filling)
            .with("block_bytes", bytes))
    }

    /// Lets the pool have more memory, where that was agreed.
    fn enlarge(&mut self) -> bool {
        let before = self.pool_bytes;
        self.pool_bytes = (before + self.growth.step_bytes).min(self.growth.pool_bytes_max).max(before);
        self.pool_bytes > before
    }

    /// Evicts what is cold until no more than `bytes` are in use or `blocks_max` blocks went: how many went.
    pub(crate) fn evict_to(&mut self, bytes: u64, blocks_max: usize) -> usize {
        for gone in 0..blocks_max {
            if self.pool_bytes - self.free_bytes() <= bytes {
                return gone;
            }
            let slots = &self.slots;
            let victim = self
                .policy
                .victim(&mut |id| slots[id as usize].as_ref().is_some_and(|slot| slot.block.is_evictable()));
            let Some(victim) = victim else { return gone };
            self.evicted += 1;
            self.free(victim);
        }
        blocks_max
    }

    /// Room for a block, evicting what is cold. None when all that is left is in use.
    fn allocate(&mut self, bytes: u64) -> Option<Runs> {
        loop {
            if let Some(runs) = self.alloc.alloc(bytes) {
                return Some(runs);
            }
            if self.grow(None) || self.enlarge() {
                continue;
            }
            if self.pinned_bytes() >= self.pool_bytes {
                return None;
            }
            let slots = &self.slots;
            let victim = self.policy.victim(&mut |id| {
                slots[id as usize].as_ref().is_some_and(|slot| slot.block.is_evictable())
            })?;
            self.evicted += 1;
            self.free(victim);
        }
    }

    /// Makes room for a block and enters it into the index. The caller has checked that the key is not there.
    pub(crate) fn insert(
        &mut self,
        key: BlockKey,
        spec: &Arc<NamespaceSpec>,
        block: Block,
    ) -> Result<SlotId> {
        let id = self.insert_apart(key, spec, block)?;
        self.index.insert(key, id);
        Ok(id)
    }

    /// Makes room for a block that the index does not name until it is published.
    pub(crate) fn insert_apart(
        &mut self,
        key: BlockKey,
        spec: &Arc<NamespaceSpec>,
        block: Block,
    ) -> Result<SlotId> {
        let bytes = spec.layout().slot_bytes();
        let filling = block.phase() == Phase::Filling;
        if filling && self.has_tiers {
            let not_saved = self.held.filling + self.held.dirty + bytes;
            if not_saved > self.pool_bytes * DIRTY_SHARE_PERCENT / 100 {
                return Err(Error::new(ErrorKind::Busy, "the tiers do not keep up with what is dumped"));
            }
        }
        let runs = self.allocate(bytes).ok_or_else(|| {
            Error::new(ErrorKind::NoSpace, "every slot of the pool is in use")
                .with("block_bytes", bytes)
                .with("pool_bytes", self.pool_bytes)
        })?;
        *self.held.arriving(!filling) += bytes;
        let spec = Arc::clone(spec);
        let slot = Slot {
            key,
            spec,
            block,
            runs,
            bytes,
            from_tier: !filling,
            writes_left: 0,
            saved: false,
            waiters: Vec::new(),
            crc64: None,
        };
        let id = match self.free_ids.pop() {
            Some(id) => {
                self.slots[id as usize] = Some(slot);
                id
            }
            None => {
                self.slots.push(Some(slot));
                SlotId::try_from(self.slots.len() - 1).expect("slots fit 32 bits: each takes at least a page")
            }
        };
        Ok(id)
    }

    /// Gives a slot's space back. Nothing may touch its bytes any more (P4).
    pub(crate) fn free(&mut self, id: SlotId) {
        let slot = self.slots[id as usize].take().expect("a slot is freed once");
        debug_assert!(slot.block.leases() == 0 && !slot.block.is_writing(), "a slot in use is not freed");
        match slot.block.phase() {
            Phase::Filling | Phase::Fetching | Phase::Quarantined => {
                *self.held.arriving(slot.from_tier) -= slot.bytes
            }
            Phase::Sealed => {
                if slot.block.is_dirty() {
                    self.held.dirty -= slot.bytes;
                }
                self.policy.remove(id);
            }
        }
        if self.index.get(&slot.key) == Some(&id) {
            self.index.remove(&slot.key);
        }
        self.alloc.free(&slot.runs);
        self.free_ids.push(id);
    }

    /// Frees the slot if it was doomed, or is not to be kept, and nothing touches it any more.
    pub(crate) fn free_if_over(&mut self, id: SlotId) {
        let block = &self.slot(id).block;
        if block.is_freeable() || (!self.keeps && block.is_evictable()) {
            self.free(id);
        }
    }

    /// A reader's lease on a readable slot.
    pub(crate) fn lease(&mut self, owner: u64, id: SlotId) -> Result<LeaseId> {
        let lease = self.leases.grant(owner, id)?;
        let slot = self.slots[id as usize].as_mut().expect("a slot id in use names a slot");
        slot.block.lease();
        if slot.block.leases() == 1 {
            self.held.leased += slot.bytes;
        }
        Ok(lease)
    }

    /// The end of a lease, whoever held it: a reader's, or a dumper's who did not finish (`writer_is_gone` when it
    /// cannot write any more).
    pub(crate) fn lease_ended(&mut self, id: SlotId) {
        let slot = self.slot_mut(id);
        let bytes = slot.bytes;
        if slot.block.phase() == Phase::Filling {
            // Only the dumper holds a lease on a slot that is being filled, and it has let go of the memory: it gave
            // the lease back itself, or its connection ended, which it does only after its copies (P4).
            slot.block.abandon();
            slot.block.quarantine_ended();
        } else {
            slot.block.unlease();
            if slot.block.leases() == 0 {
                self.held.leased -= bytes;
            }
        }
        self.free_if_over(id);
    }

    /// A block's last shard came: visible from now on, and queued for the tiers.
    pub(crate) fn sealed(&mut self, id: SlotId) {
        if let Some(write) = self.seal(id) {
            self.write_in_turn(write);
        }
        self.free_if_over(id);
    }

    /// Has every tier write a block, after the one before it under its key.
    fn write_in_turn(&mut self, write: Write) {
        let key = self.slot(write.slot).key;
        match self.successors.get_mut(&key) {
            Some(next) => *next = Some(write.slot),
            None => self.queue_writes(write),
        }
    }

    /// Whether a block that was removed is still being written: a tier may show it until it can be removed there.
    pub(crate) fn is_leaving(&self, key: &BlockKey) -> bool {
        self.successors.contains_key(key)
    }

    /// Has every tier write a block.
    pub(crate) fn queue_writes(&mut self, write: Write) {
        let tiers = self.writes.len();
        let slot = self.slot_mut(write.slot);
        (slot.writes_left, slot.saved) = (tiers, false);
        for (tier, queue) in self.writes.iter_mut().enumerate() {
            queue.push_back(Write { tier, ..write });
        }
    }

    /// Writes that have not ended.
    pub(crate) fn writes_left(&self) -> usize {
        let queued: usize = self.writes.iter().map(VecDeque::len).sum();
        queued + self.writes_in_flight.iter().sum::<usize>() + self.delayed.len()
    }

    /// Seals a block; what is to be written of it.
    fn seal(&mut self, id: SlotId) -> Option<Write> {
        let has_tiers = self.has_tiers;
        let slot = self.slot_mut(id);
        let (bytes, key) = (slot.bytes, slot.key);
        let readable = slot.block.is_readable();
        if !has_tiers || !readable {
            slot.block.seal_clean();
        }
        self.held.filling -= bytes;
        self.policy.insert(id, key);
        (has_tiers && readable).then(|| {
            self.held.dirty += bytes;
            Write { slot: id, tier: 0, replaces: false, tries: 0 }
        })
    }

    /// A slot that was filled apart becomes the block of its key, in place of what was there under it and under
    /// `others`; who reads that keeps it until they let go. Of `others` those that tiers may be told of now; None when
    /// the block is not visible because its namespace was reset.
    pub(crate) fn publish(&mut self, id: SlotId, others: &[BlockKey]) -> Option<Vec<BlockKey>> {
        let key = self.slot(id).key;
        let write = self.seal(id);
        if !self.slot(id).block.is_readable() {
            self.free_if_over(id);
            return None;
        }
        let tell = others.iter().filter(|other| self.forget(other).1).copied().collect();
        if let Some(old) = self.index.insert(key, id) {
            self.displace(old);
        }
        if let Some(write) = write {
            self.write_in_turn(Write { replaces: true, ..write });
        }
        self.free_if_over(id);
        Some(tell)
    }

    /// Takes a block out of the pool: whether it was there, and whether tiers are to be told now; if not, a write that
    /// is under way is waited for.
    pub(crate) fn forget(&mut self, key: &BlockKey) -> (bool, bool) {
        let old = self.index.remove(key);
        let was_there = old.is_some_and(|old| self.slot(old).block.is_readable());
        if let Some(old) = old {
            self.displace(old);
        }
        (was_there, !self.is_leaving(key))
    }

    /// Dooms a slot that the index names no more. Where tiers still write it, its removal has its turn after that, unless
    /// something takes its place before.
    fn displace(&mut self, old: SlotId) {
        let slot = self.slot_mut(old);
        let (key, bytes) = (slot.key, slot.bytes);
        let (dirty, writing) = (slot.block.is_dirty(), slot.block.is_writing());
        slot.block.doom();
        if dirty {
            self.held.dirty -= bytes;
        }
        if writing {
            self.successors.insert(key, None);
        } else if let Some(next) = self.successors.get_mut(&key) {
            // It waited for the write of what it replaced itself.
            *next = None;
        } else if dirty {
            self.writes.iter_mut().for_each(|queue| queue.retain(|write| write.slot != old));
        }
        self.free_if_over(old);
    }

    /// Dooms every block of a namespace id that was left behind.
    pub(crate) fn doom_namespace(&mut self, old: kvdepot_core::NamespaceId) {
        // A queue entry must not outlive its slot: what is not being written yet is forgotten first.
        let slots = &self.slots;
        for queue in &mut self.writes {
            queue.retain(|write| {
                let slot = slots[write.slot as usize].as_ref();
                slot.is_some_and(|slot| slot.key.namespace != old || slot.block.is_writing())
            });
        }
        for id in 0..self.slots.len() as SlotId {
            let Some(slot) = self.slots[id as usize].as_mut().filter(|slot| slot.key.namespace == old) else {
                continue;
            };
            if slot.block.is_dirty() {
                self.held.dirty -= slot.bytes;
            }
            slot.block.doom();
            self.free_if_over(id);
        }
        // Tiers do not know this epoch any more: nothing comes after its writes.
        self.successors.retain(|key, _| key.namespace != old);
    }
}
