//! Blocks that a tier leases where they lie: who gets them, when their leases end, and what takes their place.
#![allow(clippy::unwrap_used)] // a failing test panics

use kvdepot_core::lease::LeaseId;
use kvdepot_core::machine::{
    Command, Event, Fetched, HeldBy, Leased, Location, Machine, Outcome, Owner, Placement, Reply, Request,
    TierIndex, WriteWhen,
};
use kvdepot_core::runs::{IN_PLACE_AT, Run};
use kvdepot_core::{BlockHash, Error, ErrorKind, SlotId};

use crate::lab::{Lab, claim};

mod ahead;
mod hung;
mod losses;
mod room;

const BLOCK: u64 = 4096;
/// Blocks in the memory of the tier: half of them may be leased at a time, and an eighth without a reader.
const MEMORY_BLOCKS: u64 = 16;

/// A machine whose first tier has every block, and leases it in place.
fn lab(pool_blocks: u64, tiers: usize) -> Lab {
    let mut lab = Lab::new(pool_blocks, tiers);
    lab.located = Location::Tier(0);
    lab.feed(Event::InPlace { tier: 0, memory_bytes: MEMORY_BLOCKS * BLOCK, unit_bytes: BLOCK });
    lab
}

fn load(hashes: &[u8], in_place: bool) -> Request {
    load_of(hashes.iter().map(|&hash| BlockHash([hash; 16])).collect(), in_place)
}

fn load_of(hashes: Vec<BlockHash>, in_place: bool) -> Request {
    let (fetch_deadline, last, runs_max) = (1 << 40, true, 99);
    Request::Load { namespace: 0, id: None, hashes, fetch_deadline, last, runs_max, in_place }
}

/// Where the tests' tier has a block.
const fn place(hash: u8) -> u64 {
    BLOCK * (1 + hash as u64)
}

fn runs(hash: u8) -> Vec<Run> {
    vec![Run { offset: IN_PLACE_AT + place(hash), len: BLOCK }]
}

/// Tier, slot and block of a command.
type Commanded = (TierIndex, SlotId, u8);

/// The leases and reads among what was commanded since the last look.
fn commanded(lab: &mut Lab) -> (Vec<Commanded>, Vec<Commanded>) {
    let (mut leases, mut reads) = (Vec::new(), Vec::new());
    for command in lab.take() {
        match command {
            Command::Lease { tier, slot, key, .. } => leases.push((tier, slot, key.hash.0[0])),
            Command::Read { tier, slot, key, .. } => reads.push((tier, slot, key.hash.0[0])),
            other => panic!("{other:?}"),
        }
    }
    (leases, reads)
}

/// Ends all of these leases of the tier with success.
fn grant(lab: &mut Lab, leases: Vec<Commanded>) {
    for (tier, slot, hash) in leases {
        lab.feed(Event::LeaseEnded { tier, slot, outcome: Ok(Some(place(hash))) });
    }
    lab.machine.check().unwrap();
}

/// Loads blocks in place that the tier leases anew.
fn lease(lab: &mut Lab, hashes: &[u8]) -> Vec<Leased> {
    let token = lab.send(load(hashes, true));
    let (leases, reads) = commanded(lab);
    assert_eq!((leases.len(), reads.len()), (hashes.len(), 0));
    grant(lab, leases);
    let reply = lab.reply(token).unwrap();
    leased(reply)
}

fn leased(reply: Reply) -> Vec<Leased> {
    let Reply::Slots(outcomes) = reply else { panic!("no slots") };
    let lease = |outcome| match outcome {
        Outcome::Leased(leased) => Some(leased),
        Outcome::Have | Outcome::Refused(_) => None,
    };
    outcomes.into_iter().filter_map(lease).collect()
}

fn release(lab: &mut Lab, leased: &[Leased]) {
    let leases: Vec<LeaseId> = leased.iter().map(|leased| leased.lease).collect();
    lab.ask(Request::Release { leases });
    lab.machine.check().unwrap();
}

/// Settles a claim. Returns the units of its hit.
fn settle(lab: &mut Lab, owner: Owner, claim: u64) -> usize {
    let token = lab.send_as(owner, Request::ClaimPoll { claim, settle: true });
    let Some(Reply::Claim(progress)) = lab.reply(token) else { panic!("no claim") };
    assert!(progress.settled);
    lab.machine.check().unwrap();
    progress.units
}

