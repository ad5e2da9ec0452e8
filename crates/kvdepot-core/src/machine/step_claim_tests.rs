//! Claims, loads and leases of one connection in bounded steps, and what others see between two of them.

use super::step_tests::*;
use super::*;
use crate::LeaseId;

/// More claims than several steps may end.
const CLAIMS: u64 = 2_000;
/// Maximum number of claims that a step may release, or jobs that it may leave for their sake.
const CLAIMS_PER_STEP: usize = 200;
const OTHER: Owner = 3;

fn open(lab: &mut Lab, owner: Owner, first: u64) -> ClaimId {
    let Reply::Claim(progress) = lab.ask_as(owner, claim_of(lab.namespace, first, 2)) else {
        panic!("no claim")
    };
    progress.claim
}

#[test]
fn the_end_of_a_connection_with_many_claims_goes_in_pieces() {
    let mut lab = Lab::new("lru", BLOCKS, 0);
    lab.dump(0, BLOCKS);
    let other = open(&mut lab, OTHER, 0);
    for n in 0..CLAIMS {
        open(&mut lab, 2, 2 * n);
    }
    assert_eq!(lab.machine.gauges().claims_open, CLAIMS as usize + 1);
    lab.most_left = (0, 0);
    lab.feed(Event::OwnerEnded { owner: 2 });
    let (jobs, freed) = lab.most_left;
    assert!(jobs <= CLAIMS_PER_STEP && freed <= CLAIMS_PER_STEP, "{jobs} jobs, {freed} claims in one step");
    assert_eq!(lab.machine.gauges().claims_open, 1, "the claim of another connection is left");
    lab.ask_as(OTHER, Request::ClaimRelease { claim: other });
    assert_eq!(lab.machine.gauges().held, Held::default());
    lab.machine.check().unwrap();
}

/// Claims that wait for a tier, or for room behind each other, get neither an answer nor a lease nor a turn once their
/// connection has ended, in whatever step they are released.
#[test]
fn all_claims_of_a_connection_end_at_once() {
    let mut lab = Lab::new("lru", 64, 1);
    let (namespace, machine) = (lab.namespace, &mut lab.machine);
    // Every claim waits for the tier to say where its two blocks are.
    for token in 0..CLAIMS {
        let request = claim_of(namespace, 2 * token, 2);
        let (out, _) = step(machine, Event::Request { token, owner: 2, request });
        assert_eq!((out.replies.len(), out.questions.len()), (0, 1));
    }
    let last = CLAIMS - 1;
    let located = |ask| Event::Located { ask, locations: vec![Location::Tier(0); 2] };
    let [waits, reads] = [last, last - 1];
    // One has begun to read its blocks.
    let (out, count) = step(machine, located(Ask::Claim(reads, 0)));
    assert_eq!((count, out.replies.len()), (2, 1), "it fills");
    let reads_of = |command: &Command| match command {
        Command::Read { tier, slot, .. } => Some((*tier, *slot)),
        _ => None,
    };
    let slots: Vec<_> = out.commands.iter().filter_map(reads_of).collect();
    let (ended, _) = step(machine, Event::OwnerEnded { owner: 2 });
    assert!(machine.gauges().claims_open > CLAIMS as usize / 2, "most of them are still to be released");

    let (out, count) = step(machine, located(Ask::Claim(waits, 0)));
    assert_eq!((out.replies.len(), count, out.again.len()), (0, 0, 0), "it has ended");
    for (tier, slot) in slots {
        let (out, _) = step(machine, Event::ReadEnded { tier, slot, outcome: Ok(Fetched::Whole) });
        assert_eq!((out.replies.len(), out.again.len()), (0, 0));
    }
    assert_eq!(machine.gauges().held.leased, 0, "it leases nothing that arrives");
    for request in [
        Request::ClaimPoll { claim: waits, settle: true },
        Request::ClaimDecline { claim: waits },
        Request::ClaimRelease { claim: waits },
    ] {
        let (out, _) = step(machine, Event::Request { token: 1 << 40, owner: 2, request });
        assert!(matches!(&out.replies[..], [(_, Err(error))] if error.kind() == crate::ErrorKind::NotFound));
    }
    let (out, _) = step(machine, Event::Expire { token: waits });
    assert!(matches!(&out.replies[..], [(token, Err(_))] if *token == waits), "{:?}", out.replies);

    let mut answered: Vec<Token> = ended.replies.iter().map(|(token, _)| *token).collect();
    let mut jobs = ended.again;
    while let Some(job) = jobs.pop() {
        let (out, _) = step(machine, Event::Continue(job));
        assert!(out.replies.iter().all(|(_, outcome)| outcome.is_err()), "{:?}", out.replies);
        answered.extend(out.replies.iter().map(|(token, _)| *token));
        jobs.extend(out.again);
    }
    answered.sort_unstable();
    let expected: Vec<Token> = (0..CLAIMS).filter(|token| ![waits, reads].contains(token)).collect();
    assert_eq!(answered, expected, "each caller got one answer");
    assert_eq!(machine.gauges().claims_open, 0);
    machine.check().unwrap();
}

