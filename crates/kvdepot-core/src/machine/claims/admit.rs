//! Admission: a claim goes ahead only when all that it needs finds room.

use super::super::event::{Effects, Job};
use super::super::flaw::Flaw;
use super::super::pool::{NoRoom, Pool};
use super::super::rooms::Rooms;
use super::super::slots::Waiter;
use super::super::tiers::TierIndex;
use super::Claims;
use super::claim::{Claim, InPlaceRoom, Need, Phase, Spot, Weigh};
use super::known::Known;
use super::probing::begin_round;
use super::promised::Promised;
use crate::block::{Block, Phase as BlockPhase};
use crate::error::{Error, ErrorKind};
use crate::eviction::SlotId;

/// Share of the pool that one claim may take.
const CLAIM_SHARE_PERCENT: u64 = 90;
/// Part of a hit by which it is cut at least, if the last cut has not halved what does not fit.
const CUT_DIVISOR: usize = 8;

impl Claims {
    /// All places were looked at: how long the hit can be is found out next, and whether there is room for it.
    pub(super) fn begin_to_weigh(claim: &mut Claim) {
        claim.phase = Phase::Weigh;
        claim.excess = None;
        claim.weigh = Some(Weigh::Reach { search: claim.search(claim.limit), turn: None });
    }

    /// The next piece of that: whether there is more to do now.
    pub(super) fn weigh(&mut self, rooms: &mut Rooms<'_>, claim: &mut Claim) -> bool {
        let looks = &mut (self.pace.weigh_places / claim.width()).max(1);
        while let Some(weigh) = claim.weigh.take() {
            match weigh {
                Weigh::Reach { mut search, turn } => match claim.reach(&mut search, looks) {
                    None => {
                        claim.weigh = Some(Weigh::Reach { search, turn });
                        return true;
                    }
                    Some(reach) if turn.is_none() && !claim.probed => {
                        claim.weigh = Some(Weigh::Hope { search: claim.search(claim.limit), reach });
                    }
                    Some(hit) => claim.weigh = Some(Weigh::Need { hit, need: Need::default(), turn }),
                },
                Weigh::Hope { mut search, reach } => match claim.hope(&mut search, looks, true) {
                    None => {
                        claim.weigh = Some(Weigh::Hope { search, reach });
                        return true;
                    }
                    Some(hope) if hope > reach => {
                        begin_round(claim);
                        return true;
                    }
                    Some(_) => {
                        claim.weigh = Some(Weigh::Need { hit: reach, need: Need::default(), turn: None });
                    }
                },
                Weigh::Need { hit, mut need, turn } => {
                    let in_place =
                        InPlaceRoom { bytes: self.in_place_room(rooms), tier: rooms.pool.leasing_tier() };
                    if !claim.add_need(&mut need, hit, looks, in_place) {
                        claim.weigh = Some(Weigh::Need { hit, need, turn });
                        return true;
                    }
                    self.admit_or_queue(rooms, claim, hit, need, turn);
                }
                Weigh::Round(_) | Weigh::Leased(_) => {
                    debug_assert!(false, "a claim weighs nothing else before it is admitted");
                }
            }
        }
        claim.phase != Phase::Queued
    }

    /// Admits a claim, lets it wait behind the others, or cuts it: one that needs nothing fetched passes them, because it
    /// takes no room that they wait for.
    fn admit_or_queue(
        &mut self,
        rooms: &mut Rooms<'_>,
        claim: &mut Claim,
        hit: usize,
        need: Need,
        turn: Option<bool>,
    ) {
        if claim.lender_changed(rooms.pool) {
            claim.survey_again();
            return;
        }
        let turn = turn.unwrap_or(claim.queued || self.queue.is_empty() || !need.fetches);
        let share = share_of(rooms);
        let need = need.with_in_place_at_most(self.in_place_room(rooms));
        if turn && hit > claim.skip && need.total > share {
            let blocks = (hit - claim.skip) as u128;
            // What lies beyond the pool's share goes. The last blocks are those for which a tier's memory had no room.
            let left = u128::from(need.whole - (need.total - share).min(need.whole));
            let shorter = claim.skip + (blocks * left / u128::from(need.whole.max(1))) as usize;
            // Those may lie in a tier's memory, while it is blocks before them that do not fit.
            let excess = need.total - share;
            let helps = claim.excess.replace(excess).is_none_or(|before| excess <= before / 2);
            let least = if helps { 1 } else { (hit - claim.skip).div_ceil(CUT_DIVISOR) };
            let search = claim.search(shorter.min(hit - least));
            claim.weigh = Some(Weigh::Reach { search, turn: Some(turn) });
            if !std::mem::replace(&mut claim.cut, true) {
                rooms.counters.claims_cut += 1;
            }
            return;
        }
        if turn && self.admit(rooms, claim, hit, need) {
            if claim.queued {
                claim.queued = false;
                self.queue.pop_front();
                self.turn_came = true;
            }
            return;
        }
        if !claim.queued {
            (claim.queued, claim.times.queued) = (true, true);
            self.queue.push_back(claim.id);
        }
        // What it will be cut to at most.
        claim.need = need;
        if !turn {
            claim.need.new_pins = need.new_pins.min(share);
        }
        claim.phase = Phase::Queued;
    }

