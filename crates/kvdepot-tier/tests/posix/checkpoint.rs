//! A restart knows its files before the scan has ended, keeps the cap from the first write on (P5), and never trusts a
//! checkpoint more than the files themselves (P1).
#![allow(clippy::unwrap_used)] // a failing test panics

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::{block_file, config, disk_bytes, files_with, open, open_faulty, remove_records};
use kvdepot_core::ErrorKind;
use kvdepot_io::faults::{Fault, FaultOp, Faults};
use kvdepot_tier::conformance::{Bench, Waiting};
use kvdepot_tier::{PosixConfig, PosixTier, Presence, Tier, Written};

const FILE_BYTES: u64 = 16_384;
const CHECKPOINT: &str = ".kvdepot-index";
/// Checks before the scan's first listing, without a cap.
const SCAN_BEGINS: u64 = 4;

fn own(dir: &Path, capacity_bytes: u64) -> PosixConfig {
    PosixConfig { capacity_bytes, shared: false, ..config(dir) }
}

/// Opens a tier that is closed with its checkpoint, however slow the disk is.
fn open_to_close(dir: &Path, capacity_bytes: u64) -> Arc<PosixTier> {
    open(PosixConfig { close_wait: Duration::from_secs(60), ..own(dir, capacity_bytes) })
}

fn written(dir: &Path, count: u64) {
    let bench = Bench::new(open_to_close(dir, 0));
    bench.write_all(count);
    bench.drain();
}

/// Opens a tier whose scan hangs at its first listing, after `before` other checks: of the recorded total if there is a
/// cap, the directory, `namespace.json`, the epochs, and the checkpoint.
fn open_with_hung_scan(config: PosixConfig, before: u64) -> (Arc<PosixTier>, Faults) {
    let faults = Faults::default();
    faults.at(FaultOp::Meta, before, Fault::Hang);
    let tier = open_faulty(config, &faults);
    assert!(faults.wait_hung(1, Bench::soon()), "the scan's first listing hangs");
    (tier, faults)
}

#[test]
fn files_are_known_before_the_scan() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path(), 20);
    let (tier, faults) = open_with_hung_scan(own(dir.path(), 0), 4);
    assert_eq!(tier.usage().blocks, 20);
    let bench = Bench::new(Arc::clone(&tier) as _);
    assert!((0..20).all(|n| bench.peek(n) == Presence::Present && bench.read_is_right(n)));
    assert_eq!(bench.peek(20), Presence::Unknown, "nothing is called absent before the scan has ended");
    faults.release();
    bench.drain();
    assert_eq!(bench.peek(20), Presence::Absent);
    assert_eq!((tier.usage().blocks, tier.usage().bytes), (20, disk_bytes(dir.path())));
}

#[test]
fn the_cap_is_kept_from_the_first_write_on() {
    let dir = tempfile::tempdir().unwrap();
    let cap = 20 * FILE_BYTES;
    written(dir.path(), 20);
    // Closed with a cap, so that its total is recorded.
    open_to_close(dir.path(), cap).wait_scanned(Bench::soon());
    let (tier, faults) = open_with_hung_scan(own(dir.path(), cap), 5);
    let bench = Bench::new(Arc::clone(&tier) as _);
    for n in 20..30 {
        assert_eq!(bench.write(n).unwrap(), Written::New, "a write need not wait for the scan");
        assert!(disk_bytes(dir.path()) <= cap);
    }
    faults.release();
    bench.drain();
    assert_eq!(tier.usage().bytes, disk_bytes(dir.path()));
    assert!((20..30).all(|n| bench.read_is_right(n)));
}

