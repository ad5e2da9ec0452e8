//! Blocks in Mooncake Store, a distributed store that users already run.
//!
//! Mooncake's client is a library of another language, whose calls may hang, so it lives in a process of its own
//! (`process`, `mooncake_helper.py`). Blocks pass through staging memory that both processes map (`staging`): nothing that hangs
//! there holds a slot of the pool, and nothing that is late can change one. What Mooncake lacks is added here:
//! checksums, namespaces and epochs (`names`, `epochs`), deadlines (`link`), removal that waits for leases (`removal`).

mod config;
mod epochs;
mod link;
mod moves;
mod names;
mod process;
mod protocol;
mod removal;
mod settings;
mod shared;
mod staging;
mod waiting;

use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvdepot_core::limits::{
    MOONCAKE_BATCH_BLOCKS_MAX, MOONCAKE_END_MS, MOONCAKE_QUEUE_MAX, NAMESPACES_MAX, NAMESPACES_OPENING_MAX,
};
use kvdepot_core::{BlockKey, Error, NamespaceId, NamespaceSpec, Result};

pub use config::MooncakeConfig;
pub use process::{HelperProcess, HelperStarter, MooncakeHelper};
pub use protocol::{MooncakeAnswer, MooncakeOp, MooncakeRequest};

use crate::entry::TierEntry;
use crate::{
    BlockingCalls, BlockingConfig, Done, Fetched, Presence, ReadItem, Tier, TierEvents, TierServer,
    TierUsage, WriteItem, Written,
};
use link::Call;
use moves::Moves;
use shared::{Place, Shared, in_time, refused};

/// Threads that remove blocks.
const REMOVERS: usize = 2;

/// The registry's entry of this tier.
pub const ENTRY: TierEntry = TierEntry {
    name: "Mooncake",
    open: |config| Ok(Arc::new(MooncakeTier::open(MooncakeConfig::from_json(config)?)?)),
    guards_itself: false,
    settings: &settings::SETTINGS,
    for_users: true,
};

/// Blocks in Mooncake.
pub struct MooncakeTier {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Runs probes, too.
    reads: Moves<Fetched>,
    writes: Moves<Written>,
    removals: BlockingCalls,
    /// Runs openings and moves of namespaces.
    openings: BlockingCalls,
}

impl MooncakeTier {
    /// Starts the helper in the background; Mooncake need not be reachable yet.
    pub fn open(config: MooncakeConfig) -> Result<Self> {
        let starter = process::starter(&config);
        Self::open_with(config, starter)
    }

    /// Like [`MooncakeTier::open`], with another way to start a helper.
    pub fn open_with(config: MooncakeConfig, starter: HelperStarter) -> Result<Self> {
        let calls = |name: &str, threads_max: usize, queue_max: usize| {
            BlockingCalls::new(BlockingConfig { name: name.to_owned(), threads_max, queue_max })
        };
        let concurrent = config.calls;
        let shared = Arc::new(Shared::new(config)?);
        let mut tier = Self {
            threads: Vec::new(),
            reads: Moves::new(calls("kvd-moon-read", concurrent, MOONCAKE_QUEUE_MAX)),
            writes: Moves::new(calls("kvd-moon-write", concurrent, MOONCAKE_QUEUE_MAX)),
            removals: calls("kvd-moon-rm", REMOVERS, MOONCAKE_QUEUE_MAX),
            openings: calls("kvd-moon-ns", NAMESPACES_OPENING_MAX, NAMESPACES_MAX),
            shared,
        };
        let supervised = Arc::clone(&tier.shared);
        tier.spawn("kvdepot-moon", move || {
            process::supervise(&supervised.link, &supervised.staging.memory, &starter);
        })?;
        let late = Arc::clone(&tier.shared);
        tier.spawn("kvdepot-moon-e", move || late.catch_up())?;
        Ok(tier)
    }

    fn spawn(&mut self, name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(work);
        self.threads.push(thread.map_err(|e| Error::io("cannot start a thread", e))?);
        Ok(())
    }
}

