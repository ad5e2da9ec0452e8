//! Tiers that lose their memory, or are switched off, while blocks are leased there.

use kvdepot_core::limits::REMOVALS_OWED_MAX;
use kvdepot_core::machine::{REMOVE_BLOCKS, Reserve};

use super::room::{grant_all, wide, wide_lab};
use super::*;

/// Opens a claim of these blocks, and grants the leases that it asks the tier for. Returns its number and those leases.
fn open(lab: &mut Lab, hashes: &[u8]) -> (u64, Vec<Commanded>) {
    let hashes = hashes.iter().map(|&hash| BlockHash([hash; 16])).collect();
    let token = lab.send(claim(&[0], hashes));
    let (leases, _) = commanded(lab);
    let Some(Reply::Claim(progress)) = lab.reply(token) else { panic!("no claim") };
    (progress.claim, leases)
}

/// Tells the machine that the tier has lost its memory. Returns the event of the walk that is to follow.
fn lose(lab: &mut Lab) -> Vec<Event> {
    let walk = lab.step(Event::LostMemory { tier: 0 });
    assert!(!walk.is_empty(), "the walk comes later");
    walk
}

/// P9: what its clients could not read any more is no hit.
#[test]
fn blocks_in_lost_memory_are_not_shown_any_more() {
    let mut lab = lab(2, 1);
    let first = lease(&mut lab, &[1, 2]);
    release(&mut lab, &first[1..]);
    let coming = lab.send(load(&[3], true));
    let (under_way, _) = commanded(&mut lab);
    lab.feed(Event::LostMemory { tier: 1 });
    assert!(ended(&mut lab).is_empty(), "another tier");
    lab.feed(Event::LostMemory { tier: 0 });
    lab.feed(Event::LostMemory { tier: 0 });
    assert_eq!(ended(&mut lab), [place(2)], "nobody reads it");
    grant(&mut lab, under_way);
    let reply = lab.reply(coming).unwrap();
    assert!(leased(reply).is_empty());
    assert_eq!(ended(&mut lab), [place(3)], "it came too late");
    release(&mut lab, &first[..1]);
    assert_eq!(ended(&mut lab), [place(1)]);
    assert_eq!(lab.machine.gauges().in_place, Default::default());
    let gone: Vec<_> = lab.gone.iter().map(|gone| gone.key).collect();
    assert!(gone.contains(&lab.key(1)) && gone.contains(&lab.key(2)), "{gone:?}");
    // Nothing brings the memory back, and a claim takes no room of the pool for what the tier says that it has.
    lab.feed(Event::WentDown { tier: 0 });
    lab.feed(Event::CameBack { tier: 0 });
    let (claim, leases) = open(&mut lab, &[1]);
    assert_eq!(leases, []);
    assert_eq!(settle(&mut lab, 1, claim), 0);
    lab.send(load(&[2], true));
    let (leases, reads) = commanded(&mut lab);
    assert_eq!((leases.len(), reads.len()), (0, 1), "a load asks the tier");
}

#[test]
fn a_tier_that_is_switched_off_leases_nothing_and_keeps_what_it_has_leased() {
    let mut lab = lab(2, 1);
    let first = lease(&mut lab, &[1, 2]);
    release(&mut lab, &first);
    let coming = lab.send(load(&[3], true));
    let (under_way, _) = commanded(&mut lab);
    lab.feed(Event::WentDown { tier: 0 });
    grant(&mut lab, under_way);
    let reply = lab.reply(coming).unwrap();
    assert_eq!(leased(reply)[0].runs.to_vec(), runs(3), "it was leased all the same");
    assert_eq!(leased(lab.ask(load(&[2], true)))[0].runs.to_vec(), runs(2));
    let (claim, leases) = open(&mut lab, &[2, 3, 4]);
    assert_eq!(leases, [], "not even through the pool");
    assert_eq!(settle(&mut lab, 1, claim), 2);
    lab.take();
    lab.ask(Request::Prefetch { namespace: 0, blocks: vec![(BlockHash([5; 16]), 0)], deadline: 1 << 40 });
    assert_eq!(commanded(&mut lab), (vec![], vec![]));
    lab.feed(Event::CameBack { tier: 0 });
    lease(&mut lab, &[4]);
}

