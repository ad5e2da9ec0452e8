//! The tier that leases blocks in its memory.
//!
//! While it is switched off it leases nothing, and what it has leased can still be read. Once its memory is lost, nobody is
//! shown a leased block any more: a walk over all slots dooms them, and so does whoever comes across one before.

use super::super::Pool;
use crate::block::Phase;
use crate::eviction::SlotId;
use crate::machine::flaw::Flaw;
use crate::machine::names::PoolKey;
use crate::machine::slots::Slot;
use crate::machine::tiers::TierIndex;
use crate::misses::Fate;

/// A tier that leases blocks in its memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lender {
    pub(super) tier: TierIndex,
    /// Bytes of its memory that hold blocks.
    pub(super) memory_bytes: u64,
    /// The unit in which it allocates them.
    pub(super) unit_bytes: u64,
    /// Whether it is switched off for a while.
    pub(super) is_off: bool,
    /// Whether its memory is lost, which is for good.
    pub(super) is_lost: bool,
}

/// Returns whether a slot holds a leased block that readers may still be shown.
fn is_lent(slot: &Slot) -> bool {
    slot.is_in_place() && slot.block.phase() == Phase::Sealed && !slot.block.is_doomed()
}

impl Pool {
    /// Sets the tier whose blocks are leased in place from now on, the size of its memory, and the unit in which it
    /// allocates that.
    pub(crate) fn set_in_place(&mut self, tier: TierIndex, memory_bytes: u64, unit_bytes: u64) {
        let unit_bytes = unit_bytes.max(1);
        self.in_place.lender = Some(Lender { tier, memory_bytes, unit_bytes, is_off: false, is_lost: false });
    }

    /// Returns whether the memory of the tier that leases blocks is lost.
    pub(crate) fn is_lender_lost(&self) -> bool {
        self.in_place.lender.is_some_and(|lender| lender.is_lost)
    }

    /// Returns whether this tier leases blocks, and cannot now.
    pub(crate) fn is_lender_down(&self, tier: TierIndex) -> bool {
        self.in_place_tier() == Some(tier) && self.in_place.is_down()
    }

    /// Ends a lease that the tier has given too late.
    pub(crate) fn decline_lease(&mut self, at: u64) {
        self.in_place.ended.push(at);
    }

    /// Notes that a tier was switched off, or works again.
    pub(crate) fn set_lender_off(&mut self, tier: TierIndex, is_off: bool) {
        if let Some(lender) = self.in_place.lender.as_mut().filter(|lender| lender.tier == tier) {
            // Without it, what waits for room in its memory needs room in the pool instead.
            self.in_place.room_came |= lender.is_off != is_off;
            lender.is_off = is_off;
        }
    }

    /// Notes that a tier has lost its memory. Returns whether blocks that it has leased must be doomed now, by
    /// [`Self::doom_lent`].
    pub(crate) fn set_lender_lost(&mut self, tier: TierIndex) -> bool {
        let is_flawed = self.flaws.has(Flaw::LossIgnored);
        let lender = self.in_place.lender.as_mut().filter(|lender| lender.tier == tier);
        let Some(lender) = lender.filter(|lender| !lender.is_lost && !is_flawed) else { return false };
        lender.is_lost = true;
        self.in_place.walk = Some(0);
        self.in_place.room_came = true;
        self.losses += 1;
        true
    }

    /// Dooms blocks of a tier that has lost its memory, among the next `count` slots. Returns whether there are more.
    pub(crate) fn doom_lent(&mut self, count: usize, dooms: usize) -> bool {
        let Some(from) = self.in_place.walk else { return false };
        let at = self.walk_some(from, count, dooms, is_lent, Self::show_no_more);
        self.in_place.walk = Some(at).filter(|&at| at < self.slots.numbers());
        self.in_place.walk.is_some()
    }

    /// Like `find`, but dooms the block if it was leased in memory that is lost.
    pub(crate) fn find_kept(&mut self, key: &PoolKey) -> Option<SlotId> {
        self.find_kept_hashed(key, self.hash(key))
    }

    /// Like [`Self::find_kept`], for a caller that has the key's hash.
    pub(crate) fn find_kept_hashed(&mut self, key: &PoolKey, hash: u64) -> Option<SlotId> {
        let id = self.find_hashed(key, hash)?;
        if self.is_in_lost_memory(id) && is_lent(self.slots.at(id)) {
            self.show_no_more(id);
            return None;
        }
        Some(id)
    }

    /// Returns whether readers may be shown the block in a slot: it is readable, and was not leased in memory that is lost.
    pub(crate) fn is_shown(&self, id: SlotId) -> bool {
        self.slots.at(id).block.is_readable() && !self.is_in_lost_memory(id)
    }

    fn is_in_lost_memory(&self, id: SlotId) -> bool {
        self.is_lender_lost() && self.slots.at(id).is_in_place() && !self.flaws.has(Flaw::LossNoticedLate)
    }

    /// Dooms a leased block that its tier has lost.
    pub(crate) fn show_no_more(&mut self, id: SlotId) {
        if self.slots.at(id).is_indexed() {
            let (key, tier) = (self.slots.at(id).key, self.in_place_tier());
            self.unname(id);
            self.went(key, Fate::Lost, tier);
        }
        self.doom(id);
    }
}
