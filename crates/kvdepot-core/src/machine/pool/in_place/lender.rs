//! The tier that leases blocks in its memory. While it is down it leases nothing, and nobody is shown what it has leased.

use super::super::Pool;
use crate::block::Phase;
use crate::eviction::SlotId;
use crate::machine::flaw::Flaw;
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
    /// Whether it is down: then it leases nothing, and what it has leased is shown to nobody.
    pub(super) is_down: bool,
}

impl Pool {
    /// Sets the tier whose blocks are leased in place from now on, the size of its memory, and the unit in which it
    /// allocates that.
    pub(crate) fn set_in_place(&mut self, tier: TierIndex, memory_bytes: u64, unit_bytes: u64) {
        let unit_bytes = unit_bytes.max(1);
        self.in_place.lender = Some(Lender { tier, memory_bytes, unit_bytes, is_down: false });
    }

    pub(crate) fn is_lender_down(&self) -> bool {
        self.in_place.is_down()
    }

    /// Ends a lease that the tier has given too late.
    pub(crate) fn decline_lease(&mut self, at: u64) {
        self.in_place.ended.push(at);
    }

    /// Notes that a tier went down or came back. Returns whether blocks that it has leased must be doomed now, by
    /// [`Self::doom_lent`].
    pub(crate) fn set_lender_down(&mut self, tier: TierIndex, is_down: bool) -> bool {
        let Some(lender) = self.in_place.lender.as_mut().filter(|lender| lender.tier == tier) else {
            return false;
        };
        let was_down = std::mem::replace(&mut lender.is_down, is_down && !self.flaws.has(Flaw::LossIgnored));
        let went_down = lender.is_down && !was_down;
        if went_down {
            self.in_place.walk = Some(0);
        }
        went_down
    }

    /// Dooms blocks of a tier that went down, among the next `count` slots. Returns whether there are more.
    pub(crate) fn doom_lent(&mut self, count: usize, dooms: usize) -> bool {
        let Some(from) = self.in_place.walk else { return false };
        let is_lent = |slot: &Slot| {
            slot.is_in_place() && slot.block.phase() == Phase::Sealed && !slot.block.is_doomed()
        };
        let at = self.walk_some(from, count, dooms, is_lent, Self::show_no_more);
        self.in_place.walk = Some(at).filter(|&at| at < self.slots.numbers());
        self.in_place.walk.is_some()
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
