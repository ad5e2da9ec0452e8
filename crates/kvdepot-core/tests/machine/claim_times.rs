//! When a claim got how far, as its client is told.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use crate::lab::{Lab, claim};
use kvdepot_core::machine::{
    CameFrom, ClaimId, ClaimTimes, Command, Event, Fetched, Location, Reply, Request,
};
use kvdepot_core::{BlockHash, ErrorKind};

fn names(hashes: &[u8]) -> Vec<BlockHash> {
    hashes.iter().map(|&hash| BlockHash([hash; 16])).collect()
}

fn open(lab: &mut Lab, hashes: &[u8]) -> ClaimId {
    match lab.ask(claim(&[0], names(hashes))) {
        Reply::Claim(progress) => progress.claim,
        other => panic!("no claim: {other:?}"),
    }
}

fn times(lab: &mut Lab, claim: ClaimId) -> ClaimTimes {
    match lab.ask(Request::ClaimTimes { claim }) {
        Reply::ClaimTimes(times) => times,
        other => panic!("no times: {other:?}"),
    }
}

/// Ends the reads that were commanded, each a moment after the one before it.
fn end_reads(lab: &mut Lab) {
    for command in lab.take() {
        if let Command::Read { tier, slot, .. } = command {
            lab.now += 5;
            lab.feed(Event::ReadEnded { tier, slot, outcome: Ok(Fetched::Whole) });
        }
    }
}

#[test]
fn a_hit_from_a_tier_tells_when_its_blocks_came() {
    let mut lab = Lab::new(8, 2);
    lab.located = Location::Tier(1);
    lab.now = 100;
    let claim = open(&mut lab, &[1, 2, 3]);
    let so_far = times(&mut lab, claim);
    assert_eq!((so_far.opened, so_far.admitted, so_far.settled), (100, Some(100), None));
    end_reads(&mut lab);
    let told = times(&mut lab, claim);
    let came = CameFrom { tier: 1, blocks: 3, first: 105, last: 115 };
    assert_eq!((told.admitted, told.settled, told.queued), (Some(100), Some(115), false));
    assert_eq!(told.tiers[..], [came]);
}

/// Ends the next reads with this outcome, at this time.
fn end_reads_with(lab: &mut Lab, now: u64, outcome: &kvdepot_core::Result<Fetched>) {
    lab.now = now;
    for command in lab.take() {
        if let Command::Read { tier, slot, .. } = command {
            lab.feed(Event::ReadEnded { tier, slot, outcome: outcome.clone() });
        }
    }
}

#[test]
fn a_block_that_one_tier_missed_came_from_the_tier_that_had_it() {
    let mut lab = Lab::new(8, 2);
    lab.located = Location::Tier(0);
    let claim = open(&mut lab, &[1]);
    end_reads_with(&mut lab, 30, &Ok(Fetched::Miss));
    end_reads_with(&mut lab, 70, &Ok(Fetched::Whole));
    assert_eq!(times(&mut lab, claim).tiers[..], [CameFrom { tier: 1, blocks: 1, first: 70, last: 70 }]);
}

/// The second claim waits for the first one's fetches, and for the one of its own.
#[test]
fn blocks_that_another_claim_fetches_come_for_both() {
    let mut lab = Lab::new(8, 1);
    lab.located = Location::Tier(0);
    let first = open(&mut lab, &[1, 2]);
    let second = open(&mut lab, &[1, 2, 3]);
    end_reads(&mut lab);
    assert_eq!(times(&mut lab, first).tiers[0].blocks, 2);
    let told = times(&mut lab, second);
    assert!(told.settled.is_some());
    assert_eq!(told.tiers.iter().map(|came| came.blocks).collect::<Vec<_>>(), [3]);
}

#[test]
fn a_claim_that_waits_for_room_was_queued_until_it_was_admitted() {
    let mut lab = Lab::new(4, 1);
    lab.located = Location::Tier(0);
    let before = open(&mut lab, &[7, 8, 9]);
    end_reads(&mut lab);
    lab.now = 20;
    let claim = open(&mut lab, &[1, 2, 3]);
    assert_eq!((times(&mut lab, claim).queued, times(&mut lab, claim).admitted), (true, None));
    lab.now = 50;
    lab.ask(Request::ClaimRelease { claim: before });
    end_reads(&mut lab);
    let told = times(&mut lab, claim);
    assert_eq!((told.opened, told.admitted, told.settled), (20, Some(50), Some(65)));
}

#[test]
fn a_claim_that_has_ended_has_no_times() {
    let mut lab = Lab::new(2, 0);
    let claim = open(&mut lab, &[1]);
    lab.ask(Request::ClaimRelease { claim });
    let token = lab.send(Request::ClaimTimes { claim });
    let error = lab.replies.iter().find(|(of, _)| *of == token).unwrap().1.as_ref().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
}
