//! Regions of the pool: blocks lie where they are wished while there is room, and all of the pool is used.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

mod lab;

use kvdepot_core::machine::{
    ClaimGroup, Command, Event, Location, Machine, Outcome, Owner, Reply, Request, Reserve, ShardSet,
};
use kvdepot_core::{BlockHash, GroupShape, RegionIndex};
use lab::Lab;

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
    let mut lab = divided(0);
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
fn an_eviction_takes_the_coldest_block_wherever_it_lies() {
    let mut lab = filled(8);
    assert_eq!(dump(&mut lab, 7, 1000), Some(0), "where room came");
    assert!(!is_there(&mut lab, 0) && is_there(&mut lab, 1) && is_there(&mut lab, 8));
    assert_eq!(lab.machine.gauges().evicted, 1);
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
    };
    // A scheduler's claim and prefetch have no wish of their own.
    lab.send_as(8, load(10));
    let shape = GroupShape { window_blocks: 0, units_per_block: 1 };
    lab.send_as(
        8,
        Request::ClaimOpen {
            groups: vec![ClaimGroup { namespaces: vec![0], shape }],
            hashes: (20..23).map(hash).collect(),
            skip: 0,
            limit: 3,
            deadline: 1 << 40,
            patience: 1 << 40,
            label: None,
        },
    );
    let blocks = (30..33).map(|number| (hash(number), 0)).collect();
    lab.send_as(8, Request::Prefetch { namespace: 0, blocks, deadline: 1 << 40 });
    assert_eq!(read_to(&mut lab), [1; 9]);
    // Who loads next has another wish.
    wish(&mut lab, 9, Some(0));
    lab.send_as(9, load(40));
    assert_eq!(read_to(&mut lab), [0; 3]);
}
