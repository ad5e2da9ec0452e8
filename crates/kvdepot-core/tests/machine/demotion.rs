//! Demotion: what a tier evicts goes to the next tier below that gets such blocks.

use kvdepot_core::machine::{Event, Fetched, Location, Placement, Request, TierIndex, WriteWhen};
use std::sync::Arc;

use kvdepot_core::{BlockHash, BlockKey, Error, ErrorKind, NamespaceSpec, VALUES_KIND};

use crate::lab::{claim, spec};
use crate::placement::{BLOCK, Lab, SECOND_USE, THROUGH, stored};

const DEMOTED: Placement = Placement { write: WriteWhen::OnDemotion, promote: false };
const IN_FLIGHT: usize = 16;

fn keys(lab: &Lab, hashes: impl IntoIterator<Item = u8>) -> Vec<BlockKey> {
    let namespace = lab.machine.namespace(0).expect("a namespace").id;
    hashes.into_iter().map(|hash| BlockKey { namespace, hash: BlockHash([hash; 16]) }).collect()
}

impl Lab {
    /// A tier reports that it is about to evict blocks.
    fn cools(&mut self, tier: TierIndex, hashes: impl IntoIterator<Item = u8>) {
        let keys = keys(self, hashes);
        self.feed(Event::TierCooling { tier, keys });
    }

    /// A tier reports that it has evicted a block.
    fn evicted(&mut self, tier: TierIndex, hash: u8) {
        let keys = keys(self, [hash]);
        self.feed(Event::TierForgot { tier, keys, lost: false });
    }

    /// Completes the only read in flight.
    fn end_read(&mut self, outcome: kvdepot_core::Result<Fetched>) {
        let [(tier, slot)] = std::mem::take(&mut self.reads)[..] else { panic!("one read") };
        self.feed(Event::ReadEnded { tier, slot, outcome });
    }

    fn demoted(&self) -> (u64, u64) {
        let counters = self.machine.counters();
        (counters.demote_blocks, counters.demote_blocks_dropped)
    }
}

#[test]
fn what_a_tier_is_about_to_evict_goes_to_the_next_tier_below_that_gets_such_blocks() {
    let mut lab = Lab::new(16, "lru", true, &[THROUGH, SECOND_USE, DEMOTED, DEMOTED]);
    lab.cools(0, [1]);
    assert_eq!(lab.reads.iter().map(|(tier, _)| *tier).collect::<Vec<_>>(), [0]);
    lab.end_read(Ok(Fetched::Whole));
    assert_eq!((lab.dirty(), lab.end_writes(stored)), (0, vec![(2, 1)]));
    lab.cools(2, [2]);
    lab.end_read(Ok(Fetched::Whole));
    assert_eq!(lab.end_writes(stored), [(3, 2)]);
    lab.cools(3, [3]);
    assert!(lab.reads.is_empty(), "there is no tier below");
    assert_eq!(lab.demoted(), (2, 0));

    let mut lab = Lab::new(16, "lru", true, &[THROUGH, THROUGH]);
    lab.cools(0, [1]);
    assert!(lab.reads.is_empty(), "no tier gets such blocks");
}

/// Otherwise the tier would keep what it is about to evict.
#[test]
fn a_read_for_demotion_is_no_use_of_the_block() {
    let mut lab = Lab::new(8, "lru", true, &[THROUGH, DEMOTED]);
    lab.cools(0, [1]);
    lab.end_read(Ok(Fetched::Whole));
    assert_eq!(lab.used_reads, 0);
    lab.fetch(2, 0);
    assert_eq!(lab.used_reads, 1);
}

#[test]
fn a_dump_a_use_and_a_fetch_are_no_demotion() {
    let mut lab = Lab::new(8, "lru", true, &[THROUGH, DEMOTED]);
    (1..=20).for_each(|hash| {
        assert!(lab.dump(hash));
        assert_eq!(lab.end_writes(stored), [(0, hash)]);
        lab.use_once(hash);
    });
    lab.fetch(1, 0);
    lab.use_once(1);
    assert!(lab.writes.is_empty(), "{:?}", lab.writes);
}

