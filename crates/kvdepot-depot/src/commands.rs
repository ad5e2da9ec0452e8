//! Executes the machine's commands for tiers, in batches. The end of each operation becomes an event for the machine.
//!
//! A batch holds consecutive commands of one kind for one tier, so each tier gets its commands in the order of the
//! steps that issued them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvdepot_core::limits::REMOVALS_OWED_MAX;
use kvdepot_core::machine::{Ask, Closed, Command, Event, Nanos, RemovalId, Stored, TierIndex};
use kvdepot_core::runs::Runs;
use kvdepot_core::{BlockKey, Error, ErrorKind, Result, SlotId};
use kvdepot_io::SlotBuf;
use kvdepot_tier::{Fetched, LeaseItem, ReadItem, Tier, WriteItem, Written};
use smallvec::SmallVec;

use crate::hops::Hops;
use crate::locate::Locator;
use crate::pool::PoolMapping;
use crate::probes::Probes;
use crate::task_line::TierTask;

/// Receives the end of an operation, and what that says of a block in a tier, on any thread; must not block.
pub(crate) type Ended = Arc<dyn Fn(Event, Option<Said>) + Send + Sync>;

/// What the end of an operation says of a block in a tier.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Said {
    pub(crate) tier: TierIndex,
    pub(crate) key: BlockKey,
    /// Whether the tier has it now.
    pub(crate) is_there: bool,
}

/// Number of blocks in one call of a tier.
const BATCH_BLOCKS_MAX: usize = 256;

/// The log lines shared by the blocks of one tier call; `None` if they are not enabled.
type Task = Option<Arc<TierTask>>;

/// Commands collected for one call of a tier.
#[derive(Debug, Default)]
enum Batch {
    #[default]
    Empty,
    /// All of them have the same deadline.
    Reads(Nanos, Task, Vec<ReadItem>),
    /// All of them have the same deadline.
    Leases(Nanos, Vec<LeaseItem>),
    Writes(Task, Vec<WriteItem>),
    Removals(Vec<(RemovalId, BlockKey)>),
}

impl Batch {
    fn is_full(&self) -> bool {
        let blocks = match self {
            Self::Empty => 0,
            Self::Reads(_, _, reads) => reads.len(),
            Self::Leases(_, leases) => leases.len(),
            Self::Writes(_, writes) => writes.len(),
            Self::Removals(keys) => keys.len(),
        };
        blocks >= BATCH_BLOCKS_MAX
    }
}

