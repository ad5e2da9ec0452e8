//! Settings of a DAX tier and how they are read from JSON.

use std::path::PathBuf;
use std::time::Duration;

use kvdepot_core::limits::{IO_THREADS_MAX, NAMESPACE_OPEN_MS};
use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_io::mapped::{Access, Medium};
use serde_json::Value;

use super::settings::{
    ASYNC_PUT_DEFAULT, FIRST_READ, MAPPED, PREAD, SETTINGS, SLAB_BYTES_DEFAULT, SLAB_BYTES_MIN, WORKERS_MAX,
};
use crate::settings::{Fields, Switch};

/// Returns the number of workers by default. More than processors get into each other's way.
fn workers_by_default() -> usize {
    std::thread::available_parallelism().map_or(WORKERS_MAX, std::num::NonZero::get).min(WORKERS_MAX)
}

/// Settings of a DAX tier.
#[derive(Clone, Debug, PartialEq)]
pub struct DaxConfig {
    /// The device or file.
    pub device_path: PathBuf,
    /// Bytes of it that are used when it is formatted; 0 = all.
    pub max_bytes: u64,
    /// Cap in bytes of blocks (P5); 0 = as much as fits on the medium.
    pub capacity_bytes: u64,
    /// Whether a block on a plain file counts as written before it is flushed.
    pub async_put: bool,
    /// Number of threads that copy blocks out.
    pub restore_workers: usize,
    /// The most regions of a wave; 0 = `restore_workers`.
    pub restore_max_regions: usize,
    /// The most bytes of a wave.
    pub retrieve_staging_slab_bytes: u64,
    /// Whether a block's checksum is compared at its first read only, instead of at every read.
    pub verify_first_read_only: bool,
    /// Number of threads that copy blocks in.
    pub put_workers: usize,
    /// Whether blocks are leased in place; `None`: if the medium is memory and not a plain file.
    pub lease_in_place: Option<bool>,
    /// How the medium is accessed.
    pub access: Access,
    /// How long opening waits for another depot to release the medium. Not read from JSON.
    pub lock_wait: Duration,
    /// The longest time that opening or advancing a namespace waits for the medium, if its caller waits that long. Not
    /// read from JSON.
    pub open_wait: Duration,
}

impl DaxConfig {
    /// The defaults on one medium.
    pub fn new(device_path: impl Into<PathBuf>) -> Self {
        Self {
            device_path: device_path.into(),
            max_bytes: 0,
            capacity_bytes: 0,
            async_put: ASYNC_PUT_DEFAULT,
            restore_workers: workers_by_default(),
            restore_max_regions: 0,
            retrieve_staging_slab_bytes: SLAB_BYTES_DEFAULT,
            verify_first_read_only: false,
            put_workers: 2,
            lease_in_place: None,
            access: Access::Auto,
            lock_wait: Duration::from_secs(5),
            open_wait: Duration::from_millis(NAMESPACE_OPEN_MS),
        }
    }

    /// Reads an object with the tier's settings.
    pub fn from_json(value: &Value) -> Result<Self> {
        let fields = Fields::new("Dax", value, &SETTINGS)?;
        let missing = || {
            Error::new(ErrorKind::Config, "a Dax tier needs a medium: write its device or file")
                .with("key", "device_path")
        };
        let mut config = Self::new(fields.text("device_path")?.ok_or_else(missing)?);
        fields.u64("max_bytes", &mut config.max_bytes)?;
        fields.u64("capacity_bytes", &mut config.capacity_bytes)?;
        fields.bool("async_put", &mut config.async_put)?;
        fields.usize("restore_workers", &mut config.restore_workers)?;
        if config.restore_workers == 0 {
            config.restore_workers = workers_by_default();
        }
        fields.usize("restore_max_regions", &mut config.restore_max_regions)?;
        fields.u64("retrieve_staging_slab_bytes", &mut config.retrieve_staging_slab_bytes)?;
        fields.usize("put_workers", &mut config.put_workers)?;
        config.verify_first_read_only = fields.text("verify")?.as_deref() == Some(FIRST_READ);
        config.access = match fields.text("access")?.as_deref() {
            Some(PREAD) => Access::Pread,
            Some(MAPPED) => Access::Mapped,
            _ => Access::Auto,
        };
        config.lease_in_place = match fields.switch("lease_in_place")? {
            Some(Switch::On) => Some(true),
            Some(Switch::Off) => Some(false),
            Some(Switch::Auto) | None => None,
        };
        config.check()?;
        Ok(config)
    }

    /// Rejects values that cannot work, or not on this medium (P10).
    pub(super) fn check_on(&self, medium: &dyn Medium) -> Result<()> {
        self.check()?;
        if self.verify_first_read_only && !medium.rests_in_memory() {
            return Err(Error::new(
                ErrorKind::Config,
                "dax_verify: first_read trusts memory, but this medium is a file on a disk, which may return other bytes after \
                 an error: remove the key, or use a DAX device or a file on tmpfs",
            )
            .with("path", medium.path().display()));
        }
        Ok(())
    }

    /// Rejects values that cannot work (P10).
    pub fn check(&self) -> Result<()> {
        for (name, value, least) in [
            ("restore_workers", self.restore_workers, 1),
            ("put_workers", self.put_workers, 1),
            ("restore_max_regions", self.restore_max_regions, 0),
        ] {
            if !(least..=IO_THREADS_MAX).contains(&value) {
                return Err(
                    Error::new(ErrorKind::Config, "a Dax tier needs 1 to 512 of these").with(name, value)
                );
            }
        }
        if self.retrieve_staging_slab_bytes < SLAB_BYTES_MIN {
            return Err(Error::new(ErrorKind::Config, "a wave of a Dax tier has 1 MiB or more")
                .with("retrieve_staging_slab_bytes", self.retrieve_staging_slab_bytes));
        }
        Ok(())
    }
}
