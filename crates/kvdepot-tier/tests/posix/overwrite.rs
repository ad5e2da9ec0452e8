//! P1, P2, P5: at the cap a write takes over the file of the block that it evicts, and nobody sees bytes of both.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use crate::common::{
    Engine, block_file, config, disk_bytes, files, files_with, on_every_engine, open, open_faulty,
};
use kvdepot_core::{BlockLayout, ErrorKind};
use kvdepot_io::faults::{Fault, FaultOp, Faults};
use kvdepot_tier::conformance::{Bench, Waiting, spec, until};
use kvdepot_tier::{PosixConfig, Presence, Tier};

on_every_engine! {
    a_write_at_the_cap_takes_over_the_coldest_file
    where_files_must_not_be_overwritten_they_are_unlinked
    a_file_with_another_name_or_length_is_not_overwritten
    what_is_no_file_is_not_overwritten
    blocks_of_several_lengths_keep_the_cap
    a_block_that_is_being_read_is_not_overwritten
    a_reader_in_another_process_gets_a_miss
    a_write_that_fails_half_way_leaves_nothing_of_either_block
    the_first_block_of_a_directory_is_written_at_the_cap
    a_disk_that_refuses_all_changes_costs_no_block
    trimming_that_fails_costs_no_block
    room_comes_back_file_by_file
    a_past_epoch_that_cannot_be_removed_counts
}

const FILE_BYTES: u64 = 16_384;

fn capped(dir: &Path, capacity_bytes: u64) -> PosixConfig {
    // One directory for all blocks: the directory of the next block already exists.
    PosixConfig { capacity_bytes, shared: false, shard_directories: false, ..config(dir) }
}

fn inode(dir: &Path, bench: &Bench, n: u64) -> u64 {
    block_file(dir, bench, n).metadata().unwrap().ino()
}

fn a_write_at_the_cap_takes_over_the_coldest_file() {
    for shared in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let faults = Faults::default();
        let bench =
            Bench::new(open_faulty(PosixConfig { shared, ..capped(dir.path(), 3 * FILE_BYTES) }, &faults));
        bench.write_all(3);
        bench.drain();
        let inodes = [0, 1, 2].map(|n| inode(dir.path(), &bench, n));
        let unlinks = faults.count(FaultOp::Unlink);
        for n in 3..12 {
            bench.write(n).unwrap();
            assert_eq!(inode(dir.path(), &bench, n), inodes[n as usize % 3], "block {n}, shared: {shared}");
            assert!(bench.read_is_right(n) && bench.peek(n - 3) != Presence::Present);
            assert_eq!((disk_bytes(dir.path()), bench.tier.usage().bytes), (3 * FILE_BYTES, 3 * FILE_BYTES));
        }
        assert_eq!(faults.count(FaultOp::Unlink), unlinks, "nothing was unlinked");
        assert!(files_with(dir.path(), ".tmp-").is_empty());
    }
}

/// As on a network file system.
fn where_files_must_not_be_overwritten_they_are_unlinked() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    faults.forbid_overwriting();
    let bench = Bench::new(open_faulty(capped(dir.path(), 3 * FILE_BYTES), &faults));
    bench.write_all(3);
    bench.drain();
    let unlinks = faults.count(FaultOp::Unlink);
    bench.write(3).unwrap();
    assert_eq!(faults.count(FaultOp::Unlink), unlinks + 1);
    assert!((1..4).all(|n| bench.read_is_right(n)));
}

/// A backup made with a hard link keeps its bytes, and so does a file of another length.
fn a_file_with_another_name_or_length_is_not_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::new(open(capped(dir.path(), 2 * FILE_BYTES)));
    bench.write_all(2);
    bench.drain();
    let (kept, outside) = (block_file(dir.path(), &bench, 0), tempfile::tempdir().unwrap());
    let before = std::fs::read(&kept).unwrap();
    let copy = outside.path().join("copy");
    // On one file system: both are temporary directories.
    std::fs::hard_link(&kept, &copy).unwrap();
    bench.write(2).unwrap();
    assert_eq!(std::fs::read(&copy).unwrap(), before);
    // Somebody truncated block 1 behind the tier's back.
    let cut = block_file(dir.path(), &bench, 1);
    std::fs::File::options().write(true).open(&cut).unwrap().set_len(100).unwrap();
    bench.write(3).unwrap();
    assert!(bench.read_is_right(2) && bench.read_is_right(3) && !cut.exists());
    assert_eq!((disk_bytes(dir.path()), bench.tier.usage().bytes), (2 * FILE_BYTES, 2 * FILE_BYTES));
}

/// Anything may stand under a block's name.
fn what_is_no_file_is_not_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::new(open(capped(dir.path(), FILE_BYTES)));
    bench.write_all(1);
    bench.drain();
    let outside = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(outside.path(), vec![7; FILE_BYTES as usize]).unwrap();
    for n in 0..2 {
        let path = block_file(dir.path(), &bench, n);
        std::fs::remove_file(&path).unwrap();
        if n == 0 {
            std::os::unix::fs::symlink(outside.path(), &path).unwrap();
        } else {
            let made = std::process::Command::new("mkfifo").arg(&path).status();
            assert!(made.unwrap().success());
        }
        bench.write(n + 1).unwrap();
        assert!(bench.read_is_right(n + 1));
    }
    assert_eq!(std::fs::read(outside.path()).unwrap(), vec![7; FILE_BYTES as usize]);
}

