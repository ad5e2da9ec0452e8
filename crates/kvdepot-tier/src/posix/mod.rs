//! The tier of block files in directories: local disks and network mounts.
//!
//! One file per block, named by its key and published by rename (P1); `docs/format.md` shows the layout. The truth is
//! what lies on the disk; the index only saves lookups there. It is filled from a checkpoint and by a scan, both in the
//! background.

mod capacity;
mod checkpoint;
mod chores;
mod config;
mod delivery;
mod epochs;
mod events;
mod evict;
mod free_space;
mod held;
mod identity;
mod index;
mod leaving;
mod ledger;
mod maintenance;
mod namespaces;
mod opening;
mod order;
mod overwrite;
#[cfg(test)]
mod read_room;
mod reader;
mod removal;
mod reserve;
mod retired;
mod scan;
mod settings;
mod shared;
mod space;
mod state;
mod threads;
mod total;
mod unlinker;
mod waste;
mod writer;

use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime};

use kvdepot_core::limits::{NAMESPACES_MAX, NAMESPACES_OPENING_MAX};
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId, NamespaceSpec, Result};
use kvdepot_io::faults::{FaultDevice, Faults};
use kvdepot_io::{Device, DirDevice, IoEngine, PsyncConfig, open_engine};

use crate::entry::TierEntry;
use crate::{
    BlockingCalls, BlockingConfig, Done, Presence, ReadItem, Tier, TierEvents, TierUsage, WriteItem,
};
pub use chores::SweepReport;
pub use config::PosixConfig;
use identity::{Identity, temporary_name};
use shared::Shared;
use state::{PIECE, PIECE_SLOTS, State};

/// The registry's entry for this tier.
pub const ENTRY: TierEntry = TierEntry {
    name: "Posix",
    open: |config| Ok(Arc::new(PosixTier::open(PosixConfig::from_json(config)?)?)),
    guards_itself: false,
    settings: &settings::SETTINGS,
    for_users: true,
};

/// Block files in one or more directories.
#[derive(Debug)]
pub struct PosixTier {
    shared: Arc<Shared>,
    // Owned here rather than by what its callbacks hold, so that it is never dropped on one of its own threads.
    engine: Arc<dyn IoEngine>,
    /// Opens namespaces and moves them to other epochs.
    calls: BlockingCalls,
}

impl PosixTier {
    /// Opens the directories, which must exist and be writable, and starts to scan what lies in them.
    pub fn open(config: PosixConfig) -> Result<Self> {
        config.check()?;
        let faults = config.faults.as_deref().map(Faults::from_spec).transpose()?;
        let mut devices: Vec<Arc<dyn Device>> = Vec::new();
        for path in &config.directories {
            if config.create {
                DirDevice::create_missing(path)?;
            }
            devices.push(Arc::new(DirDevice::open(path, config.io_direct)?));
        }
        let skew_s = check_writable(&devices)?;
        if let Some(faults) = &faults {
            tracing::warn!(spec = config.faults, "this tier injects faults: for tests only");
            faults.strike_in_queue();
            devices = devices
                .into_iter()
                .map(|device| Arc::new(FaultDevice::new(device, faults.clone())) as _)
                .collect();
        }
        let engine = engine(&config, &devices, faults.as_ref())?;
        Self::start(config, devices, skew_s, engine)
    }

    /// Like `open`, on the caller's own devices and engine: `config.directories` and `config.faults` are ignored.
    pub fn open_on(
        config: PosixConfig,
        devices: Vec<Arc<dyn Device>>,
        engine: Arc<dyn IoEngine>,
    ) -> Result<Self> {
        let skew_s = vec![0; devices.len()];
        Self::start(config, devices, skew_s, engine)
    }

    /// Like `open_on`, with the engine that the configuration asks for.
    pub fn open_on_devices(config: PosixConfig, devices: Vec<Arc<dyn Device>>) -> Result<Self> {
        let engine = engine(&config, &devices, None)?;
        Self::open_on(config, devices, engine)
    }

    /// Like `open_on_devices`, with faults that also strike in the engine's queues, if it has any and the plan leaves
    /// them to it.
    pub fn open_on_faulty(
        config: PosixConfig,
        devices: Vec<Arc<dyn Device>>,
        faults: &Faults,
    ) -> Result<Self> {
        let engine = engine(&config, &devices, Some(faults))?;
        Self::open_on(config, devices, engine)
    }

