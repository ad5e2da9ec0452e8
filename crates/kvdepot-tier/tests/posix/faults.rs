//! P2: every failure of a device is a miss in bounded time, and the tier goes on.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::{Engine, config, disk_bytes, files_with, on_every_engine, open, open_faulty};
use kvdepot_core::ErrorKind;
use kvdepot_io::faults::{Fault, FaultOp, Faults};
use kvdepot_tier::conformance::{Bench, until};
use kvdepot_tier::{PosixTier, Presence, Tier, Written, registry};

on_every_engine! {
    a_tenth_of_reads_fails
    rotten_reads_never_come_through
    failing_writes_leave_nothing_behind
    a_failed_write_fails_for_all_who_waited_for_it
    a_hung_device_times_out_and_others_go_on
    a_device_that_fails_at_everything_can_still_be_asked
    faults_come_from_the_configuration_too
    a_full_disk_evicts_and_harms_nothing
    directories_that_cannot_be_used_are_refused_at_the_start
    a_tier_ends_while_its_device_hangs
}

const SEED: u64 = 7;

fn a_tenth_of_reads_fails() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::seeded(SEED);
    let bench = Bench::new(open_faulty(config(dir.path()), &faults));
    bench.write_all(200);
    faults.chance(FaultOp::Read, Fault::Eio, 0.1).chance(FaultOp::Read, Fault::Short, 0.3);
    let right = (0..200).filter(|&n| bench.read_is_right(n)).count();
    assert!((150..200).contains(&right), "{right} of 200 with seed {SEED}");
    faults.set_enabled(false);
    assert!((0..200).all(|n| bench.read_is_right(n)), "EIO once costs no block");
}

fn rotten_reads_never_come_through() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::seeded(SEED);
    let bench = Bench::new(open_faulty(config(dir.path()), &faults));
    bench.write_all(100);
    faults.chance(FaultOp::Read, Fault::Flip, 0.5);
    let right = (0..100).filter(|&n| bench.read_is_right(n)).count();
    assert!((30..70).contains(&right), "{right} of 100 with seed {SEED}");
}

fn failing_writes_leave_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::seeded(SEED);
    let bench = Bench::new(open_faulty(config(dir.path()), &faults));
    faults.chance(FaultOp::Write, Fault::Eio, 0.2).chance(FaultOp::Create, Fault::Eio, 0.1);
    faults.chance(FaultOp::Publish, Fault::Eio, 0.1);
    let kept: Vec<u64> = (0..100).filter(|&n| bench.write(n).is_ok()).collect();
    faults.set_enabled(false);
    assert!((40..80).contains(&kept.len()), "{} of 100 with seed {SEED}", kept.len());
    assert!(files_with(dir.path(), ".tmp-").is_empty());
    assert!(kept.iter().all(|&n| bench.read_is_right(n)));
    assert_eq!(bench.tier.usage().blocks, kept.len() as u64);
    assert_eq!(bench.tier.usage().bytes, disk_bytes(dir.path()), "a failed write gives its room back (P5)");
}

fn a_failed_write_fails_for_all_who_waited_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::seeded(SEED);
    let bench = Bench::new(open_faulty(config(dir.path()), &faults));
    faults.hang(FaultOp::Write);
    let first = bench.begin_write(0, bench.filled(0), Bench::soon());
    assert!(faults.wait_hung(1, Bench::soon()));
    let second = bench.begin_write(0, bench.filled(0), Bench::soon());
    faults.at(FaultOp::Publish, 0, Fault::Eio);
    faults.release();
    for answer in [first, second] {
        assert_eq!(Bench::answer(&answer).unwrap_err().kind(), ErrorKind::Io);
    }
    assert_eq!(bench.write(0).unwrap(), Written::New);
}

/// A hung device blocks its own operations only until their deadlines, and no others.
fn a_hung_device_times_out_and_others_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::seeded(SEED);
    let bench = Bench::new(open_faulty(config(dir.path()), &faults));
    bench.write_all(20);
    bench.drain();
    // As many reads as there are threads hang in the device; at their deadlines their threads are replaced. A thread
    // with a kernel queue serves others in the meantime.
    for nth in 0..4 {
        faults.at(FaultOp::Read, nth, Fault::Hang);
    }
    let deadline = Instant::now() + Duration::from_secs(10);
    let stuck: Vec<_> = (0..4).map(|n| bench.begin_read(n, bench.slot(), deadline)).collect();
    assert!(faults.wait_hung(4, Bench::soon()));
    let waiting = bench.begin_read(4, bench.slot(), deadline);
    if Engine::is_queued() {
        Bench::answer(&waiting).unwrap();
    } else {
        assert_eq!(Bench::answer(&waiting).unwrap_err().kind(), ErrorKind::Timeout);
    }
    assert!((5..20).all(|n| bench.read_is_right(n)), "others go on while four reads hang");
    assert!(stuck.iter().all(|answer| answer.try_recv().is_err()), "their buffers are still the device's");
    assert!(!bench.tier.drain(Instant::now()));
    faults.release();
    for answer in stuck {
        Bench::answer(&answer).unwrap();
    }
    bench.drain();
}

