//! The pool: slots, their space, the order of eviction, leases, and what every byte counts as.
//!
//! All changes of a slot go through [`Pool::edit`], which compares what the slot counted as before and after. So the
//! totals, the eviction policy and the list of blocks that became visible or invisible cannot drift from the slots.

use crate::block::{Block, Phase};
use crate::error::{Error, ErrorKind, Result};
use crate::eviction::{EvictionPolicy, SlotId};
use crate::lease::{LeaseId, LeaseTable};
use crate::limits::POOL_EXTENT_BYTES;
use crate::runs::{RunAllocator, Runs};

use super::fills::Fills;
use super::flaw::{Flaw, Flaws};
use super::index::Index;
use super::names::{PoolKey, SpaceId};
use super::proofs::{Change, Proofs};
use super::slots::{Slot, Slots, Standing, TierMask};
use super::uses::Uses;

/// Space that the pool takes in use at a time, when it grows into memory that nobody has touched yet.
pub const GROW_BYTES: u64 = 64 << 20;
/// Share of the pool that bytes not yet in a tier may take: beyond it dumps are dropped, so that loads find room.
const DIRTY_SHARE_PERCENT: u64 = 70;
/// Share of the pool that clients on other machines may be filling at a time.
const FILLING_SHARE_PERCENT: u64 = 50;
/// How often tiers are told that a block is in use.
const TOUCH_INTERVAL_S: u32 = 30;
/// Blocks evicted for one allocation: a bound on how long it takes.
const EVICTIONS_PER_ALLOCATION_MAX: usize = 1024;

/// Below this part of the pool that is free, what is cold is written to tiers that are to have it before its eviction.
const COLD_FREE_DIVISOR: u64 = 8;
/// Blocks that one eviction passes over because a tier is to have them first. Beyond them it takes what comes.
const UNWRITTEN_PASSED_OVER_MAX: usize = 64;

/// How a pool is set up.
#[derive(Debug)]
pub struct PoolConfig {
    /// Its size in bytes.
    pub pool_bytes: u64,
    /// The size that it may grow to; not above `pool_bytes` means that it does not grow.
    pub pool_bytes_max: u64,
    /// By how much it grows at a time.
    pub grow_step_bytes: u64,
    /// The order of eviction.
    pub policy: Box<dyn EvictionPolicy>,
    /// Whether blocks stay in the pool after they were written or loaded.
    pub keeps: bool,
    /// Seed of the index's hash function.
    pub seed: u64,
}

/// Bytes of the pool by what holds them. A slot can count in several of them, and once in `pinned` at most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Being filled by clients.
    pub filling: u64,
    /// Being filled by tiers.
    pub fetching: u64,
    /// Sealed, and not yet in every tier that is to have them.
    pub dirty: u64,
    /// Leased by at least one reader.
    pub leased: u64,
    /// Not evictable now, for any of these reasons.
    pub pinned: u64,
}

/// Slots and all that is known about them.
#[derive(Debug)]
pub(crate) struct Pool {
    slots: Slots,
    index: Index,
    alloc: RunAllocator,
    policy: Box<dyn EvictionPolicy>,
    leases: LeaseTable,
    fills: Fills,
    held: Held,
    dirty_blocks: u64,
    pool_bytes: u64,
    pool_bytes_max: u64,
    grow_step_bytes: u64,
    grown_bytes: u64,
    keeps: bool,
    serials: u32,
    evicted: u64,
    evicted_unwritten: u64,
    /// Tiers that are to have a block before it is evicted.
    cold_tiers: TierMask,
    /// Whether any tier is given blocks that are used a second time.
    counts_uses: bool,
    /// Whether blocks came in while room was short, since the last look.
    cold_due: bool,
    /// Blocks that eviction passed over, because such a tier is to have them first.
    passed_over: Vec<SlotId>,
    /// Blocks that lookups find from now on (`true`), or do not find any more.
    changes: Vec<(PoolKey, bool)>,
    /// Whether room came back since the last look.
    room_came: bool,
    now_s: u32,
    /// Blocks in use of which tiers have not been told for a while.
    touched: Vec<SlotId>,
    /// What the ledger is to be told.
    pub(crate) proofs: Proofs,
    /// What names each space: slots, and the requests of claims and loads.
    pub(super) uses: Uses,
    pub(crate) flaws: Flaws,
}