    fn start(
        config: PosixConfig,
        devices: Vec<Arc<dyn Device>>,
        skew_s: Vec<i64>,
        engine: Arc<dyn IoEngine>,
    ) -> Result<Self> {
        let cap = capacity::cap(&config, &devices)?;
        let prior = capacity::prior(&config, &devices, cap);
        let shared = Arc::new(Shared::new(config, devices, skew_s, cap, prior));
        let calls = BlockingCalls::new(BlockingConfig {
            name: "kvd-posix-ns".to_owned(),
            threads_max: NAMESPACES_OPENING_MAX,
            queue_max: NAMESPACES_MAX,
        });
        let tier = Self { shared, engine, calls };
        maintenance::start(&tier.shared)?;
        ledger::run::start(&tier.shared).inspect_err(|_| tier.shared.stop_threads())?;
        Ok(tier)
    }

    fn opening<'a>(
        &'a self,
        spec: &'a Arc<NamespaceSpec>,
        at_least: u32,
        deadline: Instant,
        done: Done<u32>,
    ) -> opening::Opening<'a> {
        let (shared, calls) = (&self.shared, &self.calls);
        opening::Opening { shared, calls, spec, at_least, deadline, done }
    }

    /// Scans the complete disk again: removes temporary files of dead writers and directories of earlier epochs (P4),
    /// learns of files that appeared or disappeared, and evicts down to the cap. This happens every ten minutes anyway;
    /// the call waits for it until the deadline. Returns what has been removed since the tier was opened.
    pub fn sweep(&self, deadline: Instant) -> SweepReport {
        self.shared.ask_for_sweep();
        self.shared.wait_idle(deadline);
        self.shared.lock().swept
    }

    /// Waits until the tier's first scan has finished; `false` if the deadline passes first.
    pub fn wait_scanned(&self, deadline: Instant) -> bool {
        self.shared.wait_idle(deadline)
    }

    /// Number of corrupt files kept for inspection in a namespace.
    pub fn quarantined(&self, spec: &NamespaceSpec) -> usize {
        self.shared.lock().bad.get(&spec.root()).map_or(0, std::collections::VecDeque::len)
    }

    /// Writes a checkpoint of what is known now; this also happens every five minutes if much has changed.
    pub fn checkpoint(&self) -> Result<()> {
        self.shared.save(None)
    }

    /// The longest time that the tier's lock was held since the last call: how long a lookup may have waited.
    pub fn take_lock_hold_max(&self) -> Duration {
        self.shared.take_hold_max()
    }

    /// Measures in processor time how long the lock is held, from now on, or in real time again (`false`), in all tiers
    /// of this process. For benchmarks.
    pub fn measure_lock_by_processor(on: bool) {
        held::measure_by_processor(on);
    }

    /// This process as it appears in the names of its temporary files: `<host>-<pid>-<start time>`.
    pub fn writer_identity() -> String {
        let own = Identity::own();
        format!("{}-{}-{}", own.host, own.pid, own.start_time)
    }

    /// The I/O engine's counters.
    pub fn engine_stats(&self) -> kvdepot_io::EngineStats {
        self.engine.stats()
    }
}

fn engine(
    config: &PosixConfig,
    devices: &[Arc<dyn Device>],
    faults: Option<&Faults>,
) -> Result<Arc<dyn IoEngine>> {
    let sizes = PsyncConfig {
        read_threads: config.read_threads,
        write_threads: config.write_threads,
        queue_depth: config.queue_depth,
        name: "kvd-posix".to_owned(),
        memory_outlives: config.memory_outlives,
    };
    open_engine(config.engine, &sizes, devices, faults)
}

/// Writes and removes a file in each directory, and returns how far each device's clock is ahead of ours, in seconds. A
/// directory that is merely full or read-only at the moment is opened all the same, for what lies in it.
fn check_writable(devices: &[Arc<dyn Device>]) -> Result<Vec<i64>> {
    devices.iter().map(|device| clock_skew_s(&**device)).collect()
}

fn clock_skew_s(device: &dyn Device) -> Result<i64> {
    let seconds = |time: SystemTime| {
        let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
    };
    let (name, second) = (temporary_name(), temporary_name());
    let path = Path::new(&name);
    let written = device.write_small(path, Path::new(&second), b"can this directory be written?\n");
    match written {
        Ok(()) => {
            let modified = device.stat(path)?.map(|stat| stat.modified);
            device.unlink(path)?;
            Ok(modified.map_or(0, |time| seconds(time) - seconds(SystemTime::now())))
        }
        Err(error) if error.kind() == ErrorKind::NoSpace || device.is_read_only() => {
            tracing::warn!(
                path = %device.root().display(), %error,
                "a tier's directory cannot be written now: its blocks are read, and writes are tried again"
            );
            Ok(0)
        }
        Err(error) => Err(Error::new(
            ErrorKind::Permission,
            "a tier's directory cannot be written; correct its owner, its mode or the configuration",
        )
        .with("path", device.root().display())
        .with_source(error)),
    }
}

