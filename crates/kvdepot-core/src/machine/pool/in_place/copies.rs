//! Copies in the pool of blocks that are leased in a tier's memory, for readers that cannot read there.
//!
//! While a copy is being read, the index names it, and nobody finds the leased block.

use super::super::{NoRoom, Pool};
use crate::block::Block;
use crate::eviction::SlotId;
use crate::machine::flaw::Flaw;
use crate::regions::RegionIndex;

impl Pool {
    /// Inserts a slot for a copy of a block that is leased in a tier's memory, for a reader that cannot read it there. The
    /// index names the copy from now on.
    pub(crate) fn insert_copy(
        &mut self,
        leased: SlotId,
        bytes: u64,
        near: Option<RegionIndex>,
    ) -> std::result::Result<SlotId, NoRoom> {
        let (key, serial) = (self.slots.at(leased).key, self.slots.at(leased).serial);
        self.unname(leased);
        let copy = self.insert(key, Block::fetching(), bytes, true, near);
        match &copy {
            Ok(copy) => drop(self.in_place.copied.insert(*copy, (leased, serial))),
            Err(_) => drop(self.name(leased)),
        }
        copy
    }

    /// Forgets that a slot is to be a copy of a leased block, and returns that block.
    fn take_copied(&mut self, copy: SlotId) -> Option<SlotId> {
        let (leased, serial) = self.in_place.copied.remove(&copy)?;
        // Its lease may have ended meanwhile, and its number be used again.
        self.slots.get(leased).filter(|slot| slot.serial == serial).map(|_| leased)
    }

    /// Dooms the leased block that this slot is to be a copy of: its tier has lost it.
    pub(crate) fn doom_copied(&mut self, copy: SlotId) {
        if self.flaws.has(Flaw::DamagedShownAgain) {
            return;
        }
        if let Some(leased) = self.take_copied(copy) {
            self.doom(leased);
        }
    }

    /// Notes that the read of a slot has ended. If it was to be a copy of a leased block, and has come, nobody is shown the
    /// leased one any more. Otherwise returns that one, and the index names it again, unless its space has passed.
    pub(crate) fn end_copy(&mut self, copy: SlotId, is_live: bool) -> Option<SlotId> {
        let leased = self.take_copied(copy)?;
        let slot = self.slots.at(copy);
        let has_come = slot.block.is_readable() || !slot.is_indexed();
        if has_come || !is_live || !self.is_shown(leased) {
            self.doom(leased);
            return None;
        }
        self.unname(copy);
        self.name(leased);
        Some(leased)
    }
}
