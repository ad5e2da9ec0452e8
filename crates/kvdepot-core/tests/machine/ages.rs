//! The ages that a depot reports: of the blocks that it evicts, and of its leases.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use crate::lab::Lab;
use kvdepot_core::BlockHash;
use kvdepot_core::lease::LeaseId;
use kvdepot_core::machine::{
    Command, EVICT_AGE_BOUNDS_S, Event, Outcome, Reply, Request, Reserve, ShardSet, Stored,
};

const SECOND: u64 = 1_000_000_000;

fn reserve(lab: &mut Lab, hash: u8) -> LeaseId {
    let how = Reserve::Block;
    let hashes = vec![BlockHash([hash; 16])];
    match lab.ask(Request::Reserve { namespace: 0, id: None, hashes, how, runs_max: 999 }) {
        Reply::Slots(outcomes) => match &outcomes[..] {
            [Outcome::Leased(leased)] => leased.lease,
            other => panic!("no slot: {other:?}"),
        },
        other => panic!("no slots: {other:?}"),
    }
}

fn commit(lab: &mut Lab, lease: LeaseId) {
    lab.ask(Request::Commit { leases: vec![lease], shards: ShardSet::All, crc64: None });
}

fn dump(lab: &mut Lab, hash: u8) {
    let lease = reserve(lab, hash);
    commit(lab, lease);
}

/// Also of blocks that a tier has, of which nothing else is told.
#[test]
fn evicted_blocks_count_by_the_time_that_they_were_in_the_pool() {
    let mut lab = Lab::new(2, 1);
    for (at_s, hash) in [(0, 1), (40, 2), (100, 3), (90_100, 4)] {
        lab.now = at_s * SECOND;
        dump(&mut lab, hash);
        for command in lab.take() {
            if let Command::Write { tier, slot, .. } = command {
                lab.feed(Event::WriteEnded { tier, slot, outcome: Ok(Stored::New) });
            }
        }
    }
    let ages = lab.machine.gauges().evict_ages;
    assert_eq!((ages.blocks.iter().sum::<u64>(), ages.sum_s), (2, 100 + 90_060));
    let bucket = |age_s| EVICT_AGE_BOUNDS_S.iter().position(|&bound_s| bound_s >= age_s).unwrap();
    assert_eq!((ages.blocks[bucket(100)], ages.blocks[bucket(90_060)]), (1, 1));
}

#[test]
fn the_oldest_lease_has_the_age_of_the_first_one_that_has_not_ended() {
    let mut lab = Lab::new(8, 0);
    let oldest = |lab: &Lab| {
        let gauges = lab.machine.gauges();
        (gauges.leases, gauges.lease_age_max_s)
    };
    assert_eq!(oldest(&lab), (0, 0));
    lab.now = 50 * SECOND;
    let first = reserve(&mut lab, 1);
    lab.now = 80 * SECOND;
    let second = reserve(&mut lab, 2);
    assert_eq!(oldest(&lab), (2, 30));
    lab.now = 90 * SECOND;
    commit(&mut lab, first);
    assert_eq!(oldest(&lab), (1, 10));
    lab.now = 100 * SECOND;
    lab.ask(Request::Release { leases: vec![second] });
    assert_eq!(oldest(&lab), (0, 0));
}

#[test]
fn what_tiers_evict_to_make_room_counts_by_tier() {
    let mut lab = Lab::new(2, 2);
    let keys = vec![lab.key(1), lab.key(2)];
    lab.feed(Event::TierForgot { tier: 1, keys: keys.clone(), lost: false });
    lab.feed(Event::TierForgot { tier: 1, keys, lost: true });
    assert_eq!(lab.machine.counters().tier_evict_blocks, [0, 2]);
}
