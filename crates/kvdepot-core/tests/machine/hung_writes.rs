//! Writes that hang in a tier: they fail after a while, and neither stop other writes nor keep dumps out of the pool (P2).
//! Their slots stay as they are until the tier has ended them (P4).
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use crate::lab::Lab;
use kvdepot_core::machine::{Event, Location, Machine, Outcome, Reply, Request, Reserve, ShardSet, Stored};
use kvdepot_core::{BlockHash, Error, ErrorKind, SlotId};

const PATIENCE: u64 = 1_000;
const BLOCK: u64 = 4096;
/// Writes that are in flight at a tier.
const TURNS: usize = 32;

fn lab(blocks: u64, tiers: usize) -> Lab {
    Lab::with_machine(blocks, |pool| Machine::new(pool, tiers).with_write_patience(PATIENCE))
}

/// Dumps a block. Returns whether the pool took it.
fn dump(lab: &mut Lab, hash: u8) -> bool {
    let hashes = vec![BlockHash([hash; 16])];
    let how = Reserve::Block;
    let reply = lab.ask(Request::Reserve { namespace: 0, id: None, hashes, how, runs_max: 9 });
    let Reply::Slots(outcomes) = reply else { panic!("no slots") };
    let [Outcome::Leased(leased)] = &outcomes[..] else { return false };
    lab.ask(Request::Commit { leases: vec![leased.lease], shards: ShardSet::All, crc64: None });
    lab.machine.check().unwrap();
    true
}

/// Lets the writes in flight hang.
fn hang(lab: &mut Lab) {
    lab.now += PATIENCE;
    lab.feed(Event::Tick);
    lab.machine.check().unwrap();
}

/// Slots of the writes to a tier that were commanded since the last look.
fn writes(lab: &mut Lab, tier: usize) -> Vec<SlotId> {
    let (writes, _) = lab.writes_and_removals();
    writes.into_iter().filter(|write| write.0 == tier).map(|write| write.1).collect()
}

fn end(lab: &mut Lab, tier: usize, slot: SlotId, outcome: kvdepot_core::Result<Stored>) {
    lab.feed(Event::WriteEnded { tier, slot, outcome });
    lab.machine.check().unwrap();
}

fn timeouts(lab: &Lab) -> u64 {
    let failures = &lab.machine.counters().failures;
    failures
        .iter()
        .filter(|failure| failure.0 == "write" && failure.1 == ErrorKind::Timeout)
        .map(|f| f.2)
        .sum()
}

#[test]
fn dumps_go_on_while_all_writes_of_a_tier_hang_and_writes_when_it_is_back() {
    let mut lab = lab(100, 1);
    let taken = (0..100).filter(|&hash| dump(&mut lab, hash)).count();
    assert_eq!(taken, 70, "the share that may be dirty");
    let hung = writes(&mut lab, 0);
    assert_eq!(hung.len(), TURNS);
    lab.now += PATIENCE - 1;
    lab.feed(Event::Tick);
    assert!(!dump(&mut lab, 100), "they may still end");
    hang(&mut lab);
    assert_eq!(timeouts(&lab), TURNS as u64);
    let held = lab.machine.gauges().held;
    assert_eq!((held.dirty, held.pinned), (0, TURNS as u64 * BLOCK));
    assert!((100..200).all(|hash| dump(&mut lab, hash)), "dumps are taken as long as it hangs");
    assert!(writes(&mut lab, 0).is_empty(), "the tier could pin the whole pool");
    for (at, slot) in hung.iter().enumerate() {
        let late = || Err(Error::new(ErrorKind::Timeout, "late"));
        end(&mut lab, 0, *slot, if at % 2 == 0 { Ok(Stored::New) } else { late() });
    }
    assert_eq!(timeouts(&lab), TURNS as u64, "each has failed once");
    assert_eq!(lab.machine.counters().write_blocks, TURNS as u64 / 2, "what it stored after all");
    assert_eq!(lab.machine.gauges().held.pinned, 0);
    assert!(dump(&mut lab, 200));
    assert_eq!(writes(&mut lab, 0).len(), 1, "it is written to again");
}

#[test]
fn hung_writes_leave_turns_to_those_that_may_end() {
    // In a large pool, a few hung writes do not keep others back.
    let mut lab = lab(1_000, 1);
    assert!((0..TURNS as u8 / 2).all(|hash| dump(&mut lab, hash)));
    assert_eq!(writes(&mut lab, 0).len(), TURNS / 2);
    hang(&mut lab);
    assert!((100..200).all(|hash| dump(&mut lab, hash)));
    assert_eq!(writes(&mut lab, 0).len(), TURNS, "all turns");
    hang(&mut lab);
    assert!((200..250).all(|hash| dump(&mut lab, hash)));
    assert!(writes(&mut lab, 0).is_empty(), "too many hang now");
    assert_eq!(lab.machine.gauges().held.dirty, 0);
}

