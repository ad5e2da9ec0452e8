//! Directories in which others write too: whatever stands in a block's place costs that block, and never causes a hang
//! (P2).
#![allow(clippy::unwrap_used)] // a failing test panics

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use crate::common::{block_file, config, files_with, open, open_faulty};
use kvdepot_core::ErrorKind;
use kvdepot_io::faults::{Fault, FaultOp, Faults};
use kvdepot_tier::conformance::{Bench, Waiting, until};
use kvdepot_tier::{GuardConfig, Guarded, PosixConfig, PosixTier, Tier, Written};

/// Longer than anything here takes, shorter than a hang.
const PATIENCE: Duration = Duration::from_secs(60);

/// Puts something that is not a file where a file was.
fn plant(kind: &str, path: &Path) {
    let _ = fs::remove_file(path);
    match kind {
        "directory" => fs::create_dir(path).unwrap(),
        "full directory" => {
            fs::create_dir(path).unwrap();
            fs::write(path.join("file"), b"x").unwrap();
        }
        "fifo" => assert!(Command::new("mkfifo").arg(path).status().unwrap().success()),
        "socket" => drop(UnixListener::bind(path).unwrap()),
        "link to a directory" => std::os::unix::fs::symlink("/", path).unwrap(),
        "dangling link" => std::os::unix::fs::symlink("nowhere", path).unwrap(),
        "link to itself" => std::os::unix::fs::symlink(path.file_name().unwrap(), path).unwrap(),
        other => panic!("{other}"),
    }
}

const KINDS: [&str; 7] = [
    "directory",
    "full directory",
    "fifo",
    "socket",
    "link to a directory",
    "dangling link",
    "link to itself",
];

fn ends<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, receive) = channel();
    std::thread::spawn(move || drop(send.send(work())));
    receive.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("{what} hangs or failed"))
}

#[test]
fn what_is_no_file_costs_its_block_and_not_the_tier() {
    for kind in KINDS {
        let dir = tempfile::tempdir().unwrap();
        let tier = Guarded::new(open(config(dir.path())), GuardConfig::default());
        let bench = Bench::new(Arc::new(tier));
        bench.write_all(20);
        bench.drain();
        let files: Vec<_> = (0..10).map(|n| block_file(dir.path(), &bench, n)).collect();
        files.iter().for_each(|file| plant(kind, file));
        let bench = ends(kind, move || {
            for n in 0..10 {
                let error = bench.read(n).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Corrupt, "{kind}: {error}");
            }
            bench
        });
        assert!((10..20).all(|n| bench.read_is_right(n)), "{kind}: the tier is not switched off");
        for n in 0..10 {
            assert_eq!(bench.write(n).unwrap(), Written::New, "{kind}: it was put aside");
            assert!(bench.read_is_right(n), "{kind}");
        }
    }
}

#[test]
fn what_is_no_file_is_written_anew_by_a_depot_that_never_saw_the_block() {
    for kind in KINDS {
        let dir = tempfile::tempdir().unwrap();
        let bench = Bench::new(open(config(dir.path())));
        bench.write_all(1);
        bench.drain();
        plant(kind, &block_file(dir.path(), &bench, 0));
        drop(bench);
        for shared in [true, false] {
            let bench = Bench::new(open(PosixConfig { shared, ..config(dir.path()) }));
            bench.drain();
            assert!(!bench.read_is_right(0) || !shared, "{kind}");
            // A directory blocks the first write, which sets it aside.
            let _ = bench.write(0);
            let _ = bench.write(0);
            assert!(bench.read_is_right(0), "{kind}, shared: {shared}");
        }
    }
}

#[test]
fn what_is_no_file_does_not_keep_a_namespace_from_opening() {
    for kind in KINDS {
        let dir = tempfile::tempdir().unwrap();
        let spec = Bench::new(open(config(dir.path()))).spec;
        plant(kind, &files_with(dir.path(), "namespace.json")[0]);
        let planted = dir.path().join("0".repeat(32));
        fs::create_dir(&planted).unwrap();
        plant(kind, &planted.join("namespace.json"));
        plant(kind, &dir.path().join("1".repeat(32)));
        let path = dir.path().to_owned();
        let opened = ends(kind, move || {
            let tier = open(config(&path));
            let other = kvdepot_tier::conformance::spec("another", spec.layout().clone());
            assert_eq!(tier.open_and_wait(&other, 0).unwrap(), 0);
            let bench = Bench::with(tier, other);
            bench.write_all(1);
            assert!(bench.read_is_right(0));
            bench.drain();
            let again = bench.tier.open_and_wait(&spec, 0);
            drop(bench);
            again
        });
        assert!(opened.is_ok() || kind.ends_with("directory"), "{kind}: {opened:?}");
    }
}