#[test]
fn a_block_of_the_pool_is_demoted_without_a_read() {
    let mut lab = Lab::new(16, "lru", true, &[THROUGH, DEMOTED]);
    (1..=2).for_each(|hash| assert!(lab.dump(hash)));
    assert_eq!(lab.end_writes(stored).len(), 2);
    lab.cools(0, [1]);
    assert_eq!((lab.reads.len(), lab.end_writes(stored)), (0, vec![(1, 1)]));
    // The tier said nothing before.
    lab.evicted(0, 2);
    assert_eq!((lab.reads.len(), lab.end_writes(stored)), (0, vec![(1, 2)]));
    lab.evicted(0, 1);
    assert!(lab.writes.is_empty(), "the tier has it");
    assert_eq!(lab.demoted(), (2, 0));
}

/// Blocks that are being read for demotion take a bounded part of the pool, and of what the tiers can do.
#[test]
fn few_blocks_are_demoted_at_a_time_and_the_others_follow() {
    let mut lab = Lab::new(160, "lru", true, &[THROUGH, DEMOTED]);
    lab.cools(0, 1..=60);
    assert_eq!(lab.reads.len(), IN_FLIGHT);
    let mut written = Vec::new();
    while !lab.reads.is_empty() {
        assert!(lab.reads.len() <= IN_FLIGHT);
        for (tier, slot) in std::mem::take(&mut lab.reads) {
            lab.feed(Event::ReadEnded { tier, slot, outcome: Ok(Fetched::Whole) });
        }
        written.extend(lab.end_writes(stored));
    }
    written.extend(lab.end_writes(stored));
    assert_eq!(written, (1..=60).map(|hash| (1, hash)).collect::<Vec<_>>());
    assert_eq!(lab.machine.gauges().held.pinned, 0);
}

/// Dumps and loads need room, too.
#[test]
fn demotions_take_an_eighth_of_the_pool_at_a_time_or_one_block() {
    for (blocks, reads) in [(64, 8), (16, 2), (4, 1)] {
        let mut lab = Lab::new(blocks, "lru", true, &[THROUGH, DEMOTED]);
        lab.cools(0, 1..=20);
        assert_eq!(lab.reads.len(), reads, "a pool of {blocks} blocks");
    }
}

/// P1: another depot that shares the tier below may have replaced or removed the value there.
#[test]
fn values_are_not_demoted() {
    let mut lab = Lab::new(16, "lru", true, &[THROUGH, DEMOTED]);
    let facts = format!("{{\"kind\":\"{VALUES_KIND}\",\"format\":1}}");
    let spec = NamespaceSpec::new(&facts, spec().layout().clone()).expect("a description");
    assert!(spec.holds_values() && !crate::lab::spec().holds_values());
    let namespace = spec.id(0);
    lab.ask(Request::OpenNamespace { spec: Arc::new(spec), epoch: 0 });
    let keys = vec![BlockKey { namespace, hash: BlockHash([1; 16]) }];
    lab.feed(Event::TierCooling { tier: 0, keys: keys.clone() });
    assert!(lab.reads.is_empty());
    // Fetched for a reader, and evicted from its tier meanwhile.
    lab.location = Location::Tier(0);
    let hashes = vec![BlockHash([1; 16])];
    let (fetch_deadline, runs_max) = (1 << 40, 9);
    let load = Request::Load {
        namespace: 1,
        id: None,
        hashes,
        fetch_deadline,
        last: true,
        runs_max,
        in_place: false,
    };
    lab.send(load);
    lab.end_read(Ok(Fetched::Whole));
    lab.feed(Event::TierForgot { tier: 0, keys, lost: false });
    assert!(lab.writes.is_empty(), "{:?}", lab.writes);
}

