//! P5: a full disk makes the tier evict and go on, no matter who filled it; and a share of the disk stays free.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::sync::Arc;
use std::time::Duration;

use crate::common::{config, disk_bytes, files_with, on_every_engine, open_faulty};
use kvdepot_core::{BlockKey, ErrorKind};
use kvdepot_io::faults::{Fault, FaultOp, Faults};
use kvdepot_tier::conformance::{Bench, listen};
use kvdepot_tier::{GuardConfig, Guarded, PosixConfig, PosixTier, Tier, TierEvents, Written};
use parking_lot::Mutex;

on_every_engine! {
    a_full_disk_evicts_the_coldest_and_goes_on
    a_disk_that_others_fill_does_not_stop_writes
    a_share_of_the_disk_stays_free
    without_a_capacity_the_cap_is_a_share_of_the_disk
    a_listener_hears_of_blocks_that_are_missing_or_corrupt
}

const FILE_BYTES: u64 = 16_384;

#[derive(Default)]
struct Heard {
    evicted: Mutex<Vec<BlockKey>>,
    lost: Mutex<Vec<BlockKey>>,
}

impl TierEvents for Heard {
    fn evicted(&self, keys: &[BlockKey]) {
        self.evicted.lock().extend(keys);
    }

    fn lost(&self, keys: &[BlockKey]) {
        self.lost.lock().extend(keys);
    }

    fn went_down(&self) {}

    fn came_back(&self) {}

    fn lost_memory(&self) {}
}

fn attach(tier: &PosixTier) -> Arc<Heard> {
    let heard = Arc::new(Heard::default());
    listen(tier, &heard);
    heard
}

/// No cap: the disk's own size is the only bound. 40 KiB of it hold the namespace's description and directories.
fn a_full_disk_evicts_the_coldest_and_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let tier = open_faulty(PosixConfig { shared: false, ..config(dir.path()) }, &faults);
    let heard = attach(&tier);
    let bench = Bench::new(Arc::clone(&tier) as _);
    bench.drain();
    faults.set_disk_bytes(Some(20 * FILE_BYTES + 40_960));
    for n in 0..200 {
        assert_eq!(bench.write(n).unwrap(), Written::New, "block {n}");
    }
    let kept: Vec<u64> = (0..200).filter(|&n| bench.read_is_right(n)).collect();
    assert!(kept.len() > 5 && kept.len() <= 21, "{kept:?}");
    assert!(kept.windows(2).all(|pair| pair[0] + 1 == pair[1]) && kept.contains(&199), "{kept:?}");
    assert!(files_with(dir.path(), ".tmp-").is_empty());
    bench.drain();
    assert_eq!(bench.tier.usage().bytes, disk_bytes(dir.path()));
    let evicted: Vec<BlockKey> = (0..kept[0]).map(|n| bench.key(n)).collect();
    assert_eq!(*heard.evicted.lock(), evicted, "every block that went was reported, the coldest first");
    assert!(heard.lost.lock().is_empty());
}

/// A disk that somebody else fills to the brim trips the breaker only as long as nothing can be freed.
fn a_disk_that_others_fill_does_not_stop_writes() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let guard = GuardConfig {
        failures_max: 1,
        off_min: Duration::from_secs(3600),
        off_max: Duration::from_secs(3600),
    };
    let posix = open_faulty(PosixConfig { shared: false, ..config(dir.path()) }, &faults);
    let tier = Arc::new(Guarded::new(posix, guard));
    let bench = Bench::new(Arc::clone(&tier) as _);
    bench.write_all(30);
    bench.drain();
    std::fs::write(dir.path().join("of-somebody-else"), vec![1; 10 * FILE_BYTES as usize]).unwrap();
    // Full to the last byte.
    let used = 30 * FILE_BYTES + 10 * FILE_BYTES + 4096;
    faults.set_disk_bytes(Some(used));
    for n in 30..60 {
        assert_eq!(bench.write(n).unwrap(), Written::New, "block {n}");
    }
    assert!(!tier.writes_are_off());
    assert!((50..60).all(|n| bench.read_is_right(n)));
}