#[test]
fn a_claim_behind_claims_of_a_connection_that_ended_gets_its_turn() {
    let mut lab = Lab::new("lru", 3, 1);
    let (namespace, machine) = (lab.namespace, &mut lab.machine);
    let ask = |machine: &mut Machine, owner, token, first| {
        let request = claim_of(namespace, first, 2);
        step(machine, Event::Request { token, owner, request });
        // Claims are numbered from 0, and so are the tokens here.
        let locations = vec![Location::Tier(0); 2];
        step(machine, Event::Located { ask: Ask::Claim(token, 0), locations }).0.commands
    };
    let reading = ask(machine, 7, 0, 0);
    assert_eq!(reading.len(), 2, "the first one takes its room");
    for token in 1..=CLAIMS {
        assert!(ask(machine, 2, token, 10 * token).is_empty(), "there is no room for it");
    }
    assert!(ask(machine, OTHER, CLAIMS + 1, 10 * CLAIMS + 10).is_empty());
    assert_eq!(machine.gauges().claims_queued, CLAIMS as usize + 1);
    let mut events = vec![Event::OwnerEnded { owner: 7 }, Event::OwnerEnded { owner: 2 }];
    events.extend(reading.into_iter().filter_map(|command| match command {
        Command::Read { tier, slot, .. } => {
            Some(Event::ReadEnded { tier, slot, outcome: Ok(Fetched::Whole) })
        }
        _ => None,
    }));
    let (mut reads, mut steps, mut events) = (0, 0, std::collections::VecDeque::from(events));
    while let Some(event) = events.pop_front() {
        let queued = machine.gauges().claims_queued;
        let (out, read) = step(machine, event);
        let passed = queued - machine.gauges().claims_queued;
        assert!(passed <= 600, "one step passed over {passed} claims");
        reads += read;
        steps += 1;
        assert!(steps < 10_000, "the work does not end");
        events.extend(out.again.into_iter().map(Event::Continue));
    }
    assert_eq!((reads, machine.gauges().claims_queued), (2, 0), "its turn has come");
}

#[test]
fn a_claim_s_tables_are_made_as_it_is_surveyed() {
    const PLACES: u64 = 100_000;
    let mut lab = Lab::new("lru", 64, 0);
    let (machine, namespace) = (&mut lab.machine, lab.namespace);
    let request = claim_of(namespace, 0, PLACES);
    let (mut out, _) = step(machine, Event::Request { token: 9, owner: 2, request });
    let mut last = 0;
    loop {
        let reached = machine.claims.places_reached(0);
        assert!(reached <= last + 5_000, "one step made {} places", reached - last);
        last = reached;
        let Some(job) = out.again.pop() else { break };
        out = step(machine, Event::Continue(job)).0;
        if last == PLACES as usize {
            break;
        }
    }
    assert_eq!(last, PLACES as usize);
}

