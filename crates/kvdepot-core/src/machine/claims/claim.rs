//! One claim: what follows from what is known of each of its places.

use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::hit::{GroupShape, HitSearch, needed_blocks};
use crate::key::{BlockHash, NamespaceId};
use crate::misses::Short;

use super::super::catalog::NamespaceHandle;
use super::super::counters::Counters;
use super::super::event::{Arriving, ClaimId, ClaimTimes, Location, Nanos, Owner, Progress, Token};
use super::super::names::{PoolKey, SpaceId};
use super::super::pool::Pool;
use super::super::probe::RunProbe;
use super::super::tiers::{TierIndex, TierSet};
use super::known::Known;
use super::places::Places;
use super::promised::Promised;

/// Units that [`Claim::progress`] looks at in one call to know how many of the leading ones are leased.
const LEAD_UNITS_PER_LOOK: usize = 2048;

/// Where a claim stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// The pool is looked through, and tiers are asked what they know without I/O.
    Survey,
    /// How long the hit can be, and whether there is room for it, is found out from what is known of each place.
    Weigh,
    /// Tiers are asked what only I/O can tell.
    Probe,
    /// Waits for room.
    Queued,
    /// Takes leases (`pass` 0) and begins fetches (`pass` 1), piece by piece.
    Lease { pass: u8 },
    /// Fetches are under way.
    Filling,
    /// How long the hit is, of what is leased, is found out.
    Settling,
    /// Final.
    Settled,
    /// Gives its leases back, piece by piece.
    Releasing,
}

/// One KV-cache group of a claim.
#[derive(Clone, Debug)]
pub(super) struct Group {
    pub(super) spaces: Vec<SpaceId>,
    /// Bytes of a block of each rank.
    pub(super) slot_bytes: Vec<u64>,
    /// Whether each rank can read in place.
    pub(super) in_place: Vec<bool>,
    /// Bytes that a block of each rank takes in the memory of the tier that leases it.
    pub(super) lent_bytes: Vec<u64>,
    pub(super) shape: GroupShape,
    /// Blocks from the first that is not skipped to the limit.
    pub(super) blocks: Range<usize>,
    /// The group's first place.
    pub(super) base: usize,
}

/// Where a place lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Spot {
    pub(super) group: usize,
    pub(super) block: usize,
    pub(super) rank: usize,
}

/// A question to the tiers that needs I/O: a run of one group and rank, a window of places at a time.
#[derive(Clone, Debug)]
pub(super) struct Run {
    pub(super) number: u32,
    pub(super) group: usize,
    pub(super) rank: usize,
    /// Blocks of it that come after the window.
    pub(super) rest: Range<usize>,
    pub(super) probe: RunProbe,
    /// The window's places that are not in the pool, and what is known of each.
    pub(super) places: Vec<u32>,
    pub(super) locations: Vec<Location>,
}

/// Bytes that a hit needs, added up piece by piece.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Need {
    group: usize,
    /// The group's next block, if some were looked at already.
    at: Option<usize>,
    /// Bytes that it would pin anew.
    pub(super) new_pins: u64,
    /// Bytes of all its blocks.
    pub(super) whole: u64,
    /// Bytes of all its blocks in the pool.
    pub(super) total: u64,
    /// Bytes that it would pin anew in the memory of the tier that leases blocks.
    pub(super) in_place: u64,
    /// Bytes of the pool that it would pin anew for blocks for which that memory has no room, and what they would take
    /// there.
    pub(super) rest: u64,
    pub(super) rest_in_place: u64,
    /// Whether any has to be fetched.
    pub(super) fetches: bool,
}

impl Need {
    /// Returns the need if so many bytes can be pinned in the memory of the tier that leases blocks: the rest comes through
    /// the pool, where a block takes no more than there.
    pub(super) const fn with_in_place_at_most(mut self, room: u64) -> Self {
        let rest = self.in_place.saturating_sub(room);
        self.in_place -= rest;
        self.new_pins += rest;
        self.total += rest;
        self.rest += rest;
        self.rest_in_place += rest;
        self
    }

    /// Returns whether it would fit into so much room of the pool, if so much is there in the memory of the tier that
    /// leases blocks.
    pub(super) fn fits(&self, room: u64, in_place_room: u64) -> bool {
        let more = in_place_room.saturating_sub(self.in_place).min(self.rest_in_place);
        let moved = u128::from(self.rest) * u128::from(more) / u128::from(self.rest_in_place.max(1));
        self.new_pins.saturating_sub(moved as u64) <= room
    }
}

/// Room in the memory of the tier that leases blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct InPlaceRoom {
    pub(super) bytes: u64,
    /// That tier, if it leases blocks now.
    pub(super) tier: Option<TierIndex>,
}

