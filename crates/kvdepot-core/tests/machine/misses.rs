//! What the machine says of blocks that went, and of claims that found less than they asked for.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use crate::lab::{Lab, claim_of};
use kvdepot_core::machine::{
    ClaimGroup, Command, Event, Fetched, Location, Machine, Outcome, Placement, Progress, Reply, Request,
    Reserve, ShardSet, Stored, TierSet, WriteWhen,
};
use kvdepot_core::misses::{Fate, Gone, Missed, Short};
use kvdepot_core::{BlockHash, Error, ErrorKind, GroupShape};

const SECOND: u64 = 1_000_000_000;

fn names(hashes: &[u8]) -> Vec<BlockHash> {
    hashes.iter().map(|&hash| BlockHash([hash; 16])).collect()
}

fn reserve(lab: &mut Lab, hashes: &[u8]) -> Vec<Outcome> {
    let (hashes, how) = (names(hashes), Reserve::Block);
    match lab.ask(Request::Reserve { namespace: 0, id: None, hashes, how, runs_max: 999 }) {
        Reply::Slots(outcomes) => outcomes,
        other => panic!("no slots: {other:?}"),
    }
}

fn dump(lab: &mut Lab, hashes: &[u8]) {
    let leases = reserve(lab, hashes).into_iter().map(|outcome| match outcome {
        Outcome::Leased(leased) => leased.lease,
        other => panic!("no slot: {other:?}"),
    });
    let leases = leases.collect();
    lab.ask(Request::Commit { leases, shards: ShardSet::All, crc64: None });
}

fn claim(lab: &mut Lab, hashes: &[u8], skip: usize) -> Progress {
    let token = send_claim(lab, hashes, skip);
    match lab.reply(token) {
        Some(Reply::Claim(progress)) => progress,
        reply => panic!("no claim: {reply:?}"),
    }
}

fn send_claim(lab: &mut Lab, hashes: &[u8], skip: usize) -> u64 {
    let shape = GroupShape { window_blocks: 0, units_per_block: 1 };
    lab.send(Request::ClaimOpen {
        groups: vec![ClaimGroup { namespaces: vec![0], shape }],
        hashes: names(hashes),
        skip,
        limit: hashes.len(),
        tiers: TierSet::ALL,
        deadline: 1 << 50,
        patience: 1 << 50,
        label: Some("a request".into()),
    })
}

/// The only miss that was told: asked, hit, the first block that was not there, and why.
fn only_miss(lab: &mut Lab) -> (usize, usize, u8, Short) {
    let missed = std::mem::take(&mut lab.missed);
    let [Missed { owner: 1, label, key, namespaces, asked, hit, short, .. }] = &missed[..] else {
        panic!("not one miss: {missed:?}")
    };
    assert_eq!((label.as_deref(), &namespaces[..]), (Some("a request"), &[lab.spec.id(0)][..]));
    assert_eq!(key.namespace, lab.spec.id(0));
    (*asked, *hit, key.hash.0[0], *short)
}

fn gone(lab: &mut Lab) -> Vec<(u8, Fate, Option<usize>, Option<u32>)> {
    let gone = std::mem::take(&mut lab.gone);
    gone.iter().map(|Gone { key, fate, tier, kept_s }| (key.hash.0[0], *fate, *tier, *kept_s)).collect()
}

fn end_writes(lab: &mut Lab, outcome: &kvdepot_core::Result<Stored>) {
    for command in lab.take() {
        if let Command::Write { tier, slot, .. } = command {
            lab.feed(Event::WriteEnded { tier, slot, outcome: outcome.clone() });
        }
    }
}

fn end_reads(lab: &mut Lab, outcome: &kvdepot_core::Result<Fetched>) {
    for command in lab.take() {
        if let Command::Read { tier, slot, .. } = command {
            lab.feed(Event::ReadEnded { tier, slot, outcome: outcome.clone() });
        }
    }
}

fn fails(kind: ErrorKind) -> Error {
    Error::new(kind, "made to fail")
}

