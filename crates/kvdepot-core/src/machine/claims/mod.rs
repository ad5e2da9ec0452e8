//! Claims: the longest hit of a request, brought into the pool and leased for all ranks before the engine hears of it.
//!
//! ```text
//!   Survey ──▶ Weigh ──▶ Lease ──▶ Filling ──▶ Settling ──▶ Settled ──▶ Releasing
//!      ▲         │
//!      └─────────┴── Probe, once; or Queued
//! ```
//!
//! A claim is admitted only when all that it needs finds room at once. Others wait in order, so that concurrent hits larger
//! than the pool take turns instead of evicting each other; a hit that can never fit is cut, and said so. A claim may have
//! a hundred thousand places, so every phase that looks at all of them does it in pieces, with other steps in between.

mod admit;
mod choice;
mod claim;
mod ending;
mod known;
mod lost;
mod missed;
mod places;
mod probing;
mod promised;
mod survey;
mod times;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use smallvec::SmallVec;

use crate::error::{Error, ErrorKind, Result};
use crate::key::BlockHash;
use crate::limits::{CLAIM_BLOCKS_MAX, CLAIMS_PER_CONNECTION_MAX};

use super::arrivals::Come;
use super::event::{
    ClaimGroup, ClaimId, ClaimTimes, Effects, Job, Location, Nanos, Owner, Reply, TierSet, Token,
};
use super::flaw::Flaws;
use super::pace::Pace;
use super::rooms::Rooms;
use claim::{Claim, Group, Need, Phase, Weigh};
use known::Known;
use places::Places;
use promised::Promised;

/// All claims, and those that wait for room, in order.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    // Ordered maps of boxes: one that grows moves a few entries, however many claims there are.
    map: BTreeMap<ClaimId, Box<Claim>>,
    owners: BTreeMap<Owner, BTreeSet<ClaimId>>,
    /// Connections that have ended and whose claims are not all released: those claims count as ended.
    ended: BTreeSet<Owner>,
    waiters: BTreeMap<Token, ClaimId>,
    queue: VecDeque<ClaimId>,
    /// Not before when each claim has to be looked at.
    due: BTreeSet<(Nanos, ClaimId)>,
    /// Room that was promised to claims and is not taken yet.
    promised: Promised,
    /// Whether the claim at the queue's head may go ahead although the pool has no new room: the one before it left the
    /// queue, or gave back room that it was promised.
    turn_came: bool,
    next: ClaimId,
    pub(crate) pace: Pace,
    pub(crate) flaws: Flaws,
}

/// What a client asks of a new claim.
#[derive(Debug)]
pub(crate) struct Open {
    pub(crate) token: Token,
    pub(crate) owner: Owner,
    pub(crate) groups: Vec<ClaimGroup>,
    pub(crate) hashes: Vec<BlockHash>,
    pub(crate) skip: usize,
    pub(crate) limit: usize,
    pub(crate) tiers: TierSet,
    pub(crate) now: Nanos,
    pub(crate) deadline: Nanos,
    pub(crate) patience: Nanos,
    pub(crate) label: Option<Box<str>>,
}

impl Claims {
    pub(crate) fn len(&self) -> usize {
        self.map.len()
    }

    /// Returns the number of places that the tables of a claim hold so far.
    #[cfg(test)]
    pub(super) fn places_reached(&self, id: ClaimId) -> usize {
        self.map[&id].places.reached()
    }

    pub(crate) fn queued(&self) -> usize {
        self.queue.len()
    }

    /// Opens a claim and looks at its first places.
    pub(crate) fn open(&mut self, rooms: &mut Rooms<'_>, open: Open, out: &mut Effects) -> Result<()> {
        let of_owner = self.owners.get(&open.owner).map_or(0, BTreeSet::len);
        if of_owner >= CLAIMS_PER_CONNECTION_MAX {
            return Err(Error::new(ErrorKind::Busy, "too many claims are open on this connection")
                .with("claims_max", CLAIMS_PER_CONNECTION_MAX));
        }
        if self.ended.contains(&open.owner) {
            return Err(Error::new(ErrorKind::Closed, "the connection has ended"));
        }
        let (token, owner) = (open.token, open.owner);
        let mut claim = Box::new(new_claim(rooms, self.next, open)?);
        claim.all_spaces().for_each(|space| rooms.pool.uses.hold(space));
        let id = claim.id;
        claim.look_at = claim.due();
        self.next += 1;
        rooms.counters.claims += 1;
        rooms.counters.lookup_blocks += (claim.limit - claim.skip) as u64;
        self.due.insert((claim.look_at, id));
        self.owners.entry(owner).or_default().insert(id);
        self.waiters.insert(token, id);
        self.map.insert(id, claim);
        self.go_on(rooms, id, out);
        Ok(())
    }

