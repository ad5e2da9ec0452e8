//! Media for tests of the DAX tier: new files, in the directory that `KVDEPOT_TEST_MEMORY_DIR` names, if any; or, if
//! `KVDEPOT_TEST_DAX` names one, a DAX device that is given up for each: what it holds is lost.
//!
//! A device is one depot's own, so tests on a device run one after another (`--test-threads=1`).
#![allow(dead_code, clippy::unwrap_used)] // each test uses some of these; a failing test panics

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvdepot_io::mapped::{self, Access, Medium};
use kvdepot_tier::{DaxConfig, DaxTier};

pub(crate) const MIB: u64 = 1 << 20;
/// Reached only by a hang.
pub(crate) const HANG: Duration = Duration::from_secs(60);

/// The device to test on.
pub(crate) fn device() -> Option<PathBuf> {
    std::env::var_os("KVDEPOT_TEST_DAX").map(PathBuf::from)
}

/// The ways to access a medium: a device is always mapped.
pub(crate) fn accesses() -> &'static [Access] {
    if device().is_some() { &[Access::Auto] } else { &[Access::Pread, Access::Mapped, Access::AsDevice] }
}

/// A configuration for tests on this medium, of which `bytes` are used; 0 = all.
pub(crate) fn config(path: &Path, bytes: u64) -> DaxConfig {
    DaxConfig {
        max_bytes: bytes,
        open_wait: HANG,
        lock_wait: HANG,
        restore_workers: 2,
        ..DaxConfig::new(path)
    }
}

pub(crate) fn open(config: DaxConfig) -> Arc<DaxTier> {
    Arc::new(DaxTier::open(config).unwrap())
}

/// Opens what a tier would store in, for reads and writes past it.
pub(crate) fn raw(config: &DaxConfig) -> Arc<dyn Medium> {
    mapped::open(&config.device_path, config.max_bytes, config.access, HANG).unwrap()
}

/// Gives a medium up by hand, as error messages advise.
pub(crate) fn give_up(config: &DaxConfig) {
    let medium = raw(config);
    let zeros = vec![0; MIB.min(medium.bytes()) as usize];
    medium.write(0, &zeros).unwrap();
    medium.write(medium.bytes() - zeros.len() as u64, &zeros).unwrap();
    medium.persist().unwrap();
}

/// Gives out empty media.
pub(crate) struct Media {
    pub(crate) dir: tempfile::TempDir,
    count: Cell<u32>,
}

impl Media {
    pub(crate) fn new() -> Self {
        let named = std::env::var_os("KVDEPOT_TEST_MEMORY_DIR").map(PathBuf::from);
        let place = named.unwrap_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")));
        Self { dir: tempfile::tempdir_in(place).unwrap(), count: Cell::new(0) }
    }

    /// An empty medium of this size.
    pub(crate) fn next(&self, bytes: u64) -> DaxConfig {
        let Some(device) = device() else { return config(&self.file(bytes), bytes) };
        let config = config(&device, bytes);
        give_up(&config);
        config
    }

    /// A new file of this size, also where media are devices.
    pub(crate) fn file(&self, bytes: u64) -> PathBuf {
        self.count.set(self.count.get() + 1);
        let path = self.dir.path().join(self.count.get().to_string());
        std::fs::File::create(&path).unwrap().set_len(bytes).unwrap();
        path
    }
}