fn blocks_of_several_lengths_keep_the_cap() {
    let dir = tempfile::tempdir().unwrap();
    let tier = open(capped(dir.path(), 6 * FILE_BYTES));
    let named = |model: &str, bytes: u64| {
        Bench::with(Arc::clone(&tier) as _, spec(model, BlockLayout::new(vec![vec![bytes]]).unwrap()))
    };
    let (small, large) = (named("small", 4096), named("large", 20_000));
    for n in 0..40 {
        let bench = if n % 3 == 0 { &large } else { &small };
        bench.write(n).unwrap();
        assert!(bench.read_is_right(n) && disk_bytes(dir.path()) <= 6 * FILE_BYTES, "block {n}");
    }
    small.drain();
    assert_eq!(tier.usage().bytes, disk_bytes(dir.path()));
}

/// A reader of the same depot has the file open: the next one is overwritten instead.
fn a_block_that_is_being_read_is_not_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let bench = Bench::new(open_faulty(capped(dir.path(), 2 * FILE_BYTES), &faults));
    bench.write_all(2);
    bench.drain();
    let file = inode(dir.path(), &bench, 1);
    faults.at(FaultOp::Read, 0, Fault::Hang);
    let slot = bench.slot();
    let read = bench.begin_read(0, slot.clone(), Bench::soon());
    assert!(faults.wait_hung(1, Bench::soon()));
    bench.write(2).unwrap();
    assert_eq!(inode(dir.path(), &bench, 2), file);
    faults.release();
    Bench::answer(&read).unwrap();
    assert_eq!(bench.block_of(&slot), bench.bytes(0));
    assert!(bench.read_is_right(0) && bench.read_is_right(2));
}

/// Another depot has the file open while its bytes change.
fn a_reader_in_another_process_gets_a_miss() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let shared = || PosixConfig { shared: true, ..capped(dir.path(), 2 * FILE_BYTES) };
    let one = Bench::new(open(shared()));
    one.write_all(2);
    one.drain();
    let tier = open_faulty(shared(), &faults);
    let other = Bench::new(Arc::clone(&tier) as _);
    other.drain();
    faults.at(FaultOp::Read, 0, Fault::Hang);
    let read = other.begin_read(0, other.slot(), Bench::soon());
    assert!(faults.wait_hung(1, Bench::soon()));
    let before = inode(dir.path(), &one, 0);
    one.write(2).unwrap();
    assert_eq!(inode(dir.path(), &one, 2), before, "it is the file that the other one reads");
    faults.release();
    let answer = Bench::answer(&read);
    if Engine::is_queued() {
        // The kernel had read the file before it was overwritten; only the completion came late.
        answer.unwrap();
    } else {
        assert_eq!(answer.unwrap_err().kind(), ErrorKind::NotFound, "no corruption: it was evicted");
    }
    assert_eq!(tier.quarantined(&other.spec), 0);
    assert!(one.read_is_right(2) && other.read_is_right(2));
    // If block 0 was still read, the other tier knows three blocks, one more than its cap allows: it may have evicted
    // this one.
    assert!(Engine::is_queued() || other.read_is_right(1));
}

fn a_write_that_fails_half_way_leaves_nothing_of_either_block() {
    for op in [FaultOp::Create, FaultOp::Write, FaultOp::Flush] {
        let dir = tempfile::tempdir().unwrap();
        let faults = Faults::default();
        let bench = Bench::new(open_faulty(capped(dir.path(), 2 * FILE_BYTES), &faults));
        bench.write_all(2);
        bench.drain();
        faults.at(op, 0, Fault::Eio);
        let written = bench.write(2);
        assert!(
            written.is_err() || op == FaultOp::Create,
            "a new file is made where this one cannot be opened"
        );
        assert!(bench.read(0).is_err() && bench.read_is_right(1));
        assert_eq!(bench.read_is_right(2), written.is_ok());
        assert!(files_with(dir.path(), ".tmp-").is_empty());
        assert_eq!(bench.tier.usage().bytes, disk_bytes(dir.path()));
        bench.write(3).unwrap();
        assert!(bench.read_is_right(3) && disk_bytes(dir.path()) <= 2 * FILE_BYTES);
    }
}

/// The directory of the new block does not exist yet, so nothing can be renamed into it.
fn the_first_block_of_a_directory_is_written_at_the_cap() {
    let dir = tempfile::tempdir().unwrap();
    let sharded = PosixConfig { shard_directories: true, ..capped(dir.path(), 3 * FILE_BYTES) };
    let bench = Bench::new(open(sharded));
    for n in 0..60 {
        bench.write(n).unwrap();
        assert!(bench.read_is_right(n) && disk_bytes(dir.path()) <= 3 * FILE_BYTES, "block {n}");
    }
    assert_eq!(bench.tier.usage().bytes, disk_bytes(dir.path()));
}