/// The tiers, as the machine's commands see them.
#[derive(Debug)]
pub(crate) struct TierCommands {
    locator: Arc<Locator>,
    /// The tiers' names in log lines.
    names: Vec<&'static str>,
    pool: Arc<PoolMapping>,
    /// The origin of the machine's time.
    began: Instant,
    timeout: Duration,
    probes: Arc<Probes>,
    tasks: AtomicU64,
    /// What moves between the pool and each tier.
    hops: Vec<Arc<Hops>>,
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
        let hops = names.iter().map(|_| Arc::default()).collect();
        Self { locator, names, pool, began, timeout, probes, tasks, hops }
    }

    /// Returns the fields of a tier in `stat`: times and bytes of what moved.
    pub(crate) fn moved(&self, tier: TierIndex) -> [(&'static str, serde_json::Value); 2] {
        self.hops[tier].to_json()
    }

    fn tier(&self, tier: TierIndex) -> &Arc<dyn Tier> {
        &self.locator.tiers[tier]
    }

    /// Logs that a tier is not used for a namespace any more.
    pub(crate) fn closed(&self, Closed { tier, part, namespace }: Closed) {
        let server = self.tier(tier).servers().into_iter().nth(part).map(|server| server.address);
        tracing::error!(
            tier = self.names[tier], server, %namespace, removals_max = REMOVALS_OWED_MAX,
            "too many removals failed: the tier is closed for this namespace until the namespace is reset; check why \
             its removals fail"
        );
    }

    /// Passes all of these commands to the tiers.
    pub(crate) fn execute(&self, commands: &mut VecDeque<Command>, ended: &Ended) {
        let mut batches: SmallVec<[Batch; 4]> = SmallVec::new();
        batches.resize_with(self.locator.tiers.len(), Batch::default);
        for command in commands.drain(..) {
            match command {
                Command::Read { tier, slot, key, runs, deadline, is_use } => {
                    // The slot was made for this read.
                    let buf = match self.pool.fresh_slot(&runs) {
                        Ok(buf) => buf,
                        Err(error) => {
                            ended(Event::ReadEnded { tier, slot, outcome: Err(no_memory(&error)) }, None);
                            continue;
                        }
                    };
                    let batch = &mut batches[tier];
                    if !matches!(batch, Batch::Reads(until, ..) if *until == deadline) {
                        let task = self.task(tier, TierTask::READ);
                        self.begin(tier, batch, Batch::Reads(deadline, task, Vec::new()), ended);
                    }
                    if let Batch::Reads(_, task, reads) = batch {
                        reads.push(ReadItem {
                            is_use,
                            ..self.read(tier, slot, key, buf, task.clone(), ended)
                        });
                    }
                    self.send_if_full(tier, &mut batches[tier], ended);
                }
                Command::Lease { tier, slot, key, deadline } => {
                    let batch = &mut batches[tier];
                    if !matches!(batch, Batch::Leases(until, _) if *until == deadline) {
                        self.begin(tier, batch, Batch::Leases(deadline, Vec::new()), ended);
                    }
                    if let Batch::Leases(_, leases) = batch {
                        leases.push(lease(tier, slot, key, ended));
                    }
                    self.send_if_full(tier, &mut batches[tier], ended);
                }
                Command::EndLeases { tier, places } => self.tier(tier).end_leases(&places),
                Command::Write { tier, slot, key, runs } => {
                    let batch = &mut batches[tier];
                    if !matches!(batch, Batch::Writes(..)) {
                        let task = self.task(tier, TierTask::WRITE);
                        self.begin(tier, batch, Batch::Writes(task, Vec::new()), ended);
                    }
                    if let Batch::Writes(task, writes) = batch {
                        writes.push(self.write(tier, slot, key, &runs, task.clone(), ended));
                    }
                    self.send_if_full(tier, &mut batches[tier], ended);
                }
                Command::Remove { id, tier, key } => {
                    match &mut batches[tier] {
                        Batch::Removals(keys) => keys.push((id, key)),
                        other => self.begin(tier, other, Batch::Removals(vec![(id, key)]), ended),
                    }
                    self.send_if_full(tier, &mut batches[tier], ended);
                }
                Command::Probe { tier, ask, keys } => {
                    self.begin(tier, &mut batches[tier], Batch::Empty, ended);
                    self.probe(tier, ask, keys, ended);
                }
                Command::Touch { keys } => self.locator.tiers.iter().for_each(|tier| tier.touch(&keys)),
            }
        }
        for (tier, batch) in batches.into_iter().enumerate() {
            self.send(tier, batch, ended);
        }
    }

    /// Sends the current batch and begins another one.
    fn begin(&self, tier: TierIndex, batch: &mut Batch, next: Batch, ended: &Ended) {
        self.send(tier, std::mem::replace(batch, next), ended);
    }

    fn send_if_full(&self, tier: TierIndex, batch: &mut Batch, ended: &Ended) {
        if batch.is_full() {
            self.begin(tier, batch, Batch::Empty, ended);
        }
    }

    fn send(&self, tier: TierIndex, batch: Batch, ended: &Ended) {
        match batch {
            Batch::Empty => {}
            Batch::Reads(deadline, task, reads) => {
                dispatching(task);
                self.tier(tier).read(reads, self.began + Duration::from_nanos(deadline));
            }
            Batch::Leases(deadline, leases) => {
                self.tier(tier).lease(leases, self.began + Duration::from_nanos(deadline));
            }
            Batch::Writes(task, writes) => {
                dispatching(task);
                self.tier(tier).write(writes, Instant::now() + self.timeout);
            }
            Batch::Removals(mut keys) => {
                while let Some(part) = keys.first().map(|(_, key)| self.tier(tier).part(key)) {
                    let (mine, others) =
                        keys.into_iter().partition(|(_, key)| self.tier(tier).part(key) == part);
                    self.remove(tier, mine, ended);
                    keys = others;
                }
            }
        }
    }

    fn remove(&self, tier: TierIndex, removals: Vec<(RemovalId, BlockKey)>, ended: &Ended) {
        let keys = removals.iter().map(|(_, key)| *key).collect();
        let (ended, name) = (Arc::clone(ended), self.names[tier]);
        let done = move |outcome: Result<()>| {
            if let Err(error) = &outcome {
                tracing::debug!("{name} may still have blocks that should be removed: {error}");
            }
            for (id, key) in removals {
                let said = outcome.is_ok().then_some(Said { tier, key, is_there: false });
                ended(Event::Removed { id, tier, key, outcome: outcome.clone() }, said);
            }
        };
        self.tier(tier).remove(keys, Box::new(done));
    }

    /// Makes the task of a new tier call.
    fn task(&self, tier: TierIndex, operation: &'static str) -> Task {
        let id = self.tasks.fetch_add(1, Ordering::Relaxed);
        TierTask::begin(id, self.names[tier], operation).map(Arc::new)
    }

    fn read(
        &self,
        tier: TierIndex,
        slot: SlotId,
        key: BlockKey,
        buf: SlotBuf,
        task: Task,
        ended: &Ended,
    ) -> ReadItem {
        task.iter().for_each(|task| task.add(buf.len()));
        let (ended, hops, begun, bytes) =
            (Arc::clone(ended), Arc::clone(&self.hops[tier]), Instant::now(), buf.len());
        let done = move |outcome: Result<Fetched>| {
            drop(task);
            if let Err(error) = &outcome {
                tracing::debug!("fetch failed: {error}");
            }
            let is_there = match &outcome {
                Ok(Fetched::Whole) => {
                    hops.reads.moved(begun, bytes as u64);
                    Some(true)
                }
                Ok(Fetched::Miss) => Some(false),
                Err(_) => None,
            };
            let said = is_there.map(|is_there| Said { tier, key, is_there });
            ended(Event::ReadEnded { tier, slot, outcome }, said);
        };
        ReadItem::new(key, buf, Box::new(done))
    }

    fn write(
        &self,
        tier: TierIndex,
        slot: SlotId,
        key: BlockKey,
        runs: &Runs,
        task: Task,
        ended: &Ended,
    ) -> WriteItem {
        let buf = self.pool.slot(runs).expect("the allocator hands out runs inside of the pool");
        task.iter().for_each(|task| task.add(buf.len()));
        let (ended, hops, begun, bytes) =
            (Arc::clone(ended), Arc::clone(&self.hops[tier]), Instant::now(), buf.len());
        let done = move |outcome: Result<Written>| {
            drop(task);
            let outcome = outcome.map(|written| match written {
                Written::New => {
                    hops.writes.moved(begun, bytes as u64);
                    Stored::New
                }
                Written::AlreadyThere => Stored::AlreadyThere,
            });
            let said = outcome.is_ok().then_some(Said { tier, key, is_there: true });
            ended(Event::WriteEnded { tier, slot, outcome }, said);
        };
        WriteItem { key, src: buf, done: Box::new(done) }
    }

    fn probe(&self, tier: TierIndex, ask: Ask, keys: Vec<BlockKey>, ended: &Ended) {
        let deadline = self.locator.probe_deadline();
        let (probes, probe) = (Arc::clone(&self.probes), self.probes.begin(deadline, ask));
        let ended = Arc::clone(ended);
        let done = move |outcome: Result<usize>| {
            if probes.end(probe) {
                ended(Event::Probed { ask, outcome }, None);
            }
        };
        self.tier(tier).probe(keys, deadline, Box::new(done));
    }

    /// Returns a probe whose tier did not answer in time, which is abandoned.
    pub(crate) fn overdue_probe(&self) -> Option<Ask> {
        self.probes.overdue(Instant::now())
    }
}

/// Logs that a tier call is about to begin. Only its blocks hold the task then, so that the line of its end is written
/// before the end of its last block is told.
fn dispatching(task: Task) {
    task.iter().for_each(|task| task.dispatching());
    drop(task);
}

/// The outcome of a read for which the pool got no memory: it says nothing of the block, which the tier may well have.
fn no_memory(error: &Error) -> Error {
    Error::new(ErrorKind::NoSpace, "the pool got no memory for a block that a tier was to read")
        .with("error", error)
}

fn lease(tier: TierIndex, slot: SlotId, key: BlockKey, ended: &Ended) -> LeaseItem {
    let ended = Arc::clone(ended);
    let done = move |outcome: Result<Option<u64>>| {
        if let Err(error) = &outcome {
            tracing::debug!("a block could not be leased in place: {error}");
        }
        let is_there = outcome.as_ref().ok().map(Option::is_some);
        let said = is_there.map(|is_there| Said { tier, key, is_there });
        ended(Event::LeaseEnded { tier, slot, outcome }, said);
    };
    LeaseItem { key, done: Box::new(done) }
}
