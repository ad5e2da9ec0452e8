//! Settings of a Posix tier and how they are read from JSON.

use std::path::PathBuf;
use std::time::Duration;

use kvdepot_core::limits::{IO_QUEUE_MAX, IO_THREADS_MAX, NAMESPACE_OPEN_MS, TIER_DIRECTORIES_MAX};
use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_io::{DirectUse, EngineKind};
use serde_json::Value;

use super::ledger::times::LEASE_MS;
use super::settings::{CAPACITY_PERCENT_DEFAULT, FREE_FLOOR_PERCENT_DEFAULT, SETTINGS};
use crate::Compression;
use crate::settings::{Fields, MEMORY_OUTLIVES, Switch};

const CLOSE_WAIT: Duration = Duration::from_secs(5);

/// Settings of a Posix tier.
#[derive(Clone, Debug, PartialEq)]
pub struct PosixConfig {
    /// Where blocks lie; a block lies in directory `hash % n`. All directories must exist and be writable.
    pub directories: Vec<PathBuf>,
    /// Whether a missing directory is created, accessible to its owner alone. Off by default: a missing mount must not
    /// let the tier fill the disk below it.
    pub create: bool,
    /// Which I/O bypasses the page cache; falls back to buffered I/O where a file system cannot do that.
    pub io_direct: DirectUse,
    /// Cap in physical bytes over all directories and namespaces (P5); 0 = `capacity_percent` decides.
    pub capacity_bytes: u64,
    /// If `capacity_bytes` is 0: the cap as a share of the size of the directories' file systems; 0 = no cap.
    pub capacity_percent: u64,
    /// Share of a file system's size that stays free, no matter who fills it: below it the tier evicts, and does not
    /// write when nothing is left to evict there; 0 = not checked.
    pub free_floor_percent: u64,
    /// Whether a new namespace spreads its files over 256 subdirectories; an existing one stays as it is.
    pub shard_directories: bool,
    /// Threads reserved for reads.
    pub read_threads: usize,
    /// The most threads that may be busy with writes.
    pub write_threads: usize,
    /// The most waiting requests, for reads and for writes each.
    pub queue_depth: usize,
    /// Whether blocks are compressed. Blocks of either form are read.
    pub compression: Compression,
    /// Whether a block's bytes are synced before it is published. Not needed for P1: a torn file is a miss.
    pub durable: bool,
    /// Whether other nodes use the directories too: then a block that is unknown here may still be there.
    pub shared: bool,
    /// Whether `capacity_bytes` covers what all depots that share the directories write to them, which they account for
    /// in a ledger. Needs `shared` and `capacity_bytes`.
    pub capacity_shared: bool,
    /// The longest time that opening or advancing a namespace waits for the file system, if its caller waits that long.
    /// Not read from JSON.
    pub open_wait: Duration,
    /// The longest time that dropping the tier waits for its background threads and its last checkpoint. A thread that
    /// hangs ends when its device responds. Not read from JSON.
    pub close_wait: Duration,
    /// For how long another depot that shares the cap may be silent before it counts as dead. The same for all depots
    /// of a directory. Not read from JSON.
    pub ledger_lease: Duration,
    /// The engine that reads and writes block files.
    pub engine: EngineKind,
    /// Whether the pool's memory outlives a killed process (`pool_keep_s`), set by the depot: then io_uring is not
    /// used.
    pub memory_outlives: bool,
    /// Faults to inject, for tests: see `kvdepot_io::faults`.
    pub faults: Option<String>,
}

impl Default for PosixConfig {
    fn default() -> Self {
        Self {
            directories: Vec::new(),
            create: false,
            io_direct: DirectUse::default(),
            capacity_bytes: 0,
            capacity_percent: CAPACITY_PERCENT_DEFAULT,
            free_floor_percent: FREE_FLOOR_PERCENT_DEFAULT,
            shard_directories: true,
            read_threads: 8,
            write_threads: 4,
            queue_depth: 4096,
            compression: Compression::Off,
            durable: false,
            shared: true,
            capacity_shared: false,
            open_wait: Duration::from_millis(NAMESPACE_OPEN_MS),
            close_wait: CLOSE_WAIT,
            ledger_lease: Duration::from_millis(LEASE_MS),
            engine: EngineKind::default(),
            memory_outlives: false,
            faults: None,
        }
    }
}

