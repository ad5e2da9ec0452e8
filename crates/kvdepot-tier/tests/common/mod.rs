//! Helpers shared by the tests of block files.
#![allow(dead_code, unused_macros, unused_imports, clippy::unwrap_used)] // each test uses some of these; a failing test panics

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvdepot_io::faults::{FaultDevice, Faults};
use kvdepot_io::{Device, DirDevice, DirectUse, EngineKind};
use kvdepot_tier::conformance::Bench;
use kvdepot_tier::{PosixConfig, PosixTier};

/// Reached only by a hang.
const HANG: Duration = Duration::from_secs(60);

thread_local! {
    static ENGINE: Cell<EngineKind> = const { Cell::new(EngineKind::Psync) };
}

/// The engine of this thread's tiers until it is dropped.
pub(crate) struct Engine;

impl Engine {
    pub(crate) fn set(kind: EngineKind) -> Self {
        ENGINE.set(kind);
        Self
    }

    pub(crate) fn is_queued() -> bool {
        ENGINE.get() != EngineKind::Psync
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        ENGINE.set(EngineKind::Psync);
    }
}

/// Runs each test with each I/O engine; where the system lacks one, with its fallback.
macro_rules! on_every_engine {
    ($($test:ident)*) => {
        on_every_engine! { @ psync Psync $($test)* }
        on_every_engine! { @ aio Aio $($test)* }
        on_every_engine! { @ io_uring IoUring $($test)* }
    };
    (@ $name:ident $kind:ident $($test:ident)*) => {
        mod $name {
            $(#[test]
            fn $test() {
                let _engine = crate::common::Engine::set(kvdepot_io::EngineKind::$kind);
                super::$test();
            })*
        }
    };
}
pub(crate) use on_every_engine;

/// A tier on a directory, with everything small.
pub(crate) fn config(dir: &Path) -> PosixConfig {
    PosixConfig {
        engine: ENGINE.get(),
        // Without O_DIRECT no queue is used for writes.
        io_direct: if Engine::is_queued() { DirectUse::Always } else { DirectUse::Never },
        read_threads: 2,
        write_threads: 2,
        // Independent of how much free space the test machine's disk has.
        capacity_percent: 0,
        free_floor_percent: 0,
        // A disk that is syncing the output of a complete build is slow, but does not hang.
        open_wait: HANG,
        ..PosixConfig::new(dir)
    }
}

pub(crate) fn open(config: PosixConfig) -> Arc<PosixTier> {
    Arc::new(PosixTier::open(config).unwrap())
}

/// A tier whose device follows a plan of faults.
pub(crate) fn open_faulty(config: PosixConfig, faults: &Faults) -> Arc<PosixTier> {
    let plain: Arc<dyn Device> = Arc::new(DirDevice::open(&config.directories[0], config.io_direct).unwrap());
    faults.strike_in_queue();
    let device: Arc<dyn Device> = Arc::new(FaultDevice::new(plain, faults.clone()));
    Arc::new(PosixTier::open_on_faulty(config, vec![device], faults).unwrap())
}

/// All files under a directory except the tier's own records of what lies there. Directories that the tier removes in
/// the meantime count as empty.
pub(crate) fn files(dir: &Path) -> Vec<PathBuf> {
    let mut out = Vec::new();
    let mut todo = vec![dir.to_owned()];
    while let Some(dir) = todo.pop() {
        let entries = match std::fs::read_dir(dir) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            entries => entries.unwrap(),
        };
        for entry in entries {
            let path = entry.unwrap().path();
            let record = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(".kvdepot-"));
            match path.is_dir() {
                _ if record => {}
                true => todo.push(path),
                false => out.push(path),
            }
        }
    }
    out.sort();
    out
}

/// Removes the tier's checkpoint and recorded total, as if an older version had run.
pub(crate) fn remove_records(dir: &Path) {
    for name in [".kvdepot-index", ".kvdepot-total"] {
        let _ = std::fs::remove_file(dir.join(name));
    }
}

pub(crate) fn files_with(dir: &Path, part: &str) -> Vec<PathBuf> {
    let named = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().contains(part));
    files(dir).into_iter().filter(named).collect()
}

/// The file of block `n`.
pub(crate) fn block_file(dir: &Path, bench: &Bench, n: u64) -> PathBuf {
    let found = files_with(dir, &format!("{}.kvb", bench.key(n).hash));
    assert_eq!(found.len(), 1, "{found:?}");
    found.into_iter().next().unwrap()
}

/// Physical bytes of all files, as a cap counts them.
pub(crate) fn disk_bytes(dir: &Path) -> u64 {
    let blocks = files(dir).into_iter().filter(|path| !path.ends_with("namespace.json"));
    blocks.filter_map(|path| path.metadata().ok()).map(|meta| meta.len().next_multiple_of(4096)).sum()
}
