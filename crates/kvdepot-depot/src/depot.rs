//! A depot: pool, index and tiers behind one handle. The same value runs inside a process or behind the local door.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use kvdepot_core::pipeline::{PipelineSpec, PoolKind, TierKind};
use kvdepot_core::{Error, ErrorKind, Result, eviction};
use kvdepot_tier::Tier;
use parking_lot::{Condvar, Mutex};

use crate::config::DepotConfig;
use crate::pool::PoolMapping;
use crate::resolver::Job;
use crate::session::Session;
use crate::state::{GROW_BYTES, Growth, State};
use crate::stats::Stats;
use crate::{claim, io_queue, resolver};

/// How often claims are looked over for expiry.
const JANITOR_TICK: Duration = Duration::from_millis(100);
/// How long a depot that ends waits for its last writes.
const DRAIN_AT_END: Duration = Duration::from_secs(10);

/// What all threads of a depot share.
pub(crate) struct Shared {
    pub(crate) config: DepotConfig,
    pub(crate) id: u64,
    pub(crate) pool: Arc<PoolMapping>,
    pub(crate) tiers: Vec<Arc<dyn Tier>>,
    /// What log lines call them.
    pub(crate) tier_names: Vec<&'static str>,
    pub(crate) state: Mutex<State>,
    /// Signalled whenever a fetch, a write, a lease or a claim ends.
    pub(crate) changed: Condvar,
    pub(crate) stats: Stats,
    pub(crate) jobs: Sender<Job>,
    /// Wakes the thread that hands queued work to the tiers.
    kicks: Sender<()>,
    pub(crate) stopping: AtomicBool,
    owners: AtomicU64,
    tasks: AtomicU64,
}

impl Shared {
    /// Has queued work handed to the tiers soon, by another thread: an answer to a client must not wait for that.
    pub(crate) fn kick(&self) {
        // A full channel means that a wake is on its way already; without tiers there is nothing to hand over.
        if !self.tiers.is_empty() {
            let _ = self.kicks.try_send(());
        }
    }

    /// A number for a log line's task.
    pub(crate) fn next_task(&self) -> u64 {
        self.tasks.fetch_add(1, Ordering::Relaxed)
    }
}

/// A running depot. Dropping it writes what is dirty, within bounds, and stops its threads.
pub struct Depot {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Depot {
    /// Starts a depot whose pool other processes can map: opens its tiers, makes its pool, and populates it in the
    /// background.
    pub fn start(config: DepotConfig) -> Result<Self> {
        let pool = PoolMapping::create(config.mapped_bytes())?;
        Self::start_on(config, pool)
    }

    /// Starts a depot for this process alone.
    pub fn start_private(config: DepotConfig) -> Result<Self> {
        let pool = PoolMapping::create_private(config.mapped_bytes())?;
        Self::start_on(config, pool)
    }

    fn start_on(config: DepotConfig, pool: PoolMapping) -> Result<Self> {
        let spec = PipelineSpec::parse(&config.pipeline)?;
        let mut tiers = Vec::new();
        for kind in &spec.tiers {
            kind.ensure_available()?;
            let name = kind.to_string();
            let value = match name.as_str() {
                "Posix" => &config.posix,
                "Remote" => &config.remote,
                "Fake" => &config.fake,
                _ => &serde_json::Value::Null,
            };
            tiers.push(kvdepot_tier::registry::build_guarded(&name, value)?);
        }
        Self::with_tiers(config, spec.pool, tiers, pool)
    }

    /// Starts a depot over tiers made by the caller; for tests and embedders.
    pub fn with_tiers(
        config: DepotConfig,
        pool_kind: PoolKind,
        tiers: Vec<Arc<dyn Tier>>,
        pool: PoolMapping,
    ) -> Result<Self> {
        let keeps = pool_kind == PoolKind::Cache;
        if !keeps && tiers.is_empty() {
            return Err(Error::new(
                ErrorKind::Config,
                "a Staging pool keeps nothing: it needs a tier below it",
            )
            .with("pipeline", &config.pipeline));
        }
        let slots_hint = usize::try_from(config.pool_bytes >> 16).unwrap_or(usize::MAX).clamp(64, 1 << 24);
        let policy = eviction::by_name(&config.eviction, slots_hint)?;
        let pool = Arc::new(pool);
        let growth = Growth {
            pool_bytes_max: config.mapped_bytes().min(pool.bytes()),
            step_bytes: config.pool_grow_bytes,
        };
        let state = State::new(config.pool_bytes, growth, policy, tiers.len(), keeps);
        let (jobs, receiver) = crossbeam_channel::unbounded();
        let (kicks, kicked) = crossbeam_channel::bounded(1);
        let shared = Arc::new(Shared {
            id: fresh_id(),
            pool,
            tier_names: tiers.iter().map(|tier| log_name(tier.name())).collect(),
            tiers,
            state: Mutex::new(state),
            changed: Condvar::new(),
            stats: Stats::default(),
            jobs,
            kicks,
            stopping: AtomicBool::new(false),
            owners: AtomicU64::new(1),
            tasks: AtomicU64::new(1),
            config,
        });
        let mut threads = resolver::spawn(&shared, &receiver)?;
        threads.push(spawn("kvdepot-janitor", &shared, janitor)?);
        threads.push(spawn("kvdepot-pump", &shared, move |shared| pump_when_kicked(shared, &kicked))?);
        if shared.config.populate {
            threads.push(spawn("kvdepot-populate", &shared, populate)?);
        }
        Ok(Self { shared, threads })
    }

