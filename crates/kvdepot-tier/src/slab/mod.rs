//! The tier of one large file or block device: local NVMe with a single owner.
//!
//! Blocks are appended, many in one write, to large segments that are written in a ring; the oldest segment is recycled
//! as a whole, and those of its blocks that have been used since are written again. The index of blocks is held in
//! memory and rebuilt at a start from the ends of segments. `docs/format.md` shows the byte layout.

mod append;
mod codec;
mod commit;
mod config;
mod footer;
mod group;
mod index;
mod keeper;
mod log;
mod medium;
mod reader;
mod record;
mod recover;
mod recycle;
mod settings;
mod shape;
mod source;
mod spaces;
mod state;
mod stats;
mod superblock;
mod syncs;
mod table;
mod writer;

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kvdepot_core::limits::{NAMESPACES_MAX, NAMESPACES_OPENING_MAX};
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId, NamespaceSpec, Result};
use kvdepot_io::faults::{FaultVolume, Faults};
use kvdepot_io::{FileVolume, IoEngine, PsyncConfig, PsyncEngine, Volume};

use crate::entry::TierEntry;
use crate::media::{MediumFacts, MediumKind};
use crate::{
    BlockingCalls, BlockingConfig, Done, Presence, ReadItem, Tier, TierEvents, TierUsage, WriteItem,
};
pub use config::SlabConfig;
use medium::Medium;
pub(crate) use source::SlabSource;
use spaces::Spaces;
use state::{PIECE, PIECE_SLOTS, Shared};
pub use stats::SlabStats;

/// The registry's entry for this tier.
pub const ENTRY: TierEntry = TierEntry {
    name: "Slab",
    open: |config| Ok(Arc::new(SlabTier::open(SlabConfig::from_json(config)?)?)),
    guards_itself: false,
    settings: &settings::SETTINGS,
    for_users: true,
};

/// The longest time that dropping a tier waits for queued work; if the medium hangs longer, that work is lost.
const CLOSE_WAIT_MAX: Duration = Duration::from_secs(5);

/// Blocks in one file or on one block device.
#[derive(Debug)]
pub struct SlabTier {
    shared: Arc<Shared>,
    // Owned here rather than by what its callbacks hold, so that it is never dropped on one of its own threads.
    engine: Arc<dyn IoEngine>,
    /// Stores epochs.
    calls: Arc<BlockingCalls>,
}

impl SlabTier {
    /// Opens the file or device, formats it if it is new, and reads what lies on it.
    pub fn open(config: SlabConfig) -> Result<Self> {
        config.check()?;
        let faults = config.faults.as_deref().map(Faults::from_spec).transpose()?;
        let mut volume: Arc<dyn Volume> = Arc::new(FileVolume::open(&config.path, config.lock_wait)?);
        if let Some(faults) = faults {
            tracing::warn!(spec = config.faults, "this tier injects faults: for tests only");
            volume = Arc::new(FaultVolume::new(volume, faults));
        }
        Self::open_on(config, volume)
    }

    /// Looks at the medium of a tier and changes nothing. Fails where `open` would, except for errors of the medium.
    pub fn inspect(config: &SlabConfig) -> Result<MediumFacts> {
        config.check()?;
        if !config.path.try_exists().unwrap_or(true) {
            return medium::to_create(config);
        }
        let volume = FileVolume::open(&config.path, config.lock_wait)?;
        let superblock = medium::look(&volume, config).map_err(|e| e.with("path", config.path.display()))?;
        Ok(MediumFacts {
            kind: if volume.can_grow() { MediumKind::File } else { MediumKind::BlockDevice },
            bytes: volume.bytes(),
            formatted_bytes: superblock.map(|superblock| superblock.shape.bytes()),
        })
    }

    /// Like `open`, on the caller's own volume: `config.path` and `config.faults` are ignored.
    pub fn open_on(config: SlabConfig, volume: Arc<dyn Volume>) -> Result<Self> {
        let medium = Medium::open(volume, &config)?;
        let began = Instant::now();
        let recovered = medium.recover()?;
        tracing::info!(
            path = %medium.volume.path().display(), blocks = recovered.index.len(),
            ms = began.elapsed().as_millis(), "a Slab tier's medium is read"
        );
        let engine = PsyncConfig {
            read_threads: config.read_threads,
            write_threads: config.write_threads,
            queue_depth: config.queue_depth,
            name: "kvd-slab".to_owned(),
            memory_outlives: false,
        };
        let engine = Arc::new(PsyncEngine::new(engine)?);
        let calls = Arc::new(BlockingCalls::new(BlockingConfig {
            name: "kvd-slab-ns".to_owned(),
            threads_max: NAMESPACES_OPENING_MAX,
            queue_max: NAMESPACES_MAX,
        }));
        let spaces = Spaces::new(&recovered.rows, table::rows_max(medium.shape.table_bytes));
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let (index, log, table) = (recovered.index, recovered.log, recovered.table);
        let shared = Shared::new(config, medium, index, spaces, table, host.trim().to_owned());
        shared.lock().removals = recovered.torn;
        let tier = Self { shared: Arc::new(shared), engine, calls };
        tier.shared.spawn("kvd-slab-append", move |shared| append::run(shared, log))?;
        tier.shared.spawn("kvd-slab-sync", |shared| append::run_sync(shared))?;
        let weak = Arc::downgrade(&tier.calls);
        tier.shared.spawn("kvd-slab-keep", move |shared| keeper::run(shared, &weak))?;
        Ok(tier)
    }

