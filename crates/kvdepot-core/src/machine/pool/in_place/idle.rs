//! Leased blocks that nobody reads: how many stay leased, and which are given back to their tier first.
//!
//! Those that were leased ahead of a load and have not been used yet count apart. They go last, because they are about to
//! be needed, but only for a while: whoever they were meant for may not come.

use std::collections::BTreeMap;

use super::super::Pool;
use super::InPlace;
use crate::eviction::SlotId;
use crate::machine::slots::Slot;

/// Share of the tier's memory that may stay leased without a reader.
const IDLE_SHARE_DIVISOR: u64 = 8;
/// Maximum number of unused blocks beyond their limit that one step gives back.
const GIVEN_BACK_PER_STEP: usize = 64;
/// Time after which a block that was leased ahead goes like any other.
const AHEAD_KEPT_S: u32 = 30;
/// Maximum number of such blocks that are looked at for one that is to be leased ahead, or given back.
const AGED_PER_LOOK: usize = 16;

/// Blocks that nobody reads, in the order in which that began.
// Ordered maps: one that grows moves a few entries, however many blocks there are.
#[derive(Debug, Default)]
pub(super) struct Idle {
    /// Those that were used, or that were leased ahead too long ago.
    used: BTreeMap<u64, SlotId>,
    /// Those that were leased ahead, and when.
    ahead: BTreeMap<u64, (SlotId, u32)>,
    since: BTreeMap<SlotId, u64>,
    ever: u64,
}

impl Idle {
    fn add(&mut self, id: SlotId, ahead_s: Option<u32>) {
        self.ever += 1;
        self.since.insert(id, self.ever);
        match ahead_s {
            Some(now_s) => drop(self.ahead.insert(self.ever, (id, now_s))),
            None => drop(self.used.insert(self.ever, id)),
        }
    }

    /// Returns whether the block was there.
    fn remove(&mut self, id: SlotId) -> bool {
        let Some(since) = self.since.remove(&id) else { return false };
        self.used.remove(&since);
        self.ahead.remove(&since);
        true
    }

    /// Makes the oldest block that was leased ahead go like any other, if that was long ago. Returns it.
    fn age(&mut self, now_s: u32) -> Option<SlotId> {
        let oldest = self.ahead.first_entry()?;
        let (id, ahead_s) = *oldest.get();
        if now_s.saturating_sub(ahead_s) < AHEAD_KEPT_S {
            return None;
        }
        let (since, _) = oldest.remove_entry();
        self.used.insert(since, id);
        Some(id)
    }

    /// Returns the block that goes first.
    fn next(&self) -> Option<SlotId> {
        let ahead = || self.ahead.first_key_value().map(|(_, &(id, _))| id);
        self.used.first_key_value().map(|(_, &id)| id).or_else(ahead)
    }
}

impl InPlace {
    fn idle_bytes_max(&self) -> u64 {
        self.lender.map_or(0, |lender| lender.memory_bytes / IDLE_SHARE_DIVISOR)
    }

    /// Notes that nobody uses a block any more; since when it is leased ahead, if it is.
    fn begin_idle(&mut self, id: SlotId, lent_bytes: u64, ahead_s: Option<u32>) {
        self.idle.add(id, ahead_s);
        self.now.idle_bytes += lent_bytes;
        self.room_came = true;
    }

    /// Notes that a block is used, or is being freed. Returns whether nobody used it.
    pub(super) fn end_idle(&mut self, id: SlotId, lent_bytes: u64) -> bool {
        let was_idle = self.idle.remove(id);
        self.now.idle_bytes -= if was_idle { lent_bytes } else { 0 };
        was_idle
    }
}

impl Pool {
    /// Returns whether a block may be leased before anybody asks for it. Those beyond the limit of unused blocks would be
    /// given back before they are used.
    pub(crate) fn may_lease_ahead(&mut self, bytes: u64) -> bool {
        self.age_ahead();
        self.in_place.now.ahead_bytes + self.lent_bytes(bytes) <= self.in_place.idle_bytes_max()
    }

    /// Notes that a block in place, just inserted, is leased ahead of a load.
    pub(crate) fn set_leased_ahead(&mut self, id: SlotId) {
        if self.slots.at(id).is_in_place() {
            self.slots.at_mut(id).set_ahead(true);
            self.in_place.now.ahead_bytes += self.lent_bytes(self.slots.at(id).bytes());
        }
    }

    /// Notes that a block counts as leased ahead no more, if it did: it is used, or that was long ago.
    pub(in super::super) fn end_ahead(&mut self, id: SlotId) {
        if self.slots.at(id).is_ahead() {
            self.slots.at_mut(id).set_ahead(false);
            self.in_place.now.ahead_bytes -= self.lent_bytes(self.slots.at(id).bytes());
        }
    }

    fn age_ahead(&mut self) {
        for _ in 0..AGED_PER_LOOK {
            let Some(id) = self.in_place.idle.age(self.now_s) else { return };
            self.end_ahead(id);
        }
    }

    /// Notes that a slot in place has a user, or has none any more.
    pub(in super::super) fn set_idle_in_place(&mut self, id: SlotId, bytes: u64, is_idle: bool) {
        let lent_bytes = self.lent_bytes(bytes);
        if is_idle {
            let ahead_s = self.slots.at(id).is_ahead().then_some(self.now_s);
            self.in_place.begin_idle(id, lent_bytes, ahead_s);
        } else {
            self.in_place.end_idle(id, lent_bytes);
        }
    }

    pub(super) fn give_back_next(&mut self) -> bool {
        self.age_ahead();
        let Some(id) = self.in_place.idle.next() else { return false };
        self.free(id);
        true
    }

    /// Gives some blocks that nobody reads back to their tier. Returns how many; fewer than `count` if those were all.
    pub(in super::super) fn give_back(&mut self, count: usize) -> usize {
        (0..count).take_while(|_| self.give_back_next()).count()
    }

    /// Gives blocks that nobody reads back to their tier, the longest unused first, until they are within their limit.
    /// Returns whether there are more.
    pub(crate) fn give_back_idle(&mut self) -> bool {
        let most = self.in_place.idle_bytes_max();
        for _ in 0..GIVEN_BACK_PER_STEP {
            if self.in_place.now.idle_bytes <= most || !self.give_back_next() {
                return false;
            }
        }
        true
    }
}

/// Returns the bytes that a slot adds to [`super::LeasedInPlace::ahead_bytes`].
pub(super) fn ahead_bytes(slot: &Slot, lent_bytes: u64) -> u64 {
    if slot.is_ahead() { lent_bytes } else { 0 }
}
