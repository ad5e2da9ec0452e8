//! Settings of a Slab tier and how they are read from JSON.

use std::path::PathBuf;
use std::time::Duration;

use kvdepot_core::limits::{IO_QUEUE_MAX, IO_THREADS_MAX, NAMESPACE_OPEN_MS};
use kvdepot_core::{Error, ErrorKind, Result};
use serde_json::Value;

use super::codec::PAGE;
use super::settings::SETTINGS;
use super::shape::{SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN};
use crate::Compression;
use crate::settings::Fields;

/// Settings of a Slab tier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlabConfig {
    /// The file or block device.
    pub path: PathBuf,
    /// Bytes of a new file; 0 = its current size.
    pub capacity_bytes: u64,
    /// Bytes of a segment on a new medium, a multiple of the page size.
    pub segment_bytes: u64,
    /// Whether a block is synced before it counts as written.
    pub durable: bool,
    /// Number of threads that read.
    pub read_threads: usize,
    /// Number of threads that compute checksums of what is written, and compress it.
    pub write_threads: usize,
    /// Whether blocks are compressed. Blocks of either form are read.
    pub compression: Compression,
    /// The most waiting requests, for reads and for writes each. Not read from JSON.
    pub queue_depth: usize,
    /// The most bytes of blocks waiting for the next write; a single block may exceed it. Not read from JSON.
    pub pending_bytes_max: u64,
    /// How long opening waits for another owner to end. Not read from JSON.
    pub lock_wait: Duration,
    /// The longest time that opening or advancing a namespace waits for the medium. Not read from JSON.
    pub open_wait: Duration,
    /// Faults to inject, for tests: see `kvdepot_io::faults`.
    pub faults: Option<String>,
}

impl SlabConfig {
    /// The defaults on one file or device.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            capacity_bytes: 0,
            segment_bytes: 256 << 20,
            durable: true,
            read_threads: 8,
            write_threads: 2,
            compression: Compression::Off,
            queue_depth: 4096,
            pending_bytes_max: 64 << 20,
            lock_wait: Duration::from_secs(5),
            open_wait: Duration::from_millis(NAMESPACE_OPEN_MS),
            faults: None,
        }
    }

    /// Reads an object with the tier's settings.
    pub fn from_json(value: &Value) -> Result<Self> {
        let fields = Fields::new("Slab", value, &SETTINGS)?;
        let path = fields.text("path")?.ok_or_else(|| {
            Error::new(ErrorKind::Config, "a Slab tier needs the path of a file or a block device")
                .with("key", "path")
        })?;
        let mut config = Self::new(path);
        fields.u64("capacity_bytes", &mut config.capacity_bytes)?;
        let mut segment_mb = config.segment_bytes >> 20;
        fields.u64("segment_mb", &mut segment_mb)?;
        config.segment_bytes = segment_mb << 20;
        fields.bool("durable", &mut config.durable)?;
        fields.usize("read_threads", &mut config.read_threads)?;
        fields.usize("write_threads", &mut config.write_threads)?;
        if let Some(switch) = fields.switch("compression")? {
            config.compression = Compression::of(switch);
        }
        config.faults = fields.text("faults")?;
        config.check()?;
        Ok(config)
    }

    /// Rejects values that cannot work (P10).
    pub fn check(&self) -> Result<()> {
        let bad = |what: &str| Error::new(ErrorKind::Config, what.to_owned());
        if !self.path.is_absolute() {
            return Err(bad("a Slab tier's path is absolute").with("path", self.path.display()));
        }
        if !(SEGMENT_BYTES_MIN..=SEGMENT_BYTES_MAX).contains(&self.segment_bytes)
            || !self.segment_bytes.is_multiple_of(PAGE)
        {
            return Err(bad("a Slab tier's segments are whole pages, 64 KiB to 4 GiB")
                .with("segment_bytes", self.segment_bytes));
        }
        for (name, value) in [("read_threads", self.read_threads), ("write_threads", self.write_threads)] {
            if !(1..=IO_THREADS_MAX).contains(&value) {
                return Err(bad("a Slab tier needs 1 to 512 threads of each kind").with(name, value));
            }
        }
        if !(1..=IO_QUEUE_MAX).contains(&self.queue_depth) {
            return Err(bad("queue_depth must be between 1 and 65536").with("queue_depth", self.queue_depth));
        }
        Ok(())
    }
}
