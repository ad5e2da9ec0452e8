//! P5: the files of all namespaces together never exceed the cap, including those that existed before.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::{config, disk_bytes, open, open_faulty};
use kvdepot_core::{BlockLayout, ErrorKind};
use kvdepot_io::faults::{Fault, FaultOp, Faults};
use kvdepot_tier::conformance::{Bench, spec};
use kvdepot_tier::{PosixConfig, Presence, Tier};

const FILE_BYTES: u64 = 16_384;

fn capped(dir: &std::path::Path, capacity_bytes: u64) -> PosixConfig {
    PosixConfig { capacity_bytes, shared: false, ..config(dir) }
}

#[test]
fn files_over_the_cap_at_the_start_go_oldest_first() {
    let dir = tempfile::tempdir().unwrap();
    Bench::new(open(config(dir.path()))).write_all(10);
    let names = Bench::new(Arc::new(kvdepot_tier::EmptyTier::new()));
    for n in 0..10 {
        let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_700_000_000 + n);
        let file =
            std::fs::File::options().write(true).open(crate::common::block_file(dir.path(), &names, n));
        file.unwrap().set_modified(time).unwrap();
    }
    // Nobody opens the namespace: its files count all the same.
    let tier = open(capped(dir.path(), 4 * FILE_BYTES));
    assert!(tier.wait_scanned(Bench::soon()));
    let bench = Bench::new(tier);
    bench.drain();
    assert!(disk_bytes(dir.path()) <= 4 * FILE_BYTES);
    let there: Vec<u64> = (0..10).filter(|&n| bench.peek(n) == Presence::Present).collect();
    assert_eq!(there, [6, 7, 8, 9]);
}

#[test]
fn namespaces_share_the_cap() {
    let dir = tempfile::tempdir().unwrap();
    let tier = open(capped(dir.path(), 6 * FILE_BYTES));
    let one = Bench::with(Arc::clone(&tier) as _, spec("one", BlockLayout::new(vec![vec![10_000]]).unwrap()));
    let two = Bench::with(Arc::clone(&tier) as _, spec("two", BlockLayout::new(vec![vec![10_000]]).unwrap()));
    one.write_all(6);
    two.write_all(4);
    one.drain();
    assert_eq!((tier.keys(one.spec.id(0)).len(), tier.keys(two.spec.id(0)).len()), (2, 4));
    assert_eq!((disk_bytes(dir.path()), tier.usage().bytes), (6 * FILE_BYTES, 6 * FILE_BYTES));
}

/// The disk's contents are checked while sixteen writers work: temporary files count.
#[test]
fn the_disk_is_never_over_the_cap() {
    let dir = tempfile::tempdir().unwrap();
    let cap = 5 * FILE_BYTES;
    let bench = Bench::new(open(PosixConfig {
        write_threads: 4,
        // One directory, so that one listing is nearly a snapshot.
        shard_directories: false,
        ..capped(dir.path(), cap)
    }));
    bench.drain();
    let done = Arc::new(AtomicBool::new(false));
    let watcher = {
        let (done, path) = (Arc::clone(&done), dir.path().to_owned());
        std::thread::spawn(move || {
            let mut most = 0;
            // Acquire pairs with the Release below: the last check comes after the last write.
            while !done.load(Ordering::Acquire) {
                most = most.max(glimpse(&path));
            }
            most
        })
    };
    let writes: Vec<_> = (0..200).map(|n| bench.begin_write(n, bench.filled(n), Bench::soon())).collect();
    writes.iter().for_each(|write| assert!(Bench::answer(write).is_ok()));
    done.store(true, Ordering::Release);
    // A listing is not a snapshot: it may see a file under both of its names, once per writer.
    assert!(watcher.join().unwrap() <= cap + 4 * FILE_BYTES);
    bench.drain();
    assert!(disk_bytes(dir.path()) <= cap);
    assert_eq!(disk_bytes(dir.path()), bench.tier.usage().bytes);
}

/// Bytes seen in one walk over directories that change in the meantime.
fn glimpse(dir: &std::path::Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(dir) else { return 0 };
    entries
        .filter_map(Result::ok)
        .filter_map(|entry| Some((entry.path(), entry.metadata().ok()?)))
        .map(|(path, meta)| match meta.is_dir() {
            true => glimpse(&path),
            false if path.ends_with("namespace.json") => 0,
            false => meta.len().next_multiple_of(4096),
        })
        .sum()
}

#[test]
fn a_file_that_cannot_be_removed_keeps_its_room() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let bench = Bench::new(open_faulty(capped(dir.path(), 2 * FILE_BYTES), &faults));
    bench.write_all(2);
    bench.drain();
    faults.chance(FaultOp::Unlink, Fault::Eio, 1.0);
    assert_eq!(bench.write(2).unwrap_err().kind(), ErrorKind::Io);
    assert!(bench.tier.usage().bytes <= 2 * FILE_BYTES);
    assert!(disk_bytes(dir.path()) <= 2 * FILE_BYTES);
    faults.set_enabled(false);
    bench.drain();
    assert!(bench.write(2).is_ok());
    assert!(disk_bytes(dir.path()) <= 2 * FILE_BYTES);
}

#[test]
fn a_block_that_is_read_may_be_evicted() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let bench = Bench::new(open_faulty(capped(dir.path(), FILE_BYTES), &faults));
    bench.write_all(1);
    faults.at(FaultOp::Read, 0, Fault::Hang);
    let slot = bench.slot();
    let read = bench.begin_read(0, slot.clone(), Bench::soon());
    assert!(faults.wait_hung(1, Bench::soon()));
    bench.write(1).unwrap();
    faults.release();
    Bench::answer(&read).unwrap();
    assert_eq!(bench.block_of(&slot), bench.bytes(0), "an open file outlives its name");
    bench.drain();
    assert_eq!(bench.tier.usage().bytes, FILE_BYTES);
    assert_eq!(disk_bytes(dir.path()), FILE_BYTES);
}
