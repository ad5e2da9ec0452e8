//! The Slab tier passes the conformance suite of all tiers.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::cell::Cell;
use std::path::PathBuf;
use std::sync::Arc;

use kvdepot_tier::{SlabConfig, SlabTier, Tier, conformance};

const MIB: u64 = 1 << 20;

/// A new file for each tier, on the disk of the build, where O_DIRECT works; at most two exist at a time.
struct Fresh {
    dir: tempfile::TempDir,
    count: Cell<u32>,
}

impl Fresh {
    fn new() -> Self {
        Self { dir: tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap(), count: Cell::new(0) }
    }

    fn next(&self) -> PathBuf {
        let before = self.count.replace(self.count.get() + 1);
        let _ = std::fs::remove_file(self.dir.path().join(before.to_string()));
        self.dir.path().join(self.count.get().to_string())
    }
}

fn open(path: PathBuf, change: impl FnOnce(&mut SlabConfig)) -> Arc<dyn Tier> {
    let mut config = SlabConfig {
        capacity_bytes: 128 * MIB,
        segment_bytes: 8 * MIB,
        open_wait: std::time::Duration::from_secs(60),
        lock_wait: std::time::Duration::from_secs(60),
        ..SlabConfig::new(path)
    };
    change(&mut config);
    Arc::new(SlabTier::open(config).unwrap())
}

#[test]
fn slab() {
    let fresh = Fresh::new();
    conformance::check(&|| open(fresh.next(), |_| {}));
}

#[test]
fn slab_that_does_not_wait_for_syncs_with_one_thread_of_each_kind() {
    let fresh = Fresh::new();
    conformance::check(&|| {
        open(fresh.next(), |config| {
            (config.durable, config.read_threads, config.write_threads) = (false, 1, 1);
        })
    });
}

#[test]
fn slab_is_persistent() {
    for durable in [true, false] {
        let path = Fresh::new().next();
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        conformance::check_persistent_alone(&|| open(path.clone(), |config| config.durable = durable));
        std::fs::remove_dir_all(path.parent().unwrap()).unwrap();
    }
}

#[test]
fn slab_reports_what_it_will_evict() {
    let fresh = Fresh::new();
    conformance::check_cooling(&|blocks| {
        let bytes = blocks * (16 << 10);
        open(fresh.next(), |config| (config.capacity_bytes, config.segment_bytes) = (bytes, MIB))
    });
}
