//! Resets: what was written before is never served again (P1), whatever the disk does, and nodes that share a directory
//! do not lose each other's resets.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::{Arc, Barrier};

use crate::common::{config, files_with, open, open_faulty};
use kvdepot_core::ErrorKind;
use kvdepot_io::faults::{Fault, FaultDevice, FaultOp, Faults};
use kvdepot_io::{Device, DirDevice, DirectUse};
use kvdepot_tier::conformance::{Bench, Waiting, until};
use kvdepot_tier::{PosixConfig, PosixTier, Written};

/// Makes everything that takes space fail, as on a full disk.
fn fill(faults: &Faults) {
    for op in [FaultOp::Grow, FaultOp::Create, FaultOp::Write] {
        faults.chance(op, Fault::NoSpace, 1.0);
    }
}

/// A tier that waits as long as a depot's tier does.
fn impatient(dir: &std::path::Path) -> PosixConfig {
    PosixConfig { open_wait: PosixConfig::default().open_wait, ..config(dir) }
}

fn names(dir: &std::path::Path) -> HashSet<String> {
    let root = files_with(dir, "namespace.json").pop().unwrap().parent().unwrap().to_owned();
    std::fs::read_dir(root).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn a_reset_on_a_full_disk_outlives_the_depot() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let bench = Bench::new(open_faulty(config(dir.path()), &faults));
    bench.write_all(3);
    bench.drain();
    // As if the depot died with its blocks still there.
    faults.chance(FaultOp::Unlink, Fault::Eio, 1.0);
    fill(&faults);
    assert_eq!(bench.tier.advance_and_wait(&bench.spec, 1).unwrap(), 1, "a rename needs no space");
    drop(bench);
    assert!(!files_with(dir.path(), ".kvb").is_empty());
    assert!(names(dir.path()).contains("below1"), "{:?}", names(dir.path()));
    let bench = Bench::new(open(config(dir.path())));
    assert_eq!(bench.epoch, 1);
    let old = Bench { tier: Arc::clone(&bench.tier), spec: bench.spec.clone(), epoch: 0 };
    assert!((0..3).all(|n| !old.read_is_right(n) && !bench.read_is_right(n)));
    bench.drain();
    assert!(files_with(dir.path(), ".kvb").is_empty(), "space is given back");
    assert!(!names(dir.path()).contains("below1"));
    bench.write_all(3);
    drop(bench);
    assert_eq!(Bench::new(open(config(dir.path()))).epoch, 1, "an epoch outlives its mark");
}

/// Not even a rename works: nothing is served until the reset is stored, and it is retried without a request.
#[test]
fn a_reset_that_cannot_be_stored_closes_the_namespace_until_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let mut bench = Bench::new(open_faulty(config(dir.path()), &faults));
    bench.write_all(3);
    bench.drain();
    fill(&faults);
    faults.chance(FaultOp::Publish, Fault::Eio, 1.0).chance(FaultOp::Unlink, Fault::Eio, 1.0);
    bench.tier.advance_and_wait(&bench.spec, 1).unwrap_err();
    assert!((0..3).all(|n| bench.read(n).unwrap_err().kind() == ErrorKind::NotFound));
    assert_eq!(bench.write(7).unwrap_err().kind(), ErrorKind::NotFound);
    bench.tier.open_and_wait(&bench.spec, 1).unwrap_err();
    bench.epoch = 1;
    assert_eq!(bench.write(7).unwrap_err().kind(), ErrorKind::NotFound, "nor is the new epoch written");
    faults.set_enabled(false);
    until("a reset is stored when the disk lets it", || matches!(bench.write(7), Ok(Written::New)));
    assert!(bench.read_is_right(7));
    drop(bench);
    let bench = Bench::new(open(config(dir.path())));
    assert_eq!(bench.epoch, 1);
    assert!(bench.read_is_right(7) && !bench.read_is_right(0));
}

#[test]
fn a_disk_that_refuses_renames_too_loses_blocks_to_make_room() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let bench = Bench::new(open_faulty(config(dir.path()), &faults));
    bench.write_all(3);
    bench.drain();
    let unlinks = faults.count(FaultOp::Unlink);
    // The first directory can be neither created nor renamed; after some blocks have gone the second attempt succeeds.
    faults.at_name(FaultOp::Grow, "e1", Fault::NoSpace).at_name(FaultOp::Publish, "below1", Fault::NoSpace);
    assert_eq!(bench.tier.advance_and_wait(&bench.spec, 0).unwrap(), 1);
    assert!(faults.count(FaultOp::Unlink) > unlinks);
    assert!(names(dir.path()).contains("e1"));
}

