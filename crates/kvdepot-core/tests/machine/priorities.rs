//! Priorities of dumped blocks in the pool.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use kvdepot_core::machine::{Placement, Request, Reserve, ShardSet, WriteWhen};
use kvdepot_core::{BlockHash, Priority};

use crate::placement::{Lab, SECOND_USE, THROUGH, stored};

const POLICIES: [&str; 3] = ["lru", "s3fifo", "lhd"];
const COLD: Placement = Placement { write: WriteWhen::WhenCold, promote: false };

/// Dumps one block with a priority. Returns whether it got a slot.
fn dump(lab: &mut Lab, hash: u8, priority: Priority) -> bool {
    let (hashes, how) = (vec![BlockHash([hash; 16])], Reserve::Ranked(priority));
    let reply = lab.ask(Request::Reserve { namespace: 0, id: None, hashes, how, runs_max: 9 });
    let leases = Lab::leases(reply);
    let got = !leases.is_empty();
    lab.ask(Request::Commit { leases, shards: ShardSet::All, crc64: None });
    lab.machine.check().unwrap();
    got
}

fn low(lab: &mut Lab, hash: u8) -> bool {
    dump(lab, hash, Priority::Low)
}

fn high(lab: &mut Lab, hash: u8) -> bool {
    dump(lab, hash, Priority::High)
}

fn ranked(lab: &Lab) -> (usize, usize) {
    let gauges = lab.machine.gauges();
    (gauges.low_priority_blocks, gauges.high_priority_blocks)
}

#[test]
fn blocks_of_low_priority_are_evicted_before_all_others() {
    for policy in POLICIES {
        let mut lab = Lab::new(8, policy, true, &[]);
        (1..=5).for_each(|hash| assert!(lab.dump(hash)));
        (11..=13).for_each(|hash| assert!(low(&mut lab, hash)));
        assert!(lab.dump(6) && lab.dump(7));
        let left: Vec<u8> = lab.in_pool.iter().copied().collect();
        assert_eq!(left, [1, 2, 3, 4, 5, 6, 7, 13], "{policy}: the oldest of them first");
        assert!(low(&mut lab, 14));
        assert!((1..=7).all(|hash| lab.in_pool.contains(&hash)), "{policy}: they take each other's room");
        assert_eq!(ranked(&lab), (1, 0));
    }
}

#[test]
fn blocks_of_high_priority_are_evicted_after_all_others() {
    for policy in POLICIES {
        let mut lab = Lab::new(8, policy, true, &[]);
        (1..=4).for_each(|hash| assert!(high(&mut lab, hash)));
        (11..=60).for_each(|hash| assert!(lab.dump(hash)));
        assert!((1..=4).all(|hash| lab.in_pool.contains(&hash)), "{policy}");
        assert_eq!(ranked(&lab), (0, 4));
    }
}

#[test]
fn blocks_of_high_priority_are_spared_only_while_they_are_half_of_all() {
    for policy in POLICIES {
        let mut lab = Lab::new(8, policy, true, &[]);
        (1..=8).for_each(|hash| assert!(high(&mut lab, hash)));
        lab.use_once(1);
        (11..=30).for_each(|hash| assert!(lab.dump(hash)));
        let spared: Vec<u8> = lab.in_pool.iter().copied().filter(|&hash| hash <= 8).collect();
        assert_eq!(spared, [1, 6, 7, 8], "{policy}: the least recently used ones went");
    }
}

#[test]
fn a_leased_block_of_low_priority_stays() {
    for policy in POLICIES {
        let mut lab = Lab::new(4, policy, true, &[]);
        (1..=4).for_each(|hash| assert!(low(&mut lab, hash)));
        let leases = Lab::leases(lab.ask(lab.load(1)));
        (11..=30).for_each(|hash| assert!(lab.dump(hash)));
        assert!(lab.in_pool.contains(&1), "{policy}");
        lab.ask(Request::Release { leases });
    }
}

#[test]
fn a_use_gives_a_block_of_low_priority_the_usual_one() {
    for policy in POLICIES {
        let mut lab = Lab::new(4, policy, true, &[]);
        (1..=4).for_each(|hash| assert!(low(&mut lab, hash)));
        lab.use_once(1);
        assert_eq!(ranked(&lab), (3, 0));
        (11..=13).for_each(|hash| assert!(lab.dump(hash)));
        assert!(lab.in_pool.contains(&1), "{policy}");
    }
}

