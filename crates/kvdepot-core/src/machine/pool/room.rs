//! Space of the pool: how it is taken into use, and how eviction frees space for a block.

use super::super::flaw::Flaw;
use super::super::names::PoolKey;
use super::super::slots::{Slot, Standing};
use super::{GROW_BYTES, GoneHere, NoRoom, Pool, Unwritten};
use crate::block::Block;
use crate::error::{Error, ErrorKind, Result};
use crate::eviction::{Search, SlotId};
use crate::misses::Fate;
use crate::priority::Priority;
use crate::regions::RegionIndex;
use crate::runs::Runs;

/// Share of the pool that unwritten bytes may take: beyond it dumps are dropped, so that loads find space.
const DIRTY_SHARE_PERCENT: u64 = 70;
/// Share of the pool that clients on other machines may be filling at a time.
const FILLING_SHARE_PERCENT: u64 = 50;
/// Maximum number of blocks evicted for one allocation, over all its steps. A pool of small blocks that are scattered
/// by leases may have no space for a large one, whatever is evicted.
const EVICTIONS_PER_ALLOCATION_MAX: usize = 1024;
/// Seconds after which an allocation that was not continued counts as abandoned: another one for its key starts with
/// the full number of evictions.
const UNFINISHED_S: u32 = 2;
/// Maximum number of allocations whose evictions are remembered between steps. Beyond it all are forgotten, and may
/// evict as many again.
const UNFINISHED_MAX: usize = 256;
/// Cost of an eviction, in examined slots.
const LOOKS_PER_EVICTION: usize = 8;
/// When a smaller part than this of the pool is free, cold blocks are written to the tiers that should get them before
/// their eviction.
const COLD_FREE_DIVISOR: u64 = 8;
/// Maximum number of blocks that one eviction passes over because a tier should get them first. Beyond it the eviction
/// takes any block.
const UNWRITTEN_PASSED_OVER_MAX: usize = 64;
/// Number of the coldest blocks that are searched for one in the preferred region. At most that many blocks of other
/// regions stay longer than their turn.
const NEAR_LOOKS: usize = 32;
/// Number of slots that one step may examine for that.
const NEAR_LOOKS_PER_STEP: usize = 2048;

impl Pool {
    /// Returns the number of bytes of the pool that are not in use yet.
    fn ungrown_bytes(&self) -> u64 {
        self.pool_bytes - self.regions.grown_bytes()
    }

    /// Takes memory into use that a background thread has populated.
    pub(crate) fn populated(&mut self, upto: u64) {
        self.regions.grow_upto(upto, self.ungrown_bytes());
    }

    /// Lets the pool grow, if that is configured.
    fn enlarge(&mut self) -> bool {
        let before = self.pool_bytes;
        self.pool_bytes = (before + self.grow_step_bytes).min(self.pool_bytes_max);
        self.pool_bytes > before
    }

    /// Lets the pool grow to at least `bytes`, if that is configured.
    pub(crate) fn enlarge_to(&mut self, bytes: u64) {
        while self.pool_bytes < bytes && self.enlarge() {}
    }

    /// Returns whether remote clients may reserve `bytes` more. Announced payload that was not sent must not evict
    /// cached blocks; one slot at a time may have any size.
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

    /// Returns whether a dump of `bytes` leaves the tiers time to write earlier dumps.
    pub(crate) fn may_dirty(&self, bytes: u64) -> Result<()> {
        let stopped = self.fills.stopped_bytes();
        let not_saved = (self.held.filling + self.held.dirty + bytes).saturating_sub(stopped);
        if not_saved > self.pool_bytes_max.saturating_sub(stopped) * DIRTY_SHARE_PERCENT / 100 {
            return Err(Error::new(ErrorKind::Busy, "the tiers do not keep up with what is dumped"));
        }
        Ok(())
    }

    /// Returns whether a block of `bytes` that a tier has lost may be written again now: that leaves half of the room for
    /// unwritten bytes to dumps.
    pub(crate) fn may_rewrite(&self, bytes: u64) -> bool {
        (self.held.filling + self.held.dirty + bytes) * 100 <= self.pool_bytes_max * DIRTY_SHARE_PERCENT / 2
    }

