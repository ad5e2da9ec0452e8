//! The pool: slots, their space, the eviction order, leases, and the totals of its bytes.
//!
//! - *room*: space taken in use, and made by eviction; slots that come and go.
//! - *leases*: who holds which slots.
//! - *births*: how long blocks have been there.
//! - *in_place*: blocks that a tier leases where they lie.
//! - *near*: who wishes its blocks in which region.
//! - *totals*: what every byte counts as.

mod ages;
mod births;
mod in_place;
mod leases;
mod near;
mod room;
mod totals;

use hashbrown::HashMap;

use crate::error::Error;
use crate::eviction::{EvictionPolicy, Ranked, SlotId};
use crate::lease::LeaseTable;
use crate::misses::Fate;
use crate::priority::Priority;
use crate::regions::{RegionIndex, Regions};

use super::event::Owner;
use super::fills::Fills;
use super::flaw::{Flaw, Flaws};
use super::index::Index;
use super::names::{PoolKey, SpaceId};
use super::proofs::{Change, Proofs};
use super::slots::{Slot, Slots};
use super::tiers::{TierIndex, TierMask};
use super::uses::Uses;

pub use ages::{EVICT_AGE_BOUNDS_S, EvictAges};
use births::Births;
use in_place::InPlace;

pub use in_place::LeasedInPlace;

/// Interval at which tiers are notified that a block is in use.
const TOUCH_INTERVAL_S: u32 = 30;
/// Space that the pool takes into use at a time, when it grows into memory that was never touched.
pub const GROW_BYTES: u64 = 64 << 20;

/// Configuration of a pool.
#[derive(Debug)]
pub struct PoolConfig {
    /// Its size in bytes.
    pub pool_bytes: u64,
    /// Maximum size; if it is not above `pool_bytes` the pool does not grow.
    pub pool_bytes_max: u64,
    /// Bytes by which it grows at a time.
    pub grow_step_bytes: u64,
    /// The eviction policy.
    pub policy: Box<dyn EvictionPolicy>,
    /// Whether blocks stay in the pool after they were written or loaded.
    pub keeps: bool,
    /// Seed of the index's hash function.
    pub seed: u64,
}

/// Bytes of the pool by use. A slot can count in several of them, and at most once in `pinned`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Being filled by clients.
    pub filling: u64,
    /// Being filled by tiers.
    pub fetching: u64,
    /// Sealed, and not yet in every tier that should have them.
    pub dirty: u64,
    /// Leased by at least one reader.
    pub leased: u64,
    /// Not evictable at the moment, for any of these reasons.
    pub pinned: u64,
}

/// Blocks that a search for a victim has passed over, because a tier should get them first.
#[derive(Clone, Copy, Debug, Default)]
struct Unwritten {
    /// `Pool::released` when the search began.
    released: u64,
    unwritten: usize,
    first_unwritten: Option<SlotId>,
}

/// Reason why there is no space for a block.
#[derive(Debug)]
pub(crate) enum NoRoom {
    /// This step has examined enough slots: the next one continues.
    Later,
    /// The rest of the pool is in use.
    Full(Error),
}

/// A block that went, as rooms of the machine name it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GoneHere {
    pub(crate) key: PoolKey,
    pub(crate) fate: Fate,
    pub(crate) tier: Option<TierIndex>,
    pub(crate) kept_s: Option<u32>,
}

/// Slots and all that is known about them.
#[derive(Debug)]
pub(crate) struct Pool {
    slots: Slots,
    index: Index,
    regions: Regions,
    /// Preferred regions of owners.
    near: HashMap<Owner, RegionIndex>,
    policy: Ranked,
    leases: LeaseTable,
    fills: Fills,
    held: Held,
    dirty_blocks: u64,
    pool_bytes: u64,
    pool_bytes_max: u64,
    grow_step_bytes: u64,
    keeps: bool,
    serials: u32,
    evicted: u64,
    evicted_unwritten: u64,
    /// Tiers that should get a block before it is evicted.
    cold_tiers: TierMask,
    /// Whether any tier gets blocks that are used a second time.
    counts_uses: bool,
    /// Whether blocks came in while space was short, since the last check.
    cold_due: bool,
    /// Blocks that eviction passed over, because such a tier should get them first.
    passed_over: Vec<SlotId>,
    /// The eviction whose search has not completed.
    search: Option<Unwritten>,
    /// Number of times that a block became evictable again: a search that found none may have passed it before.
    released: u64,
    /// The last of them.
    last_released: Option<SlotId>,
    /// Number of blocks evicted for an allocation that continues in another step, and the second of the last eviction.
    unfinished: HashMap<PoolKey, (usize, u32)>,
    /// Number of slots that this step may still examine in search of space.
    looks: usize,
    /// The same for the search for blocks in a preferred region.
    near_looks: usize,
    /// Blocks that lookups find from now on (`true`), or no longer find.
    changes: Vec<(PoolKey, bool)>,
    /// Whether space was freed since the last check.
    room_came: bool,
    now_s: u32,
    /// Blocks in use whose use was not reported to tiers for a while.
    touched: Vec<SlotId>,
    /// When slots were taken.
    births: Births,
    /// When leases were given.
    lease_births: Births,
    evict_ages: EvictAges,
    in_place: InPlace,
    /// Number of times that blocks in use were doomed, that a space in use was left, or that a tier lost its memory.
    losses: u64,
    /// Blocks that went.
    pub(super) gone: Vec<GoneHere>,
    /// What the ledger is to be told.
    pub(crate) proofs: Proofs,
    /// Uses of each space: by slots, and by requests of claims and loads.
    pub(super) uses: Uses,
    pub(crate) flaws: Flaws,
}

