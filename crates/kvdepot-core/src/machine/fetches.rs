//! Fetches of blocks from tiers, and notifications that keep pool and tiers in sync: uses, and blocks that tiers
//! forgot.

use super::arrivals::Come;
use super::event::{Command, Effects, Fetched, NamespaceHandle, Nanos, Now, Owner, TierIndex, TierSet};
use super::flaw::Flaw;
use super::flow::ReadEnd;
use super::loads::lease_slot;
use super::pool::NoRoom;
use super::{Machine, slots};
use crate::error::{Error, ErrorKind, Result};
use crate::eviction::SlotId;
use crate::key::BlockKey;
use crate::misses::{Fate, Gone};

impl Machine {
    /// Records that fetches for a namespace prefer the region of the owner that uses it, whichever client requests
    /// them.
    pub(super) fn note_near(&mut self, owner: Owner, namespace: NamespaceHandle) {
        if let Some(region) = self.pool.near(owner) {
            self.catalog.set_near(namespace, region);
        }
    }

    pub(super) fn lease_now(&mut self, owner: Owner, keys: &[BlockKey]) -> Vec<Now> {
        let mut out = Vec::with_capacity(keys.len());
        for key in keys {
            let Some(namespace) = self.catalog.by_id(key.namespace) else {
                out.push(Now::Absent);
                continue;
            };
            let pool_key = namespace.pool_key(key.hash);
            out.push(match self.pool.find(&pool_key) {
                // Whoever asks for this reads the pool's memory.
                Some(slot) if self.pool.slot(slot).is_in_place() => Now::Absent,
                Some(slot) if self.pool.slot(slot).block.is_readable() => {
                    lease_slot(&mut self.pool, namespace, owner, slot).map_or(Now::Arriving, Now::Leased)
                }
                Some(_) => Now::Arriving,
                None => Now::Absent,
            });
        }
        out
    }

    /// Begins fetches. Returns for how many of the blocks, before this step had searched long enough for space.
    pub(super) fn prefetch(
        &mut self,
        namespace: NamespaceHandle,
        blocks: &[(crate::BlockHash, TierIndex)],
        deadline: Nanos,
    ) -> Result<usize> {
        let namespace = self.catalog.get(namespace)?.clone();
        let near = namespace.near;
        for (taken, &(hash, tier)) in blocks.iter().enumerate() {
            let key = namespace.pool_key(hash);
            if self.pool.find_kept(&key).is_some()
                || self.flow.is_leaving(&key)
                || self.pool.is_lender_down(tier)
            {
                continue;
            }
            let in_place = namespace.in_place && self.pool.in_place_tier() == Some(tier);
            if in_place && !self.pool.may_lease_ahead(namespace.slot_bytes()) {
                continue;
            }
            match self.pool.insert_fetching(key, namespace.slot_bytes(), near, (tier, in_place)) {
                Ok(slot) => {
                    self.pool.set_leased_ahead(slot);
                    self.flow.read(slot, tier, deadline, TierSet::ALL);
                }
                Err(NoRoom::Later) => return Ok(taken),
                Err(NoRoom::Full(_)) => break,
            }
        }
        Ok(blocks.len())
    }

    /// Processes the answer to a `Command::Lease`.
    pub(super) fn lease_ended(
        &mut self,
        tier: TierIndex,
        slot: SlotId,
        outcome: Result<Option<u64>>,
        out: &mut Effects,
    ) {
        let outcome = outcome.and_then(|place| {
            let Some(at) = place else { return Ok(Fetched::Miss) };
            if self.pool.is_lender_lost() {
                self.pool.decline_lease(at);
                return Err(Error::new(
                    ErrorKind::Unavailable,
                    "the tier lost its memory while it leased a block",
                )
                .with("tier", tier));
            }
            self.pool.set_leased_at(slot, at);
            Ok(Fetched::Whole)
        });
        self.read_ended(tier, slot, &outcome, out);
    }

    /// Ends the tier's leases on blocks that have no slot any more.
    pub(super) fn end_leases(&mut self, out: &mut Effects) {
        let Some(tier) = self.pool.in_place_tier() else { return };
        let places: Vec<u64> = self.pool.take_ended_leases().collect();
        if !places.is_empty() {
            out.commands.push(Command::EndLeases { tier, places });
        }
    }

