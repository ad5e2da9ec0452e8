//! P1 for values of any length: complete or absent, under overwriting, class changes, removal, eviction and restarts.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use kvdepot_core::BlockKey;
use kvdepot_core::pipeline::PoolKind;
use kvdepot_depot::message::{Request, Response};
use kvdepot_depot::values::{Found, Value, Values};
use kvdepot_depot::{Depot, DepotConfig, PoolMapping};
use kvdepot_io::faults::{Fault, FaultDevice, FaultOp, Faults};
use kvdepot_io::{Device, DirDevice, DirectUse};
use kvdepot_tier::conformance::{Script, ScriptedTier};
use kvdepot_tier::{Done, FakeTier, PosixConfig, PosixTier, Tier};
use parking_lot::Mutex;

const LONG: Duration = Duration::from_secs(120);
const POOL: u64 = 16 << 20;
/// How long a removal waits for a tier.
const REMOVE_WAIT: Duration = Duration::from_secs(2);

fn config(more: &serde_json::Value) -> DepotConfig {
    let mut value =
        serde_json::json!({"pipeline": "Cache", "pool_bytes": POOL, "timeout_ms": 60_000, "eviction": "lru"});
    for (key, entry) in more.as_object().unwrap() {
        value[key] = entry.clone();
    }
    DepotConfig::from_json(&value.to_string()).unwrap()
}

fn depot(more: serde_json::Value) -> Depot {
    Depot::start_private(config(&more)).unwrap()
}

fn on_disk(directory: &std::path::Path) -> serde_json::Value {
    serde_json::json!({"pipeline": "Cache|Posix", "posix": {"directories": [directory], "io_direct": false}})
}

/// A depot over the same directory, through a device with faults.
fn depot_on(directory: &std::path::Path, faults: &Faults) -> Depot {
    let device = Arc::new(DirDevice::open(directory, DirectUse::Never).unwrap());
    let device: Arc<dyn Device> = Arc::new(FaultDevice::new(device, faults.clone()));
    let posix = PosixConfig { directories: vec![directory.to_owned()], ..PosixConfig::default() };
    let tier = PosixTier::open_on_devices(posix, vec![device]).unwrap();
    let config = config(&on_disk(directory));
    let pool = PoolMapping::create_private(config.mapped_bytes()).unwrap();
    Depot::with_tiers(config, PoolKind::Cache, vec![Arc::new(tier)], pool).unwrap()
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

/// Length and checksum of a value: what failures print.
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

/// A value that is stored again is never absent in the meantime, although it moves between classes: neither for a
/// reader nor for a caller that asks whether it exists.
#[test]
fn a_value_that_changes_its_class_is_never_absent() {
    // In a new depot every class is empty: a lookup that has begun does not know of its first value.
    (0..60).for_each(|_| store_again_under_readers(&depot(serde_json::json!({}))));
}

#[test]
fn a_value_that_changes_its_class_is_never_absent_over_a_tier() {
    for _ in 0..10 {
        let directory = tempfile::tempdir().unwrap();
        store_again_under_readers(&depot(on_disk(directory.path())));
    }
}

fn store_again_under_readers(depot: &Depot) {
    let hash = Values::hash(b"hot");
    let values = values(depot);
    put(&values, "hot", &bytes(16 << 10, 0));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Acquire) {
                assert!(
                    !matches!(values.get_now(hash), Found::Absent),
                    "a reader was told that there is nothing"
                );
                assert!(get(&values, "hot").is_some(), "a reader found nothing");
                assert_ne!(values.exist_now(&[hash]), Some(vec![false]));
                assert_eq!(values.exist(&[hash]), [true]);
            }
        });
        for class in (1..12).chain((1..12).rev()) {
            put(&values, "hot", &bytes(class * (16 << 10), 0));
        }
        stop.store(true, Ordering::Release);
    });
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

/// A tier on another machine that answers no removal before it has all of them.
struct Together {
    wanted: usize,
    begun: Mutex<Vec<(Vec<BlockKey>, Done<()>)>>,
}

impl Script for Together {
    fn remove(&self, inner: &Arc<FakeTier>, keys: Vec<BlockKey>, done: Done<()>) {
        let mut begun = self.begun.lock();
        begun.push((keys, done));
        if begun.iter().map(|(keys, _)| keys.len()).sum::<usize>() >= self.wanted {
            begun.drain(..).for_each(|(keys, done)| inner.remove(keys, done));
        }
    }
}

/// Otherwise the deletion of many values costs a round trip to a remote tier for each of them.
#[test]
fn many_values_are_removed_at_a_time() {
    const VALUES: usize = 32;
    let end = Instant::now() + LONG;
    loop {
        let tier = Arc::new(ScriptedTier::new(Together { wanted: VALUES, begun: Mutex::default() }));
        let pool = PoolMapping::create_private(POOL).unwrap();
        let depot =
            Depot::with_tiers(config(&serde_json::json!({})), PoolKind::Cache, vec![tier], pool).unwrap();
        let values = values(&depot);
        let keys: Vec<String> = (0..VALUES).map(|i| format!("k{i}")).collect();
        keys.iter().for_each(|key| put(&values, key, &bytes(1000, 1)));
        let drained = depot.session().handle(Request::Drain { wait_ms: 120_000 });
        assert!(matches!(drained, Response::Drained(true)), "{drained:?}");
        let mut hashes: Vec<_> = keys.iter().map(|key| Values::hash(key.as_bytes())).collect();
        hashes.push(hashes[0]);
        let gone = values.remove(&hashes);
        assert!(keys.iter().all(|key| !exists(&values, key)));
        if gone == VALUES {
            break;
        }
        // On a busy machine the first removal may end its wait before the last one has begun.
        assert!(Instant::now() < end, "{gone} of {VALUES} values were removed");
    }
}