#[test]
fn no_more_is_read_than_the_tier_below_can_take() {
    let mut lab = Lab::new(250, "lru", true, &[THROUGH, DEMOTED]);
    lab.cools(0, 1..=200);
    let mut read = 0;
    while !lab.reads.is_empty() {
        read += lab.reads.len();
        for (tier, slot) in std::mem::take(&mut lab.reads) {
            lab.feed(Event::ReadEnded { tier, slot, outcome: Ok(Fetched::Whole) });
        }
    }
    let (writes_in_flight, reads_when_it_stopped) = (32, IN_FLIGHT);
    assert!(read <= writes_in_flight + IN_FLIGHT + reads_when_it_stopped, "{read}");
    assert_eq!(lab.writes.len(), writes_in_flight, "the tier ends none of them");
    lab.end_writes(stored);
    assert!(!lab.reads.is_empty(), "and goes on");
}

#[test]
fn demotion_waits_while_the_pool_is_in_use() {
    let mut lab = Lab::new(4, "lru", true, &[THROUGH, DEMOTED]);
    lab.location = Location::Tier(0);
    let tokens: Vec<u64> = (101..=104).map(|hash| lab.send(lab.load(hash))).collect();
    for (tier, slot) in std::mem::take(&mut lab.reads) {
        lab.feed(Event::ReadEnded { tier, slot, outcome: Ok(Fetched::Whole) });
    }
    lab.cools(0, [1]);
    assert!(lab.reads.is_empty(), "all of the pool is leased");
    let at = lab.replies.iter().position(|(token, _)| *token == tokens[0]).expect("an answer");
    let leases = Lab::leases(lab.replies.remove(at).1);
    lab.ask(Request::Release { leases });
    assert_eq!(lab.reads.len(), 1, "as soon as there is room");
}

/// It would take the room that the claim waits for.
#[test]
fn demotion_waits_behind_a_claim_that_waits_for_room() {
    let mut lab = Lab::new(4, "lru", true, &[THROUGH, DEMOTED]);
    lab.location = Location::Tier(0);
    let tokens: Vec<u64> = (101..=103).map(|hash| lab.send(lab.load(hash))).collect();
    for (tier, slot) in std::mem::take(&mut lab.reads) {
        lab.feed(Event::ReadEnded { tier, slot, outcome: Ok(Fetched::Whole) });
    }
    lab.send(claim(&[0], vec![BlockHash([1; 16]), BlockHash([2; 16])]));
    assert_eq!(lab.machine.gauges().claims_queued, 1);
    lab.cools(0, [3]);
    assert!(lab.reads.is_empty(), "the claim needs two blocks, and one is free");
    let at = lab.replies.iter().position(|(token, _)| *token == tokens[0]).expect("an answer");
    let leases = Lab::leases(lab.replies.remove(at).1);
    lab.ask(Request::Release { leases });
    assert_eq!((lab.reads.len(), lab.machine.gauges().claims_queued), (2, 0), "those of the claim");
}

#[test]
fn a_block_that_is_gone_before_it_is_read_is_looked_for_nowhere_else() {
    let mut lab = Lab::new(16, "lru", true, &[THROUGH, SECOND_USE, DEMOTED]);
    lab.cools(0, [1]);
    lab.end_read(Ok(Fetched::Miss));
    lab.cools(0, [2]);
    lab.end_read(Err(Error::new(ErrorKind::Io, "a bad sector")));
    assert!(lab.reads.is_empty() && lab.writes.is_empty());
    assert_eq!((lab.demoted(), lab.machine.gauges().pool_blocks), ((0, 2), 0));
    let misses = |(op, kind, _): &&(&str, ErrorKind, u64)| *op == "fetch" && *kind == ErrorKind::NotFound;
    assert_eq!(lab.machine.counters().failures.iter().find(misses), None, "it was evicted, not lost");
}

