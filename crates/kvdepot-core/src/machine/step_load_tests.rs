//! Loads in bounded steps: their answers, those that wait for one block, and those of a connection that ends.

use super::step_tests::*;
use super::*;
use crate::ErrorKind;

/// More loads than several steps may answer.
const LOADS: u64 = 1_000;
const OTHER: Owner = 3;

fn load_of(namespace: NamespaceHandle, first: u64, count: u64) -> Request {
    Request::Load {
        namespace,
        id: None,
        hashes: hashes(first, count),
        fetch_deadline: 1 << 40,
        last: true,
        runs_max: usize::MAX,
        in_place: false,
    }
}

/// Begins the load of blocks that the tier has. Returns the commands.
fn begin(lab: &mut Lab, owner: Owner, token: Token, first: u64, count: u64) -> Vec<Command> {
    let request = load_of(lab.namespace, first, count);
    let (mut out, _) = step(&mut lab.machine, Event::Request { token, owner, request });
    for question in std::mem::take(&mut out.questions) {
        let locations = vec![Location::Tier(0); question.keys.len()];
        out.commands
            .extend(step(&mut lab.machine, Event::Located { ask: question.ask, locations }).0.commands);
    }
    out.commands
}

fn read_of(commands: &[Command]) -> (TierIndex, crate::SlotId) {
    match commands {
        [Command::Read { tier, slot, .. }] => (*tier, *slot),
        other => panic!("not one read: {other:?}"),
    }
}

/// A lab in which one block arrives that many loads of other connections wait for. Returns the effects of its arrival,
/// which tells only some of them.
fn arrival(lab: &mut Lab) -> Effects {
    let reading = begin(lab, OWNER, 0, 7, 1);
    let (tier, slot) = read_of(&reading);
    for token in 1..LOADS {
        assert!(begin(lab, OTHER, token, 7, 1).is_empty(), "the block is being read");
    }
    let (out, _) = step(&mut lab.machine, Event::ReadEnded { tier, slot, outcome: Ok(Fetched::Whole) });
    let told = out.replies.len();
    assert!(told > 0 && told < 100, "one step answered {told} loads");
    out
}

/// Does the work that is left. Returns the outcome of each load's only block.
fn outcomes(lab: &mut Lab, mut out: Effects) -> Vec<(Token, Outcome)> {
    let (mut all, mut jobs) = (Vec::new(), std::collections::VecDeque::new());
    loop {
        for (token, reply) in out.replies {
            let Ok(Reply::Slots(mut outcomes)) = reply.map(Reply::listed) else { panic!("no slots") };
            all.push((token, outcomes.pop().unwrap()));
        }
        jobs.extend(out.again);
        let Some(job) = jobs.pop_front() else { return all };
        out = step(&mut lab.machine, Event::Continue(job)).0;
        assert!(out.replies.len() < 100, "one step answered {} loads", out.replies.len());
    }
}

fn leased(outcomes: &[(Token, Outcome)]) -> usize {
    outcomes.iter().filter(|(_, outcome)| matches!(outcome, Outcome::Leased(_))).count()
}

#[test]
fn an_answer_of_many_blocks_is_listed_after_the_step() {
    const COUNT: u64 = 4_096;
    let mut lab = Lab::new("lru", BLOCKS, 0);
    lab.dump(0, COUNT / 2);
    let request = load_of(lab.namespace, 0, COUNT);
    let (mut out, _) = step(&mut lab.machine, Event::Request { token: 1 << 40, owner: 2, request });
    let mut left = 0;
    while out.replies.is_empty() {
        for question in std::mem::take(&mut out.questions) {
            left += question.keys.len();
        }
        let Some(job) = out.again.pop() else { break };
        out = step(&mut lab.machine, Event::Continue(job)).0;
    }
    let Some((_, Ok(Reply::Loaded(loaded)))) = out.replies.pop() else { panic!("{:?}", out.replies) };
    let outcomes = loaded.outcomes();
    assert_eq!((outcomes.len(), left), (COUNT as usize, 0));
    for (place, outcome) in outcomes.iter().enumerate() {
        let is_there = place < COUNT as usize / 2;
        let right = match outcome {
            Outcome::Leased(_) => is_there,
            other => !is_there && *other == Outcome::Refused(ErrorKind::NotFound),
        };
        assert!(right, "block {place}: {outcome:?}");
    }
    let counters = lab.machine.counters();
    assert_eq!((counters.load_blocks, counters.load_blocks_missed), (COUNT, COUNT / 2));
}