/// What is known of all places comes down to these, found out piece by piece.
#[derive(Clone, Debug)]
pub(super) enum Weigh {
    /// How long the hit can be. `turn`: whether it is being cut, and whether it may go before those that wait.
    Reach { search: HitSearch, turn: Option<bool> },
    /// Whether it can be longer than `reach`, if all were there that only I/O can tell of.
    Hope { search: HitSearch, reach: usize },
    /// What the hit needs.
    Need { hit: usize, need: Need, turn: Option<bool> },
    /// The hit that is hoped for in a round of questions to the tiers.
    Round(HitSearch),
    /// The hit of what is leased.
    Leased(HitSearch),
}

#[derive(Debug)]
pub(super) struct Claim {
    pub(super) id: ClaimId,
    pub(super) owner: Owner,
    pub(super) groups: Vec<Group>,
    /// Whether a group needs only the last blocks of a hit.
    pub(super) has_windows: bool,
    pub(super) hashes: Vec<BlockHash>,
    pub(super) skip: usize,
    pub(super) limit: usize,
    /// Where its blocks may come from: from the pool in any case.
    pub(super) tiers: TierSet,
    pub(super) places: Places,
    pub(super) phase: Phase,
    /// The next place, or hash unit while leasing, of a phase that goes piece by piece.
    pub(super) cursor: usize,
    /// Questions that have not been answered.
    pub(super) asked: usize,
    /// Whether tiers were asked by I/O: once is enough, until the tier that leases blocks stops or begins to work.
    pub(super) probed: bool,
    /// Whether blocks in windows are asked for, too.
    pub(super) windows: bool,
    pub(super) rounds: usize,
    /// Whether anything was asked in this round.
    pub(super) asked_in_round: bool,
    pub(super) runs_to_ask: Vec<(usize, usize)>,
    pub(super) runs: Vec<Run>,
    pub(super) runs_ever: u32,
    /// Whether it stands in the queue for room.
    pub(super) queued: bool,
    /// What admitting it needs, as of its last survey.
    pub(super) need: Need,
    /// Bytes by which it exceeded its share of the pool when it was cut last, since its last survey.
    pub(super) excess: Option<u64>,
    /// The tier that could lease blocks when its last survey began.
    pub(super) lender: Option<TierIndex>,
    /// Whether its survey asks the tiers again for what they have told, because that tier has stopped or begun to work.
    pub(super) asks_again: bool,
    /// Whether its hit was counted.
    pub(super) is_counted: bool,
    /// Room that was promised to it and is not taken yet.
    pub(super) promised: Promised,
    /// Hit aimed at while filling, final once settled; in hash units.
    pub(super) hit: usize,
    /// Leading hash units known to be leased whole, as far as [`Self::follow_lead`] has looked.
    pub(super) lead: usize,
    pub(super) needed: usize,
    pub(super) leased: usize,
    pub(super) waiting: usize,
    pub(super) fetched: usize,
    /// Whether leases beyond the hit are still to be given back.
    pub(super) trimming: bool,
    /// Whether the pool was too small for all of it, or had no room for a block of it.
    pub(super) cut: bool,
    pub(super) polled: Nanos,
    pub(super) times: ClaimTimes,
    /// When it is looked at next: its place in [`super::Claims::due`].
    pub(super) look_at: Nanos,
    pub(super) deadline: Nanos,
    pub(super) patience: Nanos,
    /// Who waits for an answer.
    pub(super) waiters: SmallVec<[Token; 1]>,
    /// What is being found out.
    pub(super) weigh: Option<Weigh>,
    /// What its client calls it.
    pub(super) label: Option<Box<str>>,
    /// What keys of each namespace carried when it was opened.
    pub(super) ids: Arc<[NamespaceId]>,
    /// All its namespaces.
    pub(super) handles: Arc<[NamespaceHandle]>,
    /// What blocks wanted that had not come when it began to settle; None: nothing could come any more.
    pub(super) short_of: Option<Short>,
    /// [`Pool::losses`] when all that it leases could be read.
    pub(super) losses: u64,
    /// The next place whose lease is looked at again, since something was lost.
    pub(super) relook: Option<usize>,
    pub(super) relooks: u8,
    /// What was lost for good when it looked last, as [`super::lost`] counts.
    pub(super) lost: usize,
    /// Whether its client knows how long its hit is: then it is final.
    pub(super) is_told: bool,
    /// Whether it was told what kept its hit from being longer.
    pub(super) has_missed: bool,
    /// Whether its client would compute sooner what has not come.
    pub(super) declined: bool,
}

