//! Reads that hang in a tier: after a while nobody waits for them, and their blocks can be dumped (P2). Their slots stay as
//! they are until the tier has ended them (P4), and what they bring then is nobody's (P1).
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use crate::lab::Lab;
use kvdepot_core::hit::GroupShape;
use kvdepot_core::machine::{
    ClaimGroup, Command, Event, Fetched, Location, Outcome, Progress, Reply, Request, Reserve, ShardSet,
    TierSet,
};
use kvdepot_core::misses::Fate;
use kvdepot_core::{BlockHash, Error, ErrorKind, SlotId};

const BLOCK: u64 = 4096;
const SECOND: u64 = 1_000_000_000;
/// When the fetches of these tests should have ended.
const DEADLINE: u64 = 2 * SECOND;
/// When they have hung.
const OVERDUE: u64 = DEADLINE + SECOND;

fn hashes(blocks: &[u8]) -> Vec<BlockHash> {
    blocks.iter().map(|&block| BlockHash([block; 16])).collect()
}

/// A pool in front of a tier that has every block.
fn lab(blocks: u64) -> Lab {
    let mut lab = Lab::new(blocks, 1);
    lab.located = Location::Tier(0);
    lab
}

fn claim_until(lab: &mut Lab, blocks: &[u8], deadline: u64) -> Progress {
    let shape = GroupShape { window_blocks: 0, units_per_block: 1 };
    let groups = vec![ClaimGroup { namespaces: vec![0], shape }];
    let (skip, limit, patience, label, tiers) = (0, blocks.len(), 1 << 60, None, TierSet::ALL);
    let hashes = hashes(blocks);
    let reply = lab.ask(Request::ClaimOpen { groups, hashes, skip, limit, tiers, deadline, patience, label });
    let Reply::Claim(progress) = reply else { panic!("no claim") };
    progress
}

fn poll(lab: &mut Lab, claim: u64) -> Progress {
    let Reply::Claim(progress) = lab.ask(Request::ClaimPoll { claim, settle: false }) else {
        panic!("no claim")
    };
    progress
}

/// Slots of the reads that were commanded since the last look.
fn reads(lab: &mut Lab) -> Vec<SlotId> {
    let slot = |command| match command {
        Command::Read { slot, .. } => Some(slot),
        _ => None,
    };
    lab.take().into_iter().filter_map(slot).collect()
}

/// Dumps blocks. Returns how many of them the pool has taken.
fn dump(lab: &mut Lab, blocks: &[u8]) -> usize {
    let (hashes, how) = (hashes(blocks), Reserve::Block);
    let Reply::Slots(outcomes) =
        lab.ask(Request::Reserve { namespace: 0, id: None, hashes, how, runs_max: 99 })
    else {
        panic!("no slots")
    };
    let lease = |outcome: &Outcome| match outcome {
        Outcome::Leased(leased) => Some(leased.lease),
        _ => None,
    };
    let leases: Vec<_> = outcomes.iter().filter_map(lease).collect();
    let taken = leases.len();
    lab.ask(Request::Commit { leases, shards: ShardSet::All, crc64: None });
    lab.machine.check().unwrap();
    taken
}

fn pass_to(lab: &mut Lab, now: u64) {
    lab.now = now;
    lab.feed(Event::Tick);
    lab.machine.check().unwrap();
}

fn end(lab: &mut Lab, slot: SlotId, outcome: kvdepot_core::Result<Fetched>) {
    lab.feed(Event::ReadEnded { tier: 0, slot, outcome });
    lab.machine.check().unwrap();
}

#[test]
fn a_claim_that_waits_for_a_fetch_misses_when_it_hangs() {
    let mut lab = lab(100);
    let first = claim_until(&mut lab, &[1, 2], DEADLINE);
    // It may wait longer than the first one, which began the fetch.
    let patient = claim_until(&mut lab, &[1, 2], 100 * SECOND);
    assert_eq!(reads(&mut lab).len(), 2);
    pass_to(&mut lab, OVERDUE - 1);
    assert!(poll(&mut lab, first.claim).settled);
    assert!(!poll(&mut lab, patient.claim).settled, "they may be about to end");
    pass_to(&mut lab, OVERDUE);
    let progress = poll(&mut lab, patient.claim);
    assert_eq!((progress.settled, progress.units), (true, 0));
    assert!(lab.gone.iter().filter(|gone| gone.fate == Fate::TooSlow).count() >= 2, "{:?}", lab.gone);
    let failures = &lab.machine.counters().failures;
    assert!(failures.contains(&("fetch", ErrorKind::Timeout, 2)), "{failures:?}");
}

