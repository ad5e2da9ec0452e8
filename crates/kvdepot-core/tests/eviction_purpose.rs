//! Purpose of the eviction policies: a scan must not evict shared blocks, and leases must not slow down every eviction.

use std::collections::HashMap;

use kvdepot_core::eviction::{POLICY_NAMES, Search, by_name};
use kvdepot_core::limits::EVICTION_PASSED_OVER_MAX;
use kvdepot_core::replay::SimulatedCache;
use kvdepot_core::{EvictionPolicy, SlotId};

fn key(number: u32) -> u64 {
    u64::from(number)
}

/// Returns the result of a search that may examine every slot.
fn victim(policy: &mut dyn EvictionPolicy, may_evict: &mut dyn FnMut(SlotId) -> bool) -> Option<SlotId> {
    match policy.victim(&mut { usize::MAX }, may_evict) {
        Search::Found(slot) => Some(slot),
        Search::Nothing => None,
        Search::Later => panic!("a search without bounds ends"),
    }
}

/// Returns how many of a hot set, used in between, are left after a scan of ten times the capacity.
fn hot_after_scan(name: &str) -> usize {
    const CAPACITY: u32 = 1000;
    const HOT: u32 = 500;
    let mut policy = by_name(name).expect("a known policy");
    let mut slots: HashMap<SlotId, u32> = HashMap::new();
    for number in 0..HOT {
        policy.insert(number, key(number));
        slots.insert(number, number);
    }
    for slot in (0..HOT).chain(0..HOT) {
        policy.touch(slot);
    }
    for number in HOT..HOT + 10 * CAPACITY {
        let slot = if slots.len() < CAPACITY as usize {
            number
        } else {
            let slot = victim(&mut *policy, &mut |_| true).expect("all may go");
            policy.remove(slot);
            slot
        };
        policy.insert(slot, key(number));
        slots.insert(slot, number);
    }
    slots.values().filter(|&&number| number < HOT).count()
}

#[test]
fn a_scan_pushes_the_hot_set_out_of_lru_but_not_of_the_others() {
    assert_eq!(hot_after_scan("lru"), 0);
    assert_eq!(hot_after_scan("s3fifo"), 500);
    assert_eq!(hot_after_scan("lhd"), 500);
}

#[test]
fn a_long_row_of_leased_slots_is_paid_for_once() {
    for name in POLICY_NAMES {
        let mut policy = by_name(name).unwrap();
        let leased = 4 * EVICTION_PASSED_OVER_MAX as u32;
        for slot in 0..leased + 100 {
            policy.begin_row();
            policy.insert(slot, key(slot));
        }
        let mut asked = 0;
        for round in 0..100 {
            asked = 0;
            let victim = victim(&mut *policy, &mut |slot| {
                asked += 1;
                slot >= leased
            });
            assert_eq!(victim, Some(leased + round), "{name}");
            policy.remove(leased + round);
        }
        assert!(asked <= EVICTION_PASSED_OVER_MAX + 1, "{name} asked {asked} times");
        assert_eq!(victim(&mut *policy, &mut |_| false), None);
        assert_eq!(policy.len(), leased as usize);
    }
}

#[test]
fn a_search_of_s3fifo_ends_although_what_may_go_is_used_between_its_pieces() {
    const SLOTS: u32 = 1000;
    let mut policy = by_name("s3fifo").unwrap();
    (0..SLOTS).for_each(|slot| policy.insert(slot, key(slot)));
    // All move to the main queue.
    (0..2).for_each(|_| (0..SLOTS).for_each(|slot| policy.touch(slot)));
    assert!(victim(&mut *policy, &mut |_| true).is_some());
    let mut pieces = 0;
    let found = loop {
        // The hot ones are leased and released while the search is paused.
        (0..3).for_each(|_| (0..10).for_each(|slot| policy.touch(slot)));
        match policy.victim(&mut 50, &mut |slot| slot < 10) {
            Search::Later => pieces += 1,
            search => break search,
        }
        assert!(pieces < 200, "the search does not end");
    };
    assert!(matches!(found, Search::Found(slot) if slot < 10), "{found:?}");
}

/// Returns the number of slots examined by each call, and the result of the search, with at most `looks` per call.
fn search_in_pieces(
    policy: &mut dyn EvictionPolicy,
    looks: usize,
    may_evict: impl Fn(SlotId) -> bool,
) -> (Vec<usize>, Option<SlotId>) {
    let mut pieces = Vec::new();
    loop {
        let (mut left, mut looked_at) = (looks, 0);
        let search = policy.victim(&mut left, &mut |slot| {
            looked_at += 1;
            may_evict(slot)
        });
        assert_eq!(looked_at, looks - left);
        pieces.push(looked_at);
        match search {
            Search::Later => assert!(pieces.len() < 100_000, "the search gets on"),
            Search::Found(slot) => return (pieces, Some(slot)),
            Search::Nothing => return (pieces, None),
        }
    }
}

#[test]
fn a_search_looks_at_few_slots_at_a_time_and_still_finds_the_only_one() {
    for name in POLICY_NAMES {
        for looks in [1, 7, 1000] {
            let mut policy = by_name(name).unwrap();
            let slots = 20_000;
            (0..slots).for_each(|slot| policy.insert(slot, key(slot)));
            let (pieces, found) = search_in_pieces(&mut *policy, looks, |slot| slot == slots - 1);
            assert_eq!(found, Some(slots - 1), "{name}, {looks} at a time");
            assert!(pieces.iter().all(|&looked_at| looked_at <= looks), "{name}: {pieces:?}");
            let all: usize = pieces.iter().sum();
            assert!(all <= slots as usize + 2 * EVICTION_PASSED_OVER_MAX, "{name} looked at {all}");
            assert_eq!(search_in_pieces(&mut *policy, looks, |_| false).1, None, "{name}");
            assert_eq!(policy.len(), slots as usize);
        }
    }
}