impl Pool {
    pub(crate) fn new(config: PoolConfig) -> Self {
        Self {
            slots: Slots::new(),
            index: Index::new(config.seed),
            alloc: RunAllocator::new(POOL_EXTENT_BYTES),
            policy: config.policy,
            leases: LeaseTable::new(),
            fills: Fills::default(),
            held: Held::default(),
            dirty_blocks: 0,
            pool_bytes: config.pool_bytes,
            pool_bytes_max: config.pool_bytes_max.max(config.pool_bytes),
            grow_step_bytes: config.grow_step_bytes,
            grown_bytes: 0,
            keeps: config.keeps,
            serials: 0,
            evicted: 0,
            evicted_unwritten: 0,
            cold_tiers: 0,
            counts_uses: false,
            cold_due: false,
            passed_over: Vec::new(),
            changes: Vec::new(),
            room_came: false,
            now_s: 0,
            touched: Vec::new(),
            proofs: Proofs::default(),
            uses: Uses::default(),
            flaws: Flaws::default(),
        }
    }

    pub(crate) const fn bytes(&self) -> u64 {
        self.pool_bytes
    }

    pub(crate) const fn held(&self) -> Held {
        self.held
    }

    pub(crate) const fn dirty_blocks(&self) -> u64 {
        self.dirty_blocks
    }

    /// Whether an owner has leases.
    pub(crate) fn holds(&self, owner: u64) -> bool {
        self.leases.count(owner) > 0
    }

    pub(crate) const fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Blocks that the index names.
    pub(crate) const fn blocks(&self) -> usize {
        self.index.len()
    }

    /// End of a walk over all slot numbers.
    pub(crate) const fn numbers(&self) -> usize {
        self.slots.numbers()
    }

    pub(crate) fn free_bytes(&self) -> u64 {
        self.alloc.free_bytes() + (self.pool_bytes - self.grown_bytes)
    }

    /// Bytes that could be had now, by eviction too.
    pub(crate) const fn unpinned_bytes(&self) -> u64 {
        self.pool_bytes.saturating_sub(self.held.pinned)
    }

    pub(crate) fn find(&self, key: &PoolKey) -> Option<SlotId> {
        self.index.get(&self.slots, key)
    }

    /// The slot of a block that may be read now.
    pub(crate) fn readable(&self, key: &PoolKey) -> Option<SlotId> {
        self.find(key).filter(|&id| self.slots.at(id).block.is_readable())
    }

    pub(crate) fn slot(&self, id: SlotId) -> &Slot {
        self.slots.at(id)
    }

    /// The slot of this number, if it is in use.
    pub(crate) fn get(&self, id: SlotId) -> Option<&Slot> {
        self.slots.get(id)
    }

    /// What became visible or invisible since the last call.
    pub(crate) fn take_changes(&mut self) -> Vec<(PoolKey, bool)> {
        std::mem::take(&mut self.changes)
    }

    /// Whether room came back since the last call.
    pub(crate) const fn take_room(&mut self) -> bool {
        std::mem::replace(&mut self.room_came, false)
    }

    /// Changes a slot, and all totals with it.
    pub(crate) fn edit<R>(&mut self, id: SlotId, change: impl FnOnce(&mut Slot) -> R) -> R {
        let slot = self.slots.at_mut(id);
        let before = slot.standing();
        let out = change(slot);
        let (after, bytes, key) = (slot.standing(), slot.bytes(), slot.key);
        self.count(id, before, after, bytes, key);
        if before.pinned != after.pinned {
            self.uses.set_pinned(key.space, after.pinned);
        }
        if before.listed != after.listed {
            debug_assert!(after.listed, "a sealed block stays sealed until it is freed");
            self.policy.insert(id, self.index.hash(&key));
        }
        out
    }

