//! A depot: machine, pool and tiers behind one handle. It works the same inside a process or behind the local door.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use kvdepot_core::limits::OVERDUE;
use kvdepot_core::machine::{Event, GROW_BYTES, Machine, Nanos, PoolConfig};
use kvdepot_core::pipeline::{PipelineSpec, PoolKind};
use kvdepot_core::{BlockKey, Error, ErrorKind, Result, eviction};
use kvdepot_tier::{Tier, TierMemory, registry};

use crate::config::DepotConfig;
use crate::death::DeathGuard;
use crate::ending::Unwritten;
use crate::epochs;
use crate::ledger::Ledger;
use crate::memory;
use crate::pool::{self, PoolMapping, Population, Reach};
use crate::prover;
use crate::runner::Runner;
use crate::session::Session;
use crate::stalls::{Stall, StallWatch};
use crate::stats::Stats;
use crate::tier_events::Listener;
use crate::user::User;

/// How often expired claims and delayed writes are checked.
const JANITOR_TICK: Duration = Duration::from_millis(100);
/// Largest number of tiers below a pool: the machine keeps a bit for each.
const TIERS_MAX: usize = 8;

/// A running depot. Dropping it writes dirty blocks, within limits, and stops its threads.
pub struct Depot {
    pub(crate) runner: Arc<Runner>,
    threads: Vec<JoinHandle<()>>,
    /// Kept alive for the tiers, which hold them weakly.
    _listeners: Vec<Arc<Listener>>,
}

impl DepotConfig {
    /// Checks without opening a tier whether a depot can be started from this: the value of each key, and whether they
    /// fit together.
    pub fn ensure_can_start(&self) -> Result<()> {
        let spec = PipelineSpec::parse(&self.pipeline, &registry::NAMES)?;
        self.ensure_pool_fits(spec.pool, spec.tiers.len())?;
        eviction::by_name(&self.eviction)?;
        self.placements(spec.pool, &spec.tiers).map(drop)
    }

    /// Returns whether the pool's memory outlives a crash. Private memory does not.
    fn keeps_memory(&self, pool: &PoolMapping) -> bool {
        self.pool_keep_ms > 0 && pool.fd().is_some()
    }

    /// Fails if the pool cannot have that many tiers.
    fn ensure_pool_fits(&self, pool: PoolKind, tiers: usize) -> Result<()> {
        if pool != PoolKind::Cache && tiers == 0 {
            return Err(Error::new(
                ErrorKind::Config,
                "a Staging pool keeps nothing: it needs a tier below it",
            )
            .with("pipeline", &self.pipeline));
        }
        if tiers > TIERS_MAX {
            return Err(Error::new(ErrorKind::Config, "the pipeline has too many tiers")
                .with("tiers", tiers)
                .with("tiers_max", TIERS_MAX));
        }
        Ok(())
    }
}

impl Depot {
    /// Starts a depot whose pool other processes can map: opens its tiers, makes its pool, and populates it in the
    /// background.
    pub fn start(mut config: DepotConfig) -> Result<Self> {
        let pool = pool::make(&mut config, Reach::Shared)?;
        Self::start_over(config, pool)
    }

    /// Starts a depot for this process only.
    pub fn start_private(mut config: DepotConfig) -> Result<Self> {
        let pool = pool::make(&mut config, Reach::Private)?;
        Self::start_over(config, pool)
    }

    /// Like [`Self::start`], in memory left by another depot. It stays on the nodes where that depot placed it.
    pub fn start_on(config: DepotConfig, pool: PoolMapping) -> Result<Self> {
        if config.pool_mlock
            && let Err(error) = pool::lock(&pool)
        {
            // Its blocks are worth more than the lock.
            tracing::warn!("{error}; the pool that was taken over is not locked");
        }
        Self::start_over(config, pool)
    }

