//! P1, P4: a process killed at any moment leaves no half-written block visible and no temporary file forever.
#![allow(clippy::unwrap_used)] // a failing test panics

mod common;
#[path = "common/killed.rs"]
mod killed;

use std::fs;
use std::sync::Arc;

use common::{config, files_with, open};
use kvdepot_tier::conformance::Bench;
use kvdepot_tier::{PosixTier, Tier};

const CHILD: &str = "KVDEPOT_TEST_CRASH_DIR";

/// Not a test itself: the process that `killed_while_writing` kills. It writes forever and reports its progress.
#[test]
fn child() {
    let Ok(dir) = std::env::var(CHILD) else { return };
    let bench = Bench::new(open(config(dir.as_ref())));
    killed::write(&bench, 0..u64::MAX, |_| {});
}

#[test]
fn killed_while_writing() {
    let dir = tempfile::tempdir().unwrap();
    let mut acknowledged = 0;
    for round in 1..=5 {
        acknowledged = killed::kill("child", &[(CHILD, dir.path().as_os_str())], acknowledged, round);
        let tier = open(config(dir.path()));
        let bench = Bench::new(Arc::clone(&tier) as _);
        tier.sweep(Bench::soon());
        assert!(files_with(dir.path(), ".tmp-").is_empty(), "round {round}");
        let listed = tier.usage().blocks;
        assert!(
            listed >= acknowledged,
            "round {round}: {listed} of {acknowledged} (a rename outlives its process)"
        );
        let right = (0..listed + 64).filter(|&n| bench.read_is_right(n)).count() as u64;
        assert_eq!(right, listed, "round {round}: every listed block reads right");
        assert_eq!(tier.quarantined(&bench.spec), 0, "round {round}: no half block was visible");
    }
}

/// Temporary files of the dead go; those of the living, and young ones of other hosts, stay. So do files that an NFS client
/// keeps while they are open.
#[test]
fn the_sweep_knows_the_dead_from_the_living() {
    let dir = tempfile::tempdir().unwrap();
    let tier = open(config(dir.path()));
    let bench = Bench::new(Arc::clone(&tier) as _);
    bench.write_all(1);
    let blocks = common::block_file(dir.path(), &bench, 0).parent().unwrap().to_owned();
    // The name that this process's own temporary files have: host, pid, start time.
    let own = PosixTier::writer_identity();
    let (same_process, start) = own.rsplit_once('-').unwrap();
    let own_host = same_process.rsplit_once('-').unwrap().0;
    let later = start.parse::<u64>().unwrap() + 1;
    let old = std::time::SystemTime::now() - std::time::Duration::from_secs(7200);
    let make = |name: &str, aged: bool| {
        let path = blocks.join(name);
        let file = fs::File::create(&path).unwrap();
        if aged {
            file.set_modified(old).unwrap();
        }
        path
    };
    let living = make(&format!(".tmp-{own}-77"), true);
    let reborn = make(&format!(".tmp-{same_process}-{later}-77"), false);
    let dead = make(&format!(".tmp-{own_host}-{}-5-77", u32::MAX), false);
    let young = make(".tmp-elsewhere-1-5-77", false);
    let aged = make(".tmp-elsewhere-1-5-78", true);
    // A removed file that an NFS client keeps while it is open, and of a client that crashed.
    let open_elsewhere = make(".nfs00000000000a1b2c00000007", false);
    let kept_by_nfs = make(".nfs00000000000a1b2c00000008", true);
    let not_of_nfs = make(".nfs-notes", true);
    let report = tier.sweep(Bench::soon());
    assert_eq!(report.temporaries, 4);
    assert!(living.exists() && young.exists() && open_elsewhere.exists() && not_of_nfs.exists());
    assert!(!reborn.exists() && !dead.exists() && !aged.exists() && !kept_by_nfs.exists());
    assert!(bench.read_is_right(0));
}