/// A disk that turned read-only, or refuses everything else: what can be read stays readable.
fn a_disk_that_refuses_all_changes_costs_no_block() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let bench = Bench::new(open_faulty(capped(dir.path(), 20 * FILE_BYTES), &faults));
    bench.write_all(20);
    bench.drain();
    for op in [FaultOp::Unlink, FaultOp::Publish, FaultOp::Create] {
        faults.chance(op, Fault::Eio, 1.0);
    }
    for n in 20..60 {
        assert!(bench.write(n).is_err());
    }
    assert!((0..20).all(|n| bench.peek(n) == Presence::Present && bench.read_is_right(n)));
    assert_eq!(bench.tier.usage().bytes, 20 * FILE_BYTES);
    // A block that was to go for good does not come back, although its file does not go either.
    bench.remove(7).unwrap();
    bench.drain();
    assert!(!bench.read_is_right(7));
    faults.set_enabled(false);
    assert!((20..30).all(|n| bench.write(n).is_ok()));
    bench.drain();
    assert_eq!(bench.tier.usage().bytes, disk_bytes(dir.path()));
}

/// More files exist than the cap allows, and none can be removed.
fn trimming_that_fails_costs_no_block() {
    let dir = tempfile::tempdir().unwrap();
    Bench::new(open(config(dir.path()))).write_all(40);
    let faults = Faults::default();
    faults.chance(FaultOp::Unlink, Fault::Eio, 1.0);
    let tier = open_faulty(
        PosixConfig { capacity_bytes: 4 * FILE_BYTES, shared: false, ..config(dir.path()) },
        &faults,
    );
    let bench = Bench::new(Arc::clone(&tier) as _);
    assert!(tier.wait_scanned(Bench::soon()));
    tier.sweep(Bench::soon());
    assert!(faults.count(FaultOp::Unlink) > 0);
    // A block is a miss while its unlink is attempted, and each read causes the next attempt.
    (0..40).for_each(|n| until("every block can be read", || bench.read_is_right(n)));
    faults.set_enabled(false);
    tier.sweep(Bench::soon());
    // After an unlink that has just failed, the thread may wait first.
    until("the cap is kept", || tier.usage().bytes == 4 * FILE_BYTES);
    assert_eq!(disk_bytes(dir.path()), 4 * FILE_BYTES);
}

fn room_comes_back_file_by_file() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let bench = Bench::new(open_faulty(capped(dir.path(), 8 * FILE_BYTES), &faults));
    bench.write_all(8);
    bench.drain();
    // The thread hangs at one file while others are queued, then at the second of those.
    faults.at(FaultOp::Unlink, 0, Fault::Hang).at(FaultOp::Unlink, 2, Fault::Hang);
    bench.remove(0).unwrap();
    assert!(faults.wait_hung(1, Bench::soon()));
    (1..8).for_each(|n| bench.remove(n).unwrap());
    faults.release();
    until("the first of several files counts no more", || bench.tier.usage().bytes == 6 * FILE_BYTES);
    assert!(faults.wait_hung(1, Bench::soon()));
    faults.release();
    bench.drain();
    assert!(files(dir.path()).iter().all(|path| path.ends_with("namespace.json")));
}

/// A past epoch that existed at the start and cannot be removed is counted, and does not stop writes.
fn a_past_epoch_that_cannot_be_removed_counts() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let mut bench = Bench::new(open_faulty(capped(dir.path(), 0), &faults));
    bench.write_all(3);
    bench.drain();
    faults.chance(FaultOp::Unlink, Fault::Eio, 1.0);
    bench.epoch = bench.tier.advance_and_wait(&bench.spec, 1).unwrap();
    (10..12).for_each(|n| assert!(bench.write(n).is_ok()));
    drop(bench);
    assert_eq!(files_with(dir.path(), ".kvb").len(), 5);
    crate::common::remove_records(dir.path());
    let cap = 7 * FILE_BYTES;
    let tier = open_faulty(capped(dir.path(), cap), &faults);
    let bench = Bench::new(Arc::clone(&tier) as _);
    for round in 0..3 {
        assert!(tier.wait_scanned(Bench::soon()));
        tier.sweep(Bench::soon());
        let counted = tier.usage().bytes;
        assert!(counted >= disk_bytes(dir.path()), "round {round}: {counted} bytes (P5)");
        until("nothing else counts", || tier.usage().bytes == disk_bytes(dir.path()));
    }
    for n in 20..30 {
        assert!(bench.write(n).is_ok(), "block {n}");
        assert!(disk_bytes(dir.path()) <= cap);
    }
    faults.set_enabled(false);
    tier.sweep(Bench::soon());
    tier.sweep(Bench::soon());
    assert_eq!((files_with(dir.path(), ".kvb").len(), tier.usage().bytes), (4, 4 * FILE_BYTES));
}