/// The places whose leases have ended since the last look.
fn ended(lab: &mut Lab) -> Vec<u64> {
    let places = |command| match command {
        Command::EndLeases { tier: 0, places } => places,
        Command::Touch { .. } => Vec::new(),
        other => panic!("{other:?}"),
    };
    lab.take().into_iter().flat_map(places).collect()
}

#[test]
fn a_block_is_leased_where_it_lies_and_takes_nothing_of_the_pool() {
    let mut lab = lab(1, 1);
    let both = lease(&mut lab, &[1, 2]);
    assert_eq!([both[0].runs.to_vec(), both[1].runs.to_vec()], [runs(1), runs(2)]);
    let gauges = lab.machine.gauges();
    assert_eq!((gauges.pool_free_bytes, gauges.held.pinned), (BLOCK, 0), "the pool is as free as before");
    assert_eq!((gauges.in_place.blocks, gauges.in_place.bytes), (2, 2 * BLOCK));
    let counters = lab.machine.counters();
    assert_eq!((counters.in_place_blocks, counters.fetch_blocks), (2, 0));
}

#[test]
fn an_unused_lease_serves_the_next_reader_and_the_oldest_end_beyond_the_limit() {
    let mut lab = lab(1, 1);
    let first = lease(&mut lab, &[1, 2]);
    release(&mut lab, &first);
    assert!(ended(&mut lab).is_empty(), "an eighth of the memory stays leased");
    let again = lab.ask(load(&[1], true));
    let again = leased(again);
    assert_eq!(again[0].runs.to_vec(), runs(1));
    assert!(lab.take().iter().all(|command| matches!(command, Command::Touch { .. })), "no second lease");
    // Block 1 is in use, 2 is the oldest that is not.
    let third = lease(&mut lab, &[3, 4]);
    release(&mut lab, &third);
    assert_eq!(ended(&mut lab), [place(2)]);
    release(&mut lab, &again);
    assert_eq!(ended(&mut lab), [place(3)]);
}

#[test]
fn half_of_the_memory_is_leased_at_a_time_and_other_blocks_are_read() {
    let mut lab = lab(4, 1);
    let half: Vec<u8> = (1..=8).collect();
    let first = lease(&mut lab, &half);
    lab.send(load(&[9], true));
    let (leases, reads) = commanded(&mut lab);
    assert_eq!((leases.len(), reads.len()), (0, 1), "the tier keeps room for new blocks");
    release(&mut lab, &first[..1]);
    let (leases, _) = {
        lab.send(load(&[10], true));
        let leases: Vec<_> = lab.take();
        (leases, ())
    };
    assert!(
        matches!(&leases[..], [Command::Lease { .. }, Command::EndLeases { places, .. }] if *places == [place(1)]),
        "an unused lease makes way: {leases:?}"
    );
}

#[test]
fn a_reader_that_cannot_read_in_place_gets_a_copy_in_the_pool() {
    let mut lab = lab(1, 1);
    let here = lease(&mut lab, &[1]);
    let token = lab.send(load(&[1], false));
    let (leases, reads) = commanded(&mut lab);
    let [(0, slot, 1)] = reads[..] else { panic!("{leases:?} {reads:?}") };
    lab.feed(Event::ReadEnded { tier: 0, slot, outcome: Ok(Fetched::Whole) });
    let reply = lab.reply(token).unwrap();
    let copy = leased(reply);
    assert_eq!(copy[0].runs.to_vec(), [Run { offset: 0, len: BLOCK }]);
    lab.take();
    release(&mut lab, &here);
    assert_eq!(ended(&mut lab), [place(1)], "the copy has taken its place");
    let again = lab.ask(load(&[1], true));
    assert_eq!(leased(again)[0].runs, copy[0].runs);
}

