//! What a reset or a removal leaves behind: it counts until it is really gone (P5), it goes before live blocks do, and
//! nothing of it stays forever or comes back.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::{block_file, config, disk_bytes, files_with, open, open_faulty};
use kvdepot_core::{BlockLayout, ErrorKind};
use kvdepot_io::faults::{Fault, FaultOp, Faults};
use kvdepot_tier::conformance::{Bench, Waiting, spec, until};
use kvdepot_tier::{PosixConfig, PosixTier, Tier};

const FILE_BYTES: u64 = 16_384;

fn capped(dir: &Path, capacity_bytes: u64) -> PosixConfig {
    PosixConfig { capacity_bytes, shared: false, ..config(dir) }
}

fn named(tier: &Arc<PosixTier>, model: &str) -> Bench {
    Bench::with(Arc::clone(tier) as _, spec(model, BlockLayout::new(vec![vec![10_000]]).unwrap()))
}

/// After a reset that was stored by a rename, the files lie under a name that the index does not know.
#[test]
fn files_of_a_renamed_epoch_count_until_they_are_gone() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let cap = 6 * FILE_BYTES;
    let mut bench = Bench::new(open_faulty(capped(dir.path(), cap), &faults));
    bench.write_all(4);
    bench.drain();
    // No unlink comes before the rename, and the renamed directory is not cleared before it has been listed.
    faults.hang(FaultOp::Unlink);
    faults.at_name(FaultOp::Grow, "e1", Fault::NoSpace).at_name(FaultOp::Meta, "below1", Fault::Hang);
    bench.epoch = bench.tier.advance_and_wait(&bench.spec, 1).unwrap();
    assert!(faults.wait_hung(1, Bench::soon()));
    faults.release();
    until("the files are looked for", || faults.count(FaultOp::Unlink) >= 4);
    // By the same thread, so the files were not found and are accounted for.
    assert!(faults.wait_hung(1, Bench::soon()), "the renamed directory is listed");
    assert_eq!(files_with(dir.path(), ".kvb").len(), 4);
    for n in 10..16 {
        bench.write(n).unwrap();
        assert!(disk_bytes(dir.path()) <= cap, "block {n}");
    }
    assert_eq!(bench.tier.usage().bytes, disk_bytes(dir.path()));
    faults.release();
    bench.drain();
    assert!(files_with(dir.path(), ".kvb").len() <= 2, "the past epoch has gone");
    assert!((20..26).all(|n| bench.write(n).is_ok()));
    assert_eq!(
        (disk_bytes(dir.path()), bench.tier.usage().bytes),
        (cap, cap),
        "all of the cap is used again"
    );
}

#[test]
fn what_was_put_aside_goes_with_its_epoch() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let tier = open_faulty(capped(dir.path(), 40 * FILE_BYTES), &faults);
    let mut bench = Bench::new(Arc::clone(&tier) as _);
    bench.write_all(4);
    bench.drain();
    let path = block_file(dir.path(), &bench, 1);
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir_all(path.join("deeper")).unwrap();
    std::fs::write(path.join("deeper/file"), b"x").unwrap();
    assert!(!bench.read_is_right(1));
    faults.at(FaultOp::Read, 0, Fault::Flip);
    assert!(!bench.read_is_right(2));
    assert_eq!(tier.quarantined(&bench.spec), 1);
    bench.epoch = tier.advance_and_wait(&bench.spec, 1).unwrap();
    assert_eq!(tier.quarantined(&bench.spec), 0, "a corrupt file is of its epoch");
    bench.drain();
    assert!(!dir.path().join(bench.spec.root().to_string()).join("e0").exists());
    assert_eq!((tier.usage().bytes, disk_bytes(dir.path())), (0, 0));
}

#[test]
fn a_corrupt_file_that_cannot_be_removed_keeps_its_room() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let cap = 2 * FILE_BYTES;
    let tier = open_faulty(capped(dir.path(), cap), &faults);
    let bench = Bench::new(Arc::clone(&tier) as _);
    bench.write_all(1);
    bench.drain();
    faults.at(FaultOp::Read, 0, Fault::Flip);
    assert!(!bench.read_is_right(0));
    faults.chance(FaultOp::Unlink, Fault::Eio, 1.0);
    bench.write(1).unwrap();
    for n in 2..5 {
        assert!(bench.write(n).is_err());
        assert!(disk_bytes(dir.path()) <= cap);
    }
    faults.set_enabled(false);
    tier.sweep(Bench::soon());
    assert!((2..5).all(|n| bench.write(n).is_ok()));
    assert_eq!((disk_bytes(dir.path()), tier.usage().bytes), (cap, cap));
}

/// The unlink thread is blocked: writers that need space remove the past epoch's files themselves.
#[test]
fn room_is_made_of_past_epochs_before_live_blocks() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let tier = open_faulty(capped(dir.path(), 84 * FILE_BYTES), &faults);
    let (live, mut reset) = (named(&tier, "live"), named(&tier, "reset"));
    live.write_all(4);
    reset.write_all(80);
    live.drain();
    faults.at(FaultOp::Unlink, 0, Fault::Hang);
    reset.epoch = tier.advance_and_wait(&reset.spec, 1).unwrap();
    assert!(faults.wait_hung(1, Bench::soon()));
    reset.write_all(40);
    assert!((0..4).all(|n| live.read_is_right(n)), "no live block was evicted");
    faults.release();
    live.drain();
    assert_eq!(tier.usage().bytes, disk_bytes(dir.path()));
}

