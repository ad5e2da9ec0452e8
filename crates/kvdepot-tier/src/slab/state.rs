//! State shared by the tier's calls, its I/O threads and its own three threads.
//!
//! Invariants under the one lock, which is never held across I/O:
//! - a block is in `index` only once its record is written, and synced if the tier is durable (P1);
//! - the medium learns of removals before it gets what is pending: a removal takes the token away from any pending
//!   write of the block, so a write that counts came after it;
//! - a failed write may have reached the medium all the same, so it leaves a removal;
//! - a write in flight counts for its key only while `writing` names its token, and a removal of the block takes the
//!   token away.

use std::collections::VecDeque;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};
use std::time::Instant;

use hashbrown::{HashMap, HashSet};
use kvdepot_core::limits::TIER_EVENTS_MAX;
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId, Result};
use kvdepot_io::{IoBuf, Volume};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::commit::Commit;
use super::config::SlabConfig;
use super::index::{Index, Place};
use super::medium::Medium;
use super::spaces::Spaces;
use super::stats::SlabStats;
use super::syncs::Mark;
use crate::compression::Transform;
use crate::{Done, TierEvents, Written};

/// Blocks handled while the lock is held once.
pub(super) const PIECE: usize = 128;
/// Slots of the index examined while the lock is held once.
pub(super) const PIECE_SLOTS: u32 = 4096;

/// A block that waits until a deadline to be written.
#[derive(Debug)]
pub(super) struct Record {
    pub(super) key: BlockKey,
    pub(super) token: u64,
    pub(super) buf: IoBuf,
    pub(super) deadline: Instant,
}

/// A write in flight and the callers waiting for its end.
pub(super) struct Inflight {
    pub(super) key: BlockKey,
    pub(super) bytes: u64,
    pub(super) waiters: Vec<Done<Written>>,
}

/// A written group: its records and removals, and which group of which segment life it is.
#[derive(Debug)]
pub(super) struct Appended {
    pub(super) sequence: u64,
    pub(super) ordinal: u32,
    /// A moment before it was written.
    pub(super) mark: Mark,
    pub(super) records: Vec<(BlockKey, u64, Place)>,
    pub(super) removals: Vec<BlockKey>,
}

/// Callers to notify of how a write ended, once the lock is released.
pub(super) type Answers = Vec<(Done<Written>, Result<Written>)>;

#[derive(Debug, Default)]
pub(super) struct Events {
    attached: bool,
    evicted: Vec<BlockKey>,
    lost: Vec<BlockKey>,
}

pub(super) struct State {
    pub(super) index: Index,
    pub(super) spaces: Spaces,
    pub(super) pending: VecDeque<Record>,
    pub(super) pending_bytes: u64,
    /// Blocks that must be removed on the medium. Written before what is pending.
    pub(super) removals: HashSet<BlockKey>,
    /// Whether the last write failed.
    pub(super) failing: bool,
    /// The write in flight of each key.
    pub(super) writing: HashMap<BlockKey, u64>,
    pub(super) inflight: HashMap<u64, Inflight>,
    pub(super) inflight_bytes: u64,
    tokens: u64,
    pub(super) commit: Commit<Appended>,
    /// The last synced group: its sequence, and the number of the next one.
    pub(super) synced: (u64, u32),
    /// Why something in the open segment could not be synced: no more is written to it, and nothing after it counts.
    pub(super) doubt: Option<Error>,
    /// Whether the append thread is working.
    pub(super) appending: bool,
    /// Past epochs whose blocks are being forgotten.
    pub(super) over: VecDeque<NamespaceId>,
    pub(super) events: Events,
    pub(super) stopping: bool,
    /// Threads that are still running.
    pub(super) threads: usize,
}

/// A tier without its I/O engine.
pub(super) struct Shared {
    pub(super) config: SlabConfig,
    pub(super) medium: Medium,
    /// Host name as block headers carry it.
    pub(super) host: String,
    /// Number of the newest table of namespaces; held while one is written.
    pub(super) table: Mutex<u64>,
    state: Mutex<State>,
    /// Wakes the append thread.
    pub(super) append: Condvar,
    /// Wakes the sync thread.
    pub(super) sync: Condvar,
    /// Wakes the keeper.
    pub(super) keep: Condvar,
    /// Wakes callers that wait for space, idleness or the end of threads.
    pub(super) changed: Condvar,
    listener: Mutex<Option<Weak<dyn TierEvents>>>,
    pub(super) counters: Counters,
    /// Encodes and decodes blocks.
    pub(super) transform: Transform,
}