impl Shared {
    /// Returns how many leading keys Mooncake has: first it is asked about one, then about batches.
    fn probe_now(&self, keys: &[BlockKey], deadline: Instant) -> Result<usize> {
        let (mut at, mut batch) = (0, 1);
        while at < keys.len() {
            let now = Instant::now();
            let (known, leaving) = {
                let writing = self.beliefs.writing.lock();
                (self.beliefs.known.lock().presence(&keys[at], now), writing.is_leaving(&keys[at]))
            };
            match known {
                Presence::Absent => return Ok(at),
                _ if leaving => return Ok(at),
                Presence::Present => at += 1,
                Presence::Unknown => {
                    let some = &keys[at..keys.len().min(at + batch)];
                    if !self.ask(some, deadline)? {
                        return Ok(at + self.leading(some));
                    }
                    at += some.len();
                    batch = MOONCAKE_BATCH_BLOCKS_MAX;
                }
            }
        }
        Ok(at)
    }

    /// Returns how many leading keys are known to be present.
    fn leading(&self, keys: &[BlockKey]) -> usize {
        let (known, now) = (self.beliefs.known.lock(), Instant::now());
        keys.iter().take_while(|key| known.presence(key, now) == Presence::Present).count()
    }

    /// Asks Mooncake about blocks and records the answers. Returns whether it has all of them.
    fn ask(&self, keys: &[BlockKey], deadline: Instant) -> Result<bool> {
        let removals = self.beliefs.removals();
        let mut places = Vec::with_capacity(keys.len());
        for key in keys {
            let place = self.named.lock().place(key);
            let Ok(place) = place else { break };
            places.push((*key, place));
        }
        let name = |key: &BlockKey, place: &Place| names::block(&self.config.prefix, key, place.token);
        let names: Vec<String> = places.iter().map(|(key, place)| name(key, place)).collect();
        if names.is_empty() {
            return Ok(false);
        }
        let call = Call { op: MooncakeOp::Exists, keys: names, at: Vec::new(), bytes: Vec::new() };
        let deadline = self.patience(deadline);
        let answered = self.link.call(call, None, deadline, None).map_err(|failed| failed.error)?;
        let mut has_all = places.len() == keys.len();
        for ((key, place), code) in places.into_iter().zip(answered.codes) {
            match code {
                1 => self.note_present(key, place.block_bytes(), removals),
                0 => self.beliefs.note_absent(key),
                other => return Err(refused(other, &name(&key, &place))),
            }
            has_all &= code == 1;
        }
        Ok(has_all)
    }
}

impl Tier for MooncakeTier {
    fn name(&self) -> &str {
        "mooncake"
    }

    fn open_namespace(&self, spec: &Arc<NamespaceSpec>, at_least: u32, deadline: Instant, done: Done<u32>) {
        let (shared, spec) = (Arc::clone(&self.shared), Arc::clone(spec));
        let answer = self.shared.owed.answer(done);
        let work = move || shared.open(&spec, at_least, deadline);
        self.openings.run(deadline, work, Box::new(move |outcome| answer.end(outcome)));
    }

    fn advance_epoch(&self, spec: &Arc<NamespaceSpec>, at_least: u32, deadline: Instant, done: Done<u32>) {
        // Before any request: from here on no old block is served, whatever Mooncake does.
        self.shared.leave(spec, at_least, true);
        let (shared, root) = (Arc::clone(&self.shared), spec.root());
        let answer = self.shared.owed.answer(done);
        let done = move |outcome: Result<u32>| {
            if let Err(error) = &outcome {
                tracing::error!(
                    %error, namespace = %root,
                    "a reset is not stored: the Mooncake tier gives misses for the namespace until it is. Retries are \
                     automatic; a depot that ends before that may serve blocks from before the reset after its restart"
                );
            }
            answer.end(outcome);
        };
        self.openings.run(deadline, move || shared.settle(root, deadline), Box::new(done));
    }

