//! The tier of block files in directories: local disks and network mounts.
//!
//! One file a block, named by its key, published by rename (P1), drawn in `docs/format.md`. What lies on the disk is
//! the truth; the index only saves look-ups, and is filled by a scan in the background.

mod config;
mod evict;
mod identity;
mod index;
mod maintenance;
mod reader;
mod scan;
mod space;
mod state;
mod writer;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use kvdepot_core::limits::NAMESPACES_MAX;
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId, NamespaceSpec, Result, epoch_moves};
use kvdepot_io::faults::{FaultDevice, Faults};
use kvdepot_io::{Device, DirDevice, IoEngine, PsyncConfig, PsyncEngine, SlotBuf};

use crate::{Done, Presence, Tier, TierUsage, Written};
pub use config::PosixConfig;
use space::{NamespaceFile, epoch_of_dir};
use state::{Shared, State};

/// How long dropping a tier waits for its maintenance thread; one that hangs ends when its device lets go.
const CLOSE_WAIT_MAX: Duration = Duration::from_secs(2);

/// What sweeps have removed since the tier was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SweepReport {
    /// Temporary files of dead writers (P4).
    pub temporaries: u64,
    /// Directories of earlier epochs.
    pub epochs: u64,
}

/// Block files in one or more directories.
#[derive(Debug)]
pub struct PosixTier {
    shared: Arc<Shared>,
    // Owned here and not by what its callbacks hold, so that it never ends on a thread of its own.
    engine: Arc<dyn IoEngine>,
}

impl PosixTier {
    /// Opens the directories, which must be there and writable, and starts to look at what lies in them.
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
        if let Some(faults) = faults {
            tracing::warn!(spec = config.faults, "this tier injects faults: for tests only");
            devices = devices
                .into_iter()
                .map(|device| Arc::new(FaultDevice::new(device, faults.clone())) as _)
                .collect();
        }
        let engine = psync(&config)?;
        Self::start(config, devices, skew_s, engine)
    }

    /// As `open`, on devices and an engine of the caller's: `config.directories` and `config.faults` are not looked at.
    pub fn open_on(
        config: PosixConfig,
        devices: Vec<Arc<dyn Device>>,
        engine: Arc<dyn IoEngine>,
    ) -> Result<Self> {
        let skew_s = vec![0; devices.len()];
        Self::start(config, devices, skew_s, engine)
    }

    /// As `open_on`, with the engine that the configuration asks for.
    pub fn open_on_devices(config: PosixConfig, devices: Vec<Arc<dyn Device>>) -> Result<Self> {
        let engine = psync(&config)?;
        Self::open_on(config, devices, engine)
    }

    fn start(
        config: PosixConfig,
        devices: Vec<Arc<dyn Device>>,
        skew_s: Vec<i64>,
        engine: Arc<dyn IoEngine>,
    ) -> Result<Self> {
        let shared = Arc::new(Shared::new(config, devices, skew_s));
        maintenance::start(&shared)?;
        Ok(Self { shared, engine })
    }

    /// Looks at everything on the disk again: removes temporaries of dead writers and earlier epochs (P4), learns of
    /// files that came or went, and evicts down to the cap. Runs by itself every ten minutes; this call waits for it
    /// until the deadline. Returns what was removed since the tier was opened.
    pub fn sweep(&self, deadline: Instant) -> SweepReport {
        self.shared.ask_for_sweep();
        self.shared.wait_idle(deadline);
        self.shared.lock().swept
    }

    /// Waits until the scan that began with the tier is through; `false` if the deadline passes first.
    pub fn wait_scanned(&self, deadline: Instant) -> bool {
        self.shared.wait_idle(deadline)
    }

    /// Corrupt files kept aside for a namespace's inspection.
    pub fn quarantined(&self, spec: &NamespaceSpec) -> usize {
        self.shared.lock().bad.get(&spec.root()).map_or(0, std::collections::VecDeque::len)
    }

    /// This process as the names of its temporary files spell it: `<host>-<pid>-<start time>`.
    pub fn writer_identity() -> String {
        let own = identity::Identity::own();
        format!("{}-{}-{}", own.host, own.pid, own.start_time)
    }

    /// The I/O engine's counters.
    pub fn engine_stats(&self) -> kvdepot_io::EngineStats {
        self.engine.stats()
    }
}

