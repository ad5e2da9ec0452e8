//! The thread that learns and records what lies in the directories: discovery, checkpoints, scans, recency.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::limits::{CHECKPOINT_INTERVAL_S, SWEEP_INTERVAL_S};
use kvdepot_core::{BlockKey, NamespaceId, Result};

use super::chores::ScanJob;
use super::index::time_of;
use super::shared::Shared;
use super::state::{PIECE, State};
use super::threads::start_thread;

/// One piece of work for the maintenance thread.
enum Chore {
    Discover,
    Replay,
    Scan(ScanJob),
    CountUnnamed(usize, NamespaceId),
    Touch(Vec<BlockKey>),
    Checkpoint,
}

/// Starts the background threads; they end when `Chores::stop_at` is set.
pub(super) fn start(shared: &Arc<Shared>) -> Result<()> {
    let started = start_thread(shared, "kvd-posix-maint", |shared| run(shared))
        .and_then(|()| start_thread(shared, "kvd-posix-unlink", |shared| super::unlinker::run(shared)));
    started.inspect_err(|_| shared.stop_threads())
}

fn run(shared: &Shared) {
    let now = Instant::now();
    let mut timers = Timers { sweep: now + SWEEP, checkpoint: now + CHECKPOINT };
    while let Some(chore) = shared.next_chore(&mut timers) {
        shared.do_chore(chore);
        shared.deliver_events();
        let mut state = shared.lock();
        state.check_counted();
        state.chores.busy = false;
        drop(state);
        shared.changed.notify_all();
        // Space may be needed for what was found.
        shared.unlinks.notify_one();
    }
    shared.save_at_end();
}

const SWEEP: Duration = Duration::from_secs(SWEEP_INTERVAL_S);
const CHECKPOINT: Duration = Duration::from_secs(CHECKPOINT_INTERVAL_S);

/// When the periodic work is due.
struct Timers {
    sweep: Instant,
    checkpoint: Instant,
}

impl Shared {
    /// Requests a new scan of everything.
    pub(super) fn ask_for_sweep(&self) {
        let mut state = self.lock();
        state.retry_leaving();
        state.chores.discover = true;
        state.chores.floor = true;
        drop(state);
        self.wake_all();
    }

    /// Waits until nothing is left to do or the deadline passes.
    pub(super) fn wait_idle(&self, deadline: Instant) -> bool {
        let mut state = self.lock();
        let idle = |state: &State| {
            state.chores.is_idle()
                && state.has_unlinked()
                && (state.chores.trim_failed || !self.is_over_cap(state))
        };
        while !idle(&state) {
            if state.chores.threads == 0 || state.wait_until(&self.changed, deadline) {
                return idle(&state);
            }
        }
        true
    }

    fn next_chore(&self, timers: &mut Timers) -> Option<Chore> {
        let mut state = self.lock();
        loop {
            if let Some(until) = state.chores.stop_at {
                // The recorded total shall be that of what stays. Half of the time is kept for a checkpoint.
                let until = until.checked_sub(self.config.close_wait / 2).unwrap_or(until);
                while !state.has_unlinked() && !state.wait_until(&self.changed, until) {}
                return None;
            }
            let chore = state.take_chore();
            let now = Instant::now();
            if chore.is_none() && now >= timers.checkpoint {
                timers.checkpoint = now + CHECKPOINT;
                state.chores.busy = true;
                return Some(Chore::Checkpoint);
            }
            if chore.is_some() {
                state.chores.busy = true;
                return chore;
            }
            if now >= timers.sweep {
                timers.sweep = now + SWEEP;
                drop(state);
                self.ask_for_sweep();
                state = self.lock();
                continue;
            }
            state.wait_until(&self.work, timers.sweep.min(timers.checkpoint));
        }
    }

    fn do_chore(&self, chore: Chore) {
        match chore {
            Chore::Discover => self.discover(),
            Chore::Replay => self.replay(),
            Chore::Scan(job) => {
                if let Some(rest) = self.scan_step(job) {
                    // Behind an urgent job that came in the meantime, before all others.
                    let mut state = self.lock();
                    let at = usize::from(!state.chores.scans.is_empty());
                    state.chores.scans.insert(at, rest);
                }
            }
            Chore::CountUnnamed(directory, root) => {
                if let Err(error) = self.count_unnamed(directory, root) {
                    tracing::warn!(%error, "a namespace directory cannot be counted; the next sweep tries again");
                    self.lock().discovered = false;
                }
                self.lock().chores.looks -= 1;
            }
            Chore::Touch(keys) => keys.iter().for_each(|key| self.persist_touch(key)),
            Chore::Checkpoint => self.save_if_changed(),
        }
    }

    /// Recency is stored as the file's modification time, where other nodes and the next start find it.
    fn persist_touch(&self, key: &BlockKey) {
        let (space, entry) = {
            let state = self.lock();
            let space = state.spaces.get(&key.namespace).map(Arc::clone);
            let (Some(space), Some(entry)) = (space, state.index.get(key)) else { return };
            (space, entry)
        };
        let path = space.block_path(key.hash);
        if let Err(error) = self.device(entry.directory).set_modified(&path, time_of(entry.used_s)) {
            tracing::trace!(%error, "recency was not written");
        }
    }
}

impl State {
    /// The most urgent piece of work: first what exists, then its details, then recency.
    fn take_chore(&mut self) -> Option<Chore> {
        let chores = &mut self.chores;
        if std::mem::take(&mut chores.discover) {
            return Some(Chore::Discover);
        }
        if chores.replay {
            return Some(Chore::Replay);
        }
        if let Some(job) = chores.scans.pop_front() {
            return Some(Chore::Scan(job));
        }
        if let Some((directory, root)) = chores.unnamed.pop_front() {
            chores.looks += 1;
            return Some(Chore::CountUnnamed(directory, root));
        }
        let touches = chores.touches.len().min(PIECE);
        (touches > 0).then(|| Chore::Touch(chores.touches.drain(..touches).collect()))
    }
}