impl Pool {
    pub(crate) fn new(config: PoolConfig) -> Self {
        Self {
            slots: Slots::new(),
            index: Index::new(config.seed),
            regions: Regions::new(&[config.pool_bytes_max.max(config.pool_bytes)]),
            near: HashMap::new(),
            policy: Ranked::new(config.policy),
            leases: LeaseTable::new(),
            fills: Fills::default(),
            held: Held::default(),
            dirty_blocks: 0,
            pool_bytes: config.pool_bytes,
            pool_bytes_max: config.pool_bytes_max.max(config.pool_bytes),
            grow_step_bytes: config.grow_step_bytes,
            keeps: config.keeps,
            serials: 0,
            evicted: 0,
            evicted_unwritten: 0,
            cold_tiers: 0,
            counts_uses: false,
            cold_due: false,
            passed_over: Vec::new(),
            search: None,
            released: 0,
            last_released: None,
            unfinished: HashMap::new(),
            looks: usize::MAX,
            near_looks: 0,
            changes: Vec::new(),
            room_came: false,
            now_s: 0,
            touched: Vec::new(),
            births: Births::default(),
            lease_births: Births::default(),
            evict_ages: EvictAges::default(),
            in_place: InPlace::default(),
            losses: 0,
            gone: Vec::new(),
            proofs: Proofs::default(),
            uses: Uses::default(),
            flaws: Flaws::default(),
        }
    }

    pub(crate) const fn bytes(&self) -> u64 {
        self.pool_bytes
    }

    /// Returns the size to which the pool may grow.
    pub(crate) const fn bytes_max(&self) -> u64 {
        self.pool_bytes_max
    }

    pub(crate) const fn held(&self) -> Held {
        self.held
    }

    pub(crate) const fn dirty_blocks(&self) -> u64 {
        self.dirty_blocks
    }

    pub(crate) const fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Returns the number of blocks that the index names.
    pub(crate) const fn blocks(&self) -> usize {
        self.index.len()
    }

    /// Returns the end of a walk over all slot numbers.
    pub(crate) const fn numbers(&self) -> usize {
        self.slots.numbers()
    }

    pub(crate) fn free_bytes(&self) -> u64 {
        self.regions.free_bytes() + (self.pool_bytes - self.regions.grown_bytes())
    }

    /// Returns the number of bytes that can be allocated now, including by eviction, without growth.
    pub(crate) const fn unpinned_bytes(&self) -> u64 {
        self.pool_bytes.saturating_sub(self.held.pinned)
    }

    /// Returns the number of bytes that can be allocated now, including by eviction and growth.
    pub(crate) const fn unpinned_bytes_max(&self) -> u64 {
        self.pool_bytes_max.saturating_sub(self.held.pinned)
    }

    pub(crate) fn find(&self, key: &PoolKey) -> Option<SlotId> {
        self.index.get(&self.slots, key)
    }

    /// Returns the hash by which the index finds a key.
    pub(crate) fn hash(&self, key: &PoolKey) -> u64 {
        self.index.hash(key)
    }

    /// Like `find`, for a caller that has the key's hash.
    pub(crate) fn find_hashed(&self, key: &PoolKey, hash: u64) -> Option<SlotId> {
        self.index.get_hashed(&self.slots, key, hash)
    }

    /// Brings the index entries of keys that are about to be searched or inserted into the processor's caches. Takes
    /// their hashes.
    pub(crate) fn prefetch(&self, hashes: impl Iterator<Item = u64>) {
        self.index.prefetch(hashes);
    }