    /// Goes on with a claim's work.
    pub(crate) fn go_on(&mut self, rooms: &mut Rooms<'_>, id: ClaimId, out: &mut Effects) {
        let Some(mut claim) = self.map.remove(&id) else { return };
        if claim.phase == Phase::Releasing {
            self.give_back_some(rooms, claim, out);
            return;
        }
        if self.has_ended(&claim) {
            // `release_ended` reaches it.
            self.map.insert(id, claim);
            return;
        }
        self.work(rooms, &mut claim, out);
        self.put_back(claim, out);
    }

    /// Works on a claim for as long as one step may.
    fn work(&mut self, rooms: &mut Rooms<'_>, claim: &mut Claim, out: &mut Effects) {
        let mut pieces = if self.is_small(claim) { self.pace.small_pieces } else { 1 };
        while self.next_piece(rooms, claim, out) {
            pieces -= 1;
            if pieces == 0 {
                out.again.push(Job::Claim(claim.id));
                break;
            }
        }
    }

    /// Whether all places of a claim make one piece.
    fn is_small(&self, claim: &Claim) -> bool {
        claim.places() <= self.pace.claim_leases
    }

    /// One piece of a claim's work: whether there is more to do now.
    fn next_piece(&mut self, rooms: &mut Rooms<'_>, claim: &mut Claim, out: &mut Effects) -> bool {
        match claim.phase {
            Phase::Survey => self.survey(rooms, claim, out),
            Phase::Weigh => self.weigh(rooms, claim),
            Phase::Probe => self.probe(rooms, claim, out),
            Phase::Lease { .. } => self.take_leases(rooms, claim),
            Phase::Settling => self.settle_on(rooms, claim, out),
            Phase::Settled => claim.trimming && trim(rooms, claim, self.pace),
            Phase::Filling => self.relook(rooms, claim),
            Phase::Queued | Phase::Releasing => false,
        }
    }

    /// Puts a claim back into the table, and answers who waits for it, if it has got that far.
    fn put_back(&mut self, mut claim: Box<Claim>, out: &mut Effects) {
        if matches!(claim.phase, Phase::Queued | Phase::Filling | Phase::Settled) {
            self.answer_waiters(&mut claim, out, |claim| Ok(Reply::Claim(claim.progress())));
        }
        self.map.insert(claim.id, claim);
    }

    /// Answers all who wait for a claim.
    fn answer_waiters(
        &mut self,
        claim: &mut Claim,
        out: &mut Effects,
        answer: impl Fn(&mut Claim) -> Result<Reply>,
    ) {
        for token in std::mem::take(&mut claim.waiters) {
            self.waiters.remove(&token);
            out.replies.push((token, answer(claim)));
        }
    }

    /// Takes a claim out of the table to work on it; `put_back` must follow. Returns `None` if it has ended.
    fn take_open(&mut self, id: ClaimId) -> Option<Box<Claim>> {
        self.map.get(&id).filter(|claim| !self.has_ended(claim))?;
        self.map.remove(&id)
    }

    /// The tiers' answer about the places of one piece that were not in the pool.
    pub(crate) fn located(
        &mut self,
        rooms: &mut Rooms<'_>,
        id: ClaimId,
        part: u32,
        locations: &[Location],
        out: &mut Effects,
    ) {
        let Some(mut claim) = self.take_open(id) else { return };
        claim.asked = claim.asked.saturating_sub(1);
        let start = part as usize;
        let end = claim.places().min(start + self.pace.survey_places);
        for (known, &location) in claim.places.unlocated(start..end).zip(locations) {
            *known = Known::at(location);
        }
        let more = claim.phase == Phase::Survey && claim.asked == 0 && claim.cursor == claim.places();
        if more {
            Self::begin_to_weigh(&mut claim);
        }
        self.put_back(claim, out);
        if more {
            self.go_on(rooms, id, out);
        }
    }

