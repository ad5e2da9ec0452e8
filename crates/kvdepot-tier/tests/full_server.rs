//! P5 on a network mount that is really full: the error may come as late as close(2). What could not be written is not
//! served; the tier evicts and goes on.
//!
//! `make test-nfs` names a small mount, and one whose user has a small quota. `full_disk` injects these errors on a
//! local disk.
#![allow(clippy::unwrap_used)] // a failing test panics

mod common;

use std::path::PathBuf;
use std::sync::Arc;

use common::{Engine, config, disk_bytes, files_with, open};
use kvdepot_io::EngineKind;
use kvdepot_tier::conformance::{Bench, spec};
use kvdepot_tier::{PosixConfig, Tier, Written};

/// An empty directory on a file system, or of a user, with space for 4 to 8 MiB.
const SMALL: &str = "KVDEPOT_TEST_SMALL_DIR";

const BLOCK_BYTES: u64 = 250_000;
/// More than twice what there is space for.
const BLOCKS: u64 = 72;

fn evicts_and_goes_on(kind: EngineKind) {
    let base = PathBuf::from(std::env::var_os(SMALL).expect("KVDEPOT_TEST_SMALL_DIR names a directory"));
    let _engine = Engine::set(kind);
    let dir = tempfile::tempdir_in(&base).unwrap();
    // Neither a cap nor a floor of free space: the file system's errors are the only bound.
    let tier = open(config(dir.path()));
    let layout = kvdepot_core::BlockLayout::new(vec![vec![BLOCK_BYTES]]).unwrap();
    let bench = Bench::with(Arc::clone(&tier) as _, spec("full", layout.clone()));
    for n in 0..BLOCKS {
        // One file that is closed late may cost a write another attempt, but not a third one.
        let written = bench.write(n).or_else(|_| bench.write(n));
        assert_eq!(written.unwrap(), Written::New, "{kind:?}, block {n}");
        assert!(bench.read_is_right(n), "{kind:?}, block {n}: what was just written");
    }
    bench.drain();
    let there: Vec<u64> = (0..BLOCKS).filter(|&n| bench.read_is_right(n)).collect();
    println!("{kind:?}: {} of {BLOCKS} blocks fit", there.len());
    assert!(there.len() >= 4 && there.len() < BLOCKS as usize / 2, "{there:?}");
    assert!(there.contains(&(BLOCKS - 1)));
    assert_eq!(files_with(dir.path(), ".tmp-"), Vec::<PathBuf>::new());
    assert_eq!(tier.quarantined(&bench.spec), 0, "{kind:?}: no half file was published");
    assert_eq!(tier.usage().bytes, disk_bytes(dir.path()));
    drop(bench);
    drop(tier);
    // A new tier serves the same blocks and no others.
    let bench = Bench::with(open(PosixConfig { shared: false, ..config(dir.path()) }), spec("full", layout));
    bench.drain();
    let again: Vec<u64> = (0..BLOCKS).filter(|&n| bench.read_is_right(n)).collect();
    assert_eq!(again, there, "{kind:?}");
}

#[test]
#[ignore = "needs a small mount: make test-nfs"]
fn by_psync() {
    evicts_and_goes_on(EngineKind::Psync);
}

#[test]
#[ignore = "needs a small mount: make test-nfs"]
fn by_aio() {
    evicts_and_goes_on(EngineKind::Aio);
}

#[test]
#[ignore = "needs a small mount: make test-nfs"]
fn by_io_uring() {
    evicts_and_goes_on(EngineKind::IoUring);
}
