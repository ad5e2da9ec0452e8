//! Admission: a claim goes ahead only when all that it needs finds room.

use super::super::event::{Effects, Job};
use super::super::flaw::Flaw;
use super::super::loads::Rooms;
use super::super::slots::Waiter;
use super::Claims;
use super::claim::{Claim, Known, Phase, Spot};
use crate::block::{Block, Phase as BlockPhase};

/// Share of the pool that one claim may take.
const CLAIM_SHARE_PERCENT: u64 = 90;

impl Claims {
    /// Admits a claim, or lets it wait behind the others: one that needs nothing fetched passes them, because it takes no
    /// room that they wait for. Whether there is more to do now.
    pub(super) fn admit_or_queue(&mut self, rooms: &mut Rooms<'_>, claim: &mut Claim) -> bool {
        let hit = claim.reach(claim.limit);
        let (_, _, fetches) = claim.need_of(hit);
        let turn = claim.queued || self.queue.is_empty() || !fetches;
        if turn && self.admit(rooms, claim, hit) {
            if claim.queued {
                claim.queued = false;
                self.queue.pop_front();
                self.turn_came = true;
            }
            return true;
        }
        if !claim.queued {
            claim.queued = true;
            self.queue.push_back(claim.id);
        }
        if !turn {
            // What it will be cut to at most.
            claim.need = claim.need_of(hit).0.min(share_of(rooms));
        }
        claim.phase = Phase::Queued;
        false
    }

    /// Promises a claim all that it needs, if that fits now.
    fn admit(&mut self, rooms: &mut Rooms<'_>, claim: &mut Claim, reach: usize) -> bool {
        let mut hit = reach;
        let (mut new_pins, mut total, _) = claim.need_of(hit);
        let share = share_of(rooms);
        while hit > claim.skip && total > share {
            let blocks = (hit - claim.skip) as u128;
            let shorter = claim.skip + (blocks * u128::from(share) / u128::from(total)) as usize;
            hit = claim.reach(shorter.min(hit - 1));
            (new_pins, total, _) = claim.need_of(hit);
            if !std::mem::replace(&mut claim.cut, true) {
                rooms.counters.claims_cut += 1;
            }
        }
        // What is pinned comes back: leases end, fetches and writes do. Without any, the share is there.
        if new_pins > self.room(rooms)
            && !self.flaws.has(Flaw::AdmitWithoutRoom)
            && (rooms.pool.held().pinned > 0 || self.promised > 0)
        {
            claim.need = new_pins;
            return false;
        }
        claim.promised = new_pins;
        self.promised += new_pins;
        claim.hit = hit;
        claim.needed = claim.needed_count(hit);
        claim.phase = Phase::Lease { pass: 0 };
        claim.cursor = claim.skip;
        true
    }

    /// Bytes that claims may still pin.
    fn room(&self, rooms: &Rooms<'_>) -> u64 {
        rooms.pool.unpinned_bytes().saturating_sub(self.promised)
    }

    /// Room may have come back: the claim at the head of the queue looks again, if what it needed last would fit now.
    pub(crate) fn room_came(&mut self, rooms: &mut Rooms<'_>, out: &mut Effects) {
        while let Some(&id) = self.queue.front() {
            let Some(claim) = self.map.get(&id).filter(|claim| claim.queued) else {
                self.queue.pop_front();
                continue;
            };
            match claim.phase {
                Phase::Queued => {}
                // It is being looked through, and decides when that has ended.
                Phase::Survey => return,
                _ => {
                    self.queue.pop_front();
                    continue;
                }
            }
            let idle = rooms.pool.held().pinned == 0 && self.promised == 0;
            if claim.need > self.room(rooms) && !idle {
                return;
            }
            if let Some(claim) = self.map.get_mut(&id) {
                claim.survey_again();
                out.again.push(Job::Claim(id));
            }
            return;
        }
    }