    /// Returns the slot of a block that may be read now.
    pub(crate) fn readable(&self, key: &PoolKey) -> Option<SlotId> {
        self.find(key).filter(|&id| self.slots.at(id).block.is_readable())
    }

    pub(crate) fn slot(&self, id: SlotId) -> &Slot {
        self.slots.at(id)
    }

    /// Returns the number of slot accesses.
    #[cfg(test)]
    pub(super) const fn slot_looks(&self) -> u64 {
        self.slots.looks()
    }

    /// Returns the slot with this number, if it is in use.
    pub(crate) fn get(&self, id: SlotId) -> Option<&Slot> {
        self.slots.get(id)
    }

    /// Returns the blocks that became visible or invisible since the last call.
    pub(crate) fn take_changes(&mut self) -> impl ExactSizeIterator<Item = (PoolKey, bool)> + '_ {
        self.changes.drain(..)
    }

    /// Returns whether space was freed since the last call.
    pub(crate) const fn take_room(&mut self) -> bool {
        std::mem::replace(&mut self.room_came, false)
    }

    /// Returns a number that changes when readers may no longer be shown a block that is in use.
    pub(crate) const fn losses(&self) -> u64 {
        self.losses
    }

    /// Notes that readers may no longer be shown the blocks of a space, if any of them or a request uses it.
    pub(crate) fn note_left(&mut self, space: SpaceId) {
        self.losses += u64::from(!self.uses.is_idle(space));
    }

    /// Returns whether space was freed since the last call of [`Self::take_room`].
    pub(crate) const fn has_room_come(&self) -> bool {
        self.room_came
    }

    /// Sets the tiers that should get a block before its eviction, and those that get it when it is used again.
    pub(crate) const fn set_placements(&mut self, cold: TierMask, second_use: TierMask) {
        self.cold_tiers = cold;
        self.counts_uses = second_use != 0;
    }

    pub(crate) const fn keeps(&self) -> bool {
        self.keeps
    }

    /// Returns the evicted blocks by age.
    pub(crate) const fn evict_ages(&self) -> EvictAges {
        self.evict_ages
    }

    /// Returns the number of blocks evicted before a tier got them that should have.
    pub(crate) const fn evicted_unwritten(&self) -> u64 {
        self.evicted_unwritten
    }

    /// Makes the index name `id` for its key. Returns the slot that it named before.
    pub(crate) fn name(&mut self, id: SlotId) -> Option<SlotId> {
        let old = self.index.insert(&self.slots, id).filter(|&old| old != id);
        if let Some(old) = old {
            self.edit(old, |slot| slot.set_indexed(false));
        }
        self.edit(id, |slot| slot.set_indexed(true));
        old
    }

    /// Removes a slot's key from the index.
    pub(crate) fn unname(&mut self, id: SlotId) {
        if self.index.remove(&self.slots, id) {
            self.edit(id, |slot| slot.set_indexed(false));
        }
    }

    /// Records a use of the block.
    pub(crate) fn touch(&mut self, id: SlotId) {
        let Self { policy, slots, index, .. } = self;
        if policy.touch(id, || index.hash(&slots.at(id).key)) {
            // The ledger has no blocks of low priority.
            self.proofs.note(id, Change::Visible, self.flaws);
        }
        let slot = self.slots.at_mut(id);
        let second = slot.count_use() && self.counts_uses;
        if second || !slot.was_told(self.now_s, TOUCH_INTERVAL_S) {
            slot.tell_use(self.now_s);
            self.touched.push(id);
        }
    }

    /// Returns the priority of a slot's block.
    pub(crate) fn priority(&self, id: SlotId) -> Priority {
        self.policy.priority(id)
    }

    /// Returns how many blocks of low and of high priority the pool has.
    pub(crate) fn blocks_by_priority(&self) -> (usize, usize) {
        self.policy.special()
    }

    /// Gives a slot that a client fills a priority. In a pool that keeps no blocks it would have no meaning.
    pub(crate) fn set_priority(&mut self, id: SlotId, priority: Priority) {
        if self.keeps {
            self.policy.set_filling(id, priority);
        }
    }

    /// Gives a sealed block a priority.
    pub(crate) fn rank(&mut self, id: SlotId, priority: Priority) {
        let slot = self.slots.at(id);
        let (hash, bytes, pinned) = (self.index.hash(&slot.key), slot.bytes(), slot.standing().pinned);
        self.policy.rank(id, priority, hash, bytes, pinned);
    }

    /// Gives a block a higher priority, if this is one: somebody else has dumped it.
    pub(crate) fn raise_priority(&mut self, id: SlotId, priority: Priority) {
        let slot = self.slots.at(id);
        let before = self.policy.priority(id);
        if slot.is_in_place() || !self.keeps || priority <= before {
            return;
        }
        if !slot.standing().listed {
            self.policy.set_filling(id, priority);
            return;
        }
        let is_readable = slot.block.is_readable();
        self.rank(id, priority);
        if before == Priority::Low && is_readable {
            // Neither the tiers nor the ledger have it.
            self.slots.at_mut(id).count_use();
            self.touched.push(id);
            self.proofs.note(id, Change::Visible, self.flaws);
        }
    }

    /// Returns a slot of low priority that one of the tiers has or is to get, although nobody has used its block. For tests.
    #[cfg(any(test, feature = "model"))]
    pub(crate) fn low_in_tiers(&self, tiers: TierMask) -> Option<SlotId> {
        let in_tiers = |slot: &Slot| (slot.to_write | slot.writing | slot.saved) & tiers;
        (0..self.slots.numbers()).map(|id| id as SlotId).find(|&id| {
            self.priority(id) == Priority::Low
                && self.slots.get(id).is_some_and(|slot| !slot.is_value() && in_tiers(slot) != 0)
        })
    }

    /// Tells that a block went, or that a tier failed it.
    pub(crate) fn went(&mut self, key: PoolKey, fate: Fate, tier: Option<TierIndex>) {
        self.gone.push(GoneHere { key, fate, tier, kept_s: None });
    }

    /// Tells that the block in a slot is about to go.
    fn goes(&mut self, id: SlotId, fate: Fate) {
        let slot = self.slots.at(id);
        let kept_s = self.births.age_s(slot.serial, self.now_s);
        self.gone.push(GoneHere { key: slot.key, fate, tier: None, kept_s });
    }

    /// Sets the time by which uses are told to tiers.
    pub(crate) const fn set_now(&mut self, seconds: u32) {
        self.now_s = seconds;
    }

    /// Returns the blocks that were used, each at most once in `TOUCH_INTERVAL_S`.
    pub(crate) fn take_touched(&mut self) -> Vec<SlotId> {
        std::mem::take(&mut self.touched)
    }

    /// Dooms the blocks of spaces that have `passed` among `count` slot numbers from `from` on. The flow handles the
    /// writes that this cancels: a doomed slot's queue entries name no block.
    pub(crate) fn doom_some(
        &mut self,
        from: usize,
        count: usize,
        dooms: usize,
        passed: impl Fn(SpaceId) -> bool,
    ) -> usize {
        self.walk_some(
            from,
            count,
            dooms,
            |slot| passed(slot.key.space),
            |pool, id| {
                if pool.slots.at(id).is_indexed() {
                    pool.goes(id, Fate::Reset);
                }
                pool.doom(id);
            },
        )
    }

    /// Does something to the slots that are `wanted` among `count` slot numbers from `from` on, `most` of them at most.
    /// Returns where to go on.
    fn walk_some(
        &mut self,
        from: usize,
        count: usize,
        mut most: usize,
        wanted: impl Fn(&Slot) -> bool,
        act: impl Fn(&mut Self, SlotId),
    ) -> usize {
        let end = (from + count).min(self.slots.numbers());
        for id in from..end {
            if self.slots.get(id as SlotId).is_some_and(&wanted) {
                if most == 0 {
                    return id;
                }
                most -= 1;
                act(self, id as SlotId);
            }
        }
        end
    }

    /// Gives up a slot that is being filled, because another one has got its block. Its bytes are dropped when its client has
    /// filled it, and stay reserved until then, since that client may still copy into it (P4).
    pub(crate) fn supersede(&mut self, id: SlotId) {
        if self.flaws.has(Flaw::LateFillLetGo) {
            self.abandon(id);
        } else {
            self.doom(id);
        }
    }

    /// Returns about how long a slot has held its block, or has been filled with it, in seconds.
    pub(crate) fn age_s(&self, id: SlotId) -> Option<u32> {
        self.births.age_s(self.slots.at(id).serial, self.now_s)
    }

    /// Dooms a block: it gets no new reader and no new write. It is freed immediately if nothing accesses it.
    pub(crate) fn doom(&mut self, id: SlotId) {
        let flawed = self.flaws.has(Flaw::WriteDisplaced);
        self.losses += u64::from(self.slots.at(id).block.leases() > 0);
        self.edit(id, |slot| {
            slot.block.doom();
            slot.to_write &= if flawed { slot.to_write } else { slot.writing };
            if slot.to_write | slot.writing == 0 && slot.block.is_writing() {
                slot.block.write_ended(slot.saved != 0);
            }
        });
        self.free_if_over(id);
    }
}
