//! What a tier finds again, and what it does with directories that have changed since it left them.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::fs;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::common::{block_file, config, files, files_with, open};
use kvdepot_core::ErrorKind;
use kvdepot_io::faults::{Fault, FaultOp, Faults};
use kvdepot_tier::conformance::{Bench, Waiting};
use kvdepot_tier::{PosixConfig, Presence, Tier, Written};

#[test]
fn a_scan_brings_presence_without_probes() {
    let dir = tempfile::tempdir().unwrap();
    Bench::new(open(config(dir.path()))).write_all(10);
    let bench = Bench::new(open(config(dir.path())));
    bench.drain();
    assert!((0..10).all(|n| bench.peek(n) == Presence::Present));
    assert_eq!(bench.peek(10), Presence::Unknown, "another node may have written it");
    let own = Bench::new(open(PosixConfig { shared: false, ..config(dir.path()) }));
    own.drain();
    assert_eq!(own.peek(10), Presence::Absent);
}

#[test]
fn while_the_scan_runs_nothing_is_called_absent() {
    let dir = tempfile::tempdir().unwrap();
    Bench::new(open(config(dir.path()))).write_all(3);
    let faults = Faults::default();
    faults.at(FaultOp::Meta, 0, Fault::Hang);
    let tier = crate::common::open_faulty(PosixConfig { shared: false, ..config(dir.path()) }, &faults);
    assert!(faults.wait_hung(1, Bench::soon()), "the scan's first listing hangs");
    let bench = Bench::new(tier);
    assert_eq!([0, 9].map(|n| bench.peek(n)), [Presence::Unknown; 2]);
    assert!(bench.read_is_right(0), "what is not known is looked for");
    assert_eq!(bench.probe(vec![bench.key(1), bench.key(9)]).unwrap(), 1);
    assert!(!bench.tier.drain(std::time::Instant::now()));
    faults.release();
    bench.drain();
    assert!((0..3).all(|n| bench.peek(n) == Presence::Present));
    assert_eq!(bench.peek(9), Presence::Absent);
}

#[test]
fn two_depots_share_a_directory() {
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (Bench::new(open(config(dir.path()))), Bench::new(open(config(dir.path()))));
    one.write_all(3);
    assert_eq!(two.probe(two.keys(4)).unwrap(), 3);
    assert!((0..3).all(|n| two.read_is_right(n)));
    assert_eq!(two.write(2).unwrap(), Written::AlreadyThere);
    one.remove(1).unwrap();
    one.drain();
    assert_eq!(two.read(1).unwrap_err().kind(), ErrorKind::NotFound);
    assert_ne!(two.peek(1), Presence::Present, "a miss is learnt from");
    assert_eq!(two.tier.usage().blocks, 2);
}

#[test]
fn a_sweep_learns_of_files_that_came_and_went() {
    let dir = tempfile::tempdir().unwrap();
    let tier = open(config(dir.path()));
    let mine = Bench::new(Arc::clone(&tier) as _);
    mine.write_all(2);
    let other = Bench::new(open(config(dir.path())));
    other.write(2).unwrap();
    fs::remove_file(block_file(dir.path(), &mine, 0)).unwrap();
    tier.sweep(Bench::soon());
    assert_eq!(tier.usage().blocks, 2);
    assert_eq!([0, 1, 2].map(|n| mine.peek(n) == Presence::Present), [false, true, true]);
    assert_eq!(tier.usage().bytes, crate::common::disk_bytes(dir.path()));
}

#[test]
fn recency_survives_in_the_files() {
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::new(open(config(dir.path())));
    bench.write_all(3);
    drop(bench);
    // All were written an hour ago; then a later depot reads block 0.
    let old = SystemTime::now() - Duration::from_secs(3600);
    for path in files_with(dir.path(), ".kvb") {
        fs::File::options().write(true).open(path).unwrap().set_modified(old).unwrap();
    }
    crate::common::remove_records(dir.path());
    let bench = Bench::new(open(config(dir.path())));
    bench.drain();
    assert!(bench.read_is_right(0));
    bench.tier.touch(&[bench.key(1)]);
    bench.drain();
    drop(bench);
    crate::common::remove_records(dir.path());
    let cap = 3 * 16384;
    let bench = Bench::new(open(PosixConfig { capacity_bytes: cap, ..config(dir.path()) }));
    bench.drain();
    bench.write(9).unwrap();
    let there = [0, 1, 2, 9].map(|n| bench.read_is_right(n));
    assert_eq!(there, [true, true, false, true], "the one that was not used since went");
}