/// The walk over all slots takes many steps, and requests come in between.
#[test]
fn blocks_in_lost_memory_are_not_shown_before_the_walk_has_reached_them() {
    let requests: [fn(&mut Lab); 2] = [
        |lab| {
            let token = lab.send_as(2, load(&[1], true));
            assert_eq!(commanded(lab), (vec![], vec![(0, 1, 1)]), "a load asks the tier");
            lab.feed(Event::ReadEnded { tier: 0, slot: 1, outcome: Ok(Fetched::Miss) });
            let reply = lab.reply(token).unwrap();
            assert!(leased(reply).is_empty());
        },
        |lab| {
            let token = lab.send_as(2, claim(&[0], vec![BlockHash([1; 16])]));
            let Some(Reply::Claim(progress)) = lab.reply(token) else { panic!("no claim") };
            assert_eq!(settle(lab, 2, progress.claim), 0);
        },
    ];
    for request in requests {
        let mut lab = lab(2, 1);
        let first = lease(&mut lab, &[1]);
        let walk = lose(&mut lab);
        request(&mut lab);
        walk.into_iter().for_each(|event| lab.feed(event));
        lab.take();
        release(&mut lab, &first);
        assert_eq!(ended(&mut lab), [place(1)]);
    }
}

#[test]
fn a_claim_settles_without_blocks_in_lost_memory() {
    for walks_first in [false, true] {
        let mut lab = lab(2, 1);
        let first = lease(&mut lab, &[1, 2]);
        let (claim, leases) = open(&mut lab, &[1, 2, 3]);
        assert_eq!(leases.len(), 1, "it waits for the third");
        let walk = lose(&mut lab);
        if walks_first {
            walk.into_iter().for_each(|event| lab.feed(event));
        }
        assert_eq!(settle(&mut lab, 1, claim), 0);
        release(&mut lab, &first);
    }
}

/// It has settled, and its client has not asked since it was told that it waits.
#[test]
fn a_claim_whose_client_has_not_heard_of_its_hit_looks_again() {
    let mut lab = lab(2, 1);
    let first = lease(&mut lab, &[1]);
    let (claim, leases) = open(&mut lab, &[1, 2]);
    grant(&mut lab, leases);
    assert_eq!(lab.missed.len(), 0);
    lose(&mut lab);
    let token = lab.send(Request::ClaimPoll { claim, settle: false });
    let Some(Reply::Claim(progress)) = lab.reply(token) else { panic!("no claim") };
    assert_eq!((progress.settled, progress.units), (true, 0));
    assert_eq!(lab.missed.len(), 1);
    release(&mut lab, &first);

    // What a client has been told does not change.
    let mut lab = self::lab(2, 1);
    let first = lease(&mut lab, &[1]);
    let (claim, _) = open(&mut lab, &[1]);
    lose(&mut lab);
    assert_eq!(settle(&mut lab, 1, claim), 1);
    release(&mut lab, &first);
}

/// What a filling claim tells of its leading blocks may be loaded before it settles.
#[test]
fn a_filling_claim_does_not_count_blocks_in_lost_memory() {
    let mut lab = lab(2, 1);
    let first = lease(&mut lab, &[1, 2]);
    let (claim, _) = open(&mut lab, &[1, 2, 3]);
    let arriving = |lab: &mut Lab| {
        let token = lab.send(Request::ClaimPoll { claim, settle: false });
        let Some(Reply::Claim(progress)) = lab.reply(token) else { panic!("no claim") };
        progress.arriving.map(|arriving| arriving.units_now)
    };
    assert_eq!(arriving(&mut lab), Some(2));
    lose(&mut lab);
    assert_eq!(arriving(&mut lab), None);
    release(&mut lab, &first);
    lab.machine.check().unwrap();
}

#[test]
fn a_claim_settles_without_blocks_that_were_removed_or_reset() {
    for how in ["removed", "reset"] {
        let mut lab = lab(2, 1);
        let first = lease(&mut lab, &[1, 2]);
        let (claim, _) = open(&mut lab, &[1, 2, 3]);
        match how {
            "removed" => drop(lab.remove(2, Location::Tier(0))),
            _ => drop(lab.ask(Request::EnterEpoch { namespace: 0, epoch: 1 })),
        }
        assert_eq!(settle(&mut lab, 1, claim), usize::from(how == "removed"), "{how}");
        release(&mut lab, &first);
    }
}

/// Resets the namespace, before the sweep over all slots has reached any of its blocks. Returns the event of the sweep.
fn reset(lab: &mut Lab) -> Vec<Event> {
    lab.tokens += 1;
    let (token, request) = (lab.tokens, Request::EnterEpoch { namespace: 0, epoch: 1 });
    let sweep = lab.step(Event::Request { token, owner: 2, request });
    assert!(lab.reply(token).is_some() && !sweep.is_empty(), "the sweep comes later");
    sweep
}