    pub(super) fn read_ended(
        &mut self,
        tier: TierIndex,
        slot: SlotId,
        outcome: &Result<Fetched>,
        out: &mut Effects,
    ) {
        if self.pool.in_place_tier() == Some(tier) && tells_of_loss(outcome) {
            self.pool.doom_copied(slot);
            // If the read of a copy was given up, the block is found where it lies again.
            // A lease that was given up says nothing of the one that took its place.
            let is_copy = !self.pool.slot(slot).is_in_place();
            let found = self.pool.find(&self.pool.slot(slot).key).filter(|&found| found != slot && is_copy);
            if let Some(leased) = found.filter(|&found| self.pool.slot(found).is_in_place()) {
                self.pool.show_no_more(leased);
            }
        }
        self.read_over(tier, slot, outcome, out);
    }

    /// Like [`Self::read_ended`], for a read that the tier may not have begun: its outcome says nothing of the block.
    pub(super) fn read_over(
        &mut self,
        tier: TierIndex,
        slot: SlotId,
        outcome: &Result<Fetched>,
        out: &mut Effects,
    ) {
        let Self { flow, pool, counters, demotions, .. } = self;
        if flow.hung_read_ended(tier, slot) {
            // Whatever it has read, the block's fetch has failed, and others may be under its key.
            pool.edit(slot, |slot| slot.block.quarantine_ended());
            pool.free_if_doomed(slot);
            return;
        }
        let for_nobody = demotions.is_reading(slot) && !pool.slot(slot).has_waiters();
        let end = flow.read_ended(pool, counters, tier, slot, outcome, for_nobody);
        if end == ReadEnd::GoesOn {
            self.leave_excluding(slot, out);
        } else {
            self.fetch_over(tier, slot, end == ReadEnd::Whole, for_nobody, out);
        }
    }

    /// Tells claims that may not get a block from the tier that is asked for it now that it did not come.
    fn leave_excluding(&mut self, slot: SlotId, out: &mut Effects) {
        let Some(tier) = self.flow.reader(slot).filter(|_| !self.flaws.has(Flaw::ReadGoesOnAnywhere)) else {
            return;
        };
        let waiters = self.pool.edit(slot, |slot| slot.take_waiters_without(tier));
        let first = waiters.len().min(self.pace.waiters);
        self.lease_to(&waiters[..first], None);
        self.answer(&waiters[..first], out);
        if waiters.len() > first {
            self.tell_later(None, waiters, first, out);
        }
    }

    /// Gives up a fetch whose tier is late, so that nobody waits for it. Its slot is free when the tier has ended it (P4);
    /// until then another slot may get the block.
    pub(super) fn give_up_read(&mut self, tier: TierIndex, slot: SlotId, out: &mut Effects) {
        let Self { flow, pool, counters, .. } = self;
        flow.give_up_read(pool, counters, tier, slot);
        if flow.flaws.has(Flaw::HungReadLetGo) {
            pool.edit(slot, |slot| slot.block.quarantine_ended());
        }
        self.fetch_over(tier, slot, false, false, out);
    }

    /// Tells those who wait for a block that it is there, or that it could not be read.
    fn fetch_over(
        &mut self,
        tier: TierIndex,
        slot: SlotId,
        is_whole: bool,
        for_nobody: bool,
        out: &mut Effects,
    ) {
        let Self { pool, counters, demotions, .. } = self;
        let demoted_to = demotions.read_over(slot);
        counters.demote_blocks_dropped += u64::from(demoted_to.is_some() && !is_whole);
        let waiters = pool.edit(slot, slots::Slot::take_waiters);
        // A copy that was to take the place of a block leased in a tier's memory, and did not come, leaves it there.
        let is_live = self.is_live(slot);
        let left = self.pool.end_copy(slot, is_live);
        if !is_whole && !self.pool.slot(slot).block.is_freeable() {
            // It was given up, and the tier may still fill it.
            self.pool.unname(slot);
        }
        let fetched = Some(Come { slot, tier }).filter(|_| is_whole && self.is_current(slot));
        let come =
            fetched.or_else(|| Some(Come { slot: left?, tier: self.pool.in_place_tier().unwrap_or(tier) }));
        let first = waiters.len().min(self.pace.waiters);
        self.lease_to(&waiters[..first], come);
        let has_more = waiters.len() > first;
        if has_more {
            self.keep_arrived(come);
        }
        if is_whole && fetched.is_none() {
            self.pool.doom(slot);
        } else {
            // What lies in a tier's memory is written nowhere else from there.
            if is_whole && !self.pool.slot(slot).is_in_place() {
                if !for_nobody {
                    self.flow.promote(&mut self.pool, &mut self.counters, tier, slot);
                }
                if let Some(to) = demoted_to {
                    self.write_demoted(to, slot);
                }
            }
            self.pool.free_if_doomed(slot);
        }
        self.answer(&waiters[..first], out);
        if has_more {
            self.tell_later(come, waiters, first, out);
        }
    }

