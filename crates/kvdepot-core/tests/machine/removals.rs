//! Removals: which end belongs to which, and the handling of those that a tier cannot carry out (P1).
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use std::sync::Arc;

use crate::lab::Lab;
use kvdepot_core::limits::REMOVALS_OWED_MAX;
use kvdepot_core::machine::{
    Closed, Command, Event, Location, Machine, REMOVE_BLOCKS, Reply, Request, Stored,
};
use kvdepot_core::{BlockHash, BlockKey, BlockLayout, Error, ErrorKind, NamespaceId, NamespaceSpec};

/// Ticks between two tries.
const TICKS: usize = 10;

fn failed() -> kvdepot_core::Result<()> {
    Err(Error::new(ErrorKind::Unavailable, "a removal failed"))
}

/// The second of two tiers has a value. The first one has the value before: that is being removed, for another try to write.
fn value_before_its_removal() -> Lab {
    let mut lab = Lab::new(8, 2);
    lab.put(1);
    let (writes, _) = lab.writes_and_removals();
    let slot = writes[0].1;
    lab.feed(Event::WriteEnded { tier: 1, slot, outcome: Ok(Stored::New) });
    lab.feed(Event::WriteEnded { tier: 0, slot, outcome: Ok(Stored::AlreadyThere) });
    assert_eq!(lab.writes_and_removals().1, [0]);
    lab
}

#[test]
fn a_removal_is_not_ended_by_that_of_the_value_before() {
    let mut lab = value_before_its_removal();
    let token = lab.remove(1, Location::Tier(0));
    assert_eq!(lab.writes_and_removals().1, [0, 1]);
    for tier in [0, 0] {
        lab.end_removal(tier, Ok(()));
        assert!(lab.reply(token).is_none(), "the second tier has not forgotten it");
    }
    lab.end_removal(1, Ok(()));
    assert!(matches!(lab.reply(token), Some(Reply::Removed { was_there, left: 0 }) if was_there == [true]));
}

#[test]
fn a_removal_that_a_tier_could_not_carry_out_is_owed_and_tried_again() {
    let mut lab = Lab::new(8, 2);
    lab.put(1);
    for (tier, slot) in lab.writes_and_removals().0 {
        lab.feed(Event::WriteEnded { tier, slot, outcome: Ok(Stored::New) });
    }
    let token = lab.remove(1, Location::Tier(0));
    assert_eq!(lab.writes_and_removals().1, [0, 1]);
    lab.end_removal(0, Ok(()));
    assert!(lab.reply(token).is_none(), "the second tier has not answered");
    lab.end_removal(1, failed());
    assert!(
        matches!(lab.reply(token), Some(Reply::Removed { was_there, left: 1 }) if was_there == [true]),
        "the caller is told"
    );
    // A tier that may have the earlier value does not get what is stored under the key.
    lab.put(1);
    let (writes, removals) = lab.writes_and_removals();
    assert_eq!(writes.iter().map(|(tier, _)| *tier).collect::<Vec<_>>(), [0]);
    assert!(removals.is_empty());
    lab.feed(Event::WriteEnded { tier: 0, slot: writes[0].1, outcome: Ok(Stored::New) });
    for outcome in [failed(), Ok(())] {
        assert_eq!(lab.machine.gauges().removals_owed, 1);
        (0..TICKS).for_each(|_| lab.feed(Event::Tick));
        assert_eq!(lab.writes_and_removals().1, [1], "asked again");
        lab.end_removal(1, outcome);
    }
    assert_eq!(lab.machine.gauges().removals_owed, 0);
    (0..TICKS).for_each(|_| lab.feed(Event::Tick));
    assert!(lab.writes_and_removals().1.is_empty(), "it is made");
}

/// The write is of the later block, which only the first tier got.
#[test]
fn a_removal_behind_a_write_tells_that_a_tier_owes_an_earlier_one() {
    let mut lab = Lab::new(8, 2);
    lab.remove(1, Location::Tier(1));
    lab.end_removal(0, Ok(()));
    lab.end_removal(1, failed());
    lab.take();
    lab.put(1);
    let (writes, _) = lab.writes_and_removals();
    let [(0, slot)] = writes[..] else { panic!("the second tier owes a removal: {writes:?}") };
    let token = lab.remove(1, Location::Absent);
    assert!(matches!(lab.reply(token), Some(Reply::Removed { left: 1, .. })), "the second tier may have it");
    lab.feed(Event::WriteEnded { tier: 0, slot, outcome: Ok(Stored::New) });
    assert_eq!(lab.writes_and_removals().1, [0, 1], "both are to forget it behind the write");
}