    /// A new owner of leases: one a connection, or one a lane of an embedded client.
    pub fn session(&self) -> Session {
        Session::new(Arc::clone(&self.shared), self.shared.owners.fetch_add(1, Ordering::Relaxed))
    }

    /// The pool's memory.
    pub fn pool(&self) -> Arc<PoolMapping> {
        Arc::clone(&self.shared.pool)
    }

    /// A number that no other depot has.
    pub fn id(&self) -> u64 {
        self.shared.id
    }

    /// What the depot was built from.
    pub fn config(&self) -> &DepotConfig {
        &self.shared.config
    }
}

impl Drop for Depot {
    fn drop(&mut self) {
        io_queue::drain(&self.shared, Instant::now() + DRAIN_AT_END);
        self.shared.stopping.store(true, Ordering::Release);
        for _ in 0..resolver::THREADS {
            let _ = self.shared.jobs.send(Job::Stop);
        }
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Depot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Depot({}, {} bytes)", self.shared.config.pipeline, self.shared.config.pool_bytes)
    }
}

/// A tier's name as a pipeline spells it.
fn log_name(name: &str) -> &'static str {
    let mut kinds = TierKind::ALL.into_iter().map(TierKind::as_str);
    kinds.find(|kind| kind.eq_ignore_ascii_case(name)).unwrap_or("Tier")
}

fn fresh_id() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    // The standard library's random keys: no crate is worth this.
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}

fn spawn(
    name: &str,
    shared: &Arc<Shared>,
    body: impl FnOnce(&Arc<Shared>) + Send + 'static,
) -> Result<JoinHandle<()>> {
    let shared = Arc::clone(shared);
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(move || body(&shared))
        .map_err(|e| Error::io("cannot start a thread", e).with("thread", name))
}

/// Touches the pool from its beginning and hands it over piece by piece; dumps that come faster grow the pool
/// themselves and meet page faults.
fn populate(shared: &Arc<Shared>) {
    // Background work: nothing waits for it.
    let _ = rustix::process::nice(10);
    let mut start = 0;
    let bytes = shared.config.pool_bytes.min(shared.pool.bytes());
    while start < bytes && !shared.stopping.load(Ordering::Acquire) {
        let len = GROW_BYTES.min(bytes - start);
        if let Err(error) = shared.pool.populate(start, len) {
            tracing::warn!("the pool is populated on first use only: {error}");
            return;
        }
        start += len;
        shared.state.lock().grow(Some(start));
    }
}

fn pump_when_kicked(shared: &Arc<Shared>, kicked: &Receiver<()>) {
    while !shared.stopping.load(Ordering::Acquire) {
        if kicked.recv_timeout(JANITOR_TICK).is_ok() {
            io_queue::pump(shared);
        }
    }
}

fn janitor(shared: &Arc<Shared>) {
    while !shared.stopping.load(Ordering::Acquire) {
        // Woken by nothing but its tick and the end: a thread that every stored block wakes takes a processor from
        // whoever stores it. A spurious wake only looks over the claims once more.
        std::thread::park_timeout(JANITOR_TICK);
        let mut state = shared.state.lock();
        claim::expire(shared, &mut state, Instant::now());
        let delayed = std::mem::take(&mut state.delayed);
        for write in delayed {
            state.writes[write.tier].push_back(write);
        }
        drop(state);
        io_queue::pump(shared);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Hashes;
    use crate::{acquire::acquire, ops};

    /// Nobody else would hand them over before the janitor's next turn, and who asked may ask again only after that.
    #[test]
    fn reads_are_with_the_tier_when_a_question_without_a_wait_is_answered() {
        let directory = tempfile::tempdir().unwrap();
        let posix = serde_json::json!({"directories": [directory.path()]});
        let config = serde_json::json!({"pipeline": "Cache|Posix", "pool_bytes": 8 << 20, "posix": posix});
        let depot = Depot::start_private(DepotConfig::from_json(&config.to_string()).unwrap()).unwrap();
        let layout = kvdepot_core::BlockLayout::uniform(1, &[64 << 10]).unwrap();
        let spec = kvdepot_core::NamespaceSpec::new("{\"model\":\"acquire\"}", layout).unwrap();
        let (namespace, ..) = ops::open_namespace(&depot.shared, spec.canonical()).unwrap();
        // Other nodes may have written them: only a read can tell.
        for round in 0..50u8 {
            let hashes =
                Hashes((0..8u8).flat_map(|block| [[round; 15].as_slice(), &[block]].concat()).collect());
            acquire(&depot.shared, 1, namespace, &hashes, Duration::ZERO, true).unwrap();
            let state = depot.shared.state.lock();
            assert!(state.fetches.is_empty() || state.pumping, "round {round}");
        }
    }
}