    /// The next leases of an admitted claim: whether there are more. What is there comes first, so that no fetch of this
    /// claim evicts a block that it wants too; and front to back, so that a cut loses the end.
    pub(super) fn take_leases(&mut self, rooms: &mut Rooms<'_>, claim: &mut Claim) -> bool {
        let Phase::Lease { pass } = claim.phase else { return false };
        let ranges: Vec<_> =
            (0..claim.groups.len()).map(|group| claim.needed_range(group, claim.hit)).collect();
        let mut done = 0;
        while claim.cursor < claim.hit && done < self.pace.claim_leases {
            claim.cursor += 1;
            for (group, range) in ranges.iter().enumerate() {
                let units = claim.groups[group].shape.units_per_block;
                let block = claim.cursor / units;
                if !claim.cursor.is_multiple_of(units) || !range.contains(&(block - 1)) {
                    continue;
                }
                for rank in 0..claim.groups[group].spaces.len() {
                    self.take_lease(rooms, claim, Spot { group, block: block - 1, rank }, pass > 0);
                    done += 1;
                }
            }
        }
        if claim.cursor < claim.hit {
            return true;
        }
        claim.cursor = claim.skip;
        if pass == 0 {
            claim.phase = Phase::Lease { pass: 1 };
            if claim.leased < claim.needed {
                return true;
            }
        }
        self.give_up_promise(claim);
        claim.phase = Phase::Filling;
        if claim.waiting == 0 {
            claim.hit = claim.leased_hit();
            claim.phase = Phase::Settled;
            claim.cursor = 0;
            claim.trimming = claim.leased > claim.needed_count(claim.hit);
        }
        claim.trimming
    }

    fn take_lease(&mut self, rooms: &mut Rooms<'_>, claim: &mut Claim, spot: Spot, fetch: bool) {
        let (place, key) = (claim.place(spot.group, spot.block, spot.rank), claim.key(spot));
        let known = claim.known[place];
        if matches!(known, Known::LEASED | Known::WAITING) || !rooms.catalog.is_live(key.space) {
            return;
        }
        match rooms.pool.find(&key) {
            Some(slot) if rooms.pool.slot(slot).block.is_readable() => {
                if rooms.pool.slot(slot).block.is_evictable() {
                    self.keep_promise(claim, spot);
                }
                rooms.pool.pin(slot);
                (claim.known[place], claim.slots[place]) = (Known::LEASED, slot);
                claim.leased += 1;
            }
            Some(slot) if fetch && rooms.pool.slot(slot).block.phase() == BlockPhase::Fetching => {
                wait_for(rooms, claim, place, slot);
            }
            Some(_) => {}
            None if !fetch || rooms.flow.is_leaving(&key) => {}
            None => {
                let Some(tier) = known.tier() else { return };
                match rooms.pool.insert(key, Block::fetching(), claim.bytes(spot), true) {
                    Ok(slot) => {
                        self.keep_promise(claim, spot);
                        rooms.flow.read(slot, tier, claim.deadline);
                        wait_for(rooms, claim, place, slot);
                    }
                    Err(error) => rooms.counters.failed("claim", &error),
                }
            }
        }
    }

    /// Room that was promised is not needed any more.
    pub(super) fn give_up_promise(&mut self, claim: &mut Claim) {
        self.turn_came |= claim.promised > 0;
        self.promised -= std::mem::take(&mut claim.promised);
    }

    /// Whether the queue's head may go ahead since the last call, for another reason than new room in the pool.
    pub(crate) const fn take_turn(&mut self) -> bool {
        std::mem::replace(&mut self.turn_came, false)
    }

    /// Room that was promised is taken now.
    fn keep_promise(&mut self, claim: &mut Claim, spot: Spot) {
        let bytes = claim.bytes(spot).min(claim.promised);
        claim.promised -= bytes;
        self.promised -= bytes;
    }
}

/// Bytes of the pool that one claim may take.
fn share_of(rooms: &Rooms<'_>) -> u64 {
    rooms.pool.bytes() * CLAIM_SHARE_PERCENT / 100
}

fn wait_for(rooms: &mut Rooms<'_>, claim: &mut Claim, place: usize, slot: u32) {
    let waiter = Waiter::Claim { id: claim.id, place: u32::try_from(place).expect("places are bounded") };
    rooms.pool.edit(slot, |slot| slot.add_waiter(waiter));
    claim.known[place] = Known::WAITING;
    claim.waiting += 1;
}