#[test]
fn a_copy_that_does_not_come_leaves_the_lease_in_place() {
    use ErrorKind::{Busy, NoSpace, Timeout, Unavailable};
    for (is_removed, kind) in
        [(false, Timeout), (false, Busy), (false, NoSpace), (false, Unavailable), (true, Timeout)]
    {
        let mut lab = lab(1, 1);
        let here = lease(&mut lab, &[1]);
        let token = lab.send(load(&[1], false));
        let (_, reads) = commanded(&mut lab);
        // Another reader of the block in place waits for the copy.
        let waits = lab.send_as(2, load(&[1], true));
        if is_removed {
            lab.remove(1, Location::Absent);
        }
        lab.feed(Event::ReadEnded { tier: 0, slot: reads[0].1, outcome: Err(Error::new(kind, "test")) });
        lab.machine.check().unwrap();
        let (copy, other) = (lab.reply(token).unwrap(), lab.reply(waits).unwrap());
        assert!(leased(copy).is_empty());
        let found: Vec<_> = leased(other).into_iter().map(|leased| leased.runs.to_vec()).collect();
        assert_eq!(found, if is_removed { vec![] } else { vec![runs(1)] });
        release(&mut lab, &here);
        lab.feed(Event::OwnerEnded { owner: 2 });
        let is_ended = lab
            .take()
            .iter()
            .any(|command| matches!(command, Command::EndLeases { places, .. } if *places == [place(1)]));
        assert_eq!(is_ended, is_removed);
    }
}

/// P1: the tier does not stand by the block any more, whoever was the first to learn of it.
#[test]
fn a_block_that_was_lost_for_another_reader_is_not_shown_again() {
    let failed = |kind| Err(Error::new(kind, "test"));
    for (tiers, how, outcome) in [
        (1, "read", failed(ErrorKind::Corrupt)),
        (1, "read", failed(ErrorKind::Io)),
        (1, "read", Ok(Fetched::Miss)),
        (2, "read", failed(ErrorKind::Corrupt)),
        (1, "told", failed(ErrorKind::Timeout)),
        (2, "told", failed(ErrorKind::Timeout)),
    ] {
        let mut lab = lab(1, tiers);
        let here = lease(&mut lab, &[1]);
        let token = lab.send(load(&[1], false));
        let (_, reads) = commanded(&mut lab);
        let slot = reads[0].1;
        let waits = lab.send_as(2, load(&[1], true));
        if how == "told" {
            lab.feed(Event::TierForgot { tier: 0, keys: vec![lab.key(1)], lost: true });
        }
        lab.feed(Event::ReadEnded { tier: 0, slot, outcome });
        if tiers == 2 {
            // The lower tier cannot read it either, which says nothing of the leased one.
            assert_eq!(commanded(&mut lab).1, [(1, slot, 1)]);
            lab.feed(Event::ReadEnded { tier: 1, slot, outcome: failed(ErrorKind::Timeout) });
        }
        lab.machine.check().unwrap();
        for token in [token, waits] {
            let reply = lab.reply(token).unwrap();
            assert!(leased(reply).is_empty(), "{tiers} {how}");
        }
        lab.take();
        lab.send(load(&[1], true));
        let (leases, _) = commanded(&mut lab);
        assert_eq!(leases.len(), 1, "the tier is asked again");
        release(&mut lab, &here);
        assert_eq!(ended(&mut lab), [place(1)], "its reader has kept it until now");
    }
}

/// P8: a reset passes over leased blocks in pieces, and the copy fails before the last of them.
#[test]
fn a_copy_that_does_not_come_after_a_reset_leaves_nothing() {
    let mut lab = lab(1, 1);
    let here = lease(&mut lab, &[1]);
    lab.send(load(&[1], false));
    let (_, reads) = commanded(&mut lab);
    let waits = lab.send_as(2, load(&[1], true));
    let request = Request::EnterEpoch { namespace: 0, epoch: 1 };
    let sweep = lab.step(Event::Request { token: 99, owner: 1, request });
    assert!(!sweep.is_empty(), "the sweep comes later");
    let late = Err(Error::new(ErrorKind::Timeout, "test"));
    lab.feed(Event::ReadEnded { tier: 0, slot: reads[0].1, outcome: late });
    let reply = lab.reply(waits).unwrap();
    assert!(leased(reply).is_empty());
    sweep.into_iter().for_each(|event| lab.feed(event));
    release(&mut lab, &here);
    assert_eq!(ended(&mut lab), [place(1)]);
}