/// See [`SlabStats`].
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) accepted: AtomicU64,
    pub(super) written: AtomicU64,
    pub(super) rewritten: AtomicU64,
    pub(super) groups: AtomicU64,
    pub(super) syncs: AtomicU64,
    pub(super) recycled: AtomicU64,
    pub(super) evicted: AtomicU64,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared")
            .field("config", &self.config)
            .field("shape", &self.medium.shape)
            .finish_non_exhaustive()
    }
}

impl Shared {
    pub(super) fn new(
        config: SlabConfig,
        medium: Medium,
        index: Index,
        spaces: Spaces,
        table: u64,
        host: String,
    ) -> Self {
        let state = State {
            index,
            spaces,
            pending: VecDeque::new(),
            pending_bytes: 0,
            removals: HashSet::new(),
            failing: false,
            writing: HashMap::new(),
            inflight: HashMap::new(),
            inflight_bytes: 0,
            tokens: 0,
            commit: Commit::default(),
            synced: (0, 0),
            doubt: None,
            appending: false,
            over: VecDeque::new(),
            events: Events::default(),
            stopping: false,
            threads: 0,
        };
        Self {
            transform: Transform::new(config.compression),
            config,
            medium,
            host,
            table: Mutex::new(table),
            state: Mutex::new(state),
            append: Condvar::new(),
            sync: Condvar::new(),
            keep: Condvar::new(),
            changed: Condvar::new(),
            listener: Mutex::new(None),
            counters: Counters::default(),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    pub(super) fn volume(&self) -> &dyn Volume {
        &*self.medium.volume
    }

    pub(super) fn stats(&self) -> SlabStats {
        // Relaxed: figures that order nothing.
        let read = |counter: &AtomicU64| counter.load(std::sync::atomic::Ordering::Relaxed);
        SlabStats {
            accepted_bytes: read(&self.counters.accepted),
            written_bytes: read(&self.counters.written),
            rewritten_bytes: read(&self.counters.rewritten),
            groups: read(&self.counters.groups),
            syncs: read(&self.counters.syncs),
            segments_recycled: read(&self.counters.recycled),
            blocks_evicted: read(&self.counters.evicted),
        }
    }

    /// The error for a key whose namespace is not open here, or not in this epoch.
    pub(super) fn no_namespace(key: &BlockKey) -> Error {
        Error::new(ErrorKind::NotFound, "a block's namespace is not open, or its epoch has passed")
            .with("key", key)
    }

    pub(super) fn attach(&self, listener: Weak<dyn TierEvents>) {
        *self.listener.lock() = Some(listener);
        self.lock().events.attached = true;
    }

    /// Returns who hears of evictions. The clone releases its lock before any call.
    pub(super) fn listener(&self) -> Option<Arc<dyn TierEvents>> {
        self.listener.lock().as_ref().and_then(Weak::upgrade)
    }

    /// Reports collected events to the depot above. The caller must not hold a lock of the tier.
    pub(super) fn deliver_events(&self) {
        let (evicted, lost) = {
            let mut state = self.lock();
            let Events { evicted, lost, .. } = &mut state.events;
            (std::mem::take(evicted), std::mem::take(lost))
        };
        let Some(listener) = self.listener() else { return };
        if !evicted.is_empty() {
            listener.evicted(&evicted);
        }
        if !lost.is_empty() {
            listener.lost(&lost);
        }
    }

    /// Ends writes whose outcome is known. The caller must not hold a lock of the tier.
    pub(super) fn answer(&self, answers: Answers) {
        for (done, outcome) in answers {
            done(outcome);
        }
        self.changed.notify_all();
    }

    /// Waits until nothing is in flight or the deadline passes.
    pub(super) fn wait_idle(&self, deadline: Instant) -> bool {
        let mut state = self.lock();
        while !state.is_idle() {
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                return state.is_idle();
            }
        }
        true
    }

    /// Tells the threads to finish queued work and end, and waits for that until the deadline.
    pub(super) fn stop(&self, deadline: Instant) {
        let mut state = self.lock();
        state.stopping = true;
        for condvar in [&self.append, &self.sync, &self.keep, &self.changed] {
            condvar.notify_all();
        }
        while state.threads > 0 && !self.changed.wait_until(&mut state, deadline).timed_out() {}
    }

    /// Starts a thread that ends when `stop` is called.
    pub(super) fn spawn(
        self: &Arc<Self>,
        name: &str,
        run: impl FnOnce(&Arc<Self>) + Send + 'static,
    ) -> Result<()> {
        let mine = Arc::clone(self);
        self.lock().threads += 1;
        let work = move || {
            run(&mine);
            mine.lock().threads -= 1;
            for condvar in [&mine.append, &mine.sync, &mine.keep, &mine.changed] {
                condvar.notify_all();
            }
        };
        std::thread::Builder::new().name(name.to_owned()).spawn(work).map(drop).map_err(|e| {
            let mut state = self.lock();
            state.threads -= 1;
            state.stopping = true;
            drop(state);
            self.append.notify_all();
            self.sync.notify_all();
            self.keep.notify_all();
            Error::io("cannot start a tier's background thread", e)
        })
    }
}

impl State {
    fn is_idle(&self) -> bool {
        let queued = !self.pending.is_empty()
            || !self.removals.is_empty()
            || !self.inflight.is_empty()
            || !self.over.is_empty();
        !queued && !self.appending && self.commit.len() == 0
    }