#[test]
fn another_tier_gets_what_one_that_hangs_does_not() {
    let mut lab = lab(100, 2);
    let mut ended = 0;
    for hash in 0..200 {
        if hash == 60 {
            hang(&mut lab);
        }
        assert!(dump(&mut lab, hash), "block {hash}");
        for slot in writes(&mut lab, 1) {
            end(&mut lab, 1, slot, Ok(Stored::New));
            ended += 1;
        }
    }
    assert_eq!(ended, 200);
    assert_eq!(lab.machine.counters().write_blocks_dropped, 0, "one tier has each of them");
}

#[test]
fn a_drain_ends_without_writes_that_hang() {
    let mut lab = lab(8, 1);
    assert!(dump(&mut lab, 1));
    let token = lab.send(Request::Drain { last: false });
    assert!(lab.reply(token).is_none());
    hang(&mut lab);
    assert!(matches!(lab.reply(token), Some(Reply::Drained(true))));
}

#[test]
fn the_slot_of_a_hung_write_is_not_used_again_before_it_ends() {
    let mut lab = lab(4, 1);
    assert!(dump(&mut lab, 1));
    let slot = writes(&mut lab, 0)[0];
    hang(&mut lab);
    // Neither by eviction nor because its block was removed.
    assert!((10..20).all(|hash| dump(&mut lab, hash)));
    assert!(lab.machine.gauges().held.pinned == BLOCK);
    lab.remove(1, Location::Absent);
    assert!((20..30).all(|hash| dump(&mut lab, hash)));
    assert_eq!(lab.machine.gauges().held.pinned, BLOCK);
    let (_, removals) = lab.writes_and_removals();
    assert!(removals.is_empty(), "the write may store it yet");
    end(&mut lab, 0, slot, Ok(Stored::New));
    assert_eq!(lab.writes_and_removals().1, [0]);
    assert_eq!(lab.machine.gauges().held.pinned, 0);
}

#[test]
fn a_value_replaced_while_its_write_hangs_is_written_after_it() {
    let mut lab = lab(100, 1);
    lab.put(1);
    let first = writes(&mut lab, 0)[0];
    hang(&mut lab);
    lab.put(1);
    assert_eq!(lab.writes_and_removals(), (vec![], vec![]), "the hung write could store the earlier value");
    end(&mut lab, 0, first, Ok(Stored::New));
    let second = writes(&mut lab, 0);
    assert_eq!(second.len(), 1);
    assert_ne!(second[0], first);
}

#[test]
fn a_value_whose_hung_write_did_not_replace_the_earlier_one_is_removed_from_the_tier() {
    for outcome in [Ok(Stored::AlreadyThere), Err(Error::new(ErrorKind::Io, "a write failed"))] {
        let mut lab = lab(100, 2);
        lab.put(1);
        let slot = writes(&mut lab, 0)[0];
        hang(&mut lab);
        end(&mut lab, 1, slot, Err(Error::new(ErrorKind::Io, "a write failed")));
        assert!(lab.writes_and_removals().1.is_empty(), "the first tier could store it after its removal");
        end(&mut lab, 0, slot, outcome);
        assert_eq!(lab.writes_and_removals().1, [0, 1]);
    }
}

#[test]
fn a_block_whose_write_hangs_is_written_again_by_a_use_after_its_end() {
    let mut lab = lab(100, 1);
    assert!(dump(&mut lab, 1));
    let slot = writes(&mut lab, 0)[0];
    hang(&mut lab);
    for has_ended in [false, true] {
        if has_ended {
            end(&mut lab, 0, slot, Err(Error::new(ErrorKind::Io, "a write failed")));
        }
        lab.now += 60_000_000_000;
        let hashes = vec![BlockHash([1; 16])];
        let (namespace, id, fetch_deadline) = (0, None, lab.now);
        let (last, runs_max, in_place) = (true, 9, false);
        lab.ask(Request::Load { namespace, id, hashes, fetch_deadline, last, runs_max, in_place });
        assert_eq!(writes(&mut lab, 0).len(), usize::from(has_ended));
        assert_eq!(lab.machine.counters().rewrite_blocks, u64::from(has_ended));
    }
}