    /// A tier's answer about a run of places.
    pub(crate) fn probed(
        &mut self,
        rooms: &mut Rooms<'_>,
        id: ClaimId,
        run: u32,
        count: Option<usize>,
        out: &mut Effects,
    ) {
        let Some(mut claim) = self.take_open(id) else { return };
        let more = claim.phase == Phase::Probe && self.run_answered(rooms, &mut claim, run, count, out);
        self.put_back(claim, out);
        if more {
            self.go_on(rooms, id, out);
        }
    }

    /// A fetch that a claim waited for has ended. `come`: the slot, which is readable, and the tier that the block came
    /// from; None: it did not come.
    pub(crate) fn arrived(&mut self, rooms: &mut Rooms<'_>, id: ClaimId, place: u32, come: Option<Come>) {
        let Some(claim) = self.map.get_mut(&id) else { return };
        let place = place as usize;
        claim.waiting -= 1;
        let wanted =
            matches!(claim.phase, Phase::Lease { .. } | Phase::Filling) && !self.ended.contains(&claim.owner);
        claim.places.set(place, Known::ABSENT);
        // What a tier leases in its memory may take the place of a block that did not come.
        if let Some(Come { slot, tier }) = come.filter(|come| wanted && claim.tiers.has(come.tier)) {
            claim.times.came(tier, rooms.flow.now);
            rooms.pool.pin(slot);
            claim.places.set_leased(place, slot);
            claim.leased += 1;
            claim.fetched += 1;
        }
    }

    /// Settles a claim that waits for nothing any more.
    pub(crate) fn settle_if_full(&mut self, rooms: &mut Rooms<'_>, id: ClaimId, out: &mut Effects) {
        let Some(mut claim) = self.take_open(id) else { return };
        if claim.phase == Phase::Filling && claim.waiting == 0 {
            self.begin_to_settle(&mut claim);
            // Many claims may have waited for one block.
            if self.is_small(&claim) {
                self.work(rooms, &mut claim, out);
            } else {
                out.again.push(Job::Claim(id));
            }
        }
        self.put_back(claim, out);
    }

    /// The hit is to be final: the longest one whose blocks are all leased.
    fn begin_to_settle(&mut self, claim: &mut Claim) {
        self.give_up_promise(claim);
        self.turn_came |= claim.queued;
        claim.note_end();
        claim.phase = Phase::Settling;
        claim.begin_leased_hit();
        claim.runs.clear();
        claim.runs_to_ask.clear();
    }

    /// The next piece of that: whether there is more to do now. Leases beyond the hit end when it is known.
    fn settle_on(&self, rooms: &mut Rooms<'_>, claim: &mut Claim, out: &mut Effects) -> bool {
        if claim.must_relook(rooms) {
            claim.begin_leased_hit();
        }
        if self.relook(rooms, claim) {
            return true;
        }
        let mut looks = (self.pace.weigh_places / claim.width()).max(1);
        if let Some(Weigh::Leased(mut search)) = claim.weigh.take() {
            match claim.leased_hit(&mut search, &mut looks) {
                Some(hit) => claim.hit = hit,
                None => {
                    claim.weigh = Some(Weigh::Leased(search));
                    return true;
                }
            }
        }
        if !std::mem::replace(&mut claim.is_counted, true) {
            claim.count_hit(rooms.counters);
            out.settled.push(claim.settled(rooms.flow.now));
        }
        if !claim.has_missed {
            let missed = claim.missed(rooms.pool, rooms.catalog);
            claim.has_missed = missed.is_some();
            out.missed.extend(missed);
        }
        claim.phase = Phase::Settled;
        claim.times.settled_at(rooms.flow.now);
        claim.cursor = 0;
        claim.trimming = claim.leased > claim.needed_count(claim.hit);
        claim.trimming
    }