/// As after a kill: no checkpoint was written, but the total was, before the bytes that it covers.
#[test]
fn the_cap_is_kept_after_a_kill_too() {
    let (dir, copy) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let cap = 32 * FILE_BYTES;
    let bench = Bench::new(open(own(dir.path(), cap)));
    bench.write_all(29);
    bench.drain();
    copy_all(dir.path(), copy.path());
    drop(bench);
    let (tier, faults) = open_with_hung_scan(own(copy.path(), cap), 4);
    let bench = Bench::new(Arc::clone(&tier) as _);
    let soon = || std::time::Instant::now() + std::time::Duration::from_millis(200);
    let fitted =
        (100..110).filter(|&n| Bench::answer(&bench.begin_write(n, bench.filled(n), soon())).is_ok());
    assert!(fitted.count() <= 3, "three files fit beside the 29 that nobody has counted yet");
    assert!(disk_bytes(copy.path()) <= cap);
    faults.release();
    bench.drain();
    assert_eq!(tier.usage().bytes, disk_bytes(copy.path()));
    assert_eq!(bench.write(200).unwrap(), Written::New);
    assert_eq!(bench.write(201).unwrap(), Written::New);
    assert!(disk_bytes(copy.path()) <= cap);
}

#[test]
fn a_damaged_or_foreign_checkpoint_is_ignored() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path(), 20);
    let path = dir.path().join(CHECKPOINT);
    let whole = fs::read(&path).unwrap();
    assert!(whole.len() > 20 * 24);
    let flipped = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x40;
        bytes
    };
    let mut damages = vec![Vec::new(), b"something else".to_vec(), whole[..whole.len() / 2].to_vec()];
    damages.extend((0..whole.len()).step_by(29).map(flipped));
    for (nth, damage) in damages.iter().enumerate() {
        fs::write(&path, damage).unwrap();
        let bench = Bench::new(open(own(dir.path(), 0)));
        bench.drain();
        assert_eq!(bench.tier.usage().blocks, 20, "damage {nth}");
        assert!((0..20).all(|n| bench.read_is_right(n)), "damage {nth}");
    }
}

#[test]
fn a_checkpoint_that_is_behind_costs_misses_only() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path(), 20);
    let old = fs::read(dir.path().join(CHECKPOINT)).unwrap();
    let bench = Bench::new(open(own(dir.path(), 0)));
    bench.drain();
    bench.remove(3).unwrap();
    bench.write(20).unwrap();
    bench.drain();
    let gone = block_file(dir.path(), &bench, 4);
    drop(bench);
    // Somebody removes one more file, and an earlier checkpoint comes back.
    fs::remove_file(gone).unwrap();
    fs::write(dir.path().join(CHECKPOINT), old).unwrap();
    let (tier, faults) = open_with_hung_scan(own(dir.path(), 0), 4);
    let bench = Bench::new(Arc::clone(&tier) as _);
    assert_eq!(bench.read(3).unwrap_err().kind(), ErrorKind::NotFound);
    assert!(bench.read_is_right(20), "what the checkpoint lacks is looked for");
    faults.release();
    bench.drain();
    let there: Vec<u64> = (0..=20).filter(|&n| bench.peek(n) == Presence::Present).collect();
    assert_eq!(there, (0..=20).filter(|n| ![3, 4].contains(n)).collect::<Vec<_>>());
    assert_eq!(tier.usage().bytes, disk_bytes(dir.path()));
}

#[test]
fn a_checkpoint_of_an_earlier_epoch_brings_nothing_back() {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path(), 20);
    let old = fs::read(dir.path().join(CHECKPOINT)).unwrap();
    let kept: Vec<_> =
        files_with(dir.path(), ".kvb").iter().map(|p| (p.clone(), fs::read(p).unwrap())).collect();
    let bench = Bench::new(open(own(dir.path(), 0)));
    bench.tier.advance_and_wait(&bench.spec, 1).unwrap();
    bench.drain();
    drop(bench);
    fs::write(dir.path().join(CHECKPOINT), old).unwrap();
    for (path, bytes) in kept {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
    let bench = Bench::new(open(own(dir.path(), 0)));
    assert!((0..20).all(|n| !bench.read_is_right(n)));
    bench.drain();
    assert_eq!((bench.epoch, bench.tier.usage().blocks), (1, 0));
    assert!(files_with(dir.path(), ".kvb").is_empty());
}