#[test]
fn evicting_down_to_the_floor_ends_with_the_deadline() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let disk = 100 * FILE_BYTES;
    faults.set_disk_bytes(Some(disk));
    let floored = PosixConfig { shared: false, free_floor_percent: 10, ..config(dir.path()) };
    let bench = Bench::new(open_faulty(floored.clone(), &faults));
    bench.write_all(20);
    drop(bench);
    std::fs::write(dir.path().join("of-somebody-else"), vec![1; (disk / 100 * 75) as usize]).unwrap();
    // A tier that has not queried the free space yet.
    let bench = Bench::new(open_faulty(floored, &faults));
    bench.drain();
    faults.hang(FaultOp::Unlink);
    let mut n = 100;
    let (write, deadline) = loop {
        let deadline = Instant::now() + Duration::from_secs(1);
        let write = bench.begin_write(n, bench.filled(n), deadline);
        // The floor is reached, and a block goes; on a busy machine this may not begin in time.
        if faults.wait_hung(1, deadline) {
            break (write, deadline);
        }
        n += 1;
    };
    until("the deadline passes", || Instant::now() > deadline);
    faults.release();
    assert_eq!(Bench::answer(&write).unwrap_err().kind(), ErrorKind::Busy);
}

#[test]
fn removed_blocks_do_not_come_back_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::new(open(config(dir.path())));
    bench.write_all(400);
    bench.drain();
    (0..400).for_each(|n| bench.remove(n).unwrap());
    let begun = Instant::now();
    drop(bench);
    let left = files_with(dir.path(), ".kvb").len();
    // A closing tier removes files for 2.5 s.
    assert!(left == 0 || begun.elapsed() >= Duration::from_millis(2_400), "{left} files are left");
}

/// Only the second directory has something of the namespace, and nothing describes it.
#[test]
fn files_without_a_description_are_counted_once() {
    let dir = tempfile::tempdir().unwrap();
    let dirs = ["a", "b"].map(|name| dir.path().join(name));
    dirs.iter().for_each(|dir| std::fs::create_dir(dir).unwrap());
    let unnamed = dirs[1].join("0123456789abcdef0123456789abcdef");
    std::fs::create_dir_all(unnamed.join("e0/00")).unwrap();
    std::fs::write(unnamed.join("e0/00/file.kvb"), vec![1; FILE_BYTES as usize]).unwrap();
    let config = PosixConfig { directories: dirs.to_vec(), ..capped(dir.path(), 40 * FILE_BYTES) };
    let tier = open(config);
    for _ in 0..3 {
        tier.sweep(Bench::soon());
        assert_eq!(tier.usage().bytes, FILE_BYTES);
    }
    std::fs::remove_dir_all(unnamed).unwrap();
    tier.sweep(Bench::soon());
    assert_eq!(tier.usage().bytes, 0);
}

/// A sweep lists a directory and examines its files while one of them goes.
#[test]
fn a_file_that_goes_while_it_is_looked_at_is_not_counted() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let flat = || PosixConfig { shard_directories: false, ..config(dir.path()) };
    let other = Bench::new(open(flat()));
    let tier = open_faulty(flat(), &faults);
    let bench = Bench::new(Arc::clone(&tier) as _);
    bench.drain();
    other.write_all(3);
    let parent = block_file(dir.path(), &other, 0).parent().unwrap().to_owned();
    let listed =
        std::fs::read_dir(parent).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let names: Vec<String> = listed.filter(|name| name.ends_with(".kvb")).collect();
    let number = |name: &str| (0..3).find(|&n| name == format!("{}.kvb", bench.key(n).hash)).unwrap();
    let [leaving, next, last] = &names[..] else { panic!("{names:?}") };
    assert!(bench.read_is_right(number(leaving)), "this node knows it");
    // The unlink hangs before the file has gone; the calls that examine the others hang one after another.
    faults.at_name(FaultOp::Unlink, leaving, Fault::Hang);
    faults.at_name(FaultOp::Meta, next, Fault::Hang).at_name(FaultOp::Meta, last, Fault::Hang);
    bench.remove(number(leaving)).unwrap();
    assert!(faults.wait_hung(1, Bench::soon()));
    let sweep = std::thread::spawn(move || tier.sweep(Bench::soon()));
    assert!(faults.wait_hung(2, Bench::soon()));
    faults.release();
    until("the file has gone", || bench.tier.usage().bytes == 0);
    assert!(faults.wait_hung(1, Bench::soon()));
    faults.release();
    sweep.join().unwrap();
    bench.drain();
    assert_eq!((bench.tier.usage().blocks, bench.tier.usage().bytes), (2, disk_bytes(dir.path())));
}