#[test]
fn a_load_of_a_block_that_is_being_demoted_is_served_and_asks_the_tiers_below() {
    let mut lab = Lab::new(16, "lru", true, &[THROUGH, DEMOTED]);
    for outcome in [Fetched::Whole, Fetched::Miss] {
        lab.location = Location::Absent;
        lab.cools(0, [1]);
        let token = lab.send(lab.load(1));
        assert_eq!(lab.reads.len(), 1, "one read for both");
        lab.end_read(Ok(outcome));
        if outcome == Fetched::Miss {
            assert_eq!(lab.reads[0].0, 1, "somebody waits for it");
            lab.end_read(Ok(Fetched::Whole));
            assert!(lab.writes.is_empty(), "the tier below has it");
        } else {
            assert_eq!(lab.end_writes(stored), [(1, 1)]);
        }
        let at = lab.replies.iter().position(|(other, _)| *other == token).expect("an answer");
        let leases = Lab::leases(lab.replies.remove(at).1);
        assert_eq!(leases.len(), 1);
        lab.ask(Request::Release { leases });
        lab.ask(Request::EvictTo { bytes: 0 });
    }
}

/// P1: what a reset or a removal took away must not come back in another tier.
#[test]
fn a_block_that_was_reset_or_removed_is_not_demoted() {
    for removed in [false, true] {
        let mut lab = Lab::new(16, "lru", true, &[THROUGH, DEMOTED]);
        lab.cools(0, [1]);
        let old = keys(&lab, [1, 2]);
        if removed {
            lab.location = Location::Tier(0);
            lab.send(Request::Remove { keys: old.clone(), locations: vec![Location::Tier(0); 2] });
        } else {
            lab.ask(Request::EnterEpoch { namespace: 0, epoch: 1 });
        }
        lab.feed(Event::TierCooling { tier: 0, keys: old });
        lab.end_read(Ok(Fetched::Whole));
        assert!(lab.reads.is_empty() && lab.writes.is_empty(), "removed: {removed}");
        assert_eq!(lab.machine.gauges().pool_blocks, 0);
    }
}

#[test]
fn nothing_is_read_for_a_tier_that_is_down_or_beyond_its_budget() {
    let mut lab = Lab::new(16, "lru", true, &[THROUGH, DEMOTED]);
    for down in [0, 1] {
        lab.feed(Event::WentDown { tier: down });
        lab.cools(0, [1]);
        assert!(lab.reads.is_empty());
        lab.feed(Event::CameBack { tier: down });
    }
    assert_eq!(lab.demoted(), (0, 2));
    lab.cools(0, [1]);
    assert_eq!(lab.reads.len(), 1);

    let mut lab = Lab::with_budgets(16, "lru", true, &[THROUGH, DEMOTED], &[0, 1]);
    lab.cools(0, [1]);
    lab.end_read(Ok(Fetched::Whole));
    lab.cools(0, [2]);
    assert_eq!((lab.reads.len(), lab.machine.counters().over_budget_blocks), (0, 1));
    assert_eq!(lab.end_writes(stored), [(1, 1)]);
}

#[test]
fn a_depot_that_is_handing_over_its_pool_demotes_nothing() {
    let mut lab = Lab::new(16, "lru", true, &[THROUGH, DEMOTED]);
    lab.feed(Event::Freeze);
    lab.cools(0, [1]);
    assert!(lab.reads.is_empty());
    lab.feed(Event::Thaw);
    assert_eq!(lab.reads.len(), 1);
}

#[test]
fn a_pool_that_keeps_nothing_writes_through_instead() {
    let mut lab = Lab::new(16, "lru", false, &[THROUGH, DEMOTED]);
    assert!(lab.dump(1));
    assert_eq!(lab.end_writes(stored), [(0, 1), (1, 1)]);
    lab.cools(0, [1]);
    assert!(lab.reads.is_empty());
    assert_eq!(lab.machine.gauges().pool_free_bytes, 16 * BLOCK);
}