#[test]
fn a_later_claim_does_not_wait_for_a_fetch_that_hangs() {
    let mut lab = lab(100);
    claim_until(&mut lab, &[1], DEADLINE);
    assert_eq!(reads(&mut lab).len(), 1);
    pass_to(&mut lab, OVERDUE);
    // The tier has been switched off.
    lab.located = Location::Absent;
    let progress = claim_until(&mut lab, &[1], 100 * SECOND);
    assert_eq!((progress.settled, progress.units), (true, 0));
    // It is back, and the block is read into another slot.
    lab.located = Location::Tier(0);
    let progress = claim_until(&mut lab, &[1], 100 * SECOND);
    let again = reads(&mut lab);
    assert_eq!(again.len(), 1);
    end(&mut lab, again[0], Ok(Fetched::Whole));
    assert_eq!(poll(&mut lab, progress.claim).units, 1);
}

#[test]
fn a_block_whose_fetch_is_late_is_stored_by_a_dump() {
    // At the deadline: the tick that gives the fetch up may come a second later.
    for now in [DEADLINE, OVERDUE] {
        let mut lab = lab(100);
        claim_until(&mut lab, &[1, 2], DEADLINE);
        let hung = reads(&mut lab);
        lab.now = now - 1;
        if now == DEADLINE {
            assert_eq!(dump(&mut lab, &[1]), 0, "it is about to arrive");
        }
        pass_to(&mut lab, now);
        assert_eq!(dump(&mut lab, &[1, 2]), 2);
        assert_eq!(dump(&mut lab, &[1, 2]), 0, "both are there");
        let progress = claim_until(&mut lab, &[1, 2], 100 * SECOND);
        assert_eq!((progress.settled, progress.units), (true, 2));
        // What the tier brings at last takes the place of nothing.
        let blocks = lab.machine.gauges().pool_blocks;
        end(&mut lab, hung[0], Ok(Fetched::Whole));
        end(&mut lab, hung[1], Err(Error::new(ErrorKind::Timeout, "late")));
        assert_eq!(lab.machine.gauges().pool_blocks, blocks);
        assert_eq!(claim_until(&mut lab, &[1, 2], 100 * SECOND).units, 2);
    }
}

#[test]
fn the_slot_of_a_hung_read_is_not_used_again_before_it_ends() {
    let mut lab = lab(4);
    claim_until(&mut lab, &[1], DEADLINE);
    let hung = reads(&mut lab)[0];
    pass_to(&mut lab, OVERDUE);
    for block in 10..30 {
        assert_eq!(dump(&mut lab, &[block]), 1);
        for command in lab.take() {
            if let Command::Write { tier, slot, .. } = command {
                assert_ne!(slot, hung);
                lab.feed(Event::WriteEnded { tier, slot, outcome: Ok(kvdepot_core::machine::Stored::New) });
            }
        }
        assert_eq!(lab.machine.gauges().held.fetching, BLOCK);
    }
    assert!(lab.machine.unsettled(&[]).is_some(), "its memory cannot be handed over");
    end(&mut lab, hung, Ok(Fetched::Whole));
    assert_eq!(lab.machine.gauges().held.fetching, 0);
    assert!(lab.machine.unsettled(&[]).is_none());
}

#[test]
fn a_tier_in_which_reads_hang_cannot_pin_the_whole_pool() {
    let mut lab = lab(64);
    let mut hung = Vec::new();
    for block in 0..64 {
        let deadline = lab.now + SECOND;
        let progress = claim_until(&mut lab, &[block], deadline);
        let read = reads(&mut lab);
        if read.is_empty() {
            assert!(poll(&mut lab, progress.claim).settled, "a miss at once");
        }
        hung.extend(read);
        let next = deadline + SECOND;
        pass_to(&mut lab, next);
        lab.ask(Request::ClaimRelease { claim: progress.claim });
    }
    assert_eq!(hung.len(), 64 / 8 + 1);
    for slot in hung {
        end(&mut lab, slot, Err(Error::new(ErrorKind::Timeout, "late")));
    }
    assert_eq!(lab.machine.gauges().held.pinned, 0);
    let deadline = lab.now + SECOND;
    claim_until(&mut lab, &[100], deadline);
    assert_eq!(reads(&mut lab).len(), 1, "it is asked again");
}
