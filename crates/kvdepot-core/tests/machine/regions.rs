//! Regions of the pool: blocks lie where they are wished while there is room, and all of the pool is used.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use crate::lab::{Lab, claim};
use kvdepot_core::machine::{
    Command, Event, Location, Machine, Outcome, Owner, Placement, PoolConfig, Reply, Request, Reserve,
    ShardSet, Stored, WriteWhen,
};
use kvdepot_core::{BlockHash, RegionIndex, eviction};

const BLOCK: u64 = 4096;
/// Blocks of each of the two regions.
const EACH: u64 = 40;

/// A machine whose pool has two regions.
fn divided(tiers: usize) -> Lab {
    Lab::with_machine(2 * EACH, |pool| Machine::new(pool, tiers).with_regions(&[EACH * BLOCK, EACH * BLOCK]))
}

fn wish(lab: &mut Lab, owner: Owner, region: Option<RegionIndex>) {
    let token = lab.send_as(owner, Request::Near { region });
    assert!(matches!(lab.reply(token), Some(Reply::Done)));
}

fn hash(number: u64) -> BlockHash {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    BlockHash(bytes)
}

/// Dumps a block: the region that it lies in; none when it found no room.
fn dump(lab: &mut Lab, owner: Owner, number: u64) -> Option<u64> {
    let (hashes, how) = (vec![hash(number)], Reserve::Block);
    let token = lab.send_as(owner, Request::Reserve { namespace: 0, id: None, hashes, how, runs_max: 9 });
    let Some(Reply::Slots(outcomes)) = lab.reply(token) else { panic!("no slots") };
    let Outcome::Leased(leased) = &outcomes[0] else { return None };
    let (leases, shards) = (vec![leased.lease], ShardSet::All);
    lab.send_as(owner, Request::Commit { leases, shards, crc64: None });
    Some(leased.runs[0].offset / (EACH * BLOCK))
}

fn is_there(lab: &mut Lab, number: u64) -> bool {
    let keys = vec![kvdepot_core::BlockKey { namespace: lab.spec.id(0), hash: hash(number) }];
    let Reply::Leased(now) = lab.ask(Request::Inspect { keys }) else { panic!("no reply") };
    let kvdepot_core::machine::Now::Leased(leased) = &now[0] else { return false };
    lab.ask(Request::Release { leases: vec![leased.lease] });
    true
}

#[test]
fn a_block_lies_where_it_is_wished_and_elsewhere_before_another_one_is_evicted() {
    let mut lab = divided(0);
    wish(&mut lab, 7, Some(1));
    let regions: Vec<u64> = (0..2 * EACH).map(|number| dump(&mut lab, 7, number).unwrap()).collect();
    assert!(regions[..EACH as usize].iter().all(|&region| region == 1), "{regions:?}");
    assert!(regions[EACH as usize..].iter().all(|&region| region == 0), "{regions:?}");
    assert_eq!(lab.machine.gauges().evicted, 0);
    assert!(lab.machine.regions().iter().all(|gauge| gauge.free_bytes == 0));
}

#[test]
fn blocks_of_nobody_s_wish_are_spread() {
    let mut lab = divided(0);
    let regions: Vec<u64> = (0..10).map(|number| dump(&mut lab, 7, number).unwrap()).collect();
    assert_eq!(regions.iter().filter(|&&region| region == 0).count(), 5, "{regions:?}");
}

#[test]
fn a_wish_ends_with_its_owner_and_one_for_no_region_is_none() {
    let mut lab = divided(0);
    wish(&mut lab, 7, Some(1));
    lab.feed(Event::OwnerEnded { owner: 7 });
    wish(&mut lab, 8, Some(9));
    let regions: Vec<u64> = (0..4).map(|number| dump(&mut lab, 7 + number % 2, number).unwrap()).collect();
    assert_eq!(regions.iter().sum::<u64>(), 2, "{regions:?}");
}

/// Fills the pool: `colder` blocks of region 0, all of region 1, then the rest of region 0.
fn filled(colder: u64) -> Lab {
    fill(divided(0), colder)
}

fn fill(mut lab: Lab, colder: u64) -> Lab {
    for (region, numbers) in [(0, 0..colder), (1, colder..colder + EACH), (0, colder + EACH..2 * EACH)] {
        wish(&mut lab, 7, Some(region));
        for number in numbers {
            assert_eq!(dump(&mut lab, 7, number), Some(u64::from(region)));
        }
    }
    wish(&mut lab, 7, Some(1));
    lab
}

#[test]
fn an_eviction_takes_one_of_the_coldest_blocks_where_room_is_wished() {
    let mut lab = filled(8);
    for number in 8..12 {
        assert_eq!(dump(&mut lab, 7, 1000 + number), Some(1));
        assert!(!is_there(&mut lab, number) && is_there(&mut lab, number + 1));
    }
    assert!((0..8).all(|number| is_there(&mut lab, number)), "the colder ones stay");
    assert_eq!(lab.machine.gauges().evicted, 4);
    wish(&mut lab, 7, Some(0));
    assert_eq!(dump(&mut lab, 7, 2000), Some(0));
    assert!(!is_there(&mut lab, 0) && is_there(&mut lab, 1), "they have kept their places");
}