#[test]
fn a_link_elsewhere_is_neither_read_nor_written_through() {
    let dir = tempfile::tempdir().unwrap();
    let (inside, outside) = (dir.path().join("inside"), dir.path().join("outside"));
    [&inside, &outside].into_iter().for_each(|dir| fs::create_dir(dir).unwrap());
    let bench = Bench::new(open(config(&inside)));
    bench.write_all(1);
    bench.drain();
    let file = block_file(&inside, &bench, 0);
    let shard = file.parent().unwrap();
    fs::remove_dir_all(shard).unwrap();
    std::os::unix::fs::symlink(&outside, shard).unwrap();
    assert!(bench.read(0).is_err());
    assert!(bench.write(0).is_err());
    assert!(fs::read_dir(&outside).unwrap().next().is_none(), "a block was written elsewhere");
}

/// What an unmount leaves: an empty directory at the same path, or none.
#[test]
fn nothing_is_written_below_a_mount_point_whose_file_system_is_gone() {
    for is_made_anew in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let (inner, away) = (dir.path().join("inner"), dir.path().join("away"));
        fs::create_dir(&inner).unwrap();
        let tier = Guarded::new(open(config(&inner)), GuardConfig::default());
        let bench = Bench::new(Arc::new(tier));
        bench.write_all(1);
        bench.drain();
        fs::rename(&inner, &away).unwrap();
        if is_made_anew {
            fs::create_dir(&inner).unwrap();
        }
        for n in 1..20 {
            assert_eq!(bench.write(n).unwrap_err().kind(), ErrorKind::Unavailable);
        }
        assert_eq!(bench.tier.advance_and_wait(&bench.spec, 0).unwrap_err().kind(), ErrorKind::Unavailable);
        assert_eq!(inner.exists(), is_made_anew);
        assert!(!is_made_anew || fs::read_dir(&inner).unwrap().next().is_none());
        drop(bench);
    }
}

/// A network file system reports a full quota when it writes back.
#[test]
fn a_block_whose_flush_fails_is_not_published() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let bench = Bench::new(open_faulty(config(dir.path()), &faults));
    faults.at(FaultOp::Flush, 0, Fault::NoSpace);
    assert_eq!(bench.write(0).unwrap_err().kind(), ErrorKind::NoSpace);
    assert!(files_with(dir.path(), ".kvb").is_empty() && files_with(dir.path(), ".tmp-").is_empty());
    assert_eq!(bench.tier.usage().bytes, 0);
    assert_eq!(bench.write(0).unwrap(), Written::New);
    assert!(bench.read_is_right(0));
}

fn mount(arguments: &[&str], dir: &Path) -> bool {
    Command::new("mount").args(arguments).arg(dir).status().is_ok_and(|status| status.success())
}

/// Existing blocks can be read, and writes go on when they can.
#[test]
fn a_disk_that_is_read_only_or_full_at_the_start_is_read() {
    for fault in ["read-only", "full"] {
        let dir = tempfile::tempdir().unwrap();
        if !mount(&["-t", "tmpfs", "-o", "size=1m", "none"], dir.path()) {
            eprintln!(
                "SKIPPED: a_disk_that_is_read_only_or_full_at_the_start_is_read needs to mount a tmpfs"
            );
            return;
        }
        let outcome = std::panic::catch_unwind(|| {
            let bench = Bench::new(open(config(dir.path())));
            bench.write_all(3);
            bench.drain();
            drop(bench);
            match fault {
                "full" => {
                    // Fails half-way, when all space is taken.
                    let _ = fs::write(dir.path().join("ballast"), vec![0; 2 << 20]);
                }
                _ => assert!(mount(&["-o", "remount,ro"], dir.path())),
            }
            let tier = PosixTier::open(config(dir.path())).unwrap();
            let bench = Bench::new(Arc::new(tier));
            assert!((0..3).all(|n| bench.read_is_right(n)), "{fault}");
            // A full disk gets space by eviction, if blocks of this tier take enough of it.
            let written = bench.write(9);
            assert!(fault == "full" || written.is_err(), "{fault}");
            match fault {
                "full" => fs::remove_file(dir.path().join("ballast")).unwrap(),
                _ => assert!(mount(&["-o", "remount,rw"], dir.path())),
            }
            let expected = if written.is_ok() { Written::AlreadyThere } else { Written::New };
            assert_eq!(bench.write(9).unwrap(), expected, "{fault}");
        });
        // A thread of the tier may hold its directory for a moment after the tier was dropped.
        until("it is unmounted", || {
            Command::new("umount").arg(dir.path()).status().is_ok_and(|status| status.success())
        });
        outcome.unwrap();
    }
}