/// However often it is polled, and also if it is settled early.
#[test]
fn the_blocks_of_a_claim_s_final_hit_are_counted_once() {
    let mut lab = Lab::new(16, 1);
    dump(&mut lab, &[1, 2, 3]);
    let counted = |lab: &Lab| {
        let counters = lab.machine.counters();
        (counters.lookup_blocks, counters.lookup_hit_blocks)
    };
    let progress = claim(&mut lab, &[1, 2, 3, 4, 5], 1);
    assert_eq!(counted(&lab), (4, 2), "without the one that was not asked for");
    lab.ask(Request::ClaimPoll { claim: progress.claim, settle: true });
    assert_eq!(counted(&lab), (4, 2));
    lab.located = Location::Tier(0);
    let progress = claim(&mut lab, &[1, 2, 6], 0);
    assert_eq!(counted(&lab), (7, 2), "a block is being read");
    lab.ask(Request::ClaimPoll { claim: progress.claim, settle: true });
    assert_eq!(counted(&lab), (7, 4));
    assert!(lab.machine.counters().tier_hit_blocks.is_empty(), "they were in the pool");
}

#[test]
fn blocks_of_a_hit_count_for_the_tier_that_they_came_from() {
    let mut lab = Lab::new(16, 2);
    dump(&mut lab, &[1, 2]);
    lab.located = Location::Tier(1);
    claim(&mut lab, &[1, 2, 3, 4, 5], 0);
    end_reads(&mut lab, &Ok(Fetched::Whole));
    let counters = lab.machine.counters();
    assert_eq!((counters.lookup_hit_blocks, &counters.tier_hit_blocks[..]), (5, &[0, 3][..]));
    // A block that does not come ends the hit, and what came of the others is beyond it.
    claim(&mut lab, &[1, 6, 7, 8], 0);
    for command in lab.take() {
        if let Command::Read { tier, slot, key, .. } = command {
            let outcome = if key.hash.0[0] == 6 { Err(fails(ErrorKind::Io)) } else { Ok(Fetched::Whole) };
            lab.feed(Event::ReadEnded { tier, slot, outcome });
        }
    }
    let counters = lab.machine.counters();
    assert_eq!((counters.lookup_hit_blocks, &counters.tier_hit_blocks[..]), (6, &[0, 3][..]));
}

#[test]
fn a_hit_of_all_that_was_asked_for_is_no_miss() {
    let mut lab = Lab::new(8, 0);
    dump(&mut lab, &[1, 2, 3]);
    assert_eq!(claim(&mut lab, &[1, 2, 3], 1).units, 3);
    assert_eq!(claim(&mut lab, &[1, 2, 3], 3).units, 3);
    assert!(lab.missed.is_empty() && lab.gone.is_empty());
}

#[test]
fn the_first_block_that_is_not_there_is_told_once() {
    let mut lab = Lab::new(8, 0);
    dump(&mut lab, &[1, 2, 4]);
    let progress = claim(&mut lab, &[1, 2, 3, 4], 1);
    assert_eq!(only_miss(&mut lab), (3, 1, 3, Short::Absent));
    lab.ask(Request::ClaimPoll { claim: progress.claim, settle: true });
    lab.ask(Request::ClaimRelease { claim: progress.claim });
    assert!(lab.missed.is_empty());
}

#[test]
fn a_block_that_is_being_stored_is_told_as_such() {
    let mut lab = Lab::new(8, 0);
    reserve(&mut lab, &[1]);
    claim(&mut lab, &[1, 2], 0);
    assert_eq!(only_miss(&mut lab), (2, 0, 1, Short::BeingStored));
}

#[test]
fn an_eviction_is_told_where_no_tier_has_the_block() {
    let mut lab = Lab::new(2, 0);
    dump(&mut lab, &[1]);
    lab.now = 40 * SECOND;
    dump(&mut lab, &[2]);
    lab.now = 100 * SECOND;
    dump(&mut lab, &[3, 4]);
    assert_eq!(gone(&mut lab), [(1, Fate::Evicted, None, Some(100)), (2, Fate::Evicted, None, Some(60))]);
    let mut tiered = Lab::new(2, 1);
    dump(&mut tiered, &[1]);
    end_writes(&mut tiered, &Ok(Stored::New));
    dump(&mut tiered, &[2]);
    end_writes(&mut tiered, &Ok(Stored::New));
    tiered.ask(Request::EvictTo { bytes: 0 });
    assert!(tiered.gone.is_empty());
    let key = tiered.key(1);
    tiered.feed(Event::TierForgot { tier: 0, keys: vec![key], lost: false });
    assert_eq!(gone(&mut tiered), [(1, Fate::Evicted, Some(0), None)]);
}

#[test]
fn what_a_tier_forgets_is_no_loss_while_the_pool_has_it() {
    let mut lab = Lab::new(2, 1);
    dump(&mut lab, &[1]);
    end_writes(&mut lab, &Ok(Stored::New));
    let keys = vec![lab.key(1), lab.key(9)];
    lab.feed(Event::TierForgot { tier: 0, keys, lost: true });
    assert_eq!(gone(&mut lab), [(9, Fate::Lost, Some(0), None)]);
}