#[test]
fn a_lease_takes_as_much_as_the_tiers_unit() {
    let mut lab = Lab::new(4, 1);
    lab.located = Location::Tier(0);
    lab.feed(Event::InPlace { tier: 0, memory_bytes: 16 * BLOCK, unit_bytes: 4 * BLOCK });
    let both = lease(&mut lab, &[1, 2]);
    assert_eq!(lab.machine.gauges().in_place.bytes, 8 * BLOCK);
    let token = lab.send(load(&[3], true));
    let (leases, reads) = commanded(&mut lab);
    assert_eq!((leases.len(), reads.len()), (0, 1), "half of the tier's units are leased");
    lab.feed(Event::ReadEnded { tier: 0, slot: reads[0].1, outcome: Ok(Fetched::Whole) });
    drop(lab.reply(token));
    lab.take();
    release(&mut lab, &both);
    assert_eq!(ended(&mut lab), [place(1), place(2)], "an eighth is less than a unit");
    lab.machine.check().unwrap();
}

#[test]
fn a_copy_that_finds_no_room_leaves_the_lease_in_place() {
    let mut lab = lab(1, 1);
    let other = lab.send(load(&[9], false));
    let (_, reads) = commanded(&mut lab);
    lab.feed(Event::ReadEnded { tier: 0, slot: reads[0].1, outcome: Ok(Fetched::Whole) });
    let reply = lab.reply(other).unwrap();
    assert_eq!(leased(reply).len(), 1, "the pool is full");
    let first = lease(&mut lab, &[1]);
    release(&mut lab, &first);
    let token = lab.send(load(&[1], false));
    assert!(lab.reply(token).is_none(), "it waits for room");
    assert_eq!(leased(lab.ask(load(&[1], true)))[0].runs.to_vec(), runs(1));
    lab.machine.check().unwrap();
}

#[test]
fn a_reader_that_cannot_read_in_place_misses_what_is_being_leased() {
    let mut lab = lab(1, 1);
    let token = lab.send(load(&[1], true));
    let (leases, _) = commanded(&mut lab);
    let Reply::Slots(outcomes) = lab.ask(load(&[1], false)) else { panic!("no slots") };
    assert_eq!(outcomes, [Outcome::Refused(ErrorKind::Busy)]);
    grant(&mut lab, leases);
    let reply = lab.reply(token).unwrap();
    assert_eq!(leased(reply)[0].runs.to_vec(), runs(1));
}

#[test]
fn what_cannot_be_leased_is_read_from_the_next_tier_or_missed() {
    for (tiers, outcome) in [
        (1, Ok(None)),
        (1, Err(Error::new(ErrorKind::Corrupt, "test"))),
        (2, Ok(None)),
        (2, Err(Error::new(ErrorKind::Io, "test"))),
    ] {
        let mut lab = lab(1, tiers);
        let token = lab.send(load(&[1], true));
        let (leases, _) = commanded(&mut lab);
        lab.feed(Event::LeaseEnded { tier: 0, slot: leases[0].1, outcome });
        lab.machine.check().unwrap();
        if tiers == 2 {
            let (_, reads) = commanded(&mut lab);
            assert_eq!(reads, [(1, leases[0].1, 1)]);
            lab.feed(Event::ReadEnded { tier: 1, slot: leases[0].1, outcome: Ok(Fetched::Whole) });
        }
        let reply = lab.reply(token).unwrap();
        let found = leased(reply);
        assert_eq!(found.len(), tiers - 1);
        assert!(found.iter().all(|leased| leased.runs[0].offset == 0), "in the pool");
        assert_eq!(lab.machine.gauges().in_place.blocks, 0);
        lab.machine.check().unwrap();
    }
}

#[test]
fn a_block_that_goes_while_it_is_read_stays_leased_until_its_reader_has_ended() {
    for how in ["removed", "reset", "lost", "owner"] {
        let mut lab = lab(1, 1);
        let first = lease(&mut lab, &[1]);
        match how {
            "removed" => drop(lab.remove(1, Location::Tier(0))),
            "reset" => drop(lab.ask(Request::EnterEpoch { namespace: 0, epoch: 1 })),
            "lost" => lab.feed(Event::TierForgot { tier: 0, keys: vec![lab.key(1)], lost: true }),
            _ => {}
        }
        let is_ended = |command: &Command| matches!(command, Command::EndLeases { .. });
        assert!(!lab.take().iter().any(is_ended), "{how}");
        if how == "owner" {
            lab.feed(Event::OwnerEnded { owner: 1 });
            assert_eq!(lab.machine.gauges().in_place.idle_bytes, BLOCK);
            continue;
        }
        release(&mut lab, &first);
        assert_eq!(ended(&mut lab), [place(1)], "{how}");
        assert_eq!(lab.machine.gauges().in_place.blocks, 0, "{how}");
    }
}