#[test]
fn a_lost_namespace_file_is_written_anew_in_the_newest_epoch() {
    let dir = tempfile::tempdir().unwrap();
    let mut bench = Bench::new(open(config(dir.path())));
    assert_eq!(bench.tier.advance_and_wait(&bench.spec, 4).unwrap(), 4);
    bench.epoch = 4;
    bench.write_all(2);
    drop(bench);
    for damage in [None, Some("no JSON")] {
        let path = files_with(dir.path(), "namespace.json").pop().unwrap();
        match damage {
            None => fs::remove_file(&path).unwrap(),
            Some(text) => fs::write(&path, text).unwrap(),
        }
        let bench = Bench::new(open(config(dir.path())));
        assert_eq!(bench.epoch, 4);
        bench.drain();
        assert!(bench.read_is_right(0) && bench.read_is_right(1));
        assert!(fs::read_to_string(path).unwrap().contains("\"model\""), "people can read it");
    }
}

#[test]
fn another_format_version_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::new(open(config(dir.path())));
    bench.write_all(2);
    bench.drain();
    let spec = bench.spec.clone();
    drop(bench);
    let path = files_with(dir.path(), "namespace.json").pop().unwrap();
    let written = fs::read_to_string(&path).unwrap();
    for other in ["\"format_version\": 1", "\"format_version\": 3"] {
        let text = written.replace("\"format_version\": 2", other);
        assert_ne!(text, written);
        fs::write(&path, &text).unwrap();
        let tier = open(config(dir.path()));
        for error in [tier.open_and_wait(&spec, 0), tier.open_and_wait(&spec, 7)].map(Result::unwrap_err) {
            assert_eq!(error.kind(), ErrorKind::Version);
            let said = error.to_string();
            assert!(
                said.contains(dir.path().to_str().unwrap()) && said.contains("another directory"),
                "{said}"
            );
        }
        drop(tier);
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
        assert_eq!(files_with(dir.path(), ".kvb").len(), 2);
    }
}

#[test]
fn earlier_epochs_are_cleared_after_a_crash_too() {
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::new(open(config(dir.path())));
    bench.write_all(3);
    let kept: Vec<_> =
        files_with(dir.path(), ".kvb").iter().map(|p| (p.clone(), fs::read(p).unwrap())).collect();
    assert_eq!(bench.tier.advance_and_wait(&bench.spec, 1).unwrap(), 1);
    bench.drain();
    assert!(files_with(dir.path(), ".kvb").is_empty());
    drop(bench);
    // As if the depot had died between the new namespace.json and the clearing.
    for (path, bytes) in kept {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
    let bench = Bench::new(open(config(dir.path())));
    bench.drain();
    assert_eq!((bench.epoch, bench.tier.usage().blocks), (1, 0));
    assert!(files_with(dir.path(), ".kvb").is_empty());
}

#[test]
fn a_namespace_keeps_its_directories_whatever_the_settings_say() {
    let dir = tempfile::tempdir().unwrap();
    let flat = PosixConfig { shard_directories: false, ..config(dir.path()) };
    Bench::new(open(flat)).write_all(3);
    let bench = Bench::new(open(config(dir.path())));
    bench.write(3).unwrap();
    bench.drain();
    assert!((0..4).all(|n| bench.read_is_right(n)));
    let parents: std::collections::HashSet<_> =
        files_with(dir.path(), ".kvb").iter().map(|path| path.parent().unwrap().to_owned()).collect();
    assert_eq!(parents.len(), 1);
    assert_eq!(files(dir.path()).len(), 5);
}
