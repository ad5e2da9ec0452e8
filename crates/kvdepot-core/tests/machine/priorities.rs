//! Priorities of dumped blocks in the pool.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use kvdepot_core::machine::{Adopt, Event, Placement, Reply, Request, Reserve, ShardSet, WriteWhen};
use kvdepot_core::{BlockHash, BlockKey, Priority};

use crate::lab::claim;
use crate::placement::{BLOCK, Lab, SECOND_USE, THROUGH, stored};

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
fn blocks_of_high_priority_are_spared_only_while_they_take_half_of_the_pool() {
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
    for (placement, uses) in [(THROUGH, 1), (SECOND_USE, 2)] {
        let mut lab = Lab::new(16, "lru", true, &[placement]);
        assert!(low(&mut lab, 1) && low(&mut lab, 2));
        for _ in 0..uses {
            assert_eq!((lab.writes.len(), lab.dirty()), (0, 0), "{placement:?}");
            lab.use_once(1);
        }
        assert_eq!(lab.end_writes(stored), [(0, 1)], "{placement:?}");
        lab.use_once(1);
        assert!(lab.writes.is_empty(), "{placement:?}: once");
        assert_eq!(lab.machine.counters().rewrite_blocks, 0, "no tier has lost it");
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
fn blocks_that_a_claim_held_are_evicted_first_again() {
    for policy in POLICIES {
        let mut lab = Lab::new(8, policy, true, &[]);
        (1..=4).for_each(|hash| assert!(low(&mut lab, hash)));
        let hashes = (1..=4).map(|hash| BlockHash([hash; 16])).collect();
        let Reply::Claim(claim) = lab.ask(claim(&[0], hashes)) else { panic!("no claim") };
        (11..=30).for_each(|hash| assert!(lab.dump(hash)));
        assert!((1..=4).all(|hash| lab.in_pool.contains(&hash)), "{policy}: they are held");
        lab.ask(Request::ClaimRelease { claim: claim.claim });
        assert!(lab.dump(31) && lab.dump(32));
        let left: Vec<u8> = lab.in_pool.iter().copied().filter(|&hash| hash <= 4).collect();
        assert_eq!((left, ranked(&lab)), (vec![3, 4], (2, 0)), "{policy}");
    }
}

#[test]
fn a_block_that_a_tier_evicts_is_demoted_although_it_was_dumped_again_with_low_priority() {
    let demoted = Placement { write: WriteWhen::OnDemotion, promote: false };
    let mut lab = Lab::new(4, "lru", true, &[THROUGH, demoted]);
    lab.dump(1);
    assert_eq!(lab.end_writes(stored), [(0, 1)]);
    for hash in 2..=5 {
        assert!(lab.dump(hash));
        lab.end_writes(stored);
    }
    assert!(!lab.in_pool.contains(&1));
    assert!(low(&mut lab, 1));
    let namespace = lab.machine.namespaces()[0].2;
    let key = BlockKey { namespace, hash: BlockHash([1; 16]) };
    lab.feed(Event::TierCooling { tier: 0, keys: vec![key] });
    assert_eq!(lab.end_writes(stored), [(1, 1)]);
    lab.machine.check().unwrap();
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

/// Hands the blocks of a machine over to another one, with these tiers.
fn handed_over(lab: &Lab, tiers: &[Placement]) -> Lab {
    let mut next = Lab::new(16, "lru", true, tiers);
    let (handed, rest) = lab.machine.handed(&Default::default(), 0, usize::MAX);
    assert!(rest.is_none());
    let slots = handed.into_iter().map(|handed| Adopt { handed, owners: Vec::new() }).collect();
    next.feed(Event::Adopt { pool_bytes: 16 * BLOCK, slots });
    next.machine.check().unwrap();
    next
}

#[test]
fn a_pool_is_handed_over_with_its_priorities() {
    let mut lab = Lab::new(16, "lru", true, &[THROUGH]);
    (1..=3).for_each(|hash| assert!(low(&mut lab, hash)));
    assert!(high(&mut lab, 4));
    lab.end_writes(stored);
    for tiers in [&[THROUGH] as &[Placement], &[COLD], &[SECOND_USE]] {
        let mut next = handed_over(&lab, tiers);
        assert_eq!((ranked(&next), next.writes.len(), next.dirty()), ((3, 1), 0, 0), "{tiers:?}");
        for hash in 11..=23 {
            assert!(next.dump(hash));
            let written = next.end_writes(stored);
            assert!(!written.iter().any(|(_, hash)| (1..=3).contains(hash)), "{tiers:?}: {written:?}");
        }
    }
}

#[test]
fn the_ledger_has_blocks_of_low_priority_from_their_first_use_on() {
    let mut lab = Lab::new(16, "lru", true, &[THROUGH]);
    lab.machine.keep_ledger();
    assert!(low(&mut lab, 1) && low(&mut lab, 2) && lab.dump(3));
    assert_eq!(lab.wanted, [3]);
    lab.use_once(1);
    assert!(!lab.dump(2));
    assert_eq!(lab.wanted, [3, 1, 2]);
}