    /// Promises a claim all that it needs, if that fits now.
    fn admit(&mut self, rooms: &Rooms<'_>, claim: &mut Claim, hit: usize, need: Need) -> bool {
        // What is pinned comes back: leases end, fetches and writes do. Without any, the share is there.
        if need.new_pins > self.room(rooms)
            && !self.flaws.has(Flaw::AdmitWithoutRoom)
            && (rooms.pool.held().pinned > 0 || self.promised.pool > 0)
        {
            return false;
        }
        claim.promised = Promised { pool: need.new_pins, in_place: need.in_place };
        self.promised += claim.promised;
        claim.hit = hit;
        claim.needed = claim.needed_count(hit);
        claim.times.admitted_at(rooms.flow.now);
        claim.phase = Phase::Lease { pass: 0 };
        claim.note_losses(rooms);
        claim.cursor = claim.skip;
        true
    }

    /// Bytes of the pool that claims may still pin. It grows for them, if it may.
    fn room(&self, rooms: &Rooms<'_>) -> u64 {
        rooms.pool.unpinned_bytes_max().saturating_sub(self.promised.pool)
    }

    /// Returns whether `bytes` of the pool may be taken for what no client waits for, and for which it need not grow.
    pub(crate) fn leave_room(&self, pool: &Pool, bytes: u64) -> bool {
        self.queue.is_empty() && pool.unpinned_bytes().saturating_sub(self.promised.pool) >= bytes
    }

    /// Bytes that claims may still pin in the memory of the tier that leases blocks.
    fn in_place_room(&self, rooms: &Rooms<'_>) -> u64 {
        rooms.pool.in_place_room().saturating_sub(self.promised.in_place)
    }