    /// Reports uses of blocks to the tiers, and writes blocks again that no tier has: they were evicted there, or could
    /// not be written before.
    pub(super) fn tell_uses(&mut self, out: &mut Effects) {
        let touched = self.pool.take_touched();
        if touched.is_empty() || !self.flow.has_tiers() {
            return;
        }
        let mut keys = Vec::new();
        for id in touched {
            let Some(slot) = self.pool.get(id).filter(|slot| slot.block.is_readable()) else { continue };
            let (key, bytes) = (slot.key, slot.bytes());
            if slot.is_in_place() {
                keys.push(self.catalog.block_key(&key));
                continue;
            }
            let stays = self.catalog.stays_in_pool(key.space);
            let again = if stays { 0 } else { self.flow.to_write_again(&self.pool, id) };
            if slot.saved != 0 {
                keys.push(self.catalog.block_key(&key));
            } else if !slot.is_pressing()
                && again != 0
                && slot.is_indexed()
                && self.pool.may_dirty(bytes).is_ok()
            {
                // At its first use, a block of low priority is written for the first time.
                self.counters.rewrite_blocks += u64::from(slot.is_used_again());
                self.flow.write_again(&mut self.pool, id, again);
            }
            if !stays {
                self.flow.used(&mut self.pool, &mut self.counters, id);
            }
        }
        if !keys.is_empty() {
            out.commands.push(Command::Touch { keys });
        }
    }

    /// A tier does not hold blocks any more. What it lost is written again; what it evicted to make room goes to the next
    /// tier that gets such blocks.
    pub(super) fn tier_forgot(&mut self, tier: TierIndex, keys: &[BlockKey], lost: bool, out: &mut Effects) {
        if !lost {
            self.counters.tier_evicted(tier, keys.len());
        }
        for key in keys {
            let found = self.catalog.pool_key(key).and_then(|key| self.pool.find(&key));
            if let Some(copy) = found.filter(|_| lost && self.pool.in_place_tier() == Some(tier)) {
                self.pool.doom_copied(copy);
            }
            let slot = found.filter(|&slot| self.pool.slot(slot).block.is_readable());
            if slot.is_none() {
                let fate = if lost { Fate::Lost } else { Fate::Evicted };
                out.gone.push(Gone { key: *key, fate, tier: Some(tier), kept_s: None });
            }
            let Some(slot) = slot.filter(|&slot| self.pool.slot(slot).saved & 1 << tier != 0) else {
                continue;
            };
            if self.pool.slot(slot).is_in_place() {
                // What the tier evicted stays as it is until its lease has ended; what it found damaged is not shown again.
                if lost {
                    self.pool.show_no_more(slot);
                }
                continue;
            }
            self.pool.edit(slot, |slot| slot.saved &= !(1 << tier));
            if !lost {
                self.demote_slot(tier, key, slot);
                continue;
            }
            let bytes = self.pool.slot(slot).bytes();
            if self.flow.is_late(&self.pool, slot, tier) {
                self.flow.write_late(&mut self.pool, &mut self.counters, slot, 1 << tier);
            } else if self.pool.may_rewrite(bytes) && !self.flow.is_behind(tier) {
                self.counters.rewrite_blocks += 1;
                self.flow.write_again(&mut self.pool, slot, 1 << tier);
            } else {
                // A tier that lost all of its blocks would keep dumps out of the pool: its next use writes it.
                self.pool.edit(slot, |slot| slot.refused |= 1 << tier);
            }
        }
    }
}

/// Returns whether the outcome of a read means that the tier does not stand by the block any more. One that was late, had
/// too much to do, is switched off, or got no memory to read into may still have it.
fn tells_of_loss(outcome: &Result<Fetched>) -> bool {
    use ErrorKind::{Corrupt, Io, NotFound};
    match outcome {
        Ok(Fetched::Whole) => false,
        Ok(Fetched::Miss) => true,
        Err(error) => matches!(error.kind(), Corrupt | Io | NotFound),
    }
}