#[test]
fn two_nodes_with_unequal_counts_of_resets_stay_together() {
    let dir = tempfile::tempdir().unwrap();
    let (mut one, mut two) = (Bench::new(open(config(dir.path()))), Bench::new(open(config(dir.path()))));
    assert_eq!(one.tier.advance_and_wait(&one.spec, 1).unwrap(), 1);
    assert_eq!(one.tier.advance_and_wait(&one.spec, 2).unwrap(), 2);
    two.epoch = two.tier.advance_and_wait(&two.spec, 1).unwrap();
    assert_eq!(two.epoch, 3);
    two.write_all(3);
    one.epoch = one.tier.open_and_wait(&one.spec, 2).unwrap();
    assert_eq!(one.epoch, 3);
    assert!((0..3).all(|n| one.read_is_right(n)));
}

/// Several nodes, each with its own tier on the same directory, on a disk with and without space.
#[test]
fn nodes_that_advance_at_once_get_an_epoch_each() {
    const NODES: usize = 6;
    for is_full in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let faults = Faults::default();
        let nodes: Vec<Bench> =
            (0..NODES).map(|_| Bench::new(open_faulty(config(dir.path()), &faults))).collect();
        nodes[0].write_all(1);
        if is_full {
            fill(&faults);
        }
        let barrier = Barrier::new(NODES);
        let epochs: Vec<u32> = std::thread::scope(|scope| {
            let advance = |node: &Bench| {
                barrier.wait();
                node.tier.advance_and_wait(&node.spec, 1)
            };
            let nodes: Vec<_> = nodes.iter().map(|node| scope.spawn(move || advance(node))).collect();
            nodes.into_iter().filter_map(|node| node.join().unwrap().ok()).collect()
        });
        let distinct: HashSet<u32> = epochs.iter().copied().collect();
        assert_eq!(distinct.len(), epochs.len(), "full: {is_full}, {epochs:?}");
        assert!(is_full || epochs.len() == NODES, "{epochs:?}");
        let newest = open(config(dir.path())).open_and_wait(&nodes[0].spec, 0).unwrap();
        assert!(epochs.iter().all(|&epoch| epoch <= newest) && newest >= 1, "{epochs:?} {newest}");
    }
}

fn two_directories(dirs: [PathBuf; 2], faults: [&Faults; 2]) -> Bench {
    let devices = dirs.iter().zip(faults).map(|(dir, faults)| {
        let plain: Arc<dyn Device> = Arc::new(DirDevice::open(dir, DirectUse::Never).unwrap());
        Arc::new(FaultDevice::new(plain, faults.clone())) as Arc<dyn Device>
    });
    let devices = devices.collect();
    Bench::new(Arc::new(PosixTier::open_on_devices(config(&dirs[0]), devices).unwrap()))
}

/// One of two directories cannot be reached: the other one knows after a restart.
#[test]
fn a_reset_that_one_directory_missed_is_found_in_the_other() {
    for broken in 0..2 {
        let dir = tempfile::tempdir().unwrap();
        let dirs = ["a", "b"].map(|name| dir.path().join(name));
        dirs.iter().for_each(|dir| std::fs::create_dir(dir).unwrap());
        let faults = [Faults::default(), Faults::default()];
        let bench = two_directories(dirs.clone(), [&faults[0], &faults[1]]);
        bench.write_all(20);
        bench.drain();
        for op in [FaultOp::Grow, FaultOp::Publish, FaultOp::Unlink] {
            faults[broken].chance(op, Fault::Eio, 1.0);
        }
        bench.tier.advance_and_wait(&bench.spec, 1).unwrap_err();
        assert!((0..20).all(|n| !bench.read_is_right(n)));
        drop(bench);
        // Still broken after the restart.
        let bench = two_directories(dirs, [&faults[0], &faults[1]]);
        // Each attempt to store it takes another number.
        assert!(bench.epoch >= 1, "directory {broken} was not told");
        let old = Bench { tier: Arc::clone(&bench.tier), spec: bench.spec.clone(), epoch: 0 };
        assert!((0..20).all(|n| !old.read_is_right(n) && !bench.read_is_right(n)));
    }
}

#[test]
fn files_that_are_named_like_epochs_are_in_nobody_s_way() {
    let dir = tempfile::tempdir().unwrap();
    let bench = Bench::new(open(config(dir.path())));
    bench.drain();
    let root = files_with(dir.path(), "namespace.json").pop().unwrap().parent().unwrap().to_owned();
    std::fs::write(root.join("e1"), b"").unwrap();
    std::os::unix::fs::symlink("/", root.join("e2")).unwrap();
    std::fs::write(root.join("below9"), b"").unwrap();
    let epoch = bench.tier.advance_and_wait(&bench.spec, 0).unwrap();
    assert_eq!(epoch, 3);
    let bench = Bench { epoch, ..bench };
    bench.write_all(1);
    assert!(bench.read_is_right(0));
}

