//! What the eviction policies are for: a scan must not push out what is shared, nor leases cost every eviction.

use std::collections::HashMap;

use kvdepot_core::SlotId;
use kvdepot_core::eviction::by_name;
use kvdepot_core::limits::EVICTION_PASSED_OVER_MAX;

fn key(number: u32) -> u64 {
    u64::from(number)
}

/// How many of a hot set, used in between, are left after a scan of ten times the capacity.
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
            let slot = policy.victim(&mut |_| true).expect("all may go");
            policy.remove(slot);
            slot
        };
        policy.insert(slot, key(number));
        slots.insert(slot, number);
    }
    slots.values().filter(|&&number| number < HOT).count()
}

#[test]
fn a_scan_pushes_the_hot_set_out_of_lru_but_not_of_s3fifo() {
    assert_eq!(hot_after_scan("lru"), 0);
    assert_eq!(hot_after_scan("s3fifo"), 500);
}

#[test]
fn a_long_row_of_leased_slots_is_paid_for_once() {
    for name in ["lru", "s3fifo"] {
        let mut policy = by_name(name).unwrap();
        let leased = 4 * EVICTION_PASSED_OVER_MAX as u32;
        (0..leased + 100).for_each(|slot| policy.insert(slot, key(slot)));
        let mut asked = 0;
        for round in 0..100 {
            asked = 0;
            let victim = policy.victim(&mut |slot| {
                asked += 1;
                slot >= leased
            });
            assert_eq!(victim, Some(leased + round), "{name}");
            policy.remove(leased + round);
        }
        assert!(asked <= EVICTION_PASSED_OVER_MAX + 1, "{name} asked {asked} times");
        assert_eq!(policy.victim(&mut |_| false), None);
        assert_eq!(policy.len(), leased as usize);
    }
}

#[test]
fn an_unknown_policy_is_told_the_known_ones() {
    let error = by_name("fifo").unwrap_err().to_string();
    assert!(error.contains("lru, s3fifo"), "{error}");
}

#[test]
fn a_block_that_comes_back_soon_is_kept_by_s3fifo() {
    let mut policy = by_name("s3fifo").unwrap();
    (0..10).for_each(|slot| policy.insert(slot, key(slot)));
    assert_eq!(policy.victim(&mut |_| true), Some(0));
    policy.remove(0);
    policy.insert(0, key(0));
    for slot in 1..10 {
        assert_eq!(policy.victim(&mut |_| true), Some(slot));
        policy.remove(slot);
    }
    assert_eq!(policy.victim(&mut |_| true), Some(0));
}

#[test]
fn a_doomed_block_leaves_no_ghost() {
    let mut policy = by_name("s3fifo").unwrap();
    (0..10).for_each(|slot| policy.insert(slot, key(slot)));
    policy.remove(9);
    policy.insert(9, key(9));
    (0..9).for_each(|slot| policy.remove(slot));
    policy.insert(0, key(100));
    assert_eq!(policy.victim(&mut |_| true), Some(9));
}