/// A claim that settles before its survey has ended knows nothing of the rest.
#[test]
fn a_claim_may_settle_before_its_tables_are_made() {
    let mut lab = Lab::new("lru", BLOCKS, 0);
    lab.dump(0, BLOCKS);
    let (machine, namespace) = (&mut lab.machine, lab.namespace);
    let request = claim_of(namespace, 0, BLOCKS);
    step(machine, Event::Request { token: 1 << 41, owner: 2, request });
    assert!(machine.claims.places_reached(0) < BLOCKS as usize);
    let Reply::Claim(progress) = lab.ask_as(2, Request::ClaimPoll { claim: 0, settle: true }) else {
        panic!("no claim")
    };
    assert_eq!((progress.settled, progress.units), (true, 0));
    lab.ask_as(2, Request::ClaimRelease { claim: 0 });
    lab.machine.check().unwrap();
}

#[test]
fn the_leases_of_a_take_over_are_listed_in_pieces() {
    let mut lab = Lab::new("lru", BLOCKS, 0);
    lab.dump(0, 1_000);
    let mut expected = Vec::new();
    for (place, owner) in [4, 9, 2].into_iter().enumerate() {
        let count = 300 * place as u64;
        let leased = lab.load(owner, 100 * place as u64, count);
        expected.extend(std::iter::repeat_n(place as u32, leased.len()));
    }
    lab.load(77, 0, 500);
    assert_eq!(lab.machine.unsettled(&[4, 9, 2]), Some("a connection has not given its slots back"));
    assert_eq!(lab.machine.unsettled(&[4, 9, 2, 77]), None);
    let (mut listed, mut from) = (Vec::new(), Some(HeldFrom::default()));
    while let Some(start) = from {
        let (some, next) = lab.machine.held(&[4, 9, 2], start, 64);
        assert!(some.len() <= 64);
        listed.extend(some.iter().map(|hold| hold.holder));
        from = next;
    }
    assert_eq!(listed, expected);
    let _: LeaseId = lab.reserve(5_000, 1)[0];
}

/// A client that names a shard that does not exist gets an error, and its block is like any other.
#[test]
fn a_commit_with_a_shard_too_many_leaves_nothing_behind() {
    for tiers in [0, 1] {
        let mut lab = Lab::new("lru", 64, tiers);
        let leases = lab.reserve(0, 1);
        let request = Request::Commit { leases, shards: ShardSet::Some(vec![0, 7]), crc64: None };
        let (out, _) = step(&mut lab.machine, Event::Request { token: 1 << 40, owner: OWNER, request });
        assert!(matches!(&out.replies[..], [(_, Err(error))] if error.kind() == crate::ErrorKind::Protocol));
        let writes = out.commands.iter().filter(|command| matches!(command, Command::Write { .. })).count();
        assert_eq!((lab.blocks(), writes), (1, tiers));
        lab.feed(Event::OwnerEnded { owner: OWNER });
        assert_eq!((lab.machine.gauges().held.filling, lab.machine.gauges().held.leased), (0, 0));
        lab.machine.check().unwrap();
    }
}

#[test]
fn a_holder_that_is_named_twice_stands_for_itself_only() {
    let mut lab = Lab::new("lru", 64, 0);
    lab.dump(0, 2);
    let [first, other] = [OWNER, OTHER].map(|owner| lab.load(owner, 0, 1));
    assert_eq!((first.len(), other.len()), (1, 1));
    lab.feed(Event::Freeze);
    assert!(lab.machine.unsettled(&[OWNER, OWNER]).is_some(), "another one may copy");
    assert!(lab.machine.unsettled(&[OWNER, OTHER]).is_none());
}