    fn start_over(config: DepotConfig, pool: PoolMapping) -> Result<Self> {
        let spec = PipelineSpec::parse(&config.pipeline, &registry::NAMES)?;
        let is_kept = config.keeps_memory(&pool);
        let build = |name: &&'static str| {
            let settings = config.tiers.get(name).unwrap_or(&serde_json::Value::Null);
            match is_kept {
                true => registry::build_guarded(name, &registry::for_kept_memory(name, settings)),
                false => registry::build_guarded(name, settings),
            }
        };
        let tiers = spec.tiers.iter().map(build).collect::<Result<Vec<_>>>()?;
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
        config.ensure_pool_fits(pool_kind, tiers.len())?;
        let pool = Arc::new(pool);
        let pool_bytes_max = config.mapped_bytes().min(pool.bytes());
        let pool_config = PoolConfig {
            pool_bytes: config.pool_bytes.min(pool_bytes_max),
            pool_bytes_max,
            grow_step_bytes: config.pool_grow_bytes,
            policy: eviction::by_name(&config.eviction)?,
            keeps,
            seed: kvdepot_io::random::number(),
        };
        let (kicks, kicked) = crossbeam_channel::bounded(1);
        let names: Vec<&'static str> = tiers.iter().map(|tier| log_name(tier.name())).collect();
        let is_kept = config.keeps_memory(&pool);
        let ledger = is_kept.then(|| Ledger::create(pool.regions())).transpose()?;
        let parted = tiers.clone();
        let windows: Vec<u64> = tiers.iter().map(|tier| tier.write_window_bytes()).collect();
        let regions = pool::region_sizes(pool.regions(), pool_bytes_max);
        let mut machine = Machine::new(pool_config, tiers.len())
            .with_regions(&regions)
            .with_placements(&config.placements(pool_kind, &names)?)
            .with_write_budgets(&config.write_budgets(&names))
            .with_write_windows(&windows)
            .with_write_patience(write_patience(config.timeout_ms))
            .with_parts(Arc::new(move |tier: usize, key: &BlockKey| parted[tier].part(key)));
        if is_kept {
            machine.keep_ledger();
        }
        let demotes_to = (0..tiers.len()).map(|tier| machine.demotes_to(tier)).collect();
        let memory = memory::find(&tiers, pool_bytes_max);
        let in_place = memory.as_ref().map(|(tier, memory)| Event::InPlace {
            tier: *tier,
            memory_bytes: memory.blocks_bytes,
            unit_bytes: memory.unit_bytes,
        });
        let tiers = (tiers, memory.map(|(_, memory)| memory));
        let runner = Arc::new(Runner::new(config, pool, machine, names, tiers, ledger, kicks));
        in_place.into_iter().for_each(|in_place| runner.tell(in_place));
        let mut threads = runner.probers.start()?;
        threads.push(spawn("kvdepot-janitor", &runner, janitor)?);
        threads.push(spawn("kvdepot-pump", &runner, move |runner| pump(runner, &kicked))?);
        if !runner.locator.tiers.is_empty() {
            threads.push(spawn("kvdepot-epochs", &runner, epochs::watch)?);
        }
        if is_kept {
            threads.push(spawn("kvdepot-prover", &runner, |runner| {
                runner.ledger.iter().for_each(|ledger| prover::run(runner, ledger));
            })?);
        }
        if runner.config.populate {
            threads.push(spawn("kvdepot-populate", &runner, populate)?);
        }
        let listeners = Listener::attach_all(&runner, demotes_to);
        Ok(Self { runner, threads, _listeners: listeners })
    }

    /// Makes a new owner of leases: one for each connection, or for each lane of an embedded client.
    pub fn session(&self) -> Session {
        Session::new(Arc::clone(&self.runner), self.runner.next_owner())
    }

    /// Makes a new user of namespaces, whose sessions are made by [`Self::session_of`].
    pub fn user(&self) -> User {
        User::new(Arc::clone(&self.runner))
    }

    /// Makes a new owner of leases that opens namespaces for a user.
    pub fn session_of(&self, user: &User) -> Session {
        self.session().with_user(user.clone())
    }

    /// Returns the pool's memory.
    pub fn pool(&self) -> Arc<PoolMapping> {
        Arc::clone(&self.runner.pool)
    }

    /// Returns the memory of a tier in which blocks are leased where they lie, if there is one.
    pub fn memory(&self) -> Option<&TierMemory> {
        self.runner.memory.as_ref()
    }

    /// Returns the depot's unique id.
    pub fn id(&self) -> u64 {
        self.runner.id
    }

    /// Returns whether a thread of the depot panicked: every request fails from then on.
    pub fn is_dead(&self) -> bool {
        self.runner.life.is_dead()
    }

    /// Immediately answers all requests that wait for writes, now and from now on: their connections are about to end.
    pub fn end_waits(&self) {
        self.runner.end_waits();
    }

    /// Writes dirty blocks for at most `drain_timeout_ms`, and logs progress and losses. Only the first call has an
    /// effect. Dropping the depot without it does the same.
    pub fn finish(&self) -> Unwritten {
        self.runner.finish()
    }

    /// Returns the depot's configuration.
    pub fn config(&self) -> &DepotConfig {
        &self.runner.config
    }
}

