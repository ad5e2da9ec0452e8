//! Carrying out what the machine asks of tiers. Each operation's end is an event for the machine.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvdepot_core::machine::{Ask, Command, Event, Fetched, Nanos, Stored, TierIndex};
use kvdepot_core::runs::Runs;
use kvdepot_core::{BlockKey, ErrorKind, Result, SlotId};
use kvdepot_io::SlotBuf;
use kvdepot_tier::{Tier, Written};

use crate::locate::Locator;
use crate::pool::PoolMapping;
use crate::probes::Probes;

/// Takes the end of an operation, from any thread; must not block.
pub(crate) type Ended = Arc<dyn Fn(Event) + Send + Sync>;

/// The tiers, as the machine's commands see them.
#[derive(Debug)]
pub(crate) struct TierCommands {
    locator: Arc<Locator>,
    /// What log lines call the tiers.
    names: Vec<&'static str>,
    pool: Arc<PoolMapping>,
    /// The moment that the machine counts time from.
    began: Instant,
    timeout: Duration,
    probes: Arc<Probes>,
    tasks: AtomicU64,
}

impl TierCommands {
    pub(crate) fn new(
        locator: Arc<Locator>,
        names: Vec<&'static str>,
        pool: Arc<PoolMapping>,
        began: Instant,
        timeout: Duration,
    ) -> Self {
        let (probes, tasks) = (Arc::default(), AtomicU64::new(1));
        Self { locator, names, pool, began, timeout, probes, tasks }
    }

    fn tier(&self, tier: TierIndex) -> &Arc<dyn Tier> {
        &self.locator.tiers[tier]
    }

    pub(crate) fn execute(&self, command: Command, ended: &Ended) {
        match command {
            Command::Read { tier, slot, key, runs, deadline } => {
                self.read(tier, slot, key, &runs, deadline, ended);
            }
            Command::Write { tier, slot, key, runs } => self.write(tier, slot, key, &runs, ended),
            Command::Remove { tier, key } => {
                self.tier(tier).remove(key);
                ended(Event::Removed { tier, key });
            }
            Command::Probe { tier, ask, keys } => self.probe(tier, ask, keys, ended),
            Command::Touch { keys } => self.locator.tiers.iter().for_each(|tier| tier.touch(&keys)),
        }
    }

    fn buffer(&self, runs: &Runs) -> SlotBuf {
        self.pool.slot(runs).expect("the allocator hands out runs inside of the pool")
    }

    /// A number for a log line's task.
    fn next_task(&self) -> u64 {
        self.tasks.fetch_add(1, Ordering::Relaxed)
    }

    fn read(
        &self,
        tier: TierIndex,
        slot: SlotId,
        key: BlockKey,
        runs: &Runs,
        deadline: Nanos,
        ended: &Ended,
    ) {
        let (buf, begun) = (self.buffer(runs), Instant::now());
        let (task, bytes, name) = (self.next_task(), buf.len(), self.names[tier]);
        tracing::debug!("{name} task({task},Backend2Cache,1,{bytes}) dispatching.");
        let ended = Arc::clone(ended);
        let done = move |outcome: Result<()>| {
            let cost_ms = begun.elapsed().as_secs_f64() * 1e3;
            tracing::debug!("{name} task({task},Backend2Cache,1,{bytes}) finished, cost {cost_ms:.3}ms.");
            let outcome = match outcome {
                Ok(()) => Ok(Fetched::Whole),
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(Fetched::Miss),
                Err(error) => {
                    tracing::debug!("fetch failed: {error}");
                    Err(error)
                }
            };
            ended(Event::ReadEnded { tier, slot, outcome });
        };
        let deadline = self.began + Duration::from_nanos(deadline);
        self.tier(tier).read(key, buf, deadline, Box::new(done));
    }

    fn write(&self, tier: TierIndex, slot: SlotId, key: BlockKey, runs: &Runs, ended: &Ended) {
        let (buf, begun) = (self.buffer(runs), Instant::now());
        let (task, bytes, name) = (self.next_task(), buf.len(), self.names[tier]);
        tracing::debug!("{name} task({task},Cache2Backend,1,{bytes}) dispatching.");
        let ended = Arc::clone(ended);
        let done = move |outcome: Result<Written>| {
            let cost_ms = begun.elapsed().as_secs_f64() * 1e3;
            tracing::debug!("{name} task({task},Cache2Backend,1,{bytes}) finished, cost {cost_ms:.3}ms.");
            let outcome = outcome.map(|written| match written {
                Written::New => Stored::New,
                Written::AlreadyThere => Stored::AlreadyThere,
            });
            ended(Event::WriteEnded { tier, slot, outcome });
        };
        self.tier(tier).write(key, buf, begun + self.timeout, Box::new(done));
    }

    fn probe(&self, tier: TierIndex, ask: Ask, keys: Vec<BlockKey>, ended: &Ended) {
        let deadline = self.locator.probe_deadline();
        let (probes, probe) = (Arc::clone(&self.probes), self.probes.begin(deadline, ask));
        let ended = Arc::clone(ended);
        let done = move |outcome: Result<usize>| {
            if probes.end(probe) {
                ended(Event::Probed { ask, outcome });
            }
        };
        self.tier(tier).probe(keys, deadline, Box::new(done));
    }

    /// A probe whose tier did not answer in time: it is given up.
    pub(crate) fn overdue_probe(&self) -> Option<Ask> {
        self.probes.overdue(Instant::now())
    }
}
