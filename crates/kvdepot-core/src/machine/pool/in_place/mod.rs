//! Blocks that a tier leases where they lie: they have a slot, like those in the pool's memory, and take none of it.
//!
//! The pool's eviction does not order them. While nobody has one leased it stays leased from its tier, so that the next
//! reader need not have its checksum verified again. The tier cannot evict such a block, so their bytes are limited, and
//! the longest unused ones go first.
//!
//! - *lender*: the tier that leases them.
//! - *idle*: those that nobody reads.
//! - *copies*: copies in the pool, for readers that cannot read there.

mod copies;
mod idle;
mod lender;

use hashbrown::HashMap;

use super::super::flaw::Flaw;
use super::super::names::PoolKey;
use super::super::slots::{Slot, Standing};
use super::super::tiers::TierIndex;
use super::{NoRoom, Pool};
use crate::block::Block;
use crate::eviction::SlotId;
use crate::regions::RegionIndex;
use crate::runs::{IN_PLACE_AT, Run, Runs};

use idle::{Idle, ahead_bytes};
use lender::Lender;

/// Share of the tier's memory that may be leased at a time. The rest can take new blocks.
const LEASED_SHARE_DIVISOR: u64 = 2;
/// Maximum number of unused blocks that are given back to the tier for one that is to be leased.
const GIVEN_BACK_PER_BLOCK: usize = 512;

/// Blocks leased in place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeasedInPlace {
    /// Number of blocks, including those whose lease the tier has not given yet.
    pub blocks: u64,
    /// Bytes that they take in the tier's memory.
    pub bytes: u64,
    /// Bytes of those whose lease the tier has not given yet.
    pub coming_bytes: u64,
    /// Bytes of those that nobody reads.
    pub idle_bytes: u64,
    /// Bytes of those that were leased ahead of a load, and that nobody has used yet.
    pub ahead_bytes: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct InPlace {
    lender: Option<Lender>,
    pub(super) now: LeasedInPlace,
    /// Blocks that nobody reads.
    idle: Idle,
    /// Whether more can be leased than at the last look.
    room_came: bool,
    /// Places in the tier's memory whose leases have ended.
    ended: Vec<u64>,
    /// Slots into which copies of leased blocks are being read, and the leased blocks with their serial numbers.
    copied: HashMap<SlotId, (SlotId, u32)>,
    /// Position of the walk that dooms all blocks of a tier that has lost its memory.
    walk: Option<usize>,
}

impl InPlace {
    fn bytes_max(&self) -> u64 {
        self.lender.map_or(0, |lender| lender.memory_bytes / LEASED_SHARE_DIVISOR)
    }

    fn is_down(&self) -> bool {
        self.lender.is_none_or(|lender| lender.is_off || lender.is_lost)
    }

    /// Returns the bytes that a block takes in the tier's memory.
    fn lent_bytes(&self, bytes: u64) -> u64 {
        self.lender.map_or(bytes, |lender| bytes.next_multiple_of(lender.unit_bytes))
    }
}

impl Pool {
    /// Returns the tier whose blocks are leased in place.
    pub(crate) fn in_place_tier(&self) -> Option<TierIndex> {
        self.in_place.lender.map(|lender| lender.tier)
    }

    /// Returns the bytes that a block takes in the memory of the tier that leases it.
    pub(crate) fn lent_bytes(&self, bytes: u64) -> u64 {
        self.in_place.lent_bytes(bytes)
    }

    pub(crate) const fn leased_in_place(&self) -> LeasedInPlace {
        self.in_place.now
    }

    /// Returns the number of bytes that readers can still be shown in place: what can be leased, and what is leased and
    /// not in use.
    pub(crate) fn in_place_room(&self) -> u64 {
        let LeasedInPlace { bytes, idle_bytes, .. } = self.in_place.now;
        let most = if self.is_lender_lost() { 0 } else { self.in_place.bytes_max() };
        most.saturating_sub(bytes - idle_bytes)
    }

    /// Returns the tier whose blocks can be leased in place now.
    pub(crate) fn leasing_tier(&self) -> Option<TierIndex> {
        self.in_place_tier().filter(|_| !self.in_place.is_down())
    }

    /// Returns whether more can be leased than at the last call.
    pub(crate) const fn take_in_place_room(&mut self) -> bool {
        std::mem::replace(&mut self.in_place.room_came, false)
    }