fn psync(config: &PosixConfig) -> Result<Arc<dyn IoEngine>> {
    let engine = PsyncConfig {
        read_threads: config.read_threads,
        write_threads: config.write_threads,
        queue_depth: config.queue_depth,
        name: "kvd-posix".to_owned(),
    };
    Ok(Arc::new(PsyncEngine::new(engine)?))
}

/// Writes and removes a file in each directory; how far ahead of ours each device's clock is, in seconds.
fn check_writable(devices: &[Arc<dyn Device>]) -> Result<Vec<i64>> {
    let seconds = |time: SystemTime| {
        let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
    };
    let mut skew_s = Vec::new();
    for device in devices {
        let own = identity::Identity::own();
        let (name, second) = (own.temporary_name(u64::MAX), own.temporary_name(u64::MAX - 1));
        let path = Path::new(&name);
        device.write_small(path, Path::new(&second), b"can this directory be written?\n").map_err(|e| {
            let kind =
                if e.kind() == ErrorKind::NoSpace { ErrorKind::NoSpace } else { ErrorKind::Permission };
            Error::new(
                kind,
                "a tier's directory cannot be written; correct its owner, its mode or the configuration",
            )
            .with("path", device.root().display())
            .with_source(e)
        })?;
        let modified = device.stat(path)?.map(|stat| stat.modified);
        device.unlink(path)?;
        skew_s.push(modified.map_or(0, |time| seconds(time) - seconds(SystemTime::now())));
    }
    Ok(skew_s)
}

impl Shared {
    fn open_namespace(&self, spec: &NamespaceSpec) -> Result<u32> {
        let _one_at_a_time = self.namespaces.lock();
        let root = spec.root();
        let known = {
            let state = self.lock();
            if state.roots.len() >= NAMESPACES_MAX && !state.roots.contains_key(&root) {
                return Err(Error::new(ErrorKind::NoSpace, "too many namespaces")
                    .with("namespaces_max", NAMESPACES_MAX));
            }
            state.roots.contains_key(&root)
        };
        if !known {
            self.install(self.create_or_read(spec)?);
        }
        let mut state = self.lock();
        let space = state.roots.get(&root).and_then(|id| state.spaces.get(id)).map(Arc::clone);
        let space =
            space.ok_or_else(|| Error::new(ErrorKind::Closed, "a namespace vanished while it was opened"))?;
        if !state.scanned.contains(&space.id) {
            self.enqueue_scan(&mut state, &space, true);
        }
        Ok(space.epoch)
    }

    /// What the directories say of a namespace, written where it is missing.
    fn create_or_read(&self, spec: &NamespaceSpec) -> Result<NamespaceFile> {
        let read = match self.read_namespace(spec.root()) {
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                tracing::warn!(%error, "a namespace.json is written anew");
                None
            }
            other => other?,
        };
        let file = match read {
            Some(file) => file,
            None => {
                let (epoch, sharded) = (self.newest_epoch_dir(spec.root())?, self.config.shard_directories);
                NamespaceFile { spec: spec.clone(), epoch, sharded }
            }
        };
        for device in &self.devices {
            let there = NamespaceFile::read(&**device, spec.root());
            if !matches!(there, Ok(Some(known)) if known == file) {
                file.write(&**device, &self.temporary_name())?;
            }
        }
        Ok(file)
    }

    /// Without a namespace.json the directories tell: an epoch that was left must never be entered again.
    fn newest_epoch_dir(&self, root: NamespaceId) -> Result<u32> {
        let mut newest = 0;
        for device in &self.devices {
            device.list(Path::new(&root.to_string()), &mut |entry| {
                newest = newest.max(epoch_of_dir(&entry.name).unwrap_or(0));
            })?;
        }
        Ok(newest)
    }

    fn set_epoch(&self, spec: &NamespaceSpec, epoch: u32) -> Result<()> {
        self.open_namespace(spec)?;
        let _one_at_a_time = self.namespaces.lock();
        let on_disk = self.read_namespace(spec.root())?;
        let (root, known_id) = (spec.root(), self.lock().roots.get(&spec.root()).copied());
        let known = known_id.and_then(|id| self.lock().spaces.get(&id).map(Arc::clone));
        let known_epoch = known.as_ref().map_or(0, |space| space.epoch);
        let current = known_epoch.max(on_disk.as_ref().map_or(0, |file| file.epoch));
        epoch_moves(current, epoch)?;
        let sharded = known.as_ref().map_or(self.config.shard_directories, |space| space.sharded);
        let file = NamespaceFile { spec: spec.clone(), epoch, sharded };
        for device in &self.devices {
            file.write(&**device, &self.temporary_name())?;
        }
        if known_epoch == epoch {
            return Ok(());
        }
        self.retire(root);
        self.install(file);
        let mut state = self.lock();
        if let Some(space) = state.spaces.get(&spec.id(epoch)).map(Arc::clone) {
            self.enqueue_scan(&mut state, &space, true);
        }
        Ok(())
    }

    /// Makes an epoch's blocks unreachable; their files go in the background, and the scan of the next epoch finds
    /// the directory.
    fn retire(&self, root: NamespaceId) {
        let mut state = self.lock();
        let Some(id) = state.roots.remove(&root) else { return };
        state.spaces.remove(&id);
        state.scanned.remove(&id);
        state.chores.scans.retain(|job| job.space.id != id);
        let keys: Vec<BlockKey> =
            state.index.iter().map(|(key, _)| *key).filter(|key| key.namespace == id).collect();
        for key in keys {
            state.leave(&key);
        }
    }

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
}