#[test]
fn a_search_among_blocks_that_are_all_hot_looks_at_few_slots_at_a_time() {
    let mut policy = by_name("s3fifo").unwrap();
    let slots = 5_000;
    for slot in 0..slots {
        policy.insert(slot, key(slot));
        (0..3).for_each(|_| policy.touch(slot));
    }
    // All of them move to the main queue first.
    let (pieces, found) = search_in_pieces(&mut *policy, 100, |_| true);
    assert_eq!(found, Some(0));
    assert!(pieces.len() > 10 && pieces.iter().all(|&looked_at| looked_at <= 100), "{}", pieces.len());
    (0..slots).for_each(|slot| (0..3).for_each(|_| policy.touch(slot)));
    let (pieces, found) = search_in_pieces(&mut *policy, 100, |_| true);
    assert_eq!(found, Some(0), "three rounds, one use less in each");
    assert!(pieces.len() > 100 && pieces.iter().all(|&looked_at| looked_at <= 100), "{}", pieces.len());
}

#[test]
fn an_unknown_policy_is_told_the_known_ones() {
    let error = by_name("fifo").unwrap_err().to_string();
    assert!(error.contains("lru, s3fifo, lhd"), "{error}");
}

#[test]
fn a_block_that_comes_back_soon_is_kept_by_s3fifo() {
    let mut policy = by_name("s3fifo").unwrap();
    (0..10).for_each(|slot| policy.insert(slot, key(slot)));
    assert_eq!(victim(&mut *policy, &mut |_| true), Some(0));
    policy.remove(0);
    policy.insert(0, key(0));
    for slot in 1..10 {
        assert_eq!(victim(&mut *policy, &mut |_| true), Some(slot));
        policy.remove(slot);
    }
    assert_eq!(victim(&mut *policy, &mut |_| true), Some(0));
}

#[test]
fn a_doomed_block_leaves_no_ghost() {
    let mut policy = by_name("s3fifo").unwrap();
    (0..10).for_each(|slot| policy.insert(slot, key(slot)));
    policy.remove(9);
    policy.insert(9, key(9));
    (0..9).for_each(|slot| policy.remove(slot));
    policy.insert(0, key(100));
    assert_eq!(victim(&mut *policy, &mut |_| true), Some(9));
}

/// Evicts what the policy chooses, and returns it.
fn evicted(policy: &mut dyn EvictionPolicy) -> SlotId {
    policy.begin_row();
    let slot = victim(policy, &mut |_| true).expect("all may go");
    policy.remove(slot);
    slot
}

#[test]
fn lhd_evicts_the_end_of_a_prompt_before_its_beginning() {
    let mut policy = by_name("lhd").unwrap();
    for first in [0, 10] {
        policy.begin_row();
        (first..first + 10).for_each(|slot| policy.insert(slot, key(slot)));
    }
    let order: Vec<SlotId> = (0..20).map(|_| evicted(&mut *policy)).collect();
    let wanted: Vec<SlotId> = (0..10).rev().chain((10..20).rev()).collect();
    assert_eq!(order, wanted, "the older prompt goes first");
}

#[test]
fn lhd_evicts_by_last_use_before_it_has_learned_anything() {
    let mut policy = by_name("lhd").unwrap();
    for slot in 0..20 {
        policy.begin_row();
        policy.insert(slot, key(slot));
    }
    for slot in [3, 7, 3] {
        policy.begin_row();
        policy.touch(slot);
    }
    let order: Vec<SlotId> = (0..20).map(|_| evicted(&mut *policy)).collect();
    let wanted: Vec<SlotId> = (0..20).filter(|slot| ![3, 7].contains(slot)).chain([7, 3]).collect();
    assert_eq!(order, wanted);
}

/// Returns the share of hits among uses of 60 blocks at random, each followed by four blocks that are used once.
fn hits_of_hot(name: &str) -> f64 {
    const USES: u64 = 5_000;
    let mut cache = SimulatedCache::new(name, 150).expect("a known policy");
    let mut hits = 0;
    for round in 0..USES {
        let hot = u64::from((round as u32).wrapping_mul(0x9E37_79B9) >> 16) % 60;
        for block in [hot, 4 * round + 100, 4 * round + 101, 4 * round + 102, 4 * round + 103] {
            cache.begin_request();
            match cache.touch(block) {
                true => hits += 1,
                false => drop(cache.insert(block)),
            }
        }
    }
    f64::from(hits) / USES as f64
}

#[test]
fn lhd_learns_which_blocks_are_used_again() {
    let (lru, lhd) = (hits_of_hot("lru"), hits_of_hot("lhd"));
    assert!(lru < 0.4 && lhd > 0.9, "{lru} and {lhd}");
}

#[test]
fn a_doomed_block_is_not_remembered_by_lhd() {
    // After an eviction, the block that returns is of a higher class than one that is new; after a removal it is not.
    for (evicts, wanted) in [(true, 1), (false, 0)] {
        let mut policy = by_name("lhd").unwrap();
        for slot in 0..2 {
            policy.begin_row();
            policy.insert(slot, key(slot));
        }
        if evicts {
            assert_eq!(evicted(&mut *policy), 0);
        } else {
            policy.remove(0);
        }
        // One row: both are equally old. Of such the less used goes first, and of equals the last.
        policy.remove(1);
        policy.begin_row();
        policy.insert(1, key(7));
        policy.insert(0, key(0));
        assert_eq!(evicted(&mut *policy), wanted);
    }
}