impl PosixConfig {
    /// The defaults on one directory.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self { directories: vec![directory.into()], ..Self::default() }
    }

    /// Reads an object with the tier's settings: the fields of this struct except `open_wait`, `close_wait` and
    /// `ledger_lease`.
    pub fn from_json(value: &Value) -> Result<Self> {
        let fields = Fields::new("Posix", value, &SETTINGS)?;
        let mut config = Self { directories: fields.paths("directories")?, ..Self::default() };
        fields.bool("create", &mut config.create)?;
        config.io_direct = match fields.switch("io_direct")? {
            Some(Switch::On) => DirectUse::Always,
            Some(Switch::Off) => DirectUse::Never,
            Some(Switch::Auto) | None => DirectUse::ColdReads,
        };
        // An explicit 0 means no cap; if the key is missing, the cap is a share of the disk.
        if value.get("capacity_bytes").is_some() {
            config.capacity_percent = 0;
        }
        fields.u64("capacity_bytes", &mut config.capacity_bytes)?;
        fields.u64("capacity_percent", &mut config.capacity_percent)?;
        fields.u64("free_floor_percent", &mut config.free_floor_percent)?;
        fields.bool("shard_directories", &mut config.shard_directories)?;
        fields.usize("read_threads", &mut config.read_threads)?;
        fields.usize("write_threads", &mut config.write_threads)?;
        fields.usize("queue_depth", &mut config.queue_depth)?;
        if let Some(switch) = fields.switch("compression")? {
            config.compression = Compression::of(switch);
        }
        fields.bool("durable", &mut config.durable)?;
        fields.bool("shared", &mut config.shared)?;
        fields.bool("capacity_shared", &mut config.capacity_shared)?;
        if let Some(engine) = fields.text("engine")? {
            config.engine = EngineKind::named(&engine)
                .ok_or_else(|| Error::new(ErrorKind::Config, "no such I/O engine").with("engine", engine))?;
        }
        fields.bool(MEMORY_OUTLIVES, &mut config.memory_outlives)?;
        config.faults = fields.text("faults")?;
        config.check()?;
        Ok(config)
    }

    /// Rejects values that cannot work (P10).
    pub fn check(&self) -> Result<()> {
        let bad = |what: &str| Error::new(ErrorKind::Config, what.to_owned());
        if self.directories.is_empty() || self.directories.len() > TIER_DIRECTORIES_MAX {
            return Err(
                bad("a Posix tier needs 1 to 255 directories").with("directories", self.directories.len())
            );
        }
        for (name, value) in [("read_threads", self.read_threads), ("write_threads", self.write_threads)] {
            if !(1..=IO_THREADS_MAX).contains(&value) {
                return Err(bad("a Posix tier needs 1 to 512 threads of each kind").with(name, value));
            }
        }
        if !(1..=IO_QUEUE_MAX).contains(&self.queue_depth) {
            return Err(bad("queue_depth must be between 1 and 65536").with("queue_depth", self.queue_depth));
        }
        let is_capped = self.capacity_bytes > 0 || self.capacity_percent > 0;
        if self.capacity_shared && !(self.shared && is_capped) {
            return Err(bad(
                "posix_capacity_shared needs directories_shared and a posix_capacity_gb that is not 0: set both, or leave \
                 it off",
            )
            .with("directories_shared", self.shared)
            .with("capacity_bytes", self.capacity_bytes));
        }
        for (name, value) in
            [("capacity_percent", self.capacity_percent), ("free_floor_percent", self.free_floor_percent)]
        {
            if value > 100 {
                return Err(bad("a share of a file system is at most 100 percent").with(name, value));
            }
        }
        Ok(())
    }
}
