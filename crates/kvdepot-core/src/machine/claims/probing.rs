//! Probes tiers for the parts of a claim's places that only I/O can tell: groups of full attention first, then the
//! windows at the end of the hit that these allow, until everything that the hit needs is known.
//!
//! A round determines the hit that can be hoped for and asks the tiers about it, run by run: the places of one group
//! and rank, a window of them at a time. A round that asks nothing is the last one.

use super::super::event::{Ask, Command, Effects, Location};
use super::super::probe::{PROBE_KEYS_MAX, ProbeStep, RunProbe};
use super::super::rooms::Rooms;
use super::Claims;
use super::claim::{Claim, Phase, Run, Spot, Weigh};
use super::known::Known;

/// Maximum number of rounds for one claim. Each shortens the hoped-for hit by at least one block; a window with that
/// many gaps in a slow tier is not worth more.
const ROUNDS_MAX: usize = 256;
/// Maximum number of a claim's runs that are probed at a time.
const RUNS_AT_A_TIME: usize = 4;

/// Begins the next round, or ends the probing.
pub(super) fn begin_round(claim: &mut Claim) {
    claim.rounds += 1;
    claim.phase = Phase::Probe;
    claim.asked_in_round = false;
    claim.weigh = Some(Weigh::Round(claim.search(claim.limit)));
}

impl Claims {
    /// Continues a round by one piece. Returns whether there is more to do now.
    pub(super) fn probe(&mut self, rooms: &mut Rooms<'_>, claim: &mut Claim, out: &mut Effects) -> bool {
        if let Some(Weigh::Round(mut search)) = claim.weigh.take() {
            let mut looks = (self.pace.weigh_places / claim.width()).max(1);
            match claim.hope(&mut search, &mut looks, claim.windows) {
                None => claim.weigh = Some(Weigh::Round(search)),
                Some(hope) => {
                    claim.hit = hope;
                    claim.runs_to_ask = runs_of(claim);
                }
            }
            return true;
        }
        let may_ask = claim.runs.iter().filter(|run| run.is_asked()).count() < RUNS_AT_A_TIME;
        if let Some(at) = claim.runs.iter().position(|run| !run.is_asked()) {
            let run = claim.runs.swap_remove(at);
            ask_on(rooms, claim, run, out);
        } else if may_ask && let Some((group, rank)) = claim.runs_to_ask.pop() {
            let run = new_run(rooms, claim, group, rank);
            ask_on(rooms, claim, run, out);
        }
        if claim.runs.is_empty() && claim.runs_to_ask.is_empty() {
            end_round(claim);
            return true;
        }
        has_more(claim)
    }

    /// A tier's answer, `None` if it did not answer: whether there is more to do now.
    pub(super) fn run_answered(
        &mut self,
        rooms: &mut Rooms<'_>,
        claim: &mut Claim,
        number: u32,
        count: Option<usize>,
        out: &mut Effects,
    ) -> bool {
        let Some(at) = claim.runs.iter().position(|run| run.number == number) else { return false };
        let mut run = claim.runs.swap_remove(at);
        run.probe.answered(&mut run.locations, count);
        ask_on(rooms, claim, run, out);
        claim.runs.is_empty() || has_more(claim)
    }
}

impl Run {
    /// Returns whether a tier owes an answer.
    const fn is_asked(&self) -> bool {
        self.probe.is_asked()
    }
}

/// Returns whether a run can continue now.
fn has_more(claim: &Claim) -> bool {
    let asked = claim.runs.iter().filter(|run| run.is_asked()).count();
    asked < claim.runs.len() || (asked < RUNS_AT_A_TIME && !claim.runs_to_ask.is_empty())
}

fn end_round(claim: &mut Claim) {
    let is_last = (!claim.asked_in_round && claim.windows) || claim.rounds > ROUNDS_MAX;
    if !is_last {
        claim.windows |= !claim.asked_in_round;
        begin_round(claim);
        return;
    }
    // The pool has changed in the meantime.
    claim.probed = true;
    claim.hit = claim.skip;
    claim.survey_again();
}

/// Continues a run: sends the next question about its window, processes the known answers, or begins the next window.
fn ask_on(rooms: &Rooms<'_>, claim: &mut Claim, mut run: Run, out: &mut Effects) {
    if let ProbeStep::Ask { tier, from, end } = run.probe.next(&mut run.locations) {
        let places = run.places[from..end].iter().zip(&run.locations[from..end]);
        let asked = places.filter(|(_, location)| !matches!(location, Location::Tier(_)));
        let keys = asked.map(|(&place, _)| rooms.catalog.block_key(&claim.key(claim.spot(place as usize))));
        let (ask, keys) = (Ask::Claim(claim.id, run.number), keys.collect());
        out.commands.push(Command::Probe { tier, ask, keys });
        claim.asked_in_round = true;
        claim.runs.push(run);
        return;
    }
    for (&place, &location) in run.places.iter().zip(&run.locations) {
        if claim.known(place as usize) != Known::UNTOLD || location != Location::Absent {
            claim.places.set(place as usize, Known::at(location));
        }
    }
    let end = run.locations.iter().position(|location| !matches!(location, Location::Tier(_)));
    if let Some(end) = end.filter(|_| run.probe.ends_untold()) {
        claim.places.set(run.places[end] as usize, Known::UNTOLD);
    }
    if end.is_none() && !run.rest.is_empty() {
        next_window(rooms, claim, &mut run);
        claim.runs.push(run);
    }
}

/// Returns the groups and ranks of the round, the last one first.
fn runs_of(claim: &Claim) -> Vec<(usize, usize)> {
    let groups = claim.groups.iter().enumerate().rev();
    let groups = groups.filter(|(_, entry)| claim.windows || entry.shape.window_blocks == 0);
    groups.flat_map(|(group, entry)| (0..entry.spaces.len()).rev().map(move |rank| (group, rank))).collect()
}

fn new_run(rooms: &Rooms<'_>, claim: &mut Claim, group: usize, rank: usize) -> Run {
    claim.runs_ever += 1;
    let mut run = Run {
        number: claim.runs_ever,
        group,
        rank,
        rest: claim.needed_range(group, claim.hit),
        probe: RunProbe::new(rooms.flow.tier_count(), claim.tiers),
        places: Vec::new(),
        locations: Vec::new(),
    };
    next_window(rooms, claim, &mut run);
    run
}

/// Prepares the next blocks of a run.
fn next_window(rooms: &Rooms<'_>, claim: &Claim, run: &mut Run) {
    let end = run.rest.end.min(run.rest.start + PROBE_KEYS_MAX);
    run.probe = RunProbe::new(rooms.flow.tier_count(), claim.tiers);
    (run.places, run.locations) = (Vec::new(), Vec::new());
    for block in run.rest.start..end {
        let place = claim.place(run.group, block, run.rank);
        debug_assert_eq!(claim.spot(place), Spot { group: run.group, block, rank: run.rank });
        let known = claim.known(place);
        if known.is_in_pool() {
            continue;
        }
        run.places.push(u32::try_from(place).expect("a claim's places are bounded"));
        run.locations.push(match known.tier() {
            Some(tier) => Location::Tier(tier),
            None if known == Known::UNKNOWN => Location::Unknown,
            None => Location::Absent,
        });
    }
    run.rest.start = end;
}