    /// Room may have come back: the claim at the head of the queue looks again, if what it needed last would fit now.
    pub(crate) fn room_came(&mut self, rooms: &mut Rooms<'_>, out: &mut Effects) {
        let mut looks = self.pace.queue_entries;
        while let Some(&id) = self.queue.front() {
            if looks == 0 {
                // Many claims at the head have ended.
                self.turn_came = true;
                out.again.push(Job::Emit);
                return;
            }
            looks -= 1;
            let claim = self.map.get(&id);
            let Some(claim) = claim.filter(|claim| claim.queued && !self.has_ended(claim)) else {
                self.queue.pop_front();
                continue;
            };
            match claim.phase {
                Phase::Queued => {}
                // It is being looked through, and decides when that has ended.
                Phase::Survey | Phase::Probe | Phase::Weigh => return,
                _ => {
                    self.queue.pop_front();
                    continue;
                }
            }
            let idle = rooms.pool.held().pinned == 0 && self.promised.pool == 0;
            let fits = claim.need.fits(self.room(rooms), self.in_place_room(rooms));
            if !fits && !idle && !claim.lender_changed(rooms.pool) {
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
            let end = claim.cursor + 1;
            done += 1;
            for (group, range) in ranges.iter().enumerate() {
                let units = claim.groups[group].shape.units_per_block;
                let block = end / units;
                if !end.is_multiple_of(units) || !range.contains(&(block - 1)) {
                    continue;
                }
                for rank in 0..claim.groups[group].spaces.len() {
                    done += 1;
                    if !self.take_lease(rooms, claim, Spot { group, block: block - 1, rank }, pass > 0) {
                        // The next step goes on with these blocks: those that are leased are passed over.
                        return true;
                    }
                }
            }
            claim.cursor = end;
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
            self.begin_to_settle(claim);
            return true;
        }
        // Something may have been lost while it took its leases, and its client is about to hear what it has.
        claim.must_relook(rooms)
    }

    /// Leases or fetches one block: false when this step has looked long enough for room.
    fn take_lease(&mut self, rooms: &mut Rooms<'_>, claim: &mut Claim, spot: Spot, fetch: bool) -> bool {
        let (place, key) = (claim.place(spot.group, spot.block, spot.rank), claim.key(spot));
        let known = claim.known(place);
        if matches!(known, Known::LEASED | Known::WAITING) || !rooms.catalog.is_live(key.space) {
            return true;
        }
        match rooms.pool.find_kept(&key) {
            Some(slot) if !claim.may_use(rooms, slot) => {}
            Some(slot) if rooms.pool.slot(slot).block.is_readable() => {
                let found = rooms.pool.slot(slot);
                if found.block.is_evictable() {
                    self.keep_promise(claim, spot, found.is_in_place());
                }
                rooms.pool.pin(slot);
                claim.places.set_leased(place, slot);
                claim.leased += 1;
            }
            Some(slot) if fetch && rooms.pool.slot(slot).block.phase() == BlockPhase::Fetching => {
                wait_for(rooms, claim, place, slot);
            }
            Some(_) => {}
            None if !fetch || rooms.flow.is_leaving(&key) => {}
            None => {
                let Some(tier) = known.tier().filter(|&tier| !rooms.pool.is_lender_down(tier)) else {
                    return true;
                };
                let in_place = has_promised_place(rooms, claim, spot, tier);
                match self.make_room(rooms, claim, spot, tier, in_place) {
                    Ok(slot) => {
                        // A block that finds no room in the tier's memory leaves what was promised to others of the pool.
                        self.keep_promise(claim, spot, in_place);
                        rooms.flow.read(slot, tier, claim.deadline, claim.tiers);
                        wait_for(rooms, claim, place, slot);
                    }
                    Err(NoRoom::Later) => return false,
                    Err(NoRoom::Full(error)) => {
                        claim.cut = true;
                        rooms.counters.failed("claim", &error);
                    }
                }
            }
        }
        true
    }

    /// Makes a slot for a block that a tier is to lease or to read. `in_place`: whether it was promised room in the tier's
    /// memory. If it finds none there, it takes no room of the pool that was promised to any block.
    fn make_room(
        &self,
        rooms: &mut Rooms<'_>,
        claim: &Claim,
        spot: Spot,
        tier: TierIndex,
        in_place: bool,
    ) -> std::result::Result<SlotId, NoRoom> {
        let (key, bytes) = (claim.key(spot), claim.bytes(spot));
        if in_place {
            if let Some(slot) = rooms.pool.insert_in_place(key, bytes, tier) {
                return Ok(slot);
            }
            if bytes > self.room(rooms) {
                let error = Error::new(
                    ErrorKind::NoSpace,
                    "no room is left for a block in a tier's memory, or in the pool",
                );
                return Err(NoRoom::Full(error.with("block_bytes", bytes)));
            }
        }
        let near = rooms.catalog.near(key.space);
        rooms.pool.insert(key, Block::fetching(), bytes, true, near)
    }

    /// Room that was promised is not needed any more.
    pub(super) fn give_up_promise(&mut self, claim: &mut Claim) {
        self.turn_came |= !claim.promised.is_none();
        self.promised -= std::mem::take(&mut claim.promised);
    }

    /// Whether the queue's head may go ahead since the last call, for another reason than new room in the pool.
    pub(crate) const fn take_turn(&mut self) -> bool {
        std::mem::replace(&mut self.turn_came, false)
    }

    /// Room that was promised is taken now.
    fn keep_promise(&mut self, claim: &mut Claim, spot: Spot, in_place: bool) {
        let wanted = match in_place {
            true => Promised { pool: 0, in_place: claim.lent_bytes(spot) },
            false => Promised { pool: claim.bytes(spot), in_place: 0 },
        };
        let part = claim.promised.part(wanted);
        claim.promised -= part;
        self.promised -= part;
    }
}

/// Whether a claim was promised room in a tier's memory for a block, and the tier still leases blocks.
fn has_promised_place(rooms: &Rooms<'_>, claim: &Claim, spot: Spot, tier: TierIndex) -> bool {
    rooms.pool.leasing_tier() == Some(tier)
        && claim.groups[spot.group].in_place[spot.rank]
        && claim.promised.in_place >= claim.lent_bytes(spot)
}

/// Bytes of the pool that one claim may take.
fn share_of(rooms: &Rooms<'_>) -> u64 {
    rooms.pool.bytes_max() * CLAIM_SHARE_PERCENT / 100
}

fn wait_for(rooms: &mut Rooms<'_>, claim: &mut Claim, place: usize, slot: u32) {
    let place_number = u32::try_from(place).expect("places are bounded");
    let waiter = Waiter::Claim { id: claim.id, place: place_number, tiers: claim.tiers };
    rooms.pool.edit(slot, |slot| slot.add_waiter(waiter));
    claim.places.set(place, Known::WAITING);
    claim.waiting += 1;
}