impl Claim {
    /// The space of each rank of each group.
    pub(super) fn all_spaces(&self) -> impl Iterator<Item = SpaceId> + '_ {
        self.groups.iter().flat_map(|group| group.spaces.iter().copied())
    }

    pub(super) fn shapes(&self) -> Vec<GroupShape> {
        self.groups.iter().map(|group| group.shape).collect()
    }

    pub(super) fn places(&self) -> usize {
        self.places.count()
    }

    pub(super) fn known(&self, place: usize) -> Known {
        self.places.known(place)
    }

    /// Gives back the lease on a place's block.
    pub(super) fn unlease(&mut self, pool: &mut Pool, place: usize) {
        self.places.set(place, Known::ABSENT);
        self.leased -= 1;
        pool.unpin(self.places.slot(place));
    }

    /// Ranks of all groups: blocks of a hash unit, where every group has one.
    pub(super) fn width(&self) -> usize {
        self.groups.iter().map(|group| group.spaces.len()).sum::<usize>().max(1)
    }

    pub(super) fn place(&self, group: usize, block: usize, rank: usize) -> usize {
        let entry = &self.groups[group];
        entry.base + (block - entry.blocks.start) * entry.spaces.len() + rank
    }

    pub(super) fn spot(&self, place: usize) -> Spot {
        let group = self.groups.partition_point(|group| group.base <= place) - 1;
        let entry = &self.groups[group];
        let (block, rank) =
            ((place - entry.base) / entry.spaces.len(), (place - entry.base) % entry.spaces.len());
        Spot { group, block: entry.blocks.start + block, rank }
    }

    pub(super) fn key(&self, spot: Spot) -> PoolKey {
        let entry = &self.groups[spot.group];
        let hash = self.hashes[(spot.block + 1) * entry.shape.units_per_block - 1];
        PoolKey { space: entry.spaces[spot.rank], hash }
    }

    pub(super) fn bytes(&self, spot: Spot) -> u64 {
        self.groups[spot.group].slot_bytes[spot.rank]
    }

    pub(super) fn lent_bytes(&self, spot: Spot) -> u64 {
        self.groups[spot.group].lent_bytes[spot.rank]
    }

    /// Whether `is` holds for the places of all ranks of a block.
    fn all_ranks(&self, group: usize, block: usize, is: impl Fn(Known) -> bool) -> bool {
        let first = self.place(group, block, 0);
        (first..first + self.groups[group].spaces.len()).all(|place| is(self.known(place)))
    }

    pub(super) fn search(&self, limit: usize) -> HitSearch {
        HitSearch::new(&self.shapes(), self.skip, limit)
    }

    /// Goes on with a search among places of which `is` holds.
    fn go_on(
        &self,
        search: &mut HitSearch,
        looks: &mut usize,
        is: impl Fn(usize, Known) -> bool,
    ) -> Option<usize> {
        search.go_on(&self.shapes(), looks, &mut |group, block| {
            self.all_ranks(group, block, |known| is(group, known))
        })
    }

    /// The longest hit of what is in the pool, on its way into it, or known to be in a tier.
    pub(super) fn reach(&self, search: &mut HitSearch, looks: &mut usize) -> Option<usize> {
        self.go_on(search, looks, |_, known| known.is_within_reach())
    }

    /// The longest hit if every block that only I/O can tell of were there; the windows' too, unless `windows`.
    pub(super) fn hope(&self, search: &mut HitSearch, looks: &mut usize, windows: bool) -> Option<usize> {
        self.go_on(search, looks, |group, known| {
            let ignored = !windows && self.groups[group].shape.window_blocks > 0;
            ignored || known.is_within_reach() || known == Known::UNKNOWN
        })
    }

    /// Begins to find out the longest hit of what is leased.
    pub(super) fn begin_leased_hit(&mut self) {
        self.weigh = Some(Weigh::Leased(self.search(self.hit)));
    }

    /// The longest hit of what is leased.
    pub(super) fn leased_hit(&self, search: &mut HitSearch, looks: &mut usize) -> Option<usize> {
        self.go_on(search, looks, |_, known| known == Known::LEASED)
    }

    /// The blocks of a group that a hit needs.
    pub(super) fn needed_range(&self, group: usize, hit: usize) -> Range<usize> {
        needed_blocks(&self.groups[group].shape, self.skip, hit)
    }

    pub(super) fn needed_count(&self, hit: usize) -> usize {
        (0..self.groups.len())
            .map(|group| self.needed_range(group, hit).len() * self.groups[group].spaces.len())
            .sum()
    }

    /// Adds up what the next blocks of a hit need: whether all of them are in it.
    pub(super) fn add_need(
        &self,
        need: &mut Need,
        hit: usize,
        looks: &mut usize,
        in_place: InPlaceRoom,
    ) -> bool {
        while let Some(entry) = self.groups.get(need.group) {
            let range = self.needed_range(need.group, hit);
            for block in need.at.unwrap_or(range.start)..range.end {
                need.at = Some(block);
                let Some(left) = looks.checked_sub(1) else { return false };
                *looks = left;
                let first = self.place(need.group, block, 0);
                for (rank, &bytes) in entry.slot_bytes.iter().enumerate() {
                    let (known, lent_bytes) = (self.known(first + rank), entry.lent_bytes[rank]);
                    let is_leasable =
                        known.tier().is_some() && known.tier() == in_place.tier && entry.in_place[rank];
                    need.whole += bytes;
                    need.fetches |= known.tier().is_some();
                    if known == Known::PINNED_IN_PLACE {
                        continue;
                    }
                    if known == Known::IN_PLACE || is_leasable {
                        if need.in_place + lent_bytes <= in_place.bytes {
                            need.in_place += lent_bytes;
                            continue;
                        }
                        need.rest += bytes;
                        need.rest_in_place += lent_bytes;
                    }
                    need.total += bytes;
                    if !matches!(known, Known::PINNED | Known::LEASED | Known::WAITING) {
                        need.new_pins += bytes;
                    }
                }
            }
            (need.group, need.at) = (need.group + 1, None);
        }
        true
    }

    /// How many of the units beyond `skip`, up to `end`, so many blocks make.
    fn units_of(&self, blocks: usize, end: usize) -> usize {
        (blocks / self.width()).min(end - self.skip)
    }

    /// Counts the blocks of the final hit, and those that tiers had to be asked for: at least so many. What is leased
    /// beyond the hit may be what came from tiers, so it is taken off.
    pub(super) fn count_hit(&self, counters: &mut Counters) {
        let mut left = self.hit - self.skip;
        counters.lookup_hit_blocks += left as u64;
        let mut beyond = self.leased.saturating_sub(self.needed_count(self.hit));
        for came in &self.times.tiers {
            let off = beyond.min(came.blocks);
            beyond -= off;
            let units = ((came.blocks - off) / self.width()).min(left);
            counters.tier_hit(came.tier, units);
            left -= units;
        }
    }

    pub(super) fn progress(&mut self) -> Progress {
        self.follow_lead();
        let settled = self.phase == Phase::Settled;
        self.is_told |= settled;
        let units = if settled { self.hit } else { self.skip };
        let units_from_tier = self.units_of(self.fetched, units);
        Progress { claim: self.id, settled, units, units_from_tier, arriving: self.arriving() }
    }

    /// Counts the leading units that are leased, a few more per call. Leases stay while a claim fills. With windows nothing
    /// is certain, because a shorter hit needs other blocks than a longer one, and those were not fetched.
    fn follow_lead(&mut self) {
        if self.phase != Phase::Filling || self.has_windows {
            return;
        }
        let end = self.hit.min(self.lead + LEAD_UNITS_PER_LOOK);
        while self.lead < end && self.holds_unit(self.lead) {
            self.lead += 1;
        }
    }

    /// Whether the block of each group that a unit lies in is leased on all ranks.
    fn holds_unit(&self, unit: usize) -> bool {
        self.groups.iter().enumerate().all(|(index, group)| {
            let block = unit / group.shape.units_per_block;
            group.blocks.contains(&block) && self.all_ranks(index, block, |known| known == Known::LEASED)
        })
    }

    /// Nothing once a block of the hit has failed: then only settling tells how long the hit is.
    fn arriving(&self) -> Option<Arriving> {
        let is_sure = self.phase == Phase::Filling && self.relook.is_none();
        if !is_sure || self.leased + self.waiting < self.needed {
            return None;
        }
        Some(Arriving {
            units: self.hit,
            units_now: self.lead.min(self.hit),
            units_from_tier: self.units_of(self.fetched + self.waiting, self.hit),
            blocks_come: self.fetched,
            blocks_left: self.waiting,
        })
    }

    /// Notes which tier can lease blocks now. If it is another than in the last survey, the tiers are asked again, by I/O
    /// too.
    pub(super) fn note_lender(&mut self, pool: &Pool) {
        self.asks_again = self.lender_changed(pool);
        self.lender = pool.leasing_tier();
        if self.asks_again {
            (self.probed, self.windows, self.rounds) = (false, false, 0);
        }
    }

    /// Looks through all places again: what is known may be old.
    pub(super) fn survey_again(&mut self) {
        self.phase = Phase::Survey;
        self.cursor = 0;
        self.lead = self.skip;
    }

    /// Returns whether the tier that leases blocks was switched off, lost its memory or came back since its last survey.
    pub(super) fn lender_changed(&self, pool: &Pool) -> bool {
        self.lender != pool.leasing_tier()
    }

    /// When it ends if nothing happens before.
    pub(super) fn due(&self) -> Nanos {
        let forgotten = self.polled.saturating_add(self.patience);
        let settles = matches!(self.phase, Phase::Settling | Phase::Settled);
        if settles { forgotten } else { forgotten.min(self.deadline) }
    }
}