    /// Inserts a slot for a block that `tier` is to lease where it lies. Returns `None` if that tier does not, or has
    /// leased too much already.
    pub(crate) fn insert_in_place(&mut self, key: PoolKey, bytes: u64, tier: TierIndex) -> Option<SlotId> {
        if self.leasing_tier() != Some(tier) {
            return None;
        }
        let is_flawed = self.flaws.has(Flaw::LeasedShareIgnored);
        let most = if is_flawed { u64::MAX } else { self.in_place.bytes_max() };
        let lent_bytes = self.lent_bytes(bytes);
        for _ in 0..GIVEN_BACK_PER_BLOCK {
            if self.in_place.now.bytes + lent_bytes <= most || !self.give_back_next() {
                break;
            }
        }
        if self.in_place.now.bytes + lent_bytes > most {
            return None;
        }
        self.serials = self.serials.wrapping_add(1);
        self.births.came(self.serials, self.now_s);
        let mut slot = Slot::in_place(key, bytes, self.serials, true);
        slot.tell_use(self.now_s);
        let after = slot.standing();
        let id = self.slots.insert(slot)?;
        self.count(id, Standing::NONE, after, 0, key);
        self.uses.slot_came(key.space, after.pinned);
        self.index.insert_new(&self.slots, id, self.index.hash(&key));
        self.in_place.now.blocks += 1;
        self.in_place.now.bytes += lent_bytes;
        self.in_place.now.coming_bytes += lent_bytes;
        Some(id)
    }

    /// Inserts a slot for a block that a tier is to read, or to lease where it lies if the reader can read it there. The
    /// index must not name its key.
    pub(crate) fn insert_fetching(
        &mut self,
        key: PoolKey,
        bytes: u64,
        near: Option<RegionIndex>,
        (tier, in_place): (TierIndex, bool),
    ) -> std::result::Result<SlotId, NoRoom> {
        let apart = in_place.then(|| self.insert_in_place(key, bytes, tier)).flatten();
        apart.map_or_else(|| self.insert(key, Block::fetching(), bytes, true, near), Ok)
    }

    /// Notes where a tier has leased a block.
    pub(crate) fn set_leased_at(&mut self, id: SlotId, at: u64) {
        let len = self.slots.at(id).bytes();
        let runs = Runs::from_slice(&[Run { offset: IN_PLACE_AT + at, len }]);
        self.slots.at_mut(id).set_place(&runs, true);
    }

    /// Gives a slot, whose block no tier leases, memory of the pool, so that another tier can read into it. Returns
    /// whether there was some.
    pub(crate) fn take_into_pool(&mut self, id: SlotId) -> bool {
        let (key, bytes) = (self.slots.at(id).key, self.slots.at(id).bytes());
        debug_assert!(self.slots.at(id).leased_at().is_none(), "a leased block needs no memory");
        let Ok(runs) = self.allocate(key, bytes, None) else { return false };
        let standing = self.slots.at(id).standing();
        self.end_ahead(id);
        self.slots.at_mut(id).set_place(&runs, false);
        self.in_place.room_came = true;
        self.in_place.now.blocks -= 1;
        self.in_place.now.bytes -= self.lent_bytes(bytes);
        self.lease_came(bytes);
        self.count(id, Standing::NONE, standing, bytes, key);
        true
    }

    /// Notes that a slot in place waits for its tier no longer.
    pub(super) fn lease_came(&mut self, bytes: u64) {
        self.in_place.now.coming_bytes -= self.lent_bytes(bytes);
    }

    /// Forgets a slot in place that is being freed, and ends its tier's lease.
    pub(super) fn free_in_place(&mut self, id: SlotId, slot: &Slot) {
        let bytes = self.lent_bytes(slot.bytes());
        let was_idle = self.in_place.end_idle(id, bytes);
        self.in_place.room_came |= !was_idle;
        self.in_place.now.blocks -= 1;
        self.in_place.now.bytes -= bytes;
        self.in_place.now.ahead_bytes -= ahead_bytes(slot, bytes);
        self.in_place.now.coming_bytes -= if slot.standing().fetching { bytes } else { 0 };
        self.in_place.ended.extend(slot.leased_at().filter(|_| !self.flaws.has(Flaw::LeaseNotEnded)));
    }

    /// Ends the tier's lease on a block, whoever reads it: a planted mistake.
    pub(super) fn end_lease_in_place(&mut self, id: SlotId) {
        self.in_place.ended.extend(self.slots.at(id).leased_at());
    }

    /// Returns what is leased in place, recounted. For tests.
    #[cfg(any(test, feature = "model"))]
    pub(crate) fn recount_in_place(&self) -> LeasedInPlace {
        let mut now = LeasedInPlace::default();
        for slot in (0..self.slots.numbers()).filter_map(|id| self.slots.get(id as SlotId)) {
            if slot.is_in_place() {
                let bytes = self.lent_bytes(slot.bytes());
                now.blocks += 1;
                now.bytes += bytes;
                now.coming_bytes += if slot.standing().fetching { bytes } else { 0 };
                now.idle_bytes += if slot.standing().pinned { 0 } else { bytes };
                now.ahead_bytes += ahead_bytes(slot, bytes);
            }
        }
        now
    }

    /// Returns the places whose leases have ended since the last call.
    pub(crate) fn take_ended_leases(&mut self) -> std::vec::Drain<'_, u64> {
        self.in_place.ended.drain(..)
    }
}