    /// How far a claim is. `settle_now` takes what has come: then the answer comes when it has been settled.
    pub(crate) fn poll(
        &mut self,
        rooms: &mut Rooms<'_>,
        now: Nanos,
        (token, owner): (Token, Owner),
        id: ClaimId,
        settle_now: bool,
        out: &mut Effects,
    ) -> Result<()> {
        let mut claim = self.take(owner, id)?;
        claim.polled = now;
        claim.relooks = 0;
        // It was settled, and something has been lost before its client knew.
        let again = claim.phase == Phase::Settled && !claim.is_told && claim.must_relook(rooms);
        if again {
            claim.phase = Phase::Settling;
            claim.begin_leased_hit();
        }
        if claim.phase == Phase::Filling && claim.must_relook(rooms) {
            self.work(rooms, &mut claim, out);
        }
        if settle_now && !matches!(claim.phase, Phase::Settling | Phase::Settled) {
            self.begin_to_settle(&mut claim);
        }
        let waits = settle_now || again;
        if waits && claim.phase == Phase::Settling {
            // Also if the last block has begun it: the thread that goes on with that may be long in coming.
            self.work(rooms, &mut claim, out);
        }
        if waits && claim.phase == Phase::Settling {
            claim.waiters.push(token);
            self.waiters.insert(token, id);
        } else {
            out.replies.push((token, Ok(Reply::Claim(claim.progress()))));
        }
        self.put_back(claim, out);
        Ok(())
    }

    /// Notes that a claim's client would compute sooner what has not come.
    pub(crate) fn decline(&mut self, owner: Owner, id: ClaimId) -> Result<()> {
        let mut claim = self.take(owner, id)?;
        claim.declined = true;
        self.map.insert(id, claim);
        Ok(())
    }

    /// When a claim got how far.
    pub(crate) fn times(&self, owner: Owner, id: ClaimId) -> Result<ClaimTimes> {
        let claim = self.map.get(&id).filter(|claim| {
            claim.owner == owner && claim.phase != Phase::Releasing && !self.has_ended(claim)
        });
        let claim = claim.ok_or_else(|| no_such_claim(id))?;
        Ok(claim.times.clone())
    }

    fn take(&mut self, owner: Owner, id: ClaimId) -> Result<Box<Claim>> {
        match self.map.get(&id) {
            Some(claim)
                if claim.owner == owner
                    && claim.phase != Phase::Releasing
                    && !self.ended.contains(&owner) => {}
            _ => return Err(no_such_claim(id)),
        }
        self.map.remove(&id).ok_or_else(|| no_such_claim(id))
    }

    /// Who waits for a claim's first answer waits no longer.
    pub(crate) fn expire_waiter(&mut self, token: Token, out: &mut Effects) -> bool {
        let Some(id) = self.waiters.remove(&token) else { return false };
        if let Some(claim) = self.map.get_mut(&id) {
            claim.waiters.retain(|waiter| *waiter != token);
            let has_ended = self.ended.contains(&claim.owner);
            let answer = if has_ended { Err(no_such_claim(id)) } else { Ok(Reply::Claim(claim.progress())) };
            out.replies.push((token, answer));
        }
        true
    }

    /// Ends claims that nobody polls, and settles those whose time is over (P2, P4).
    pub(crate) fn tick(&mut self, rooms: &mut Rooms<'_>, now: Nanos, out: &mut Effects) {
        let mut places = self.pace.claim_leases;
        for _ in 0..self.pace.claims_expired {
            let Some(&(due, id)) = self.due.first().filter(|(due, _)| *due <= now) else { return };
            self.due.remove(&(due, id));
            let Some(mut claim) = self.take_open(id) else { continue };
            if claim.phase != Phase::Releasing && claim.due() <= now {
                if claim.polled.saturating_add(claim.patience) <= now {
                    rooms.counters.claims_expired += 1;
                    let now = claim.places() <= places;
                    places -= claim.places().min(places);
                    self.let_go(rooms, claim, now, out);
                    continue;
                }
                if !matches!(claim.phase, Phase::Settling | Phase::Settled) {
                    self.begin_to_settle(&mut claim);
                    if claim.places() <= places {
                        places -= claim.places();
                        self.work(rooms, &mut claim, out);
                    } else {
                        out.again.push(Job::Claim(id));
                    }
                }
            }
            if claim.phase != Phase::Releasing {
                claim.look_at = claim.due();
                self.due.insert((claim.look_at, id));
            }
            self.put_back(claim, out);
        }
    }
}

fn no_such_claim(id: ClaimId) -> Error {
    Error::new(ErrorKind::NotFound, "no such claim on this connection").with("claim", id)
}