#[test]
fn an_eviction_takes_the_coldest_block_where_few_of_the_coldest_lie_elsewhere() {
    let mut lab = filled(EACH);
    assert_eq!(dump(&mut lab, 7, 1000), Some(0), "where room came");
    assert!(!is_there(&mut lab, 0) && is_there(&mut lab, 1) && is_there(&mut lab, EACH));
    assert_eq!(lab.machine.gauges().evicted, 1);
}

/// As `filled`, with S3-FIFO.
fn filled_by_s3fifo(colder: u64) -> Lab {
    let lab = Lab::with_machine(2 * EACH, |pool| {
        let pool = PoolConfig { policy: eviction::by_name("s3fifo").unwrap(), ..pool };
        Machine::new(pool, 0).with_regions(&[EACH * BLOCK, EACH * BLOCK])
    });
    fill(lab, colder)
}

#[test]
fn a_block_that_was_evicted_for_where_it_lies_and_comes_back_is_kept() {
    let mut lab = filled_by_s3fifo(8);
    assert_eq!(dump(&mut lab, 7, 1000), Some(1));
    assert!(!is_there(&mut lab, 8));
    dump(&mut lab, 7, 8);
    for number in 0..100 {
        assert!(dump(&mut lab, 7, 2000 + number).is_some());
    }
    assert!(is_there(&mut lab, 8), "it is in the main queue");
}

#[test]
fn a_block_in_use_is_not_evicted_for_where_it_lies() {
    let mut lab = filled_by_s3fifo(8);
    let hashes: Vec<BlockHash> = (8..10).map(hash).collect();
    for _ in 0..2 {
        let hashes = hashes.clone();
        let load = Request::Load {
            namespace: 0,
            id: None,
            hashes,
            fetch_deadline: 1,
            last: true,
            runs_max: 9,
            in_place: false,
        };
        let Reply::Slots(outcomes) = lab.ask(load) else { panic!("no slots") };
        let leased = outcomes.iter().filter_map(|outcome| match outcome {
            Outcome::Leased(leased) => Some(leased.lease),
            _ => None,
        });
        let leases: Vec<_> = leased.collect();
        assert_eq!(leases.len(), 2);
        lab.ask(Request::Release { leases });
    }
    assert_eq!(dump(&mut lab, 7, 1000), Some(1));
    assert!(is_there(&mut lab, 8) && is_there(&mut lab, 9) && !is_there(&mut lab, 10));
}

#[test]
fn a_block_that_a_tier_is_to_have_first_is_not_evicted_for_where_it_lies() {
    let cold = Placement { write: WriteWhen::WhenCold, promote: false };
    let lab = Lab::with_machine(2 * EACH, |pool| {
        let machine = Machine::new(pool, 1).with_placements(&[cold]);
        machine.with_regions(&[EACH * BLOCK, EACH * BLOCK])
    });
    let mut lab = fill(lab, 8);
    loop {
        let commands = lab.take();
        if commands.is_empty() {
            break;
        }
        for command in commands {
            let Command::Write { tier, slot, .. } = command else { continue };
            lab.feed(Event::WriteEnded { tier, slot, outcome: Ok(Stored::New) });
        }
    }
    let key = kvdepot_core::BlockKey { namespace: lab.spec.id(0), hash: hash(8) };
    lab.feed(Event::TierForgot { tier: 0, keys: vec![key], lost: false });
    assert_eq!(dump(&mut lab, 7, 1000), Some(1));
    assert!(is_there(&mut lab, 8) && !is_there(&mut lab, 9), "the tier does not have the first");
    assert_eq!(lab.machine.gauges().evicted_unwritten, 0);
}

/// Where tiers were told to read blocks to.
fn read_to(lab: &mut Lab) -> Vec<u64> {
    let region = |command: Command| match command {
        Command::Read { runs, .. } => Some(runs[0].offset / (EACH * BLOCK)),
        _ => None,
    };
    lab.take().into_iter().filter_map(region).collect()
}

#[test]
fn what_is_fetched_lies_where_the_namespace_s_user_wishes_it() {
    let mut lab = divided(1);
    lab.located = Location::Tier(0);
    wish(&mut lab, 7, Some(1));
    dump(&mut lab, 7, 0);
    lab.take();
    let load = |first: u64| Request::Load {
        namespace: 0,
        id: None,
        hashes: (first..first + 3).map(hash).collect(),
        fetch_deadline: 1 << 40,
        last: true,
        runs_max: 9,
        in_place: false,
    };
    // A scheduler's claim and prefetch have no wish of their own.
    lab.send_as(8, load(10));
    lab.send_as(8, claim(&[0], (20..23).map(hash).collect()));
    let blocks = (30..33).map(|number| (hash(number), 0)).collect();
    lab.send_as(8, Request::Prefetch { namespace: 0, blocks, deadline: 1 << 40 });
    assert_eq!(read_to(&mut lab), [1; 9]);
    // Who loads next has another wish.
    wish(&mut lab, 9, Some(0));
    lab.send_as(9, load(40));
    assert_eq!(read_to(&mut lab), [0; 3]);
}