fn a_device_that_fails_at_everything_can_still_be_asked() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::seeded(SEED);
    let tier = open_faulty(config(dir.path()), &faults);
    let bench = Bench::new(tier);
    bench.write_all(1);
    for op in [FaultOp::Open, FaultOp::Read, FaultOp::Create, FaultOp::Unlink, FaultOp::Meta] {
        faults.chance(op, Fault::Eio, 1.0);
    }
    assert_eq!(bench.read(0).unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(bench.write(1).unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(bench.probe(vec![bench.key(5)]).unwrap_err().kind(), ErrorKind::Io);
    bench.remove(0).unwrap();
    assert_eq!(bench.peek(0), Presence::Absent);
    bench.drain();
    faults.set_enabled(false);
    assert_eq!(bench.read(0).unwrap_err().kind(), ErrorKind::NotFound, "removed is removed");
}

fn faults_come_from_the_configuration_too() {
    let dir = tempfile::tempdir().unwrap();
    // Independent of how much free space this machine's disk has.
    let settings = serde_json::json!({
        "directories": [dir.path()], "faults": "read_eio=1,seed=3", "free_floor_percent": 0,
    });
    let bench = Bench::new(registry::build("Posix", &settings).unwrap());
    bench.write_all(1);
    assert_eq!(bench.read(0).unwrap_err().kind(), ErrorKind::Io);
}

/// A really full disk: a small tmpfs, if this test may mount one. See `full_disk.rs` for simulated ones.
fn a_full_disk_evicts_and_harms_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mount =
        |arguments: &[&str]| std::process::Command::new("mount").args(arguments).arg(dir.path()).status();
    if !mount(&["-t", "tmpfs", "-o", "size=256k", "none"]).is_ok_and(|status| status.success()) {
        eprintln!("SKIPPED: a_full_disk_evicts_and_harms_nothing needs the right to mount a tmpfs");
        return;
    }
    let outcome = std::panic::catch_unwind(|| {
        let bench = Bench::new(open(config(dir.path())));
        assert!((0..40).all(|n| bench.write(n).is_ok_and(|written| written == Written::New)));
        let kept: Vec<u64> = (0..40).filter(|&n| bench.read_is_right(n)).collect();
        assert!((2..16).contains(&kept.len()) && kept.contains(&39), "{kept:?}");
        assert_eq!(bench.tier.usage().blocks, kept.len() as u64);
        assert_eq!(bench.tier.usage().bytes, disk_bytes(dir.path()), "what was evicted is not charged");
        assert!(files_with(dir.path(), ".tmp-").is_empty());
    });
    // A thread of the tier may hold its directory for a moment after the tier was dropped.
    until("it is unmounted", || {
        std::process::Command::new("umount").arg(dir.path()).status().is_ok_and(|status| status.success())
    });
    outcome.unwrap();
}

fn directories_that_cannot_be_used_are_refused_at_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let missing = PosixTier::open(config(&dir.path().join("missing"))).unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::Config);
    assert!(missing.to_string().contains("missing"), "{missing}");
    let file = dir.path().join("file");
    std::fs::write(&file, b"").unwrap();
    assert_eq!(PosixTier::open(config(&file)).unwrap_err().kind(), ErrorKind::Config);
    // Root can write everywhere except where nobody can.
    let nowhere = PosixTier::open(config(std::path::Path::new("/proc/self"))).unwrap_err();
    assert!(nowhere.to_string().contains("/proc/self"), "{nowhere}");
    assert_eq!(nowhere.kind(), ErrorKind::Permission);
}

fn a_tier_ends_while_its_device_hangs() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::seeded(SEED);
    let tier: Arc<dyn Tier> = open_faulty(config(dir.path()), &faults);
    let bench = Bench::new(tier);
    bench.write_all(1);
    bench.drain();
    faults.hang(FaultOp::Read);
    let stuck = bench.begin_read(0, bench.slot(), Bench::soon());
    assert!(faults.wait_hung(1, Bench::soon()));
    drop(bench);
    assert!(stuck.try_recv().is_err());
    faults.release();
    Bench::answer(&stuck).unwrap();
}