fn new_claim(rooms: &Rooms<'_>, id: ClaimId, open: Open) -> Result<Claim> {
    let Open { token, owner, groups: asked, hashes, skip, mut limit, tiers, now, deadline, patience, label } =
        open;
    // One that names them all is without limits.
    let tiers = if tiers.has_all(rooms.flow.tier_count()) { TierSet::ALL } else { tiers };
    if skip > hashes.len() || asked.iter().any(|group| group.shape.units_per_block == 0) {
        return Err(Error::new(
            ErrorKind::Protocol,
            "a claim's blocks must have at least one hash, and no more hashes may be skipped than are given",
        )
        .with("skip", skip)
        .with("hashes", hashes.len()));
    }
    limit = limit.min(hashes.len()).max(skip);
    let units = limit - skip;
    let blocks_of =
        |group: &ClaimGroup| group.namespaces.len() * units.div_ceil(group.shape.units_per_block.max(1));
    let blocks: usize = asked.iter().map(blocks_of).sum();
    if blocks > CLAIM_BLOCKS_MAX {
        limit = skip + (units as u128 * CLAIM_BLOCKS_MAX as u128 / blocks as u128) as usize;
    }
    let shapes: Vec<_> = asked.iter().map(|group| group.shape).collect();
    // A hit ends where every group's blocks do, so what lies beyond the last such place is no part of any.
    limit = crate::hit::whole_blocks(&shapes, limit).max(skip);
    let mut groups = Vec::with_capacity(asked.len());
    let mut base = 0;
    let (mut ids, mut handles) = (Vec::new(), Vec::new());
    for group in asked {
        let (mut spaces, mut slot_bytes) = (Vec::new(), Vec::new());
        let (mut in_place, mut lent_bytes) = (Vec::new(), Vec::new());
        for handle in group.namespaces {
            let namespace = rooms.catalog.get(handle)?;
            spaces.push(namespace.space);
            ids.push(namespace.id);
            handles.push(handle);
            slot_bytes.push(namespace.slot_bytes());
            in_place.push(namespace.in_place);
            lent_bytes.push(rooms.pool.lent_bytes(namespace.slot_bytes()));
        }
        let units = group.shape.units_per_block;
        let blocks = skip / units..limit / units;
        let places = blocks.len() * spaces.len();
        groups.push(Group { spaces, slot_bytes, in_place, lent_bytes, shape: group.shape, blocks, base });
        base += places;
    }
    Ok(Claim {
        id,
        owner,
        has_windows: groups.iter().any(|group| group.shape.window_blocks > 0),
        groups,
        hashes,
        skip,
        limit,
        tiers,
        places: Places::new(base),
        phase: Phase::Survey,
        cursor: 0,
        asked: 0,
        probed: false,
        windows: false,
        rounds: 0,
        asked_in_round: false,
        runs_to_ask: Vec::new(),
        runs: Vec::new(),
        runs_ever: 0,
        queued: false,
        need: Need::default(),
        excess: None,
        lender: None,
        asks_again: false,
        promised: Promised::default(),
        is_counted: false,
        hit: skip,
        losses: 0,
        relook: None,
        relooks: 0,
        lost: 0,
        is_told: false,
        has_missed: false,
        lead: skip,
        needed: 0,
        leased: 0,
        waiting: 0,
        fetched: 0,
        trimming: false,
        cut: false,
        polled: now,
        times: ClaimTimes::opened_at(now),
        look_at: 0,
        deadline,
        patience,
        waiters: SmallVec::from_slice(&[token]),
        weigh: None,
        label,
        ids: Arc::from(ids),
        handles: Arc::from(handles),
        short_of: None,
        declined: false,
    })
}

/// Gives back leases beyond the hit: whether there are more.
fn trim(rooms: &mut Rooms<'_>, claim: &mut Claim, pace: Pace) -> bool {
    let mut given_back = 0;
    let mut looked_at = 0;
    while claim.cursor < claim.places() && given_back < pace.claim_leases && looked_at < pace.weigh_places {
        let place = claim.cursor;
        claim.cursor += 1;
        looked_at += 1;
        if claim.known(place) != Known::LEASED {
            continue;
        }
        let spot = claim.spot(place);
        if !claim.needed_range(spot.group, claim.hit).contains(&spot.block) {
            claim.unlease(rooms.pool, place);
            given_back += 1;
        }
    }
    claim.trimming = claim.cursor < claim.places();
    claim.trimming
}