    fn count(&mut self, id: SlotId, before: Standing, after: Standing, bytes: u64, key: PoolKey) {
        let total = |total: &mut u64, was: bool, is: bool| match (was, is) {
            (false, true) => *total += bytes,
            (true, false) => *total -= bytes,
            _ => {}
        };
        total(&mut self.held.filling, before.filling, after.filling);
        total(&mut self.held.fetching, before.fetching, after.fetching);
        total(&mut self.held.dirty, before.dirty, after.dirty);
        total(&mut self.held.leased, before.leased, after.leased);
        total(&mut self.held.pinned, before.pinned, after.pinned);
        self.dirty_blocks += u64::from(after.dirty);
        self.dirty_blocks -= u64::from(before.dirty);
        self.room_came |= before.pinned && !after.pinned;
        if before.visible != after.visible {
            self.changes.push((key, after.visible));
            let change = if after.visible { Change::Visible } else { Change::Gone };
            self.proofs.note(id, change, self.flaws);
        }
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

    /// Lets the pool have more memory, where that was agreed.
    fn enlarge(&mut self) -> bool {
        let before = self.pool_bytes;
        self.pool_bytes = (before + self.grow_step_bytes).min(self.pool_bytes_max);
        self.pool_bytes > before
    }

    /// Lets the pool have at least so many bytes, where that was agreed.
    pub(crate) fn enlarge_to(&mut self, bytes: u64) {
        while self.pool_bytes < bytes && self.enlarge() {}
    }

    /// Whether remote clients may reserve `bytes` more. Announced but unsent payload must not evict cached blocks; one
    /// slot at a time may be of any size.
    pub(crate) fn may_fill(&self, bytes: u64) -> Result<()> {
        let stopped = self.fills.stopped_bytes();
        let filling = self.held.filling.saturating_sub(stopped);
        let share = self.pool_bytes_max.saturating_sub(stopped) * FILLING_SHARE_PERCENT / 100;
        if filling == 0 || filling + bytes <= share {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Busy, "too much of the pool is being filled already")
            .with("filling_bytes", self.held.filling)
            .with("block_bytes", bytes))
    }

    /// Whether a dump of `bytes` leaves the tiers time to write what was dumped before.
    pub(crate) fn may_dirty(&self, bytes: u64) -> Result<()> {
        let stopped = self.fills.stopped_bytes();
        let not_saved = (self.held.filling + self.held.dirty + bytes).saturating_sub(stopped);
        if not_saved > self.pool_bytes.saturating_sub(stopped) * DIRTY_SHARE_PERCENT / 100 {
            return Err(Error::new(ErrorKind::Busy, "the tiers do not keep up with what is dumped"));
        }
        Ok(())
    }

    /// Evicts the coldest block that may go. One that a tier is to have first goes when no other does, or many do not.
    fn evict_one(&mut self) -> bool {
        let (slots, cold, passed_over) = (&self.slots, self.cold_tiers, &mut self.passed_over);
        let mut passed = 0;
        let mut victim = self.policy.victim(&mut |id| {
            let Some(slot) = slots.get(id).filter(|slot| slot.block.is_evictable()) else { return false };
            if passed == UNWRITTEN_PASSED_OVER_MAX || !slot.owes(cold) {
                return true;
            }
            passed += 1;
            if passed_over.len() < UNWRITTEN_PASSED_OVER_MAX {
                passed_over.push(id);
            }
            false
        });
        if victim.is_none() && passed > 0 {
            victim =
                self.policy.victim(&mut |id| slots.get(id).is_some_and(|slot| slot.block.is_evictable()));
        }
        let Some(victim) = victim else { return false };
        self.evicted += 1;
        let slot = self.slots.at(victim);
        self.evicted_unwritten += u64::from(!slot.is_value() && cold & !slot.saved != 0);
        self.free(victim);
        true
    }

    /// Blocks that are about to be evicted and that a tier is to have first: those that an eviction passed over, and, when
    /// room is short, those among the `count` slots that go next.
    pub(crate) fn take_cold(&mut self, count: usize) -> Vec<SlotId> {
        let mut cold = std::mem::take(&mut self.passed_over);
        if std::mem::take(&mut self.cold_due) {
            let (slots, tiers) = (&self.slots, self.cold_tiers);
            let mut left = count;
            self.policy.coldest(&mut |id, goes| {
                if goes && slots.get(id).is_some_and(|slot| slot.owes(tiers)) {
                    cold.push(id);
                }
                left -= 1;
                left > 0
            });
        }
        cold
    }

    /// Sets the tiers that are to have a block before its eviction, and those that are given it when it is used again.
    pub(crate) const fn set_placements(&mut self, cold: TierMask, second_use: TierMask) {
        self.cold_tiers = cold;
        self.counts_uses = second_use != 0;
    }