#[test]
fn a_dump_that_finds_no_room_is_told_as_dropped() {
    let mut lab = Lab::new(2, 0);
    reserve(&mut lab, &[1, 2, 3, 4]);
    assert_eq!(gone(&mut lab), [(3, Fate::Dropped, None, None), (4, Fate::Dropped, None, None)]);
}

#[test]
fn what_an_answer_has_no_place_for_is_asked_again_and_not_dropped() {
    let mut lab = Lab::new(4, 0);
    let (hashes, how) = (names(&[1, 2, 3]), Reserve::Block);
    let reply = lab.ask(Request::Reserve { namespace: 0, id: None, hashes, how, runs_max: 1 });
    let Reply::Slots(outcomes) = reply else { panic!("no slots: {reply:?}") };
    let [Outcome::Leased(_), Outcome::Refused(second), Outcome::Refused(third)] = &outcomes[..] else {
        panic!("{outcomes:?}")
    };
    assert_eq!([second, third], [&ErrorKind::Busy; 2]);
    assert!(lab.gone.is_empty(), "{:?}", lab.gone);
}

#[test]
fn a_probe_that_is_not_answered_was_too_slow() {
    for (outcome, short) in [
        (Ok(0), Short::Absent),
        (Err(fails(ErrorKind::Timeout)), Short::TooSlow),
        (Err(fails(ErrorKind::Unavailable)), Short::TooSlow),
    ] {
        let mut lab = Lab::new(8, 2);
        dump(&mut lab, &[1]);
        lab.take();
        lab.located = Location::Unknown;
        let token = send_claim(&mut lab, &[1, 2, 3], 0);
        // The first tier answers as the case says; the other one does not have it.
        let mut tiers = Vec::new();
        loop {
            let mut probes = lab.take().into_iter().filter_map(|command| match command {
                Command::Probe { tier, ask, .. } => Some((tier, ask)),
                _ => None,
            });
            let Some((tier, ask)) = probes.next() else { break };
            assert!(probes.next().is_none(), "one run, one question at a time");
            let outcome = if tier == 0 { outcome.clone() } else { Ok(0) };
            lab.feed(Event::Probed { ask, outcome });
            tiers.push(tier);
        }
        assert_eq!(tiers, [0, 1]);
        let Some(Reply::Claim(progress)) = lab.reply(token) else { panic!("no claim") };
        assert_eq!((progress.settled, progress.units), (true, 1));
        assert_eq!(only_miss(&mut lab), (3, 1, 2, short));
    }
}

#[test]
fn a_block_that_no_tier_could_write_is_told_before_it_is_evicted() {
    let mut lab = Lab::new(2, 1);
    dump(&mut lab, &[1]);
    end_writes(&mut lab, &Err(fails(ErrorKind::NoSpace)));
    lab.ask(Request::EvictTo { bytes: 0 });
    let went = gone(&mut lab);
    assert_eq!(went, [(1, Fate::WriteFailed, Some(0), None), (1, Fate::Evicted, None, Some(0))]);
}

#[test]
fn a_read_that_fails_says_how() {
    for (outcome, fate) in [
        (Err(fails(ErrorKind::Io)), Fate::ReadFailed),
        (Err(fails(ErrorKind::Unavailable)), Fate::ReadFailed),
        (Err(fails(ErrorKind::Corrupt)), Fate::Checksum),
        (Err(fails(ErrorKind::Timeout)), Fate::TooSlow),
        (Err(fails(ErrorKind::NotFound)), Fate::Lost),
        (Ok(Fetched::Miss), Fate::Lost),
    ] {
        let mut lab = Lab::new(4, 1);
        lab.located = Location::Tier(0);
        claim(&mut lab, &[1], 0);
        end_reads(&mut lab, &outcome);
        assert_eq!(gone(&mut lab), [(1, fate, Some(0), None)]);
        assert_eq!(only_miss(&mut lab), (1, 0, 1, Short::Absent));
    }
}

#[test]
fn a_claim_that_is_settled_early_was_too_slow_or_not_worth_it() {
    for (declines, short) in [(false, Short::TooSlow), (true, Short::NotWorthIt)] {
        let mut lab = Lab::new(4, 1);
        lab.located = Location::Tier(0);
        let claim = claim(&mut lab, &[1, 2], 0).claim;
        let reply = lab.ask(match declines {
            true => Request::ClaimDecline { claim },
            false => Request::ClaimPoll { claim, settle: true },
        });
        assert!(matches!(reply, Reply::Claim(Progress { settled: true, units: 0, .. })), "{reply:?}");
        assert_eq!(only_miss(&mut lab), (2, 0, 1, short));
        end_reads(&mut lab, &Ok(Fetched::Whole));
        assert!(lab.missed.is_empty());
    }
}