/// Whether the scan knows the files from a checkpoint or not, wherever it has got to, and whether the write of the newer
/// block has ended by then or not.
#[test]
fn a_block_that_is_replaced_during_the_scan_is_the_newer_one() {
    const BLOCKS: u64 = 6;
    for is_known in [true, false] {
        for is_under_way in [false, true] {
            let mut steps = 0;
            while is_replaced_during_the_scan(BLOCKS, is_known, is_under_way, steps) {
                steps += 1;
            }
            assert!(steps > BLOCKS, "the scan looks at each directory: {steps} steps");
        }
    }
}

/// Replaces blocks while the scan hangs at its step `step`. Returns `false` if it has fewer steps.
fn is_replaced_during_the_scan(blocks: u64, is_known: bool, is_under_way: bool, step: u64) -> bool {
    let dir = tempfile::tempdir().unwrap();
    written(dir.path(), blocks);
    if !is_known {
        remove_records(dir.path());
    }
    let faults = Faults::default();
    faults.at(FaultOp::Meta, SCAN_BEGINS + step, Fault::Hang);
    let tier = open_faulty(own(dir.path(), 0), &faults);
    while !faults.wait_hung(1, Instant::now()) {
        if tier.wait_scanned(Instant::now()) {
            return false;
        }
        std::thread::yield_now();
    }
    let bench = Bench::new(Arc::clone(&tier) as _);
    let newer = |bench: &Bench, n| bench.bytes(100 + n);
    if is_under_way {
        faults.at(FaultOp::Publish, faults.count(FaultOp::Publish), Fault::Hang);
    }
    let writes: Vec<_> = (0..blocks - 1)
        .map(|n| {
            bench.remove(n).unwrap();
            let write = bench.begin_write(n, bench.filled(100 + n), Bench::soon());
            if is_under_way && n == 0 {
                assert!(faults.wait_hung(2, Bench::soon()), "the first write hangs before it publishes");
            } else {
                assert_eq!(Bench::answer(&write).unwrap(), Written::New);
                assert_eq!(bench.read(n).unwrap(), newer(&bench, n), "block {n} during the scan");
            }
            write
        })
        .collect();
    bench.remove(blocks - 1).unwrap();
    faults.release();
    if is_under_way {
        assert_eq!(Bench::answer(&writes[0]).unwrap(), Written::New);
    }
    bench.drain();
    let is_right = |bench: &Bench| {
        (0..blocks - 1).all(|n| bench.read(n).unwrap() == newer(bench, n))
            && bench.peek(blocks - 1) == Presence::Absent
            && files_with(dir.path(), ".kvb").len() as u64 == blocks - 1
            && (bench.tier.usage().blocks, bench.tier.usage().bytes) == (blocks - 1, disk_bytes(dir.path()))
    };
    assert!(is_right(&bench), "known: {is_known}, under way: {is_under_way}, step {step}");
    drop((bench, tier));
    // The next start agrees, with a checkpoint and without one.
    for _ in 0..2 {
        let bench = Bench::new(open(own(dir.path(), 0)));
        bench.drain();
        assert!(
            is_right(&bench),
            "known: {is_known}, under way: {is_under_way}, step {step}, after a restart"
        );
        drop(bench);
        remove_records(dir.path());
    }
    true
}

/// What replaces a block need not wait for a background thread to unlink the earlier file.
#[test]
fn a_removed_block_is_written_again_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let bench = Bench::new(open_faulty(own(dir.path(), 0), &faults));
    bench.write_all(2);
    bench.drain();
    // The unlink thread hangs at block 0, with block 1 behind it.
    faults.at(FaultOp::Unlink, 0, Fault::Hang);
    bench.remove(0).unwrap();
    assert!(faults.wait_hung(1, Bench::soon()));
    bench.remove(1).unwrap();
    assert_eq!(bench.write(1).unwrap(), Written::New);
    assert!(bench.read_is_right(1));
    let write = bench.begin_write(0, bench.filled(0), Bench::soon());
    faults.release();
    assert_eq!(Bench::answer(&write).unwrap(), Written::New, "it waits for an unlink that has begun");
    bench.drain();
    assert!((0..2).all(|n| bench.read_is_right(n)));
}

fn copy_all(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            fs::create_dir(&target).unwrap();
            copy_all(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}