    fn close_namespace(&self, root: NamespaceId) {
        let closed = self.shared.named.lock().close(root);
        if let Some(id) = closed {
            self.shared.beliefs.forget_namespace(id);
        }
    }

    fn is_down(&self, _key: &BlockKey) -> bool {
        !self.shared.link.is_up()
    }

    fn peek(&self, keys: &[BlockKey], out: &mut Vec<Presence>) {
        out.clear();
        if !self.shared.link.is_up() {
            return out.resize(keys.len(), Presence::Absent);
        }
        let now = Instant::now();
        let named = self.shared.named.lock();
        let writing = self.shared.beliefs.writing.lock();
        let known = self.shared.beliefs.known.lock();
        out.extend(keys.iter().map(|key| {
            if writing.is_leaving(key) || named.spaces.of(key).is_err() {
                return Presence::Absent;
            }
            known.presence(key, now)
        }));
    }

    fn probe(&self, keys: Vec<BlockKey>, deadline: Instant, done: Done<usize>) {
        if let Err(error) = in_time(deadline) {
            return done(Err(error));
        }
        let (shared, answer) = (Arc::clone(&self.shared), self.shared.owed.answer(done));
        let work = move || shared.probe_now(&keys, deadline);
        self.reads.calls.run(deadline, work, Box::new(move |outcome| answer.end(outcome)));
    }

    fn read(&self, reads: Vec<ReadItem>, deadline: Instant) {
        self.shared.read(&self.reads, reads, deadline);
    }

    fn write(&self, writes: Vec<WriteItem>, deadline: Instant) {
        self.shared.write(&self.writes, writes, deadline);
    }

    fn remove(&self, keys: Vec<BlockKey>, done: Done<()>) {
        self.shared.remove(&self.removals, keys, done);
    }

    /// Mooncake tracks recency by the reads that reach it.
    fn touch(&self, _keys: &[BlockKey]) {}

    fn attach(&self, events: Weak<dyn TierEvents>) {
        *self.shared.listener.lock() = Some(events);
    }

    /// The blocks that this depot knows; Mooncake may hold more or fewer.
    fn usage(&self) -> TierUsage {
        self.shared.beliefs.known.lock().usage()
    }

    fn servers(&self) -> Vec<TierServer> {
        let (address, up, failures, last_error) = self.shared.link.describe();
        vec![TierServer { address, up, connections: usize::from(up), failures, last_error }]
    }

    fn figures(&self) -> Vec<(&'static str, u64)> {
        let figures = &self.shared.figures;
        let (_, _, restarts, _) = self.shared.link.describe();
        vec![
            ("corrupt_blocks", figures.corrupt.load(Ordering::Relaxed)),
            ("lost_blocks", figures.lost.load(Ordering::Relaxed)),
            ("lease_refusals", figures.refused_by_lease.load(Ordering::Relaxed)),
            ("helper_ends", restarts),
        ]
    }

    fn keys_from(&self, namespace: NamespaceId, from: u64) -> (Vec<BlockKey>, Option<u64>) {
        self.shared.beliefs.known.lock().present_from(namespace, from)
    }

    fn drain(&self, deadline: Instant) -> bool {
        self.shared.owed.drain(deadline)
    }
}

impl Drop for MooncakeTier {
    fn drop(&mut self) {
        self.shared.link.stop();
        // The kernel may take any time to end a process: the thread that waits for one keeps the memory it maps.
        let until = Instant::now() + Duration::from_millis(MOONCAKE_END_MS);
        for thread in self.threads.drain(..) {
            while !thread.is_finished() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(5));
            }
            if thread.is_finished() {
                let _ = thread.join();
            } else {
                tracing::warn!(timeout_ms = MOONCAKE_END_MS, "a process of the Mooncake tier does not end");
            }
        }
    }
}

impl fmt::Debug for MooncakeTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MooncakeTier").field("shared", &self.shared).finish_non_exhaustive()
    }
}
