//! Finding out what only I/O can tell about a claim's places: groups of full attention first, then the windows at the end
//! of what they allow, until nothing that the hit needs is unknown.

use super::super::event::{Ask, Command, Effects, Location};
use super::super::loads::Rooms;
use super::super::probe::{ProbeStep, RunProbe};
use super::Claims;
use super::claim::{Claim, Known, Run, Spot};

/// Rounds of questions for one claim. Each shortens the hit that is hoped for by a block at least; a window with that many
/// gaps in a slow tier is not worth more.
const ROUNDS_MAX: usize = 256;
/// Runs of one claim that are asked about at a time.
const RUNS_AT_A_TIME: usize = 4;

impl Claims {
    /// Collects the runs of the next round, and asks about the first of them: whether there is more to do now.
    pub(super) fn begin_round(
        &mut self,
        rooms: &mut Rooms<'_>,
        claim: &mut Claim,
        out: &mut Effects,
    ) -> bool {
        loop {
            claim.rounds += 1;
            let hope = claim.hope(claim.windows);
            claim.runs_to_ask = unknown_runs(claim, hope);
            if !claim.runs_to_ask.is_empty() && claim.rounds <= ROUNDS_MAX {
                claim.hit = hope;
                return self.probe(rooms, claim, out);
            }
            if claim.windows || claim.rounds > ROUNDS_MAX {
                break;
            }
            claim.windows = true;
        }
        // The pool has moved on meanwhile.
        claim.probed = true;
        claim.hit = claim.skip;
        claim.survey_again();
        true
    }

    /// Asks about the next run: whether there are more that may be asked about now.
    pub(super) fn probe(&mut self, rooms: &mut Rooms<'_>, claim: &mut Claim, out: &mut Effects) -> bool {
        if claim.runs.len() < RUNS_AT_A_TIME
            && let Some((group, rank)) = claim.runs_to_ask.pop()
        {
            let run = new_run(rooms, claim, group, rank);
            let number = run.number;
            claim.runs.push(run);
            ask_on(rooms, claim, number, out);
        }
        if claim.runs.is_empty() && claim.runs_to_ask.is_empty() {
            return self.begin_round(rooms, claim, out);
        }
        claim.runs.len() < RUNS_AT_A_TIME && !claim.runs_to_ask.is_empty()
    }

    /// A tier's answer: whether there is more to do now.
    pub(super) fn run_answered(
        &mut self,
        rooms: &mut Rooms<'_>,
        claim: &mut Claim,
        number: u32,
        count: usize,
        out: &mut Effects,
    ) -> bool {
        let Some(run) = claim.runs.iter_mut().find(|run| run.number == number) else { return false };
        run.probe.answered(&mut run.locations, count);
        ask_on(rooms, claim, number, out);
        claim.runs.is_empty() || (claim.runs.len() < RUNS_AT_A_TIME && !claim.runs_to_ask.is_empty())
    }
}

/// Sends a run's next question, or ends the run.
fn ask_on(rooms: &mut Rooms<'_>, claim: &mut Claim, number: u32, out: &mut Effects) {
    let Some(at) = claim.runs.iter().position(|run| run.number == number) else { return };
    let mut run = claim.runs.swap_remove(at);
    match run.probe.next(&mut run.locations) {
        ProbeStep::Ask { tier, from, end } => {
            let places = run.places[from..end].iter().zip(&run.locations[from..end]);
            let asked = places.filter(|(_, location)| !matches!(location, Location::Tier(_)));
            let keys =
                asked.map(|(&place, _)| rooms.catalog.block_key(&claim.key(claim.spot(place as usize))));
            let (ask, keys) = (Ask::Claim(claim.id, number), keys.collect());
            out.commands.push(Command::Probe { tier, ask, keys });
            claim.runs.push(run);
        }
        ProbeStep::Over => {
            for (&place, &location) in run.places.iter().zip(&run.locations) {
                claim.known[place as usize] = Known::at(location);
            }
        }
    }
}

/// Groups and ranks of which a hit needs a block that only I/O can tell of.
fn unknown_runs(claim: &Claim, hit: usize) -> Vec<(usize, usize)> {
    let mut runs = Vec::new();
    for (group, entry) in claim.groups.iter().enumerate().rev() {
        if !claim.windows && entry.shape.window_blocks > 0 {
            continue;
        }
        for rank in (0..entry.spaces.len()).rev() {
            let mut blocks = claim.needed_range(group, hit);
            if blocks.any(|block| claim.known[claim.place(group, block, rank)] == Known::UNKNOWN) {
                runs.push((group, rank));
            }
        }
    }
    runs
}

fn new_run(rooms: &Rooms<'_>, claim: &mut Claim, group: usize, rank: usize) -> Run {
    let (mut places, mut locations) = (Vec::new(), Vec::new());
    for block in claim.needed_range(group, claim.hit) {
        let place = claim.place(group, block, rank);
        debug_assert_eq!(claim.spot(place), Spot { group, block, rank });
        let known = claim.known[place];
        if known.is_in_pool() {
            continue;
        }
        places.push(u32::try_from(place).expect("a claim's places are bounded"));
        locations.push(match known.tier() {
            Some(tier) => Location::Tier(tier),
            None if known == Known::UNKNOWN => Location::Unknown,
            None => Location::Absent,
        });
    }
    claim.runs_ever += 1;
    Run { number: claim.runs_ever, probe: RunProbe::new(rooms.flow.tier_count()), places, locations }
}