#[test]
fn blocks_of_low_priority_are_written_to_tiers_when_they_are_used() {
    for placement in [THROUGH, SECOND_USE] {
        let mut lab = Lab::new(16, "lru", true, &[placement]);
        assert!(low(&mut lab, 1) && low(&mut lab, 2));
        assert_eq!((lab.writes.len(), lab.dirty()), (0, 0), "{placement:?}");
        lab.use_once(1);
        assert_eq!(lab.end_writes(stored), [(0, 1)], "{placement:?}");
        lab.use_once(1);
        assert!(lab.writes.is_empty(), "{placement:?}: once");
    }
}

#[test]
fn blocks_of_low_priority_are_evicted_without_a_write_and_do_not_count_as_unwritten() {
    let mut lab = Lab::new(8, "lru", true, &[COLD]);
    (1..=60).for_each(|hash| assert!(low(&mut lab, hash)));
    assert!(lab.writes.is_empty());
    assert_eq!((lab.unwritten(), lab.machine.gauges().evicted), (0, 52));
}

#[test]
fn a_dump_with_a_higher_priority_raises_that_of_the_block() {
    let mut lab = Lab::new(4, "lru", true, &[THROUGH]);
    assert!(low(&mut lab, 1) && low(&mut lab, 2));
    assert!(!lab.dump(1), "the pool has it");
    assert_eq!((lab.end_writes(stored), ranked(&lab)), (vec![(0, 1)], (1, 0)));
    assert!(!low(&mut lab, 1));
    assert_eq!(ranked(&lab), (1, 0), "and is never lowered");
    assert!(!high(&mut lab, 1) && !high(&mut lab, 2));
    assert_eq!((lab.end_writes(stored), ranked(&lab)), (vec![(0, 2)], (0, 2)));
    assert!(!lab.dump(1));
    assert_eq!(ranked(&lab), (0, 2));
    lab.machine.check().unwrap();
}

#[test]
fn a_dump_raises_the_priority_of_a_block_that_another_client_fills() {
    let mut lab = Lab::new(4, "lru", true, &[THROUGH]);
    let how = Reserve::Ranked(Priority::Low);
    let hashes = || vec![BlockHash([1; 16])];
    let reply = lab.ask(Request::Reserve { namespace: 0, id: None, hashes: hashes(), how, runs_max: 9 });
    assert!(!lab.dump(1), "it is on its way");
    lab.ask(Request::Commit { leases: Lab::leases(reply), shards: ShardSet::All, crc64: None });
    assert_eq!((lab.end_writes(stored), ranked(&lab)), (vec![(0, 1)], (0, 0)));
}

#[test]
fn a_value_is_written_to_all_tiers_whatever_its_priority() {
    let mut lab = Lab::new(4, "lru", true, &[THROUGH, SECOND_USE]);
    let (hashes, how) = (vec![BlockHash([1; 16])], Reserve::Ranked(Priority::Low));
    let leases = Lab::leases(lab.ask(Request::Reserve { namespace: 0, id: None, hashes, how, runs_max: 9 }));
    lab.ask(Request::Publish { lease: leases[0], others: Vec::new() });
    assert_eq!(lab.end_writes(stored), [(0, 1), (1, 1)]);
    lab.machine.check().unwrap();
}

#[test]
fn a_pool_that_keeps_nothing_knows_no_priorities() {
    let mut lab = Lab::new(4, "lru", false, &[THROUGH]);
    assert!(low(&mut lab, 1));
    assert_eq!((lab.dirty(), lab.end_writes(stored)), (1, vec![(0, 1)]));
    assert_eq!(ranked(&lab), (0, 0));
}

#[test]
fn a_dump_that_is_given_up_leaves_no_priority() {
    let mut lab = Lab::new(4, "lru", true, &[THROUGH]);
    let (hashes, how) = (vec![BlockHash([1; 16])], Reserve::Ranked(Priority::Low));
    let reply = lab.ask(Request::Reserve { namespace: 0, id: None, hashes, how, runs_max: 9 });
    lab.ask(Request::Release { leases: Lab::leases(reply) });
    assert!(lab.dump(2), "it may get the same slot");
    assert_eq!((lab.end_writes(stored), ranked(&lab)), (vec![(0, 2)], (0, 0)));
}