/// Values are stored again and again, in changing classes, while the tier writes, sometimes slowly: in the end the last
/// one is on the disk.
#[test]
fn the_last_value_of_a_key_is_the_one_on_disk() {
    for seed in 0..8 {
        let directory = tempfile::tempdir().unwrap();
        for round in 0..3u8 {
            let faults = Faults::seeded(seed);
            for op in [FaultOp::Create, FaultOp::Publish, FaultOp::Unlink] {
                faults.chance(op, Fault::Slow(Duration::from_millis(2)), 0.3);
            }
            let depot = depot_on(directory.path(), &faults);
            let values = values(&depot);
            let expected = round.checked_sub(1).map(|before| sum(20_000 + usize::from(before), 39));
            assert_eq!(get(&values, "key"), expected, "seed {seed}, round {round}");
            for count in 0..40u8 {
                let len = 20_000 + usize::from(count % 3) * 40_000 * usize::from(count != 39);
                put(&values, "key", &bytes(len, count));
            }
            put(&values, "key", &bytes(20_000 + usize::from(round), 39));
        }
    }
}

/// What is done with a key while the tier still writes its first value.
type Deed = fn(&Values);

/// Another value, a removal, or both come while a value is being written: the disk has what came last.
#[test]
fn what_came_last_is_on_the_disk_however_late_the_first_is_written() {
    const SMALL: usize = 20_000;
    const LARGE: usize = 100_000;
    let deeds: [(&str, Deed, Option<Sum>); 5] = [
        (
            "removed",
            |values| {
                let begun = Instant::now();
                let gone = values.remove(&[Values::hash(b"key")]);
                // On a busy machine the wait for the tier may be over before it has removed the value.
                assert!(gone == 1 || begun.elapsed() >= REMOVE_WAIT, "{gone}");
            },
            None,
        ),
        ("stored again", |values| put(values, "key", &bytes(SMALL, 2)), Some(sum(SMALL, 2))),
        ("stored larger", |values| put(values, "key", &bytes(LARGE, 2)), Some(sum(LARGE, 2))),
        (
            "stored larger, and smaller again",
            |values| {
                put(values, "key", &bytes(LARGE, 2));
                put(values, "key", &bytes(SMALL, 3));
            },
            Some(sum(SMALL, 3)),
        ),
        (
            "removed, and stored again",
            |values| {
                values.remove(&[Values::hash(b"key")]);
                put(values, "key", &bytes(SMALL, 2));
            },
            Some(sum(SMALL, 2)),
        ),
    ];
    // Returns whether it was done in less time than a removal waits for a tier.
    let is_quick = |(deed, act, expected): (&str, Deed, Option<Sum>)| {
        let directory = tempfile::tempdir().unwrap();
        let faults = Faults::seeded(1);
        let quick = {
            let depot = depot_on(directory.path(), &faults);
            let values = values(&depot);
            faults.hang(FaultOp::Write);
            put(&values, "key", &bytes(SMALL, 1));
            assert!(faults.wait_hung(1, Instant::now() + LONG), "{deed}: the first is not written");
            let begun = Instant::now();
            act(&values);
            let quick = begun.elapsed() < REMOVE_WAIT;
            assert_eq!(get(&values, "key"), expected, "{deed}: at once");
            faults.release();
            quick
        };
        let depot = depot(on_disk(directory.path()));
        assert_eq!(get(&self::values(&depot), "key"), expected, "{deed}: after a restart");
        quick
    };
    for deed in deeds {
        // This machine may stand still during one try.
        assert!((0..5).any(|_| is_quick(deed)), "{}: each try took {REMOVE_WAIT:?} or longer", deed.0);
    }
}

/// A crash between writing a value and removing the previous one, and a clock that was set back an hour in between.
#[test]
fn the_later_of_two_values_counts_although_the_clock_went_back() {
    fn files(directory: &std::path::Path) -> Vec<std::path::PathBuf> {
        let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
        entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
    }
    let directory = tempfile::tempdir().unwrap();
    let start = |now| {
        let depot = depot(on_disk(directory.path()));
        let values = Values::open_at(depot.direct(), POOL, 16 << 10, now).unwrap();
        (depot, values)
    };
    let blocks = || {
        let is_block = |path: &std::path::PathBuf| path.extension().is_some_and(|end| end == "kvb");
        files(directory.path()).into_iter().filter(is_block).collect::<Vec<_>>()
    };
    let now = SystemTime::now();
    let (depot, values) = start(now);
    put(&values, "key", &bytes(20_000, 1));
    drop(values);
    drop(depot);
    let [older] = &blocks()[..] else { panic!("one value, one file") };
    let kept = std::fs::read(older).unwrap();
    let (depot, values) = start(now - Duration::from_secs(3600));
    put(&values, "key", &bytes(50_000, 2));
    drop(values);
    drop(depot);
    assert!(!older.exists(), "the value before was removed");
    std::fs::write(older, kept).unwrap();
    let (_depot, values) = start(now - Duration::from_secs(1800));
    assert_eq!(get(&values, "key"), Some(sum(50_000, 2)));
}