impl Drop for Depot {
    fn drop(&mut self) {
        self.finish();
        self.runner.stopping.store(true, Ordering::Release);
        self.runner.probers.stop();
        self.runner.looks.end();
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Depot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Depot({}, {} bytes)", self.runner.config.pipeline, self.runner.config.pool_bytes)
    }
}

/// A tier's name as a pipeline spells it.
fn log_name(name: &str) -> &'static str {
    registry::NAMES.into_iter().find(|known| known.eq_ignore_ascii_case(name)).unwrap_or("Tier")
}

fn spawn(
    name: &str,
    runner: &Arc<Runner>,
    body: impl FnOnce(&Arc<Runner>) + Send + 'static,
) -> Result<JoinHandle<()>> {
    let runner = Arc::clone(runner);
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(move || {
            let _guard = DeathGuard(&runner.life);
            body(&runner);
        })
        .map_err(|e| Error::io("cannot start a thread", e).with("thread", name))
}

/// Touches the pool from its beginning and hands it over piece by piece. Faster dumps grow the pool themselves and
/// incur page faults.
fn populate(runner: &Arc<Runner>) {
    let population = Population {
        bytes: runner.config.pool_bytes.min(runner.pool.bytes()),
        piece_bytes: GROW_BYTES,
        threads: pool::populate_threads(runner.config.pool_populate_threads),
        stop: &|| runner.stopping.load(Ordering::Acquire),
        touch: &|start, len| runner.pool.populate(start, len),
        reached: &|upto_bytes| {
            runner.tell_and_leave(Event::Populated { upto_bytes });
        },
    };
    if let Err(error) = population.run() {
        tracing::warn!("the pool is populated on first use only: {error}");
    }
}

/// Passes queued commands to tiers and continues work that was cut into pieces, on behalf of threads that must not wait
/// for it.
fn pump(runner: &Arc<Runner>, kicked: &Receiver<()>) {
    while !runner.stopping.load(Ordering::Acquire) {
        if kicked.recv_timeout(JANITOR_TICK).is_ok() {
            runner.work_off();
        }
    }
}

fn note_stall(runner: &Runner, stall: Stall) {
    let stats = &runner.locator.stats;
    Stats::add(&stats.stalls, 1);
    let late_us = u64::try_from(stall.late.as_micros()).unwrap_or(u64::MAX);
    stats.stall_max_us.fetch_max(late_us, Ordering::Relaxed);
    if let Some(left_out) = stall.logged_after {
        tracing::warn!(
            "the depot stalled: it was not scheduled for {:.1} s (and {left_out} more times since the last such line), \
             and requests waited that long; leave it a CPU, see \"The depot is starved of CPU\" in docs/operate.md",
            stall.late.as_secs_f64()
        );
    }
}

/// Returns the time after which a write has hung: its deadline is `timeout_ms` after it was passed to the tier.
fn write_patience(timeout_ms: u64) -> Nanos {
    let patience = Duration::from_millis(timeout_ms).saturating_add(OVERDUE);
    Nanos::try_from(patience.as_nanos()).unwrap_or(Nanos::MAX)
}

fn janitor(runner: &Arc<Runner>) {
    let mut stalls = StallWatch::default();
    while !runner.stopping.load(Ordering::Acquire) {
        // Woken only by its tick and at the end: a thread woken for every stored block would take a processor from the
        // storing thread. A spurious wake only checks the claims once more.
        let began = Instant::now();
        std::thread::park_timeout(JANITOR_TICK);
        let now = Instant::now();
        if let Some(stall) = stalls.timer_came(JANITOR_TICK, now - began, now) {
            note_stall(runner, stall);
        }
        runner.expire_probes();
        runner.locator.tiers.iter().for_each(|tier| tier.tick());
        runner.tell(Event::Tick);
        runner.keep_history();
    }
}