impl Tier for PosixTier {
    fn name(&self) -> &str {
        "posix"
    }

    fn open_namespace(&self, spec: &NamespaceSpec) -> Result<u32> {
        self.shared.open_namespace(spec)
    }

    fn set_epoch(&self, spec: &NamespaceSpec, epoch: u32) -> Result<()> {
        self.shared.set_epoch(spec, epoch)
    }

    fn peek(&self, keys: &[BlockKey], out: &mut Vec<Presence>) {
        out.clear();
        let state = self.shared.lock();
        out.extend(keys.iter().map(|key| self.shared.presence(&state, key)));
    }

    fn probe(&self, keys: Vec<BlockKey>, deadline: Instant, done: Done<usize>) {
        self.begin_probe(keys, deadline, done);
    }

    fn read(&self, key: BlockKey, dst: SlotBuf, deadline: Instant, done: Done<()>) {
        self.begin_read(key, dst, deadline, done);
    }

    fn write(&self, key: BlockKey, src: SlotBuf, deadline: Instant, done: Done<Written>) {
        self.begin_write(key, src, deadline, done);
    }

    /// Unreachable at once; the file goes in the background. A block that this node has not seen is looked for there.
    fn remove(&self, key: BlockKey) {
        let mut state = self.shared.lock();
        if state.index.get(&key).is_none()
            && !state.leaving.contains_key(&key)
            && let Some(space) = state.spaces.get(&key.namespace).map(Arc::clone)
            && !state.is_complete(space.id, self.shared.config.shared)
            && !state.reserved.contains_key(&key)
        {
            // Not charged, because it never was: the release that follows gives nothing back.
            let directory = space::home(key.hash, self.shared.devices.len());
            state.adopt(key, state::Adopt { space, directory, bytes: 0, used: None });
        }
        state.leave(&key);
        self.shared.changed.notify_all();
    }

    fn touch(&self, keys: &[BlockKey]) {
        let mut state = self.shared.lock();
        let mut due = false;
        for key in keys {
            due |= state.touch(key);
        }
        if due {
            self.shared.changed.notify_all();
        }
    }

    fn usage(&self) -> TierUsage {
        let state = self.shared.lock();
        TierUsage {
            blocks: state.index.len() as u64,
            bytes: state.bytes,
            bytes_max: self.shared.config.capacity_bytes,
        }
    }

    fn keys(&self, namespace: NamespaceId) -> Vec<BlockKey> {
        let state = self.shared.lock();
        state.index.iter().map(|(key, _)| *key).filter(|key| key.namespace == namespace).collect()
    }

    fn drain(&self, deadline: Instant) -> bool {
        self.engine.drain(deadline) && self.shared.wait_idle(deadline)
    }
}

impl Drop for PosixTier {
    fn drop(&mut self) {
        self.shared.stop(Instant::now() + CLOSE_WAIT_MAX);
    }
}
