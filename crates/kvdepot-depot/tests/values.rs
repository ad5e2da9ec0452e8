//! P1 for values of any length: whole or absent, under overwriting, class changes, removal, eviction and restarts.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use std::time::Duration;

use kvdepot_depot::values::{Found, Value, Values};
use kvdepot_depot::{Depot, DepotConfig};

const LONG: Duration = Duration::from_secs(20);
const POOL: u64 = 16 << 20;

fn depot(more: serde_json::Value) -> Depot {
    let mut value =
        serde_json::json!({"pipeline": "Cache", "pool_bytes": POOL, "timeout_ms": 10_000, "eviction": "lru"});
    for (key, entry) in more.as_object().unwrap() {
        value[key] = entry.clone();
    }
    Depot::start_private(DepotConfig::from_json(&value.to_string()).unwrap()).unwrap()
}

fn on_disk(directory: &std::path::Path) -> serde_json::Value {
    serde_json::json!({"pipeline": "Cache|Posix", "posix": {"directories": [directory], "io_direct": false}})
}

fn values(depot: &Depot) -> Values {
    Values::open(depot.direct(), POOL, 16 << 10).unwrap()
}

fn bytes(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(7) ^ (i >> 8) as u8 ^ seed).collect()
}

fn put(values: &Values, key: &str, value: &[u8]) {
    let mut slot = values.reserve(Values::hash(key.as_bytes()), value.len() as u64).unwrap();
    let mut at = 0;
    for mut piece in slot.io_slices_mut(0, value.len()) {
        let len = piece.len();
        piece.copy_from_slice(&value[at..at + len]);
        at += len;
    }
    assert_eq!(at, value.len());
    slot.publish().unwrap();
}

/// Length and checksum: what failures print of a value.
type Sum = (usize, u64);

fn sum(len: usize, seed: u8) -> Sum {
    (len, kvdepot_io::checksum::crc64(&bytes(len, seed)))
}

fn content(value: &Value) -> Sum {
    let bytes: Vec<u8> = value.io_slices(0, value.len()).iter().flat_map(|piece| piece.to_vec()).collect();
    (bytes.len(), kvdepot_io::checksum::crc64(&bytes))
}

fn get(values: &Values, key: &str) -> Option<Sum> {
    values.get(Values::hash(key.as_bytes()), LONG).unwrap().map(|value| content(&value))
}

fn exists(values: &Values, key: &str) -> bool {
    values.exist(&[Values::hash(key.as_bytes())])[0]
}

#[test]
fn values_of_all_lengths_come_back_exactly() {
    let depot = depot(serde_json::json!({}));
    let values = values(&depot);
    for len in [0, 1, 63, 4096, 16_384, 16_385, 65_536, 100_000, 1 << 20, 3_000_001] {
        let value = bytes(len, 3);
        put(&values, "key", &value);
        assert_eq!(get(&values, "key").unwrap(), sum(len, 3), "{len} bytes");
        assert_eq!(values.count().unwrap(), 1, "each length replaced the one before");
    }
    let large = values.reserve(Values::hash(b"large"), POOL).unwrap_err();
    assert_eq!(large.kind(), kvdepot_core::ErrorKind::NoSpace);
    assert_eq!(get(&values, "other"), None);
}

#[test]
fn a_reader_keeps_what_it_leased_while_the_key_is_stored_again() {
    let depot = depot(serde_json::json!({}));
    let values = values(&depot);
    let hash = Values::hash(b"key");
    put(&values, "key", &bytes(50_000, 1));
    let Found::Here(old) = values.get_now(hash) else { panic!("it was stored") };
    // The same class, another one, and back.
    for (len, seed) in [(50_000, 2), (200_000, 3), (50_000, 4)] {
        put(&values, "key", &bytes(len, seed));
        assert_eq!(content(&old), sum(50_000, 1));
        assert_eq!(get(&values, "key").unwrap(), sum(len, seed));
    }
    values.remove(&[hash]);
    assert_eq!(content(&old), sum(50_000, 1));
    assert!(!exists(&values, "key"));
    drop(old);
    let stats = depot.direct().stats();
    assert_eq!((&stats["pool_leased_bytes"], &stats["pool_blocks"]), (&0.into(), &0.into()));
    assert_eq!(stats["pool_free_bytes"], POOL);
}

