//! Orders of events that the simulation found the machine wrong about, one test each.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use crate::lab::{self, Lab};
use kvdepot_core::machine::{ClaimGroup, Event, Location, Reply, Request, Stored, TierSet};
use kvdepot_core::{BlockHash, Error, ErrorKind, GroupShape};

#[test]
fn a_hit_of_nothing_needs_no_whole_blocks() {
    let mut lab = Lab::new(8, 0);
    let shape = GroupShape { window_blocks: 0, units_per_block: 3 };
    let reply = lab.ask(Request::ClaimOpen {
        groups: vec![ClaimGroup { namespaces: vec![0], shape }],
        hashes: (0..6).map(|hash| BlockHash([hash; 16])).collect(),
        skip: 4,
        limit: 6,
        tiers: TierSet::ALL,
        deadline: 1 << 40,
        patience: 1 << 40,
        label: None,
    });
    assert!(matches!(reply, Reply::Claim(progress) if progress.settled && progress.units == 4));
}

#[test]
fn a_value_removed_while_a_tier_writes_it_is_removed_after_that_write() {
    for removed_during_the_write in [true, false] {
        let mut lab = Lab::new(8, 2);
        lab.put(1);
        let slot = lab.writes_and_removals().0[0].1;
        // The first tier may have the value before this one, and is to forget it.
        let outcome = Err(Error::new(ErrorKind::Io, "a write failed"));
        lab.feed(Event::WriteEnded { tier: 0, slot, outcome });
        let (_, early) = lab.writes_and_removals();
        if early.contains(&1) {
            lab.end_removal(1, Ok(()));
        }
        if removed_during_the_write {
            lab.remove(1, Location::Absent);
        }
        lab.feed(Event::WriteEnded { tier: 1, slot, outcome: Ok(Stored::New) });
        if !removed_during_the_write {
            lab.remove(1, Location::Tier(1));
        }
        if early.contains(&0) {
            lab.end_removal(0, Ok(()));
        }
        let (_, removals) = lab.writes_and_removals();
        assert!(removals.contains(&1), "the second tier keeps what it wrote");
    }
}

#[test]
fn a_claim_goes_ahead_when_the_one_before_it_needs_no_room_after_all() {
    let mut lab = Lab::new(4, 1);
    lab.located = Location::Tier(0);
    let claim = |lab: &mut Lab, hashes: &[u8]| {
        let hashes = hashes.iter().map(|&hash| BlockHash([hash; 16])).collect();
        let reply = lab.ask(lab::claim(&[0], hashes));
        let Reply::Claim(progress) = reply else { panic!("no claim") };
        progress.claim
    };
    let first = claim(&mut lab, &[1, 2, 3]);
    let second = claim(&mut lab, &[4, 5, 6]);
    claim(&mut lab, &[7]);
    claim(&mut lab, &[8]);
    assert_eq!(lab.machine.gauges().claims_queued, 3);
    // The third fits, but waits its turn. It comes when the second has gone, without new room in the pool.
    lab.take();
    lab.ask(Request::ClaimRelease { claim: second });
    assert_eq!(
        (lab.take().len(), lab.machine.gauges().claims_queued),
        (1, 1),
        "the pool has room for one more"
    );
    lab.ask(Request::ClaimRelease { claim: first });
}

#[test]
fn a_claim_whose_numbers_make_no_sense_is_refused() {
    for (skip, units_per_block) in [(0, 0), (3, 1), (usize::MAX, 1)] {
        let mut lab = Lab::new(4, 1);
        let shape = GroupShape { window_blocks: 0, units_per_block };
        let token = lab.send(Request::ClaimOpen {
            groups: vec![ClaimGroup { namespaces: vec![0], shape }],
            hashes: vec![BlockHash([1; 16]); 2],
            skip,
            limit: usize::MAX,
            tiers: TierSet::ALL,
            deadline: 1 << 40,
            patience: 1 << 40,
            label: None,
        });
        let refused = |reply: &kvdepot_core::Result<Reply>| {
            reply.as_ref().is_err_and(|error| error.kind() == ErrorKind::Protocol)
        };
        assert!(matches!(&lab.replies[..], [(other, reply)] if *other == token && refused(reply)));
    }
}

#[test]
fn claims_that_have_ended_do_not_delay_the_deadlines_of_others() {
    let mut lab = Lab::new(4, 1);
    let shape = GroupShape { window_blocks: 0, units_per_block: 1 };
    let claim = |lab: &mut Lab, deadline: u64| {
        let reply = lab.ask(Request::ClaimOpen {
            groups: vec![ClaimGroup { namespaces: vec![0], shape }],
            hashes: vec![BlockHash([1; 16])],
            skip: 0,
            limit: 1,
            tiers: TierSet::ALL,
            deadline,
            patience: 1 << 40,
            label: None,
        });
        let Reply::Claim(progress) = reply else { panic!("no claim") };
        progress
    };
    for _ in 0..1_000 {
        let ended = claim(&mut lab, 10);
        lab.ask(Request::ClaimRelease { claim: ended.claim });
    }
    lab.located = Location::Tier(0);
    let waits = claim(&mut lab, 20);
    assert!(!waits.settled);
    lab.now = 30;
    lab.feed(Event::Tick);
    let reply = lab.ask(Request::ClaimPoll { claim: waits.claim, settle: false });
    assert!(matches!(reply, Reply::Claim(progress) if progress.settled), "{reply:?}");
}

#[test]
fn a_value_that_tiers_were_told_to_forget_is_written_again_when_it_is_used() {
    let mut lab = Lab::new(8, 2);
    lab.put(1);
    let slot = lab.writes_and_removals().0[0].1;
    lab.feed(Event::WriteEnded { tier: 1, slot, outcome: Ok(Stored::New) });
    lab.feed(Event::WriteEnded { tier: 0, slot, outcome: Err(Error::new(ErrorKind::Io, "a write failed")) });
    let key = lab.key(1);
    for tier in lab.writes_and_removals().1 {
        lab.end_removal(tier, Ok(()));
    }
    lab.now = 60_000_000_000;
    lab.ask(Request::LeaseNow { keys: vec![key] });
    assert_eq!(lab.writes_and_removals().0, [(0, slot), (1, slot)], "the pool has the only copy");
}
