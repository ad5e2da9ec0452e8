//! Media for tests: new files or, if `KVDEPOT_TEST_SLAB` names one, a block device that is wiped for each: what it holds is
//! lost.
//!
//! A device is one depot's own, so tests on a device run as root, one after another (`--test-threads=1`).
#![allow(clippy::unwrap_used)] // a failing test panics

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvdepot_io::{AlignedBuf, FileVolume, IoBuf, Volume};
use kvdepot_tier::SlabConfig;

pub(crate) const MIB: u64 = 1 << 20;
/// Reached only by a hang.
pub(crate) const HANG: Duration = Duration::from_secs(60);

/// The block device to test on.
pub(crate) fn device() -> Option<PathBuf> {
    std::env::var_os("KVDEPOT_TEST_SLAB").map(PathBuf::from)
}

/// A configuration for tests on this medium, of which `bytes` are used; 0 = all.
pub(crate) fn config(path: &Path, bytes: u64) -> SlabConfig {
    SlabConfig {
        capacity_bytes: bytes,
        segment_bytes: 8 * MIB,
        open_wait: HANG,
        lock_wait: HANG,
        ..SlabConfig::new(path)
    }
}

/// Gives a device up by hand, as docs/operate.md advises.
pub(crate) fn wipe(device: &Path) {
    let volume = FileVolume::open(device, HANG).unwrap();
    for at in [0, volume.bytes() - MIB] {
        let zeros = AlignedBuf::zeroed(1 << 20);
        volume.write_at(&[IoBuf::for_write_owned(AlignedBuf::zeroed(0), zeros)], at).unwrap();
    }
    volume.sync().unwrap();
}

/// Gives out empty media, on the disk of the build, where O_DIRECT works. Of files, at most two exist at a time.
pub(crate) struct Media {
    /// For files beside them.
    pub(crate) dir: tempfile::TempDir,
    count: Cell<u32>,
}

impl Media {
    pub(crate) fn new() -> Self {
        Self { dir: tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap(), count: Cell::new(0) }
    }

    /// An empty medium of this size.
    pub(crate) fn next(&self, bytes: u64) -> SlabConfig {
        if let Some(device) = device() {
            wipe(&device);
            return config(&device, bytes);
        }
        let before = self.count.replace(self.count.get() + 1);
        let _ = std::fs::remove_file(self.dir.path().join(before.to_string()));
        config(&self.dir.path().join(self.count.get().to_string()), bytes)
    }
}