    pub(crate) const fn keeps(&self) -> bool {
        self.keeps
    }

    /// Blocks evicted before a tier had them that was to.
    pub(crate) const fn evicted_unwritten(&self) -> u64 {
        self.evicted_unwritten
    }

    /// Evicts what is cold until no more than `bytes` are in use or `blocks_max` blocks went: how many went.
    pub(crate) fn evict_to(&mut self, bytes: u64, blocks_max: usize) -> usize {
        for gone in 0..blocks_max {
            if self.pool_bytes - self.free_bytes() <= bytes || !self.evict_one() {
                return gone;
            }
        }
        blocks_max
    }

    /// Room for a block, made by eviction where needed. None when what is left is in use.
    fn allocate(&mut self, bytes: u64) -> Option<Runs> {
        let mut evictions = 0;
        loop {
            if let Some(runs) = self.alloc.alloc(bytes) {
                return Some(runs);
            }
            if self.grow(None) || self.enlarge() {
                continue;
            }
            evictions += 1;
            // Without anything to evict, no walk over the slots finds it.
            if self.held.pinned + self.free_bytes() >= self.pool_bytes
                || evictions > EVICTIONS_PER_ALLOCATION_MAX
                || !self.evict_one()
            {
                return None;
            }
        }
    }

    /// Makes room for a block. `indexed`: the index names it from now on; its key must not be there yet.
    pub(crate) fn insert(&mut self, key: PoolKey, block: Block, bytes: u64, indexed: bool) -> Result<SlotId> {
        let full = |pool: &Self| {
            Error::new(ErrorKind::NoSpace, "every slot of the pool is in use")
                .with("block_bytes", bytes)
                .with("pool_bytes", pool.pool_bytes)
        };
        let runs = self.allocate(bytes).ok_or_else(|| full(self))?;
        self.serials = self.serials.wrapping_add(1);
        self.cold_due |= self.cold_tiers != 0 && self.free_bytes() < self.pool_bytes / COLD_FREE_DIVISOR;
        let mut slot = Slot::new(key, block, &runs, self.serials, indexed);
        // What a tier has just read it knows to be in use.
        if slot.is_from_tier() {
            slot.tell_use(self.now_s);
        }
        let after = slot.standing();
        let Some(id) = self.slots.insert(slot) else {
            self.alloc.free(&runs);
            return Err(full(self));
        };
        self.count(id, Standing::NONE, after, bytes, key);
        self.uses.slot_came(key.space, after.pinned);
        if indexed {
            let before = self.index.insert(&self.slots, id);
            debug_assert!(before.is_none(), "the caller looked that the key is not there");
        }
        Ok(id)
    }

    /// A slot that another depot left at this place of the pool's memory. None when the place is not free, or the index
    /// names another slot for its key.
    pub(crate) fn adopt(&mut self, key: PoolKey, block: Block, runs: &Runs, indexed: bool) -> Option<SlotId> {
        if indexed && self.find(&key).is_some() {
            return None;
        }
        let end = runs.iter().map(|run| run.offset.saturating_add(run.len)).max()?;
        self.enlarge_to(end);
        self.grow(Some(end));
        if !self.alloc.take(runs) {
            return None;
        }
        self.serials = self.serials.wrapping_add(1);
        let slot = Slot::new(key, block, runs, self.serials, indexed);
        let (after, bytes) = (slot.standing(), slot.bytes());
        let Some(id) = self.slots.insert(slot) else {
            self.alloc.free(runs);
            return None;
        };
        self.count(id, Standing::NONE, after, bytes, key);
        self.uses.slot_came(key.space, after.pinned);
        if indexed {
            self.index.insert(&self.slots, id);
        }
        if after.listed {
            self.policy.insert(id, self.index.hash(&key));
        }
        Some(id)
    }