    /// Begins a step, which may examine `looks` slots in search of space. The blocks that a step uses or stores are
    /// those of one request, in its order.
    pub(crate) fn begin_step(&mut self, looks: usize) {
        self.policy.begin_row();
        (self.looks, self.near_looks) = (looks, NEAR_LOOKS_PER_STEP);
    }

    /// Evicts one of the coldest blocks that is in a region, if there is one that would be evicted at its turn. All
    /// others keep their places.
    fn evict_near(&mut self, region: RegionIndex) -> bool {
        if self.near_looks < NEAR_LOOKS || self.looks == 0 {
            return false;
        }
        let Self { slots, regions, cold_tiers, .. } = self;
        let (mut looks, mut found) = (NEAR_LOOKS, None);
        self.policy.coldest(self.pool_bytes, &mut |id, goes| {
            looks -= 1;
            let may_go = |slot: &&Slot| goes && slot.block.is_evictable() && !slot.owes(*cold_tiers);
            let slot = slots.get(id).filter(may_go);
            found = slot.is_some_and(|slot| regions.of(slot.first_byte()) == Some(region)).then_some(id);
            found.is_none() && looks > 0
        });
        self.near_looks -= NEAR_LOOKS - looks;
        if let Some(victim) = found {
            self.policy.choose(victim);
            self.evict(victim);
        }
        found.is_some()
    }

    fn evict(&mut self, victim: SlotId) {
        self.looks = self.looks.saturating_sub(LOOKS_PER_EVICTION);
        self.evicted += 1;
        let slot = self.slots.at(victim);
        let kept_s = self.births.age_s(slot.serial, self.now_s);
        if let Some(age_s) = kept_s {
            self.evict_ages.count(age_s);
        }
        let is_owed = self.policy.priority(victim) != Priority::Low && !slot.is_value();
        self.evicted_unwritten += u64::from(is_owed && self.cold_tiers & !slot.saved != 0);
        if slot.saved == 0 && slot.is_indexed() {
            self.gone.push(GoneHere { key: slot.key, fate: Fate::Evicted, tier: None, kept_s });
        }
        self.free(victim);
    }

    /// Evicts the coldest block that may be evicted, in any region. A block that a tier should get first is evicted if
    /// no other can be, or if many cannot be.
    fn evict_one(&mut self) -> Search {
        let cold = self.cold_tiers;
        let victim = loop {
            let Self { slots, passed_over, released, looks, .. } = self;
            let mut search =
                self.search.take().unwrap_or(Unwritten { released: *released, ..Unwritten::default() });
            let victim = self.policy.victim(self.pool_bytes, looks, &mut |id| {
                let Some(slot) = slots.get(id).filter(|slot| slot.block.is_evictable()) else { return false };
                if search.unwritten == UNWRITTEN_PASSED_OVER_MAX || !slot.owes(cold) {
                    return true;
                }
                search.unwritten += 1;
                search.first_unwritten.get_or_insert(id);
                if passed_over.len() < UNWRITTEN_PASSED_OVER_MAX {
                    passed_over.push(id);
                }
                false
            });
            let unwritten = search.first_unwritten.filter(|&id| self.is_evictable(id));
            match (victim, unwritten) {
                (Search::Later, _) => {
                    self.search = Some(search);
                    return Search::Later;
                }
                (Search::Found(victim), _) | (Search::Nothing, Some(victim)) => break victim,
                // The search may have begun in an earlier step for another request, and may have passed a block that
                // became evictable since. It restarts, unless the most recently used block is sufficient: a block in
                // constant use might have been passed, too.
                (Search::Nothing, None) if search.released != self.released => {
                    if let Some(last) = self.last_released.take().filter(|&id| self.is_evictable(id)) {
                        break last;
                    }
                }
                (Search::Nothing, None) => return Search::Nothing,
            }
        };
        self.evict(victim);
        Search::Found(victim)
    }

    fn is_evictable(&self, id: SlotId) -> bool {
        self.slots.get(id).is_some_and(|slot| slot.block.is_evictable())
    }

    /// Returns blocks that are about to be evicted and that a tier should get first: those that an eviction passed over
    /// and, if space is short, those among the `count` slots next in the eviction order.
    pub(crate) fn take_cold(&mut self, count: usize) -> Vec<SlotId> {
        let mut cold = std::mem::take(&mut self.passed_over);
        if std::mem::take(&mut self.cold_due) {
            let (slots, tiers) = (&self.slots, self.cold_tiers);
            let mut left = count;
            self.policy.coldest(self.pool_bytes, &mut |id, goes| {
                if goes && slots.get(id).is_some_and(|slot| slot.owes(tiers)) {
                    cold.push(id);
                }
                left -= 1;
                left > 0
            });
        }
        cold
    }