    /// Counters since the tier was opened.
    pub fn stats(&self) -> SlabStats {
        self.shared.stats()
    }
}

impl Tier for SlabTier {
    fn name(&self) -> &str {
        "slab"
    }

    fn open_namespace(&self, spec: &Arc<NamespaceSpec>, at_least: u32, deadline: Instant, done: Done<u32>) {
        self.shared.open_namespace(&self.calls, spec, at_least, deadline, done);
    }

    fn advance_epoch(&self, spec: &Arc<NamespaceSpec>, at_least: u32, deadline: Instant, done: Done<u32>) {
        self.shared.advance_epoch(&self.calls, spec, at_least, deadline, done);
    }

    fn close_namespace(&self, root: NamespaceId) {
        self.shared.lock().spaces.close(root);
    }

    fn peek(&self, keys: &[BlockKey], out: &mut Vec<Presence>) {
        out.clear();
        for keys in keys.chunks(PIECE) {
            let state = self.shared.lock();
            out.extend(keys.iter().map(|key| {
                let known = state.spaces.get(key).is_some() && state.index.get(key).is_some();
                if known { Presence::Present } else { Presence::Absent }
            }));
        }
    }

    /// The index knows everything that exists.
    fn probe(&self, keys: Vec<BlockKey>, deadline: Instant, done: Done<usize>) {
        if deadline <= Instant::now() {
            return done(Err(Error::new(ErrorKind::Timeout, "the deadline had passed when the call came")));
        }
        let mut presence = Vec::new();
        self.peek(&keys, &mut presence);
        done(Ok(presence.iter().take_while(|presence| **presence == Presence::Present).count()));
    }

    fn read(&self, reads: Vec<ReadItem>, deadline: Instant) {
        let begun = reads.into_iter().filter_map(|read| self.shared.begin_read(read, deadline));
        self.engine.submit(begun.collect());
    }

    fn write(&self, writes: Vec<WriteItem>, deadline: Instant) {
        let begun = writes.into_iter().filter_map(|write| self.shared.begin_write(write, deadline));
        self.engine.submit(begun.collect());
        self.shared.keep.notify_one();
    }

    /// The blocks are unreachable at once; the medium learns of it with the next group.
    fn remove(&self, keys: Vec<BlockKey>, done: Done<()>) {
        for keys in keys.chunks(PIECE) {
            let mut state = self.shared.lock();
            for key in keys {
                state.forget(key);
            }
        }
        self.shared.append.notify_one();
        done(Ok(()));
    }

    fn touch(&self, keys: &[BlockKey]) {
        for keys in keys.chunks(PIECE) {
            let mut state = self.shared.lock();
            keys.iter().for_each(|key| state.index.touch(key));
        }
    }

    fn attach(&self, events: Weak<dyn TierEvents>) {
        self.shared.attach(events);
    }

    /// The cap is the medium itself, which is fully allocated.
    fn usage(&self) -> TierUsage {
        let state = self.shared.lock();
        TierUsage {
            blocks: state.index.len(),
            bytes: state.index.bytes() + state.inflight_bytes,
            bytes_max: self.shared.medium.shape.bytes(),
        }
    }

    fn figures(&self) -> Vec<(&'static str, u64)> {
        let stats = self.stats();
        let own = [
            ("accepted_bytes", stats.accepted_bytes),
            ("written_bytes", stats.written_bytes),
            ("rewritten_bytes", stats.rewritten_bytes),
            ("groups", stats.groups),
            ("syncs", stats.syncs),
            ("segments_recycled", stats.segments_recycled),
            ("blocks_evicted", stats.blocks_evicted),
        ];
        own.into_iter().chain(self.shared.transform.figures()).collect()
    }

    fn keys_from(&self, namespace: NamespaceId, from: u64) -> (Vec<BlockKey>, Option<u64>) {
        let from = u32::try_from(from).unwrap_or(u32::MAX);
        let state = self.shared.lock();
        // The index keeps blocks of a past epoch until the keeper has forgotten them.
        if !state.spaces.is_open(namespace) {
            return (Vec::new(), None);
        }
        let (keys, next) = state.index.keys(namespace, from, PIECE_SLOTS);
        (keys, next.map(u64::from))
    }

    fn drain(&self, deadline: Instant) -> bool {
        self.engine.drain(deadline) && self.shared.wait_idle(deadline)
    }
}

impl Drop for SlabTier {
    fn drop(&mut self) {
        self.shared.stop(Instant::now() + CLOSE_WAIT_MAX);
    }
}