/// A reset is answered at once, and requests come in before the sweep has ended.
#[test]
fn a_claim_settles_without_reset_blocks_that_the_sweep_has_not_reached() {
    for (polls, hashes) in [(false, &[1, 2][..]), (true, &[1, 2]), (true, &[2])] {
        let mut lab = lab(2, 1);
        let first = lease(&mut lab, &[1]);
        let (claim, leases) = open(&mut lab, hashes);
        let sweep = reset(&mut lab);
        if polls {
            // It looks at its leases again, and then the block comes.
            let reply = lab.ask(Request::ClaimPoll { claim, settle: false });
            let Reply::Claim(progress) = reply else { panic!("{reply:?}") };
            assert!(hashes.len() == 1 || progress.arriving.is_none());
        }
        grant(&mut lab, leases);
        assert_eq!(settle(&mut lab, 1, claim), 0);
        sweep.into_iter().for_each(|event| lab.feed(event));
        release(&mut lab, &first);
    }
}

/// Has the tier lease these blocks to the owner 2.
fn lease_all(lab: &mut Lab, blocks: &[BlockHash]) {
    for piece in blocks.chunks(50) {
        lab.send_as(2, load_of(piece.to_vec(), true));
        grant_all(lab);
    }
}

/// A lab whose tier has leased these blocks to the owner 2.
fn lab_with(blocks: &[BlockHash]) -> Lab {
    let mut lab = Lab::new(10, 1);
    lab.located = Location::Tier(0);
    lab.feed(Event::InPlace { tier: 0, memory_bytes: 8000 * BLOCK, unit_bytes: BLOCK });
    lease_all(&mut lab, blocks);
    lab
}

/// Blocks of others that are removed all the time neither keep a claim from settling nor hide what it has lost itself.
#[test]
fn a_claim_settles_without_what_was_lost_after_many_removals() {
    let losses: [fn(&mut Lab) -> Vec<Event>; 2] = [reset, lose];
    for loss in losses {
        // It looks at its leases in several steps.
        let blocks: Vec<_> = (0..1600).map(wide).collect();
        let mut others = 201..;
        let removed = others.clone().take(5).map(|hash| BlockHash([hash; 16]));
        let mut lab = lab_with(&blocks.iter().copied().chain(removed).collect::<Vec<_>>());
        let token = lab.send(claim(&[0], [&blocks[..], &[wide(5000)]].concat()));
        let Some(Reply::Claim(progress)) = lab.reply(token) else { panic!("no claim") };
        let mut remove = |lab: &mut Lab| lab.remove(others.next().unwrap(), Location::Tier(0));
        remove(&mut lab);
        let request = Request::ClaimPoll { claim: progress.claim, settle: true };
        let mut todo = lab.step(Event::Request { token: 999, owner: 1, request });
        for _ in 0..4 {
            remove(&mut lab);
            let event = todo.pop().unwrap();
            todo.extend(lab.step(event));
        }
        assert!(lab.reply(999).is_none(), "it settles");
        loss(&mut lab);
        todo.into_iter().for_each(|event| lab.feed(event));
        let Some(Reply::Claim(progress)) = lab.reply(999) else { panic!("it does not settle") };
        assert_eq!((progress.settled, progress.units), (true, 0));
        lab.machine.check().unwrap();
    }
}

/// What was lost before a claim is admitted is not leased, so it keeps nothing of its first answer from the client.
#[test]
fn a_claim_tells_first_what_arrives_although_something_was_lost_before() {
    let blocks: Vec<_> = (0..600).map(wide).collect();
    let other = 201;
    let mut lab = lab_with(&blocks.iter().copied().chain([BlockHash([other; 16])]).collect::<Vec<_>>());
    let request = claim(&[0], [&blocks[..], &[wide(5000)]].concat());
    let todo = lab.step(Event::Request { token: 999, owner: 1, request });
    lab.remove(other, Location::Tier(0));
    assert!(lab.reply(999).is_none(), "it is not admitted yet");
    todo.into_iter().for_each(|event| lab.feed(event));
    let Some(Reply::Claim(progress)) = lab.reply(999) else { panic!("no claim") };
    assert_eq!(progress.arriving.map(|arriving| arriving.units), Some(601));
}