/// What the load has not reached counts as late, like what has not arrived.
#[test]
fn a_load_that_expires_before_its_first_stage_has_ended_names_all_its_blocks() {
    let mut lab = Lab::new("lru", BLOCKS, 0);
    lab.dump(0, 1_000);
    let request = load_of(lab.namespace, 0, 1_000);
    let (out, _) = step(&mut lab.machine, Event::Request { token: 1 << 40, owner: 2, request });
    assert!(out.replies.is_empty());
    let (mut out, _) = step(&mut lab.machine, Event::Expire { token: 1 << 40 });
    let Some((_, Ok(Reply::Loaded(loaded)))) = out.replies.pop() else { panic!("{:?}", out.replies) };
    let outcomes = loaded.outcomes();
    let late = outcomes.iter().filter(|outcome| **outcome == Outcome::Refused(ErrorKind::Timeout)).count();
    assert_eq!(outcomes.len(), 1_000);
    assert!(late > 800 && late < 1_000, "{late} of them");
    assert_eq!(lab.machine.counters().load_blocks_missed, late as u64);
}

#[test]
fn loads_that_wait_for_one_block_are_told_a_few_at_a_time() {
    let mut lab = Lab::new("lru", 64, 1);
    let out = arrival(&mut lab);
    let outcomes = outcomes(&mut lab, out);
    assert_eq!((outcomes.len(), leased(&outcomes)), (LOADS as usize, LOADS as usize));
    lab.machine.check().unwrap();
    lab.feed(Event::OwnerEnded { owner: OWNER });
    lab.feed(Event::OwnerEnded { owner: OTHER });
    assert_eq!(lab.machine.gauges().held, Held::default(), "nothing keeps the block any more");
}

#[test]
fn a_block_stays_until_the_last_load_that_waits_for_it_has_a_lease() {
    let mut lab = Lab::new("lru", 64, 1);
    let mut out = arrival(&mut lab);
    // Whoever has a lease gives it back, and others need the room.
    let told = outcomes_now(&mut out);
    for (token, outcome) in told {
        let Outcome::Leased(leased) = outcome else { panic!("no lease") };
        let owner = if token == 0 { OWNER } else { OTHER };
        lab.ask_as(owner, Request::Release { leases: vec![leased.lease] });
    }
    lab.ask(Request::EvictTo { bytes: 0 });
    assert_eq!(lab.blocks(), 1);
    let rest = outcomes(&mut lab, out);
    assert_eq!(leased(&rest), rest.len());
    assert!(rest.len() > 900);
}

fn outcomes_now(out: &mut Effects) -> Vec<(Token, Outcome)> {
    let listed = |(token, reply): (Token, Result<Reply>)| match reply.map(Reply::listed) {
        Ok(Reply::Slots(mut outcomes)) => (token, outcomes.pop().unwrap()),
        other => panic!("no slots: {other:?}"),
    };
    out.replies.drain(..).map(listed).collect()
}

/// Loads that were not told before a reset miss (P1).
#[test]
fn a_reset_between_two_steps_of_an_arrival_counts_for_the_rest() {
    let mut lab = Lab::new("lru", 64, 1);
    let mut out = arrival(&mut lab);
    let told = outcomes_now(&mut out).len();
    let advance =
        Request::BeginAdvance { namespace: lab.namespace, provisional: crate::key::NamespaceId([9; 16]) };
    let (more, _) = step(&mut lab.machine, Event::Request { token: 1 << 40, owner: 9, request: advance });
    out.again.extend(more.again);
    let rest = outcomes(&mut lab, out);
    assert_eq!((rest.len() + told, leased(&rest)), (LOADS as usize, 0));
    lab.machine.check().unwrap();
}