    /// Evicts cold blocks until at most `bytes` are in use or `blocks_max` blocks were evicted. Returns how many were,
    /// and whether the search for more should continue.
    pub(crate) fn evict_to(&mut self, bytes: u64, blocks_max: usize) -> (usize, bool) {
        // Those in a tier's memory take none of the pool's: only who wants nothing kept wants them gone.
        let given_back = if bytes == 0 { self.give_back(blocks_max) } else { 0 };
        for gone in given_back..blocks_max {
            if self.pool_bytes - self.free_bytes() <= bytes {
                return (gone, false);
            }
            match self.evict_one() {
                Search::Found(_) => {}
                search => return (gone, search == Search::Later),
            }
        }
        (blocks_max, true)
    }

    /// Allocates free space of a region, from memory that was never touched if necessary.
    fn take_in(&mut self, region: RegionIndex, bytes: u64) -> Option<Runs> {
        loop {
            if let Some(runs) = self.regions.alloc_in(region, bytes) {
                return Some(runs);
            }
            if self.regions.grow(region, GROW_BYTES.min(self.ungrown_bytes())) == 0 {
                return None;
            }
        }
    }

    /// Allocates free space: in the preferred region, otherwise in the one with the most, otherwise in the others,
    /// otherwise in several. A block in another region is copied more slowly, but a block that is evicted is computed
    /// or read again, which costs far more.
    fn take_free(&mut self, near: Option<RegionIndex>, bytes: u64) -> Option<Runs> {
        let count = self.regions.count() as RegionIndex;
        let first = near.unwrap_or_else(|| self.regions.emptiest());
        let rest = (0..count).filter(|&region| region != first);
        std::iter::once(first)
            .chain(rest)
            .find_map(|region| self.take_in(region, bytes))
            .or_else(|| self.regions.alloc_across(bytes))
    }

    /// Allocates space for a block, evicting others if necessary. Returns `None` if the rest is in use.
    pub(super) fn allocate(
        &mut self,
        key: PoolKey,
        bytes: u64,
        near: Option<RegionIndex>,
    ) -> std::result::Result<Runs, NoRoom> {
        let near = near.filter(|_| !self.flaws.has(Flaw::RegionIgnored));
        let mut evictions = self.recall(&key);
        loop {
            if let Some(runs) = self.take_free(near, bytes) {
                return Ok(runs);
            }
            if self.enlarge() {
                continue;
            }
            // If nothing can be evicted, no walk over the slots is needed.
            if self.held.pinned + self.free_bytes() >= self.pool_bytes
                || evictions == EVICTIONS_PER_ALLOCATION_MAX
            {
                return Err(self.full(bytes));
            }
            if near.is_some_and(|region| self.evict_near(region)) {
                evictions += 1;
                continue;
            }
            match self.evict_one() {
                Search::Found(_) => evictions += 1,
                Search::Nothing => return Err(self.full(bytes)),
                Search::Later => {
                    self.remember(key, evictions);
                    return Err(NoRoom::Later);
                }
            }
        }
    }

    /// Returns the evictions of an allocation that continues; none if one for the same key was abandoned.
    fn recall(&mut self, key: &PoolKey) -> usize {
        if self.unfinished.is_empty() {
            return 0;
        }
        let Some((evictions, at_s)) = self.unfinished.remove(key) else { return 0 };
        if self.now_s.saturating_sub(at_s) > UNFINISHED_S { 0 } else { evictions }
    }

    fn remember(&mut self, key: PoolKey, evictions: usize) {
        if self.unfinished.len() >= UNFINISHED_MAX {
            self.unfinished.clear();
        }
        self.unfinished.insert(key, (evictions, self.now_s));
    }

    fn full(&self, bytes: u64) -> NoRoom {
        let error = Error::new(ErrorKind::NoSpace, "every slot of the pool is in use")
            .with("block_bytes", bytes)
            .with("pool_bytes", self.pool_bytes);
        NoRoom::Full(error)
    }