/// The file system never returns ENOSPC here: only the floor keeps a tenth of it free.
fn a_share_of_the_disk_stays_free() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let disk = 100 * FILE_BYTES;
    faults.set_disk_bytes(Some(disk));
    let floored = PosixConfig { shared: false, free_floor_percent: 10, ..config(dir.path()) };
    let tier = open_faulty(floored, &faults);
    let bench = Bench::new(Arc::clone(&tier) as _);
    for n in 0..150 {
        assert_eq!(bench.write(n).unwrap(), Written::New, "block {n}");
        assert!(disk_bytes(dir.path()) <= disk / 10 * 9, "block {n}");
    }
    assert!(bench.tier.usage().blocks > 80 && bench.read_is_right(149) && !bench.read_is_right(0));
    // Others take more and more: the tier gives way, down to nothing if necessary, and then writes no more.
    for others in (10..=90).step_by(8).chain([95]) {
        let bytes = vec![1; (disk / 100 * others) as usize];
        std::fs::write(dir.path().join("of-somebody-else"), bytes).unwrap();
        tier.sweep(Bench::soon());
        let most = 90_u64.saturating_sub(others);
        let blocks = bench.tier.usage().blocks;
        assert!(blocks <= most && blocks + 12 > most, "{blocks} blocks beside {others} percent");
    }
    assert_eq!(bench.tier.usage().blocks, 0);
    let error = bench.write(500).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    assert!(error.to_string().contains("free_floor_percent"), "{error}");
    std::fs::remove_file(dir.path().join("of-somebody-else")).unwrap();
    tier.sweep(Bench::soon());
    assert_eq!(bench.write(500).unwrap(), Written::New, "room that came back is used");
}

fn without_a_capacity_the_cap_is_a_share_of_the_disk() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    faults.set_disk_bytes(Some(1000 * 4096));
    let by_default =
        PosixConfig { capacity_percent: PosixConfig::default().capacity_percent, ..config(dir.path()) };
    assert_eq!(open_faulty(by_default, &faults).usage().bytes_max, 800 * 4096);
    let path = dir.path().to_str().unwrap();
    let from_json = |text: &str| PosixConfig::from_json(&serde_json::from_str(text).unwrap()).unwrap();
    let left_out = from_json(&format!(r#"{{"directories": ["{path}"]}}"#));
    assert_eq!(open_faulty(left_out, &faults).usage().bytes_max, 800 * 4096);
    let none = from_json(&format!(r#"{{"directories": ["{path}"], "capacity_bytes": 0}}"#));
    assert_eq!(open_faulty(none, &faults).usage().bytes_max, 0, "0 was said: no cap");
    let said = from_json(&format!(r#"{{"directories": ["{path}"], "capacity_bytes": 8192}}"#));
    assert_eq!(open_faulty(said, &faults).usage().bytes_max, 8192);
}

fn a_listener_hears_of_blocks_that_are_missing_or_corrupt() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let tier = open_faulty(config(dir.path()), &faults);
    let heard = attach(&tier);
    let bench = Bench::new(Arc::clone(&tier) as _);
    bench.write_all(4);
    // The first scan would find out too.
    bench.drain();
    std::fs::remove_file(crate::common::block_file(dir.path(), &bench, 0)).unwrap();
    assert_eq!(bench.read(0).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(*heard.lost.lock(), [bench.key(0)]);
    faults.at(FaultOp::Read, 0, Fault::Flip);
    assert_eq!(bench.read(1).unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(*heard.lost.lock(), [0, 1].map(|n| bench.key(n)));
    std::fs::remove_file(crate::common::block_file(dir.path(), &bench, 2)).unwrap();
    tier.sweep(Bench::soon());
    assert_eq!(*heard.lost.lock(), [0, 1, 2].map(|n| bench.key(n)), "a sweep notices, too");
    bench.remove(3).unwrap();
    bench.drain();
    assert_eq!(heard.lost.lock().len(), 3, "what the depot removed itself is no news");
    assert!(heard.evicted.lock().is_empty());
}