/// A hung file system blocks the namespace that is being opened, not the others (P2).
#[test]
fn a_hung_file_system_ends_openings_in_time_and_holds_up_no_lookup() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let bench = Bench::new(open_faulty(impatient(dir.path()), &faults));
    bench.write_all(1);
    bench.drain();
    faults.hang(FaultOp::Meta);
    let (tier, spec) = (Arc::clone(&bench.tier), bench.spec.clone());
    let other = kvdepot_tier::conformance::spec("another", spec.layout().clone());
    let waiting = std::thread::spawn(move || {
        let look = tier.open_and_wait(&spec, 0);
        let new = tier.open_and_wait(&other, 0);
        (look, new, tier.advance_and_wait(&spec, 1))
    });
    assert!(faults.wait_hung(1, Bench::soon()));
    assert!(bench.read_is_right(0), "reads need no answer about namespaces");
    let (look, new, reset) = waiting.join().unwrap();
    for kind in [look.unwrap_err().kind(), new.unwrap_err().kind(), reset.unwrap_err().kind()] {
        assert_eq!(kind, ErrorKind::Timeout);
    }
    assert!(!bench.read_is_right(0), "a reset holds though nothing could be stored");
    faults.release();
    let bench = Bench { epoch: 1, ..bench };
    until("the reset is stored when the file system answers", || bench.write(1).is_ok());
    assert!(bench.read_is_right(1));
}

/// The caller has stopped waiting when the opening finds that an epoch must be stored but cannot be.
#[test]
fn an_opening_that_comes_too_late_is_tried_again() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let mut bench = Bench::new(open_faulty(impatient(dir.path()), &faults));
    bench.drain();
    // It raises the namespace's epoch; that hangs and then fails.
    faults.hang(FaultOp::Meta);
    let error = bench.tier.open_and_wait(&bench.spec, 1).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    faults.at_name(FaultOp::Grow, "e1", Fault::Eio).at_name(FaultOp::Publish, "below1", Fault::Eio);
    let grown = faults.count(FaultOp::Grow);
    faults.release();
    until("the opening goes on", || faults.count(FaultOp::Grow) > grown + 1);
    bench.epoch = 1;
    until("it is tried again by itself", || bench.write(7).is_ok());
    assert!(bench.read_is_right(7));
}

/// One node stores its reset by a rename, another one by a new directory, and a third clears what was renamed just
/// before the second checks whether it was alone.
#[test]
fn a_mark_that_is_cleared_between_two_resets_keeps_them_apart() {
    let dir = tempfile::tempdir().unwrap();
    let (full, slow) = (Faults::default(), Faults::default());
    let one = Bench::new(open_faulty(config(dir.path()), &full));
    one.write_all(3);
    let two = Bench::new(open_faulty(config(dir.path()), &slow));
    [&one, &two].into_iter().for_each(Bench::drain);
    // The second node has checked `namespace.json` and the marks, and is about to make its own.
    slow.at_name(FaultOp::Meta, "e1", Fault::Hang);
    let (tier, spec) = (Arc::clone(&two.tier), two.spec.clone());
    let second = std::thread::spawn(move || tier.advance_and_wait(&spec, 1));
    assert!(slow.wait_hung(1, Bench::soon()));
    full.at_name(FaultOp::Grow, "e1", Fault::NoSpace);
    // The first node does not clear what it has renamed.
    full.chance(FaultOp::Unlink, Fault::Eio, 1.0);
    let first = one.tier.advance_and_wait(&one.spec, 1).unwrap();
    assert!(names(dir.path()).contains("below1"));
    // It syncs the directory before it checks the marks again.
    slow.at_name(FaultOp::Meta, &one.spec.root().to_string(), Fault::Hang);
    slow.release();
    until("the second node makes its mark", || names(dir.path()).contains("e1"));
    assert!(slow.wait_hung(1, Bench::soon()));
    let third = open(config(dir.path()));
    third.open_and_wait(&one.spec, 1).unwrap();
    third.sweep(Bench::soon());
    assert!(!names(dir.path()).contains("below1"), "cleared");
    slow.release();
    let second = second.join().unwrap();
    assert_ne!(first, second.unwrap(), "two resets have an epoch each");
}

/// Somebody removes a namespace's directory. The namespace is opened again in the known epoch, while the unlink thread
/// lags behind, and keeps what is written then.
#[test]
fn a_namespace_that_opens_again_in_its_epoch_keeps_new_blocks() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let mut bench = Bench::new(open_faulty(config(dir.path()), &faults));
    bench.epoch = bench.tier.advance_and_wait(&bench.spec, 1).unwrap();
    bench.write_all(10);
    bench.drain();
    let root = files_with(dir.path(), "namespace.json").pop().unwrap().parent().unwrap().to_owned();
    faults.at(FaultOp::Unlink, 0, Fault::Hang);
    bench.remove(9).unwrap();
    assert!(faults.wait_hung(1, Bench::soon()));
    std::fs::remove_dir_all(root).unwrap();
    assert_eq!(bench.tier.open_and_wait(&bench.spec, 1).unwrap(), 1);
    assert_eq!(bench.write(3).unwrap(), Written::New);
    faults.release();
    bench.drain();
    assert!(bench.read_is_right(3));
}
