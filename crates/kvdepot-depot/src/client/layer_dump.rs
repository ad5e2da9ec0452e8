//! A dump that follows the engine layer by layer: slots are reserved with the first shard, and blocks are sealed with
//! the last.

use std::sync::Arc;

use kvdepot_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use crate::client::generation::Generation;
use crate::client::lane_guard::LaneGuard;
use crate::client::slots::{CHUNK_BLOCKS, Placed, Reserved, commit, copy, lane_of, reserve};
use crate::client::work::{Kept, Work};
use crate::message::Shards;

/// The state of the dump. It owns the lane: if the dump is dropped half-way, its slots are released (P4).
pub(crate) struct LayerDumpState {
    /// Owners of the dump's memory, for shards that have not been submitted.
    kept: Arc<Mutex<Vec<Kept>>>,
    begun: Option<(Arc<Generation>, LaneGuard)>,
    placed: Vec<Placed>,
    copied: Vec<bool>,
}

impl LayerDumpState {
    pub(crate) fn new(kept: Arc<Mutex<Vec<Kept>>>) -> Self {
        Self { kept, begun: None, placed: Vec::new(), copied: Vec::new() }
    }

    /// Copies one shard of every block; the last one seals them. Runs on a thread of the executor.
    pub(crate) fn run_shard(this: &Arc<Mutex<Self>>, mut work: Work, shard: usize) {
        let mut state = this.lock();
        // The memory's owner is dropped under the lock: the last shard reports the task when it holds the lock.
        if work.state.done() {
            work.kept.clear();
            return;
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

    /// Fails the dump: no further shard will be copied.
    pub(crate) fn give_up(this: &Arc<Mutex<Self>>, work: Work, error: &Error) {
        this.lock().end(work, error);
    }

    fn end(&mut self, mut work: Work, error: &Error) {
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