#[test]
fn a_block_that_was_reset_while_it_was_being_leased_is_given_back() {
    let mut lab = lab(1, 1);
    let token = lab.send(load(&[1], true));
    let (leases, _) = commanded(&mut lab);
    lab.ask(Request::EnterEpoch { namespace: 0, epoch: 1 });
    grant(&mut lab, leases);
    let reply = lab.reply(token).unwrap();
    assert!(leased(reply).is_empty());
    assert_eq!(ended(&mut lab), [place(1)]);
}

#[test]
fn a_claim_of_blocks_in_place_needs_no_room_in_the_pool() {
    let mut lab = lab(1, 1);
    // Its readers have told that they can read in place.
    let first = lease(&mut lab, &[1]);
    release(&mut lab, &first);
    lab.take();
    let hashes: Vec<BlockHash> = (1..=6).map(|hash| BlockHash([hash; 16])).collect();
    let token = lab.send(claim(&[0], hashes));
    let (leases, reads) = commanded(&mut lab);
    assert_eq!((leases.len(), reads.len()), (5, 0));
    grant(&mut lab, leases);
    let Some(Reply::Claim(progress)) = lab.reply(token) else { panic!("no claim") };
    let Reply::Claim(progress) = lab.ask(Request::ClaimPoll { claim: progress.claim, settle: true }) else {
        panic!("no claim")
    };
    assert_eq!((progress.settled, progress.units), (true, 6), "more than the pool holds");
    assert_eq!(lab.machine.counters().claims_cut, 0);
    // The ranks' loads find what the claim holds, and more than an eighth stays while it does.
    let found = leased(lab.ask(load(&[1, 2, 3, 4, 5, 6], true)));
    release(&mut lab, &found);
    assert!(ended(&mut lab).is_empty());
    lab.ask(Request::ClaimRelease { claim: progress.claim });
    assert_eq!(ended(&mut lab).len(), 4);
}

#[test]
fn the_first_claim_leases_blocks_in_place_if_a_reader_was_announced() {
    for is_announced in [false, true] {
        let mut lab = lab(2, 1);
        if is_announced {
            lab.ask(Request::ReadsInPlace { namespace: 0 });
        }
        lab.send(claim(&[0], vec![BlockHash([1; 16])]));
        let (leases, reads) = commanded(&mut lab);
        assert_eq!((leases.len(), reads.len()), if is_announced { (1, 0) } else { (0, 1) });
    }
}

#[test]
fn a_block_in_place_is_written_to_no_other_tier() {
    let placements = [Placement::default(), Placement { write: WriteWhen::OnSecondUse, promote: true }];
    let mut lab = Lab::with_machine(1, |pool| Machine::new(pool, 2).with_placements(&placements));
    lab.located = Location::Tier(0);
    lab.feed(Event::InPlace { tier: 0, memory_bytes: MEMORY_BLOCKS * BLOCK, unit_bytes: BLOCK });
    for _ in 0..3 {
        lab.now += 60_000_000_000;
        let token = lab.send(load(&[1], true));
        let leases = lab.take();
        for command in leases {
            match command {
                Command::Lease { slot, .. } => {
                    lab.feed(Event::LeaseEnded { tier: 0, slot, outcome: Ok(Some(place(1))) });
                }
                Command::Touch { .. } => {}
                other => panic!("{other:?}"),
            }
        }
        let reply = lab.reply(token).unwrap();
        release(&mut lab, &leased(reply));
        assert!(ended(&mut lab).is_empty());
    }
}

#[test]
fn neither_a_handover_nor_a_ledger_names_a_block_in_place() {
    let mut lab = lab(1, 1);
    lab.machine.keep_ledger();
    let found = lease(&mut lab, &[1]);
    // Not even when a reader tells its checksum.
    lab.ask(Request::SetChecksum { lease: found[0].lease, crc64: 7 });
    assert!(lab.proofs.is_empty());
    lab.feed(Event::Freeze);
    let (held, _) = lab.machine.held(&[1], Default::default(), 9);
    assert_eq!(held.len(), 1);
    let mut held_by = HeldBy::default();
    held_by.add(&held);
    assert_eq!(lab.machine.handed(&held_by, 0, 9).0, []);
}