    /// Every lease: who holds it, and on which slot.
    pub(crate) fn leases(&self) -> impl Iterator<Item = (u64, SlotId)> + '_ {
        self.leases.all()
    }

    /// Lets the index name `id` for its key; the slot that it named before is unnamed now.
    pub(crate) fn name(&mut self, id: SlotId) -> Option<SlotId> {
        let old = self.index.insert(&self.slots, id).filter(|&old| old != id);
        if let Some(old) = old {
            self.edit(old, |slot| slot.set_indexed(false));
        }
        self.edit(id, |slot| slot.set_indexed(true));
        old
    }

    /// Takes a slot's key out of the index.
    pub(crate) fn unname(&mut self, id: SlotId) {
        if self.index.remove(&self.slots, id) {
            self.edit(id, |slot| slot.set_indexed(false));
        }
    }

    /// Gives a slot's space back. Nothing may touch its bytes any more (P4).
    fn free(&mut self, id: SlotId) {
        debug_assert!(
            self.slots.at(id).block.leases() == 0 && !self.slots.at(id).block.is_writing(),
            "a slot in use is not freed"
        );
        self.index.remove(&self.slots, id);
        let slot = self.slots.remove(id);
        let before = slot.standing();
        self.count(id, before, Standing::NONE, slot.bytes(), slot.key);
        self.uses.slot_went(slot.key.space, before.pinned);
        if before.listed {
            self.policy.remove(id);
        }
        self.alloc.free(&slot.runs());
        self.room_came = true;
    }

    /// Frees a slot that is of no use to anybody, or is not to be kept, when nothing touches it any more.
    pub(crate) fn free_if_over(&mut self, id: SlotId) {
        let block = &self.slots.at(id).block;
        let waits = self.slots.at(id).to_write != 0;
        if block.is_freeable() || (!self.keeps && block.is_evictable() && !waits) {
            self.free(id);
        }
    }

    /// Frees a slot if it was doomed: where blocks are not kept, one that was fetched stays for who asked for it.
    pub(crate) fn free_if_doomed(&mut self, id: SlotId) {
        if self.slots.get(id).is_some_and(|slot| slot.block.is_freeable()) {
            self.free(id);
        }
    }

    /// The block was used.
    pub(crate) fn touch(&mut self, id: SlotId) {
        self.policy.touch(id);
        let slot = self.slots.at_mut(id);
        let second = slot.count_use() && self.counts_uses;
        if second || !slot.was_told(self.now_s, TOUCH_INTERVAL_S) {
            slot.tell_use(self.now_s);
            self.touched.push(id);
        }
    }

    /// Sets the time by which uses are told to tiers.
    pub(crate) const fn set_now(&mut self, seconds: u32) {
        self.now_s = seconds;
    }

    /// Blocks that were used, each once in `TOUCH_INTERVAL_S`.
    pub(crate) fn take_touched(&mut self) -> Vec<SlotId> {
        std::mem::take(&mut self.touched)
    }

    /// Pins a readable block for a claim, which unpins it itself.
    pub(crate) fn pin(&mut self, id: SlotId) {
        self.edit(id, |slot| slot.block.lease());
    }

    /// The end of a pin or of a reader's lease.
    pub(crate) fn unpin(&mut self, id: SlotId) {
        self.edit(id, |slot| slot.block.unlease());
        self.free_if_over(id);
    }

    #[cfg(any(test, feature = "model"))]
    pub(crate) const fn leases_granted(&self) -> u64 {
        self.leases.granted_ever()
    }

    /// A reader's lease on a readable slot.
    pub(crate) fn lease(&mut self, owner: u64, id: SlotId) -> Result<LeaseId> {
        let lease = self.leases.grant(owner, id)?;
        self.pin(id);
        Ok(lease)
    }

    /// A dumper's lease on a slot that it is to fill.
    pub(crate) fn lease_for_filling(&mut self, owner: u64, id: SlotId) -> Result<LeaseId> {
        debug_assert_eq!(self.slots.at(id).block.phase(), Phase::Filling, "only what is new is filled");
        let lease = self.leases.grant(owner, id)?;
        self.fills.begun(owner, self.slots.at(id).bytes(), self.now_s);
        Ok(lease)
    }

    /// An owner asks for slots to fill.
    pub(crate) fn seen(&mut self, owner: u64) {
        self.fills.seen(owner, self.now_s);
    }

    /// Bytes that owners fill who have stopped.
    pub(crate) const fn stopped_bytes(&self) -> u64 {
        self.fills.stopped_bytes()
    }

    /// Looks who has stopped in the middle of a dump.
    pub(crate) fn look_who_stopped(&mut self) {
        self.fills.look(self.now_s);
    }

    pub(crate) fn leased_slot(&self, owner: u64, lease: LeaseId) -> Result<SlotId> {
        self.leases.slot_of(owner, lease)
    }

    /// Takes a dumper's lease out of the table, without an effect on its slot.
    pub(crate) fn forget_lease(&mut self, owner: u64, lease: LeaseId) -> Result<()> {
        let id = self.leases.release(owner, lease)?;
        self.fills.ended(owner, self.slots.at(id).bytes(), self.now_s);
        Ok(())
    }

    /// Ends a lease by its number.
    pub(crate) fn release(&mut self, owner: u64, lease: LeaseId) -> Result<()> {
        let id = self.leases.release(owner, lease)?;
        self.lease_ended(owner, id);
        Ok(())
    }

    /// The end of a lease, of a reader or of a dumper who did not finish.
    pub(crate) fn lease_ended(&mut self, owner: u64, id: SlotId) {
        if self.slots.at(id).block.phase() == Phase::Filling {
            self.fills.ended(owner, self.slots.at(id).bytes(), self.now_s);
            self.abandon(id);
        } else {
            self.unpin(id);
        }
    }

    /// Nobody fills this slot any more. Only the dumper holds a lease on a slot that is being filled, and it cannot write
    /// any more: it gave the lease back itself, or its connection ended and with it, as the runner makes sure, all its
    /// copies (P4).
    pub(crate) fn abandon(&mut self, id: SlotId) {
        self.edit(id, |slot| {
            slot.block.abandon();
            slot.block.quarantine_ended();
        });
        self.free_if_over(id);
    }

    /// Ends up to `max` leases of an owner; whether it has none left.
    pub(crate) fn end_owner(&mut self, owner: u64, max: usize) -> (usize, bool) {
        let slots = self.leases.end_some(owner, max);
        for &slot in &slots {
            self.lease_ended(owner, slot);
        }
        (slots.len(), self.leases.count(owner) == 0)
    }

    /// Dooms the blocks of spaces that have `passed` among `count` slot numbers from `from` on. Which tiers' writes that
    /// calls off is the flow's business: a doomed slot's queue entries name no block.
    pub(crate) fn doom_some(&mut self, from: usize, count: usize, passed: impl Fn(SpaceId) -> bool) {
        let end = (from + count).min(self.slots.numbers());
        for id in from..end {
            let id = id as SlotId;
            if self.slots.get(id).is_some_and(|slot| passed(slot.key.space)) {
                self.doom(id);
            }
        }
    }

    /// No new reader and no new write of a block. Freed at once if nothing touches it.
    pub(crate) fn doom(&mut self, id: SlotId) {
        let flawed = self.flaws.has(Flaw::WriteDisplaced);
        self.edit(id, |slot| {
            slot.block.doom();
            slot.to_write &= if flawed { slot.to_write } else { slot.writing };
            if slot.to_write == 0 && slot.block.is_writing() {
                slot.block.write_ended(slot.saved != 0);
            }
        });
        self.free_if_over(id);
    }

    /// Every total, computed from the slots. For tests: it must equal what was counted.
    #[cfg(any(test, feature = "model"))]
    pub(crate) fn recount(&self) -> (Held, u64) {
        let mut held = Held::default();
        let mut used = 0;
        for slot in (0..self.slots.numbers()).filter_map(|id| self.slots.get(id as SlotId)) {
            let (standing, bytes) = (slot.standing(), slot.bytes());
            let share = |is: bool| if is { bytes } else { 0 };
            held.filling += share(standing.filling);
            held.fetching += share(standing.fetching);
            held.dirty += share(standing.dirty);
            held.leased += share(standing.leased);
            held.pinned += share(standing.pinned);
            used += bytes;
        }
        (held, used)
    }

    /// Slots of each space, and those of them that are pinned, counted anew. For tests.
    #[cfg(any(test, feature = "model"))]
    pub(crate) fn recount_spaces(&self) -> hashbrown::HashMap<SpaceId, (u32, u32)> {
        let mut spaces: hashbrown::HashMap<SpaceId, (u32, u32)> = hashbrown::HashMap::new();
        for slot in (0..self.slots.numbers()).filter_map(|id| self.slots.get(id as SlotId)) {
            let counted = spaces.entry(slot.key.space).or_default();
            counted.0 += 1;
            counted.1 += u32::from(slot.standing().pinned);
        }
        spaces
    }
}