    /// Allocates a slot for a block. `indexed`: the index names it from now on; its key must not exist yet. `near`: the
    /// preferred region.
    pub(crate) fn insert(
        &mut self,
        key: PoolKey,
        block: Block,
        bytes: u64,
        indexed: bool,
        near: Option<RegionIndex>,
    ) -> std::result::Result<SlotId, NoRoom> {
        self.insert_hashed((key, self.index.hash(&key)), block, bytes, indexed, near)
    }

    /// Like `insert`, for a caller that has the key's hash.
    pub(crate) fn insert_hashed(
        &mut self,
        (key, hash): (PoolKey, u64),
        block: Block,
        bytes: u64,
        indexed: bool,
        near: Option<RegionIndex>,
    ) -> std::result::Result<SlotId, NoRoom> {
        let runs = self.allocate(key, bytes, near)?;
        self.serials = self.serials.wrapping_add(1);
        self.births.came(self.serials, self.now_s);
        self.cold_due |= self.cold_tiers != 0 && self.free_bytes() < self.pool_bytes / COLD_FREE_DIVISOR;
        let mut slot = Slot::new(key, block, &runs, self.serials, indexed);
        // The tier that has just read it knows that it is in use.
        if slot.is_from_tier() {
            slot.tell_use(self.now_s);
        }
        let after = slot.standing();
        let Some(id) = self.slots.insert(slot) else {
            self.regions.free(&runs);
            return Err(self.full(bytes));
        };
        self.count(id, Standing::NONE, after, bytes, key);
        self.uses.slot_came(key.space, after.pinned);
        if indexed {
            // The caller looked that the key is not there.
            self.index.insert_new(&self.slots, id, hash);
        }
        Ok(id)
    }

    /// Adds a slot that another depot left at this place in the pool's memory. Returns `None` if the place is not free,
    /// or if the index names another slot for its key.
    pub(crate) fn adopt(&mut self, key: PoolKey, block: Block, runs: &Runs, indexed: bool) -> Option<SlotId> {
        if runs.is_empty() || (indexed && self.find(&key).is_some()) {
            return None;
        }
        for &run in runs {
            let missing = self.regions.missing(run)?;
            self.enlarge_to(self.regions.grown_bytes() + missing);
            let region = self.regions.of(run.offset)?;
            self.regions.grow(region, missing.min(self.ungrown_bytes()));
        }
        if !self.regions.take(runs) {
            return None;
        }
        self.serials = self.serials.wrapping_add(1);
        let slot = Slot::new(key, block, runs, self.serials, indexed);
        let (after, bytes) = (slot.standing(), slot.bytes());
        let Some(id) = self.slots.insert(slot) else {
            self.regions.free(runs);
            return None;
        };
        self.count(id, Standing::NONE, after, bytes, key);
        self.uses.slot_came(key.space, after.pinned);
        if indexed {
            self.index.insert(&self.slots, id);
        }
        if after.listed {
            self.policy.insert(id, self.index.hash(&key), bytes, after.pinned);
        }
        Some(id)
    }

    /// Frees a slot's space. Nothing may access its bytes any more (P4).
    pub(super) fn free(&mut self, id: SlotId) {
        debug_assert!(
            self.slots.at(id).block.leases() == 0 && !self.slots.at(id).block.is_writing(),
            "a slot in use is not freed"
        );
        self.index.remove(&self.slots, id);
        let slot = self.slots.remove(id);
        let before = slot.standing();
        self.count(id, before, Standing::NONE, slot.pool_bytes(), slot.key);
        self.uses.slot_went(slot.key.space, before.pinned);
        if slot.is_in_place() {
            self.free_in_place(id, &slot);
            return;
        }
        self.policy.remove(id);
        self.regions.free(&slot.runs());
        self.room_came = true;
    }

    /// Frees a slot that is no longer needed, or not kept, when nothing accesses it any more.
    pub(crate) fn free_if_over(&mut self, id: SlotId) {
        let block = &self.slots.at(id).block;
        let waits = self.slots.at(id).to_write != 0;
        if block.is_freeable() || (!self.keeps && block.is_evictable() && !waits) {
            self.free(id);
        }
    }

    /// Frees a slot if it was doomed. In a pool that keeps no blocks, a fetched one stays for its waiters.
    pub(crate) fn free_if_doomed(&mut self, id: SlotId) {
        if self.slots.get(id).is_some_and(|slot| slot.block.is_freeable()) {
            self.free(id);
        }
    }
}