impl Shared {
    fn presence(&self, state: &State, key: &BlockKey) -> Presence {
        if state.index.get(key).is_some() {
            return Presence::Present;
        }
        let nowhere = !state.spaces.contains_key(&key.namespace) || state.leaving.contains_key(key);
        if nowhere || state.is_complete(key.namespace, self.config.shared) || state.is_noted_absent(key) {
            return Presence::Absent;
        }
        Presence::Unknown
    }

    fn forget_block(&self, state: &mut State, key: BlockKey) {
        if state.index.get(&key).is_none()
            && !state.leaving.contains_key(&key)
            && let Some(space) = state.spaces.get(&key.namespace).map(Arc::clone)
            && !state.is_complete(space.id, self.config.shared)
            && !state.reserved.contains_key(&key)
        {
            // Not charged, because it never was: the release that follows gives nothing back.
            let directory = space::home(key.hash, self.devices.len());
            state.adopt(key, state::Adopt { space, directory, bytes: 0, used: None });
        }
        state.leave(&key);
    }
}

impl Tier for PosixTier {
    fn name(&self) -> &str {
        "posix"
    }

    fn open_namespace(&self, spec: &Arc<NamespaceSpec>, at_least: u32, deadline: Instant, done: Done<u32>) {
        self.opening(spec, at_least, deadline, done).open();
    }

    fn advance_epoch(&self, spec: &Arc<NamespaceSpec>, at_least: u32, deadline: Instant, done: Done<u32>) {
        self.opening(spec, at_least, deadline, done).advance();
    }

    /// The index stays: the cap counts what lies on the disk, no matter who asks for it (P5), and an advance that is
    /// not stored yet is still retried.
    fn close_namespace(&self, _root: NamespaceId) {}

    fn peek(&self, keys: &[BlockKey], out: &mut Vec<Presence>) {
        out.clear();
        for keys in keys.chunks(PIECE) {
            let state = self.shared.lock();
            out.extend(keys.iter().map(|key| self.shared.presence(&state, key)));
        }
    }

    fn probe(&self, keys: Vec<BlockKey>, deadline: Instant, done: Done<usize>) {
        if let Some(request) = self.shared.begin_probe(keys, deadline, done) {
            self.engine.submit(vec![request]);
        }
    }

    fn read(&self, reads: Vec<ReadItem>, deadline: Instant) {
        self.engine.submit(self.shared.begin_reads(reads, deadline));
    }

    fn write(&self, writes: Vec<WriteItem>, deadline: Instant) {
        let begun = writes.into_iter().filter_map(|write| self.shared.begin_write(write, deadline));
        self.engine.submit(begun.collect());
    }

    /// The blocks are unreachable at once; their files go in the background. A block that this node has not seen is
    /// looked for there.
    fn remove(&self, keys: Vec<BlockKey>, done: Done<()>) {
        for keys in keys.chunks(PIECE) {
            let mut state = self.shared.lock();
            keys.iter().for_each(|key| self.shared.forget_block(&mut state, *key));
        }
        self.shared.unlinks.notify_one();
        done(Ok(()));
    }

    fn touch(&self, keys: &[BlockKey]) {
        let mut due = false;
        for keys in keys.chunks(PIECE) {
            let mut state = self.shared.lock();
            for key in keys {
                due |= state.touch(key);
            }
        }
        if due {
            self.shared.work.notify_one();
        }
    }

    fn attach(&self, events: Weak<dyn TierEvents>) {
        self.shared.attach(events);
    }

    fn usage(&self) -> TierUsage {
        let state = self.shared.lock();
        TierUsage {
            blocks: state.index.len() as u64,
            bytes: state.found_bytes(),
            bytes_max: self.shared.cap_in(&state),
        }
    }

    fn engine(&self) -> &'static str {
        self.engine.name()
    }

    fn figures(&self) -> Vec<(&'static str, u64)> {
        let now_ms = self.shared.now_ms();
        let purse = self.shared.lock().purse.as_ref().map_or_else(Vec::new, |purse| purse.figures(now_ms));
        purse.into_iter().chain(self.shared.transform.figures()).collect()
    }

    fn keys_from(&self, namespace: NamespaceId, from: u64) -> (Vec<BlockKey>, Option<u64>) {
        let from = u32::try_from(from).unwrap_or(u32::MAX);
        let (keys, next) = self.shared.lock().index.keys(namespace, from, PIECE_SLOTS);
        (keys, next.map(u64::from))
    }

    fn drain(&self, deadline: Instant) -> bool {
        self.engine.drain(deadline) && self.shared.wait_idle(deadline)
    }
}

impl Drop for PosixTier {
    fn drop(&mut self) {
        self.shared.namespaces.stop();
        self.shared.stop(Instant::now() + self.shared.config.close_wait);
    }
}