#[test]
fn only_its_owner_declines_a_claim() {
    let mut lab = Lab::new(4, 1);
    lab.located = Location::Tier(0);
    let claim = claim(&mut lab, &[1], 0).claim;
    let token = lab.send_as(2, Request::ClaimDecline { claim });
    let (_, reply) = lab.replies.iter().find(|(other, _)| *other == token).expect("an answer");
    assert_eq!(reply.as_ref().unwrap_err().kind(), ErrorKind::NotFound);
    lab.ask(Request::ClaimPoll { claim, settle: true });
    assert_eq!(only_miss(&mut lab).3, Short::TooSlow);
}

#[test]
fn a_hit_that_the_pool_cannot_hold_says_so() {
    let mut lab = Lab::new(4, 1);
    lab.located = Location::Tier(0);
    let hashes: Vec<u8> = (1..=8).collect();
    claim(&mut lab, &hashes, 0);
    end_reads(&mut lab, &Ok(Fetched::Whole));
    let (asked, hit, first, short) = only_miss(&mut lab);
    assert_eq!((asked, usize::from(first), short), (8, hit + 1, Short::NoRoom));
    assert!((1..4).contains(&hit), "{hit}");
}

#[test]
fn a_claim_that_was_cut_and_waits_is_told_what_ended_it() {
    for (declines, short) in [(false, Short::TooSlow), (true, Short::NotWorthIt)] {
        let mut lab = Lab::new(4, 1);
        lab.located = Location::Tier(0);
        let hashes: Vec<u8> = (1..=8).collect();
        let claim = claim(&mut lab, &hashes, 0).claim;
        lab.ask(match declines {
            true => Request::ClaimDecline { claim },
            false => Request::ClaimPoll { claim, settle: true },
        });
        assert_eq!(only_miss(&mut lab), (8, 0, 1, short));
    }
}

#[test]
fn a_reset_is_told_under_the_root_of_its_namespace() {
    let mut lab = Lab::new(4, 0);
    dump(&mut lab, &[1, 2]);
    lab.ask(Request::EnterEpoch { namespace: 0, epoch: 1 });
    assert!(lab.gone.iter().all(|gone| gone.key.namespace == lab.spec.root()));
    assert_eq!(gone(&mut lab), [(1, Fate::Reset, None, Some(0)), (2, Fate::Reset, None, Some(0))]);
}

#[test]
fn what_was_only_in_the_pool_of_a_forgotten_namespace_is_forgotten() {
    let placement = Placement { write: WriteWhen::WhenCold, promote: false };
    let mut lab = Lab::with_machine(8, |pool| {
        Machine::new(pool, 1).with_placements(&[placement]).with_namespaces_max(1)
    });
    dump(&mut lab, &[1]);
    lab.feed(Event::OwnerEnded { owner: 1 });
    lab.open_another();
    assert_eq!(lab.gone.first().map(|gone| gone.key.namespace), Some(lab.spec.id(0)));
    assert_eq!(gone(&mut lab), [(1, Fate::Forgotten, None, Some(0))]);
}

#[test]
fn a_removal_is_told_of_what_was_there() {
    let mut lab = Lab::new(4, 0);
    dump(&mut lab, &[1]);
    lab.remove(1, Location::Absent);
    lab.remove(2, Location::Absent);
    assert_eq!(gone(&mut lab), [(1, Fate::Removed, None, None)]);
}

/// Two groups with blocks of one and of two units: the larger block ends the hit although every small one is there.
#[test]
fn the_block_that_ends_a_hit_of_several_groups_is_found() {
    let mut lab = Lab::new(16, 0);
    dump(&mut lab, &[1, 2, 3, 4]);
    let group = |units_per_block| ClaimGroup {
        namespaces: vec![0],
        shape: GroupShape { window_blocks: 0, units_per_block },
    };
    lab.ask(claim_of(vec![group(1), group(2)], names(&[1, 2, 3, 9])));
    let [Missed { key, asked: 4, hit: 2, short: Short::Absent, .. }] = &lab.missed[..] else {
        panic!("{:?}", lab.missed)
    };
    assert_eq!(key.hash.0[0], 9);
}