    /// Notes a write in flight and its first waiter.
    pub(super) fn begin(&mut self, key: BlockKey, bytes: u64, done: Done<Written>) -> u64 {
        self.tokens += 1;
        self.writing.insert(key, self.tokens);
        self.inflight_bytes += bytes;
        self.inflight.insert(self.tokens, Inflight { key, bytes, waiters: vec![done] });
        self.tokens
    }

    /// Counts a write with the length of its record, once that is known: an encoded one is shorter than a plain one.
    pub(super) fn correct(&mut self, token: u64, bytes: u64) {
        if let Some(inflight) = self.inflight.get_mut(&token) {
            let before = std::mem::replace(&mut inflight.bytes, bytes);
            self.inflight_bytes = self.inflight_bytes - before + bytes;
        }
    }

    /// Returns whether a write still counts for its key.
    pub(super) fn counts(&self, key: &BlockKey, token: u64) -> bool {
        self.writing.get(key) == Some(&token)
    }

    /// Ends a write.
    pub(super) fn end(&mut self, token: u64, outcome: &Result<Written>, answers: &mut Answers) {
        let Some(Inflight { key, bytes, waiters }) = self.inflight.remove(&token) else { return };
        self.inflight_bytes -= bytes;
        if self.counts(&key, token) {
            self.writing.remove(&key);
        }
        let outcome = outcome.clone().map_err(|error| error.with("key", key));
        let rest = outcome.clone().map(|_| Written::AlreadyThere);
        let outcomes = std::iter::once(outcome).chain(std::iter::repeat(rest));
        answers.extend(waiters.into_iter().zip(outcomes));
    }

    /// Ends a group: its blocks exist from now on, or not at all.
    pub(super) fn end_group(&mut self, group: Appended, outcome: &Result<()>, answers: &mut Answers) {
        for (key, token, place) in group.records {
            let ended = match outcome {
                Err(error) => Err(error.clone()),
                Ok(()) if self.spaces.get(&key).is_none() => Err(Shared::no_namespace(&key)),
                Ok(()) => {
                    if self.counts(&key, token) {
                        self.index.insert(key, place, false);
                    }
                    Ok(Written::New)
                }
            };
            if ended.is_err() && self.counts(&key, token) {
                self.removals.insert(key);
            }
            self.end(token, &ended, answers);
        }
        if outcome.is_ok() {
            self.synced = self.synced.max((group.sequence, group.ordinal + 1));
        } else {
            self.removals.extend(group.removals);
        }
    }

    /// Makes a block unreachable; on the medium too once the removal is written.
    pub(super) fn forget(&mut self, key: &BlockKey) {
        let known = self.index.remove(key).is_some() | self.writing.remove(key).is_some();
        if known {
            self.removals.insert(*key);
        }
    }

    pub(super) fn note_evicted(&mut self, key: BlockKey) {
        if self.events.attached && self.events.evicted.len() < TIER_EVENTS_MAX {
            self.events.evicted.push(key);
        }
    }

    pub(super) fn note_lost(&mut self, key: BlockKey) {
        if self.events.attached && self.events.lost.len() < TIER_EVENTS_MAX {
            self.events.lost.push(key);
        }
    }

    /// Takes the past epochs from the namespaces; returns whether there are any.
    pub(super) fn note_over(&mut self) -> bool {
        let over = self.spaces.take_over();
        self.over.extend(over);
        !self.over.is_empty()
    }
}
