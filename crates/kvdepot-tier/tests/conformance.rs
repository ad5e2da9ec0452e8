//! Every tier of this crate passes the suite that it exports.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;

use kvdepot_io::{DirectUse, EngineKind};
use kvdepot_tier::{FakeTier, PosixConfig, PosixTier, Tier, conformance};

fn posix(dir: &Path, change: impl FnOnce(&mut PosixConfig)) -> Arc<dyn Tier> {
    let open_wait = std::time::Duration::from_secs(60);
    let mut config = PosixConfig { free_floor_percent: 0, open_wait, ..PosixConfig::new(dir) };
    change(&mut config);
    for directory in &config.directories {
        std::fs::create_dir_all(directory).unwrap();
    }
    Arc::new(PosixTier::open(config).unwrap())
}

/// A directory on the disk of the build, where O_DIRECT works, or in KVDEPOT_TEST_DIR, and a new name in it for each tier.
struct Fresh {
    dir: tempfile::TempDir,
    count: Cell<u32>,
}

impl Fresh {
    fn new() -> Self {
        let base = std::env::var_os("KVDEPOT_TEST_DIR").unwrap_or_else(|| env!("CARGO_TARGET_TMPDIR").into());
        Self { dir: tempfile::tempdir_in(base).unwrap(), count: Cell::new(0) }
    }

    fn next(&self) -> std::path::PathBuf {
        self.count.set(self.count.get() + 1);
        self.dir.path().join(self.count.get().to_string())
    }
}

#[test]
fn fake() {
    conformance::check(&|| Arc::new(FakeTier::new(0)));
    conformance::check(&|| Arc::new(FakeTier::new(64 << 20)));
    conformance::check_capped(&|cap| Arc::new(FakeTier::new(cap)));
}

#[test]
fn posix_shared() {
    let fresh = Fresh::new();
    conformance::check(&|| posix(&fresh.next(), |_| {}));
}

#[test]
fn posix_of_its_own_buffered_durable_and_flat() {
    let fresh = Fresh::new();
    conformance::check(&|| {
        posix(&fresh.next(), |config| {
            (config.shared, config.io_direct, config.shard_directories) = (false, DirectUse::Never, false);
            config.durable = true;
        })
    });
}

#[test]
fn posix_over_three_directories_with_one_thread_of_each_kind() {
    let fresh = Fresh::new();
    conformance::check(&|| {
        let whole = fresh.next();
        posix(&whole, |config| {
            config.directories = ["a", "b", "c"].map(|name| whole.join(name)).to_vec();
            (config.read_threads, config.write_threads) = (1, 1);
        })
    });
}

#[test]
fn posix_is_persistent() {
    for shared in [true, false] {
        let dir = Fresh::new().next();
        conformance::check_persistent(&|| posix(&dir, |config| config.shared = shared));
        std::fs::remove_dir_all(dir).unwrap();
    }
}

#[test]
fn posix_is_capped() {
    for shared in [true, false] {
        let fresh = Fresh::new();
        conformance::check_capped(&|cap| {
            posix(&fresh.next(), |config| (config.capacity_bytes, config.shared) = (cap, shared))
        });
    }
}

#[test]
fn posix_reports_what_it_will_evict() {
    for shared in [true, false] {
        let fresh = Fresh::new();
        conformance::check_cooling(&|blocks| {
            let cap = blocks * (16 << 10);
            posix(&fresh.next(), |config| (config.capacity_bytes, config.shared) = (cap, shared))
        });
    }
}

fn queued(engine: EngineKind) {
    let fresh = Fresh::new();
    conformance::check(&|| posix(&fresh.next(), |config| config.engine = engine));
}

fn queued_direct(engine: EngineKind) {
    let fresh = Fresh::new();
    conformance::check(&|| {
        posix(&fresh.next(), |config| {
            (config.engine, config.io_direct, config.durable) = (engine, DirectUse::Always, true);
            (config.read_threads, config.write_threads) = (1, 1);
        })
    });
    let dir = fresh.next();
    let direct = |config: &mut PosixConfig| (config.engine, config.io_direct) = (engine, DirectUse::Always);
    conformance::check_persistent(&|| posix(&dir, direct));
    conformance::check_capped(&|cap| {
        posix(&fresh.next(), |config| {
            direct(config);
            config.capacity_bytes = cap;
        })
    });
}

#[test]
fn posix_by_aio() {
    queued(EngineKind::Aio);
}

#[test]
fn posix_by_aio_direct() {
    queued_direct(EngineKind::Aio);
}

#[test]
fn posix_by_io_uring() {
    queued(EngineKind::IoUring);
}

#[test]
fn posix_by_io_uring_direct() {
    queued_direct(EngineKind::IoUring);
}

#[test]
fn posix_by_what_is_quickest() {
    let fresh = Fresh::new();
    let tier = posix(&fresh.next(), |config| config.engine = EngineKind::Auto);
    assert!(["psync", "aio", "io_uring"].contains(&tier.engine()));
    conformance::check_persistent(&|| {
        posix(&fresh.dir.path().join("one"), |config| config.engine = EngineKind::Auto)
    });
}
