//! A dump that follows the engine layer by layer: slots are reserved with the first shard, and blocks are sealed with
//! the last. The engine's thread that submits shards waits for none of them.

use std::sync::Arc;

use kvdepot_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use crate::client::generation::Generation;
use crate::client::lane_guard::LaneGuard;
use crate::client::slots::{CHUNK_BLOCKS, Placed, Reserved, commit, copy, lane_of, reserve};
use crate::client::work::{Kept, Work};
use crate::message::Shards;

/// The dump, as its user and the jobs of its shards have it.
pub(crate) struct Layers {
    state: Mutex<LayerDumpState>,
    /// Why no further shard is to be copied. Nothing else is locked while it is, and the engine's thread waits for nothing.
    given_up: Mutex<Option<Error>>,
}

/// The state of the dump. It owns the lane: if the dump is dropped half-way, its slots are released (P4).
struct LayerDumpState {
    /// Owners of the dump's memory, for shards that have not been submitted.
    kept: Arc<Mutex<Vec<Kept>>>,
    begun: Option<(Arc<Generation>, LaneGuard)>,
    placed: Vec<Placed>,
    copied: Vec<bool>,
}

impl Layers {
    pub(crate) fn new(kept: Arc<Mutex<Vec<Kept>>>) -> Self {
        let state = LayerDumpState { kept, begun: None, placed: Vec::new(), copied: Vec::new() };
        Self { state: Mutex::new(state), given_up: Mutex::default() }
    }

    /// Copies one shard of every block; the last one seals them. Runs on a thread of the executor.
    pub(crate) fn run_shard(&self, work: Work, shard: usize) {
        let rest = Work { kept: Vec::new(), ..work.clone() };
        self.run(work, shard);
        // Whoever gave it up meanwhile has found the state locked.
        if let Some(error) = self.reason() {
            self.state.lock().end(rest, &error);
        }
    }

    /// Returns the reason, which stays: until somebody has ended the dump, whoever gets the state must not begin a copy. The
    /// reason's lock has ended on return: in a condition of `if let` it would last until the end of the body.
    fn reason(&self) -> Option<Error> {
        self.given_up.lock().clone()
    }

    fn run(&self, mut work: Work, shard: usize) {
        let mut state = self.state.lock();
        // The memory's owner is dropped under the lock: the last shard reports the task when it holds the lock.
        if work.state.done() {
            work.kept.clear();
            return;
        }
        if let Some(error) = self.reason() {
            return state.end(work, &error);
        }
        match state.try_shard(&work, shard) {
            Ok(false) => work.kept.clear(),
            Ok(true) => {
                state.kept.lock().clear();
                work.finish();
            }
            Err(error) => state.end(work, &error),
        }
    }

    /// Fails the dump: no further shard will be copied. If one is being copied, its thread fails the dump when it has ended.
    pub(crate) fn give_up(&self, work: Work, error: Error) {
        *self.given_up.lock() = Some(error);
        if let Some(mut state) = self.state.try_lock()
            && let Some(error) = self.reason()
        {
            state.end(work, &error);
        }
    }
}

impl LayerDumpState {
    fn end(&mut self, mut work: Work, error: &Error) {
        if work.state.done() {
            return;
        }
        self.begun = None;
        self.placed.clear();
        self.kept.lock().clear();
        work.kept.clear();
        work.fail_all(error);
    }

    /// Copies a shard. Returns whether it was the last one.
    fn try_shard(&mut self, work: &Work, shard: usize) -> Result<bool> {
        if self.begun.is_none() {
            self.copied = vec![false; work.layout().shard_count()];
            let generation = work.base.attachment.generation()?;
            let mut lane = lane_of(work, &generation)?;
            let items: Vec<usize> = (0..work.items.len()).collect();
            for chunk in items.chunks(CHUNK_BLOCKS) {
                let Reserved { placed, full } = reserve(work, &generation, &mut lane, chunk)?;
                self.placed.extend(placed);
                full.iter().for_each(|&item| work.fail(item, ErrorKind::NoSpace));
            }
            self.begun = Some((generation, lane));
        }
        let Some((generation, lane)) = &mut self.begun else { return Ok(false) };
        if std::mem::replace(&mut self.copied[shard], true) {
            return Ok(false);
        }
        copy(work, generation, lane, &self.placed, Some(shard))?;
        if !self.copied.iter().all(|&copied| copied) {
            return Ok(false);
        }
        for chunk in self.placed.chunks(CHUNK_BLOCKS) {
            commit(work, lane, chunk.iter().map(|placed| placed.lease).collect(), Shards::All)?;
        }
        if let Some((_, lane)) = self.begun.take() {
            lane.finish();
        }
        Ok(true)
    }
}