#[test]
fn a_value_that_is_not_published_was_never_there() {
    let depot = depot(serde_json::json!({}));
    let values = values(&depot);
    put(&values, "key", &bytes(1000, 1));
    let slot = values.reserve(Values::hash(b"key"), 2000).unwrap();
    let unborn = values.reserve(Values::hash(b"unborn"), 2000).unwrap();
    assert_eq!(get(&values, "key").unwrap(), sum(1000, 1));
    assert!(!exists(&values, "unborn"));
    drop((slot, unborn));
    assert_eq!(get(&values, "key").unwrap(), sum(1000, 1));
    assert_eq!(depot.direct().stats()["pool_filling_bytes"], 0);
}

#[test]
fn what_is_cold_goes_when_the_pool_is_full() {
    let depot = depot(serde_json::json!({}));
    let values = values(&depot);
    for i in 0..100 {
        put(&values, &format!("k{i}"), &bytes(400_000, i));
    }
    assert_eq!(get(&values, "k0"), None);
    assert_eq!(get(&values, "k99").unwrap(), sum(400_000, 99));
    let direct = depot.direct();
    assert!(direct.used_percent() > 80.0);
    assert!(direct.evict_to_percent(50.0) > 0);
    assert!(direct.used_percent() <= 50.0);
    assert_eq!(get(&values, "k99").unwrap(), sum(400_000, 99));
}

#[test]
fn a_pool_that_may_grow_does_so_before_it_evicts() {
    let depot = depot(serde_json::json!({"pool_bytes_max": 3 * POOL, "pool_grow_bytes": POOL}));
    let values = values(&depot);
    for i in 0..100 {
        put(&values, &format!("k{i}"), &bytes(400_000, i));
    }
    assert_eq!(get(&values, "k0").unwrap(), sum(400_000, 0));
    assert_eq!(depot.direct().stats()["pool_bytes"], 3 * POOL);
    for i in 100..200 {
        put(&values, &format!("k{i}"), &bytes(400_000, i));
    }
    assert_eq!(get(&values, "k1"), None);
    assert_eq!(depot.direct().stats()["pool_bytes"], 3 * POOL, "and no further");
}

#[test]
fn values_survive_a_restart_in_the_tier() {
    let directory = tempfile::tempdir().unwrap();
    {
        let depot = depot(on_disk(directory.path()));
        let values = values(&depot);
        for i in 0..20u8 {
            put(&values, &format!("k{i}"), &bytes(1000 + usize::from(i) * 9000, i));
        }
        put(&values, "k3", &bytes(500_000, 99));
        put(&values, "k4", &bytes(1000 + 4 * 9000, 98));
        values.remove(&[Values::hash(b"k5")]);
    }
    let depot = depot(on_disk(directory.path()));
    let values = Values::open(depot.direct(), POOL, 64 << 10).unwrap();
    for i in 0..20u8 {
        let expected = match i {
            3 => Some(sum(500_000, 99)),
            4 => Some(sum(1000 + 4 * 9000, 98)),
            5 => None,
            _ => Some(sum(1000 + usize::from(i) * 9000, i)),
        };
        assert_eq!(get(&values, &format!("k{i}")), expected, "k{i}");
        assert_eq!(exists(&values, &format!("k{i}")), expected.is_some(), "k{i}");
    }
    assert_eq!(values.count().unwrap(), 19);
    assert_eq!(values.purge().unwrap(), 19);
    assert_eq!((get(&values, "k1"), values.count().unwrap()), (None, 0));
    put(&values, "k1", &bytes(10, 1));
    assert_eq!(get(&values, "k1").unwrap(), sum(10, 1));
}

/// Values stored again and again, in changing classes, while the tier writes: in the end the last one is on the disk.
#[test]
fn the_last_value_of_a_key_is_the_one_on_disk() {
    let directory = tempfile::tempdir().unwrap();
    for round in 0..3u8 {
        let depot = depot(on_disk(directory.path()));
        let values = values(&depot);
        if round > 0 {
            assert_eq!(get(&values, "key").unwrap(), sum(20_000 + usize::from(round - 1), 39));
        }
        for seed in 0..40u8 {
            put(
                &values,
                "key",
                &bytes(20_000 + usize::from(seed % 3) * 40_000 * usize::from(seed != 39), seed),
            );
        }
        put(&values, "key", &bytes(20_000 + usize::from(round), 39));
    }
}