#[test]
fn the_end_of_a_connection_with_many_loads_goes_in_pieces() {
    let mut lab = Lab::new("lru", 64, 1);
    for token in 0..LOADS {
        begin(&mut lab, 2, token, 7, 1);
    }
    begin(&mut lab, OTHER, LOADS, 7, 1);
    let (out, _) = step(&mut lab.machine, Event::OwnerEnded { owner: 2 });
    assert!(out.replies.len() <= 200 && out.discarded.len() <= 200, "{} replies", out.replies.len());
    assert!(lab.machine.gauges().loads_open > LOADS as usize / 2, "most of them are still to be answered");
    let mut answered: Vec<Token> = Vec::new();
    let (mut out, mut jobs) = (out, Vec::new());
    loop {
        assert!(out.replies.len() <= 200);
        for (token, reply) in out.replies {
            assert_eq!(reply.unwrap_err().kind(), ErrorKind::Closed);
            answered.push(token);
        }
        jobs.extend(out.again);
        let Some(job) = jobs.pop() else { break };
        out = step(&mut lab.machine, Event::Continue(job)).0;
    }
    answered.sort_unstable();
    assert_eq!(answered, (0..LOADS).collect::<Vec<_>>(), "each caller got one answer");
    assert_eq!(lab.machine.gauges().loads_open, 1, "the load of another connection is left");
}

/// Whatever arrives for a load whose connection has ended leases nothing: its leases end before it is answered.
#[test]
fn all_loads_of_a_connection_end_at_once() {
    let mut lab = Lab::new("lru", 4_096, 1);
    let mut reading = Vec::new();
    for token in 0..LOADS {
        reading.extend(begin(&mut lab, 2, token, token, 1));
    }
    let (ended, _) = step(&mut lab.machine, Event::OwnerEnded { owner: 2 });
    let open = lab.machine.gauges().loads_open;
    let last = LOADS - 1;
    for command in reading {
        let Command::Read { tier, slot, .. } = command else { continue };
        let (out, _) = step(&mut lab.machine, Event::ReadEnded { tier, slot, outcome: Ok(Fetched::Whole) });
        assert_eq!(out.replies.len(), 0);
    }
    let (out, _) = step(&mut lab.machine, Event::Expire { token: last });
    assert!(matches!(&out.replies[..], [(token, Err(_))] if *token == last), "{:?}", out.replies);
    assert_eq!(lab.machine.gauges().loads_open, open - 1);
    assert_eq!(lab.machine.gauges().held.leased, 0);
    ended.again.into_iter().for_each(|job| lab.feed(Event::Continue(job)));
    assert_eq!((lab.machine.gauges().loads_open, lab.machine.gauges().held.leased), (0, 0));
    lab.machine.check().unwrap();
}

#[test]
fn a_load_behind_loads_of_a_connection_that_ended_gets_its_turn() {
    let mut lab = Lab::new("lru", 2, 1);
    let reads = begin(&mut lab, 7, 0, 0, 2);
    for command in reads {
        let Command::Read { tier, slot, .. } = command else { continue };
        step(&mut lab.machine, Event::ReadEnded { tier, slot, outcome: Ok(Fetched::Whole) });
    }
    for token in 1..=LOADS {
        assert!(begin(&mut lab, 2, token, 10 * token, 1).is_empty(), "there is no room");
    }
    assert!(begin(&mut lab, OTHER, LOADS + 1, 5, 1).is_empty());
    let mut events =
        std::collections::VecDeque::from([Event::OwnerEnded { owner: 2 }, Event::OwnerEnded { owner: 7 }]);
    let (mut reads, mut steps) = (0, 0);
    while let Some(event) = events.pop_front() {
        let (out, read) = step(&mut lab.machine, event);
        reads += read;
        steps += 1;
        assert!(steps < 10_000, "the work does not end");
        events.extend(out.again.into_iter().map(Event::Continue));
    }
    assert_eq!((reads, lab.machine.gauges().loads_open), (1, 1), "its turn has come");
}
