//! P5: the files of all namespaces together never exceed the cap, including those that existed before.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use crate::common::{config, disk_bytes, open, open_faulty};
use kvdepot_core::{BlockLayout, ErrorKind, Result};
use kvdepot_io::SlotBuf;
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
            loop {
                // Acquire pairs with the Release below: the last check comes after the last write.
                let is_last = done.load(Ordering::Acquire);
                most = most.max(glimpse(&path));
                if is_last {
                    return most;
                }
            }
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

/// Reads block `n`, up to the moment when its file is open.
fn hang_read(bench: &Bench, faults: &Faults, n: u64, hung: usize) -> (SlotBuf, Receiver<Result<()>>) {
    faults.at(FaultOp::Read, 0, Fault::Hang);
    let slot = bench.slot();
    let read = bench.begin_read(n, slot.clone(), Bench::soon());
    assert!(faults.wait_hung(hung, Bench::soon()));
    (slot, read)
}

/// Checks that a write of block `n` waits until its deadline.
fn is_refused_as_busy(bench: &Bench, n: u64) {
    // On a slow machine a write may be past its deadline before it begins to wait: then it says nothing.
    let (end, mut patience) = (Bench::soon(), Duration::from_millis(100));
    loop {
        let late = bench.begin_write(n, bench.filled(n), Instant::now() + patience);
        match Bench::answer(&late).unwrap_err().kind() {
            ErrorKind::Timeout if Instant::now() < end => {
                patience = (2 * patience).min(Duration::from_secs(10))
            }
            kind => return assert_eq!(kind, ErrorKind::Busy),
        }
    }
}

/// An open file keeps its space after its unlink; on NFS it even keeps a name (`.nfs…`).
#[test]
fn a_block_that_is_read_is_not_evicted() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let bench = Bench::new(open_faulty(capped(dir.path(), 2 * FILE_BYTES), &faults));
    bench.write_all(2);
    let (slot, read) = hang_read(&bench, &faults, 0, 1);
    bench.write(2).unwrap();
    let there = |n| bench.peek(n) == Presence::Present;
    assert!(there(0) && !there(1) && there(2), "the next one goes instead");

    // Now everything is being read: a write is dropped at its deadline, or waits for the end of a read.
    let (other_slot, other) = hang_read(&bench, &faults, 2, 2);
    is_refused_as_busy(&bench, 3);
    assert!(there(0) && there(2) && !there(3));
    let write = bench.begin_write(4, bench.filled(4), Bench::soon());
    assert_eq!(disk_bytes(dir.path()), 2 * FILE_BYTES);
    faults.release();
    Bench::answer(&read).unwrap();
    Bench::answer(&other).unwrap();
    Bench::answer(&write).unwrap();
    assert_eq!((bench.block_of(&slot), bench.block_of(&other_slot)), (bench.bytes(0), bench.bytes(2)));
    bench.drain();
    assert_eq!((bench.tier.usage().bytes, disk_bytes(dir.path())), (2 * FILE_BYTES, 2 * FILE_BYTES));
}

/// It is unreachable at once, and its file goes when the read has ended.
#[test]
fn a_removed_block_that_is_read_keeps_its_file_and_its_room() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let bench = Bench::new(open_faulty(capped(dir.path(), FILE_BYTES), &faults));
    bench.write_all(1);
    let (slot, read) = hang_read(&bench, &faults, 0, 1);
    bench.remove(0).unwrap();
    assert_eq!((bench.peek(0), disk_bytes(dir.path())), (Presence::Absent, FILE_BYTES));
    // Neither the same block nor another one takes its place.
    is_refused_as_busy(&bench, 0);
    is_refused_as_busy(&bench, 1);
    assert_eq!(disk_bytes(dir.path()), FILE_BYTES);
    let write = bench.begin_write(0, bench.filled(0), Bench::soon());
    faults.release();
    Bench::answer(&read).unwrap();
    assert_eq!(bench.block_of(&slot), bench.bytes(0));
    Bench::answer(&write).unwrap();
    bench.drain();
    assert_eq!((bench.tier.usage().bytes, disk_bytes(dir.path())), (FILE_BYTES, FILE_BYTES));
    assert!(bench.read_is_right(0));
}

/// The end of a tier waits for no read: a removed block must not be back at the next start.
#[test]
fn a_removed_block_goes_at_the_end_although_it_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    // Only while more than half of this time is left are further files unlinked.
    let config = PosixConfig { close_wait: Duration::from_secs(60), ..capped(dir.path(), 2 * FILE_BYTES) };
    let bench = Bench::new(open_faulty(config, &faults));
    bench.write_all(1);
    let (_slot, read) = hang_read(&bench, &faults, 0, 1);
    bench.remove(0).unwrap();
    drop(bench);
    assert_eq!(disk_bytes(dir.path()), 0);
    faults.release();
    let _ = Bench::answer(&read);
}
