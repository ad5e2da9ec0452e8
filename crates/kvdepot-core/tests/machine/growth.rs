//! Shares of a pool that may grow: they are of the size that it may reach, since it grows before it evicts.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use crate::lab::{Lab, claim};
use kvdepot_core::BlockHash;
use kvdepot_core::machine::{
    Command, Event, Fetched, Location, Machine, Outcome, PoolConfig, Progress, Reply, Request, Reserve,
    ShardSet,
};

const BLOCK: u64 = 4096;

/// A pool in front of a tier.
fn lab(blocks: u64, blocks_max: u64) -> Lab {
    Lab::with_machine(blocks, |pool| {
        let pool = PoolConfig { pool_bytes_max: blocks_max * BLOCK, grow_step_bytes: 4 * BLOCK, ..pool };
        Machine::new(pool, 1)
    })
}

fn hashes(count: u8) -> Vec<BlockHash> {
    (0..count).map(|block| BlockHash([block; 16])).collect()
}

/// Blocks of a burst that the pool takes while its tier ends no write.
fn dumped(lab: &mut Lab, count: u8) -> usize {
    let dumped = hashes(count).into_iter().filter(|&hash| {
        let (how, hashes) = (Reserve::Block, vec![hash]);
        let reply = lab.ask(Request::Reserve { namespace: 0, id: None, hashes, how, runs_max: 9 });
        let Reply::Slots(outcomes) = reply else { panic!("no slots") };
        let [Outcome::Leased(leased)] = &outcomes[..] else { return false };
        lab.ask(Request::Commit { leases: vec![leased.lease], shards: ShardSet::All, crc64: None });
        true
    });
    dumped.count()
}

#[test]
fn a_burst_of_dumps_may_take_its_share_of_what_the_pool_may_grow_to() {
    assert_eq!(dumped(&mut lab(10, 10), 100), 7);
    let mut growing = lab(10, 100);
    assert_eq!(dumped(&mut growing, 100), 70);
    assert!(growing.machine.gauges().pool_bytes >= 70 * BLOCK);
}

#[test]
fn a_hit_larger_than_the_pool_is_whole_if_the_pool_may_grow() {
    for (blocks_max, units, cut) in [(10, 9, 1), (100, 20, 0)] {
        let mut lab = lab(10, blocks_max);
        lab.located = Location::Tier(0);
        let Reply::Claim(Progress { claim, .. }) = lab.ask(claim(&[0], hashes(20))) else {
            panic!("no claim")
        };
        for command in lab.take() {
            let Command::Read { tier, slot, .. } = command else { continue };
            lab.feed(Event::ReadEnded { tier, slot, outcome: Ok(Fetched::Whole) });
        }
        let Reply::Claim(progress) = lab.ask(Request::ClaimPoll { claim, settle: false }) else {
            panic!("no claim")
        };
        assert!(progress.settled, "at most {blocks_max} blocks");
        assert_eq!((progress.units, lab.machine.counters().claims_cut), (units, cut));
    }
}

/// Hits that wait for room get what the pool may grow by, too.
#[test]
fn a_second_hit_goes_ahead_while_the_first_one_is_leased() {
    let mut lab = lab(10, 100);
    lab.located = Location::Tier(0);
    for first in [0, 100] {
        let hashes = (first..first + 9).map(|block| BlockHash([block; 16])).collect();
        let Reply::Claim(Progress { arriving, .. }) = lab.ask(claim(&[0], hashes)) else {
            panic!("no claim")
        };
        assert_eq!(arriving.map(|arriving| arriving.units), Some(9), "blocks {first} and after");
    }
}