#[test]
fn a_removal_that_is_owed_ends_with_the_epoch_of_its_block() {
    let mut lab = Lab::new(8, 1);
    lab.remove(1, Location::Tier(0));
    lab.end_removal(0, failed());
    assert_eq!(lab.machine.gauges().removals_owed, 1);
    lab.ask(Request::EnterEpoch { namespace: 0, epoch: 1 });
    (0..10).for_each(|_| lab.feed(Event::Tick));
    let gauges = lab.machine.gauges();
    assert_eq!((gauges.removals_owed, gauges.spaces), (0, gauges.namespaces), "nothing is left of it");
}

/// The end of an earlier removal comes later, with another outcome.
#[test]
fn a_removal_is_not_ended_by_the_late_end_of_one_before_it() {
    let mut lab = value_before_its_removal();
    let token = lab.remove(1, Location::Tier(0));
    let tiers: Vec<usize> = lab.removals.iter().map(|removal| removal.1).collect();
    assert_eq!(tiers, [0, 0, 1], "of the value before, and then of this one");
    lab.end_removal_at(1, failed());
    lab.end_removal_at(0, Ok(()));
    assert!(lab.reply(token).is_none(), "the second tier has not answered");
    lab.end_removal(1, Ok(()));
    assert!(matches!(lab.reply(token), Some(Reply::Removed { left: 1, .. })), "the first tier failed");
    assert_eq!(lab.machine.gauges().removals_owed, 1);
}

#[test]
fn a_removal_s_end_that_is_told_twice_counts_once() {
    let mut lab = Lab::new(8, 2);
    let token = lab.remove(1, Location::Tier(0));
    let (id, tier, key) = lab.removals[0];
    for _ in 0..2 {
        lab.feed(Event::Removed { id, tier, key, outcome: Ok(()) });
        assert!(lab.reply(token).is_none(), "the second tier has not answered");
    }
    lab.end_removal(1, failed());
    assert!(matches!(lab.reply(token), Some(Reply::Removed { left: 1, .. })));
    let (again, outcome) = (lab.removals[0].0, Ok(()));
    lab.feed(Event::Removed { id: again, tier: 1, key, outcome });
    assert_eq!(lab.machine.gauges().removals_owed, 1, "the removal had ended, and this is not its end");
}

/// Between a try and its end the block was removed, stored and removed again.
#[test]
fn a_late_end_of_a_try_pays_no_debt_that_came_after_it() {
    let mut lab = Lab::new(8, 1);
    lab.remove(1, Location::Tier(0));
    lab.end_removal(0, failed());
    (0..TICKS).for_each(|_| lab.feed(Event::Tick));
    let late = lab.removals.remove(0);
    lab.remove(1, Location::Tier(0));
    lab.end_removal(0, Ok(()));
    assert_eq!(lab.machine.gauges().removals_owed, 0);
    lab.take();
    lab.put(1);
    let (writes, _) = lab.writes_and_removals();
    let [(tier, slot)] = writes[..] else { panic!("the tier owes nothing: {writes:?}") };
    lab.feed(Event::WriteEnded { tier, slot, outcome: Ok(Stored::New) });
    lab.remove(1, Location::Tier(0));
    lab.end_removal(0, failed());
    let (id, tier, key) = late;
    lab.feed(Event::Removed { id, tier, key, outcome: Ok(()) });
    assert_eq!(lab.machine.gauges().removals_owed, 1, "the tier may have what was stored since");
}

/// Returns a lab in which blocks with even names are on an unreachable server of the second tier.
fn parted() -> Lab {
    let part_of = |tier: usize, key: &BlockKey| usize::from(tier == 1 && key.hash.0[1] % 2 == 1);
    Lab::with_machine(8, |pool| Machine::new(pool, 2).with_parts(Arc::new(part_of)))
}

fn name(n: usize) -> BlockHash {
    let mut hash = [0; 16];
    // The same name as `Lab::key` returns, as far as it determines the part.
    hash[1] = 2;
    hash[8..].copy_from_slice(&(n as u64).to_le_bytes());
    BlockHash(hash)
}

/// Removes these blocks on the unreachable server.
fn owe(lab: &mut Lab, blocks: std::ops::Range<usize>) {
    let namespace = lab.spec.id(0);
    owe_in(lab, namespace, blocks);
}

fn owe_in(lab: &mut Lab, namespace: NamespaceId, blocks: std::ops::Range<usize>) {
    let all: Vec<BlockKey> = blocks.map(|n| BlockKey { namespace, hash: name(n) }).collect();
    for keys in all.chunks(REMOVE_BLOCKS) {
        let locations = vec![Location::Tier(1); keys.len()];
        let token = lab.send(Request::Remove { keys: keys.to_vec(), locations });
        for (id, tier, key) in std::mem::take(&mut lab.removals) {
            let outcome = if tier == 1 { failed() } else { Ok(()) };
            lab.feed(Event::Removed { id, tier, key, outcome });
        }
        let reply = lab.reply(token);
        assert!(matches!(&reply, Some(Reply::Removed { left, .. }) if *left == keys.len()), "{reply:?}");
    }
    lab.take();
}