/// It takes its leases in several steps.
#[test]
fn a_claim_that_begins_to_fill_does_not_count_blocks_in_lost_memory() {
    let blocks = |range: std::ops::Range<u16>| range.map(wide).collect::<Vec<_>>();
    let mut before = 0;
    for steps in 0.. {
        let mut lab = wide_lab(10);
        lease_all(&mut lab, &blocks(0..300));
        // A claim on it waits for this read.
        lab.send_as(2, load_of(blocks(300..301), false));
        let mut todo =
            lab.step(Event::Request { token: 999, owner: 1, request: claim(&[0], blocks(0..301)) });
        for _ in 0..steps {
            if let Some(event) = todo.pop() {
                todo.extend(lab.step(event));
            }
        }
        let reply = lab.reply(999);
        lose(&mut lab);
        if reply.is_some() {
            assert!(before > 3, "it took {before} steps until its answer");
            break;
        }
        todo.into_iter().for_each(|event| lab.feed(event));
        let Some(Reply::Claim(progress)) = lab.reply(999) else { panic!("no claim") };
        assert_eq!(progress.arriving, None, "after {steps} steps");
        lab.machine.check().unwrap();
        before = steps;
    }
}

#[test]
fn a_block_that_only_lost_memory_has_is_dumped_again() {
    let mut lab = lab(2, 1);
    let first = lease(&mut lab, &[1]);
    let reserve = || {
        let (hashes, how) = (vec![BlockHash([1; 16])], Reserve::Block);
        Request::Reserve { namespace: 0, id: None, hashes, how, runs_max: 9 }
    };
    let had = lab.ask(reserve());
    assert!(matches!(had, Reply::Slots(outcomes) if matches!(outcomes[..], [Outcome::Have])));
    lose(&mut lab);
    let reply = lab.ask(reserve());
    assert_eq!(leased(reply).len(), 1);
    release(&mut lab, &first);
}

#[test]
fn a_claim_keeps_a_block_whose_copy_has_taken_its_place() {
    let mut lab = lab(1, 1);
    let first = lease(&mut lab, &[1]);
    let (claim, _) = open(&mut lab, &[1, 2]);
    let token = lab.send_as(2, load(&[1], false));
    let (_, reads) = commanded(&mut lab);
    lab.feed(Event::ReadEnded { tier: 0, slot: reads[0].1, outcome: Ok(Fetched::Whole) });
    let reply = lab.reply(token).unwrap();
    let copy = leased(reply);
    let leases = copy.iter().map(|leased| leased.lease).collect();
    lab.send_as(2, Request::Release { leases });
    assert_eq!(settle(&mut lab, 1, claim), 1);
    // The claim holds the copy now.
    let other = lab.send_as(2, load(&[9], false));
    assert!(lab.reply(other).is_none(), "the pool has no room for another block");
    assert_eq!(leased(lab.ask(load(&[1], true)))[0].runs, copy[0].runs);
    release(&mut lab, &first);
}

#[test]
fn a_copy_that_does_not_come_from_lost_memory_leaves_nothing() {
    let mut lab = lab(1, 1);
    let first = lease(&mut lab, &[1]);
    let copy = lab.send(load(&[1], false));
    let (_, reads) = commanded(&mut lab);
    let waits = lab.send_as(2, load(&[1], true));
    let walk = lose(&mut lab);
    let late = Err(Error::new(ErrorKind::Timeout, "test"));
    lab.feed(Event::ReadEnded { tier: 0, slot: reads[0].1, outcome: late });
    for token in [copy, waits] {
        let reply = lab.reply(token).unwrap();
        assert!(leased(reply).is_empty());
    }
    walk.into_iter().for_each(|event| lab.feed(event));
    release(&mut lab, &first);
    assert_eq!(ended(&mut lab), [place(1)]);
}

/// It does not get as far as the tier, so it says nothing of the block.
#[test]
fn a_copy_from_a_tier_that_is_closed_leaves_the_lease_in_place() {
    let mut lab = lab(1, 1);
    lease(&mut lab, &[1]);
    lab.take();
    let keys: Vec<_> = (0..=REMOVALS_OWED_MAX as u64)
        .map(|n| {
            let mut key = lab.key(7);
            key.hash.0[8..].copy_from_slice(&n.to_le_bytes());
            key
        })
        .collect();
    for keys in keys.chunks(REMOVE_BLOCKS) {
        lab.send(Request::Remove { keys: keys.to_vec(), locations: vec![Location::Tier(0); keys.len()] });
        for (id, tier, key) in std::mem::take(&mut lab.removals) {
            let outcome = Err(Error::new(ErrorKind::Io, "test"));
            lab.feed(Event::Removed { id, tier, key, outcome });
        }
    }
    assert_eq!(lab.closed.len(), 1);
    lab.take();
    assert!(leased(lab.ask(load(&[1], false))).is_empty());
    assert_eq!(leased(lab.ask(load(&[1], true)))[0].runs.to_vec(), runs(1));
    lab.machine.check().unwrap();
}