#[test]
fn a_server_that_owes_too_many_removals_is_closed_and_refuses_nobody_s_writes() {
    let mut lab = parted();
    owe(&mut lab, 0..REMOVALS_OWED_MAX);
    let gauges = lab.machine.gauges();
    assert_eq!((gauges.removals_owed, gauges.removals_closed), (REMOVALS_OWED_MAX, 0));
    owe(&mut lab, REMOVALS_OWED_MAX..REMOVALS_OWED_MAX + 300);
    let gauges = lab.machine.gauges();
    assert_eq!((gauges.removals_owed, gauges.removals_closed), (0, 1), "they are not remembered one by one");
    let namespace = lab.spec.id(0);
    assert_eq!(lab.closed, [Closed { tier: 1, part: 0, namespace }]);
    assert!(lab.machine.unsettled(&[]).is_some(), "another depot would not know of it");
    // Values are stored in the pool and in the tiers that are not closed.
    for (hash, tiers) in [(2, vec![0]), (3, vec![0, 1])] {
        lab.put(hash);
        let (writes, removals) = lab.writes_and_removals();
        assert_eq!(writes.iter().map(|write| write.0).collect::<Vec<_>>(), tiers);
        assert!(removals.is_empty());
        for (tier, slot) in writes {
            lab.feed(Event::WriteEnded { tier, slot, outcome: Ok(Stored::New) });
        }
    }
    let token = lab.remove(2, Location::Tier(0));
    assert_eq!(lab.writes_and_removals().1, [0], "the other is not asked any more");
    lab.end_removal(0, Ok(()));
    assert!(matches!(lab.reply(token), Some(Reply::Removed { left: 1, .. })), "it may have it still");
}

#[test]
fn a_removal_behind_a_write_tells_that_a_closed_tier_may_have_the_block() {
    let mut lab = parted();
    owe(&mut lab, 0..REMOVALS_OWED_MAX + 1);
    lab.put(2);
    let (writes, _) = lab.writes_and_removals();
    assert_eq!(writes.iter().map(|write| write.0).collect::<Vec<_>>(), [0], "the second tier is closed");
    let token = lab.remove(2, Location::Absent);
    assert!(matches!(lab.reply(token), Some(Reply::Removed { left: 1, .. })), "it may have it still");
}

#[test]
fn a_namespace_with_many_debts_closes_a_server_for_itself_and_for_no_other() {
    let mut lab = parted();
    let other =
        NamespaceSpec::new("{\"model\":\"other\"}", BlockLayout::uniform(1, &[4096]).unwrap()).unwrap();
    let (few, many) = (other.id(0), lab.spec.id(0));
    lab.ask(Request::OpenNamespace { spec: other.into(), epoch: 0 });
    owe_in(&mut lab, few, 0..3);
    owe_in(&mut lab, many, 0..REMOVALS_OWED_MAX - 3);
    owe_in(&mut lab, few, 3..4);
    assert_eq!(lab.closed, [Closed { tier: 1, part: 0, namespace: many }], "it owes the most");
    let gauges = lab.machine.gauges();
    assert_eq!((gauges.removals_owed, gauges.removals_closed), (4, 1), "the other's debts are remembered");
}

#[test]
fn what_is_closed_is_not_read_and_the_tier_below_is() {
    for (hash, tier, read_from) in [(2, 1, None), (2, 0, Some(0)), (3, 1, Some(1))] {
        let mut lab = parted();
        owe(&mut lab, 0..REMOVALS_OWED_MAX + 1);
        lab.located = Location::Tier(tier);
        let hashes = vec![BlockHash([hash; 16])];
        let token = lab.send(Request::Load {
            namespace: 0,
            id: None,
            hashes,
            fetch_deadline: 1 << 40,
            last: true,
            runs_max: 9,
            in_place: false,
        });
        let read = lab.take().into_iter().find_map(|command| match command {
            Command::Read { tier, .. } => Some(tier),
            _ => None,
        });
        assert_eq!(read, read_from, "{hash} is believed to lie in tier {tier}");
        assert_eq!(lab.reply(token).is_some(), read_from.is_none(), "a miss at once");
    }
}

#[test]
fn a_reset_opens_what_was_closed() {
    let mut lab = parted();
    owe(&mut lab, 0..REMOVALS_OWED_MAX + 1);
    lab.ask(Request::EnterEpoch { namespace: 0, epoch: 1 });
    (0..TICKS).for_each(|_| lab.feed(Event::Tick));
    let gauges = lab.machine.gauges();
    assert_eq!((gauges.removals_closed, gauges.spaces), (0, gauges.namespaces));
    assert!(lab.machine.unsettled(&[]).is_none());
    lab.put(2);
    let (writes, _) = lab.writes_and_removals();
    assert_eq!(writes.iter().map(|write| write.0).collect::<Vec<_>>(), [0, 1]);
}
