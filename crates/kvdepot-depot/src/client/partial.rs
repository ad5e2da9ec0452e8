//! Dumps of single shards: a block's slot stays reserved between tasks until all of its shards have arrived.
//!
//! A slot that is lost in between takes the shards with it that its caller was told have arrived. So the block's further shards
//! fail until it is begun anew: without the others they would fill a slot that is never whole, and whose key nobody else dumps.

use std::sync::Arc;
use std::time::Instant;

use hashbrown::{HashMap, HashSet};
use kvdepot_core::{BlockHash, ErrorKind, Result};
use parking_lot::Mutex;

use crate::client::generation::Generation;
use crate::client::lane_guard::LaneGuard;
use crate::client::slots::{CHUNK_BLOCKS, Placed, Reserved, commit, copy, lane_of, release, reserve};
use crate::client::work::Work;
use crate::message::Shards;
use kvdepot_core::runs::Runs;

/// Number of blocks beyond which those that were lost long ago are forgotten.
const LOST_MAX: usize = 1 << 16;

struct Open {
    lease: u64,
    runs: Runs,
    copied: Vec<bool>,
    /// When a shard was last submitted.
    at: Instant,
}

/// A block whose slot is gone.
struct Lost {
    /// The shards that it had.
    copied: Vec<bool>,
    at: Instant,
}

/// Blocks of a store of which some shards have arrived. They share one lane, and end with it.
#[derive(Default)]
pub(crate) struct Partial {
    lane: Option<(Arc<Generation>, LaneGuard)>,
    open: HashMap<BlockHash, Open>,
    lost: HashMap<BlockHash, Lost>,
}

/// Runs a dump task that does not contain complete blocks.
pub(crate) fn run(work: &Work, partial: &Mutex<Partial>) -> Result<()> {
    let mut partial = partial.lock();
    let outcome = partial.dump(work);
    if let Err(error) = &outcome {
        partial.lose_all();
        for item in 0..work.items.len() {
            work.fail(item, error.kind());
        }
    }
    partial.end_late(work);
    outcome
}

/// Gives up blocks whose shards come no more, unless a task of single shards is being carried out, which does the same.
pub(crate) fn end_late(work: &Work, partial: &Mutex<Partial>) {
    if let Some(mut partial) = partial.try_lock() {
        partial.end_late(work);
    }
}

impl Partial {
    fn dump(&mut self, work: &Work) -> Result<()> {
        let current = work.base.attachment.generation()?;
        if !self.lane.as_ref().is_some_and(|(generation, _)| Arc::ptr_eq(generation, &current)) {
            self.lose_all();
            self.lane = Some((Arc::clone(&current), lane_of(work, &current)?));
        }
        let lost = self.still_lost(work);
        let items: Vec<usize> = (0..work.items.len()).filter(|item| !lost.contains(item)).collect();
        let Some((generation, lane)) = &mut self.lane else { return Ok(()) };
        let is_new = |&item: &usize| !self.open.contains_key(&work.items[item].hash);
        let new: Vec<usize> = items.iter().copied().filter(is_new).collect();
        for chunk in new.chunks(CHUNK_BLOCKS) {
            let Reserved { placed, full } = reserve(work, generation, lane, chunk)?;
            full.iter().for_each(|&item| work.fail(item, ErrorKind::NoSpace));
            for placed in placed {
                let copied = vec![false; work.layout().shard_count()];
                let open = Open { lease: placed.lease, runs: placed.runs, copied, at: Instant::now() };
                self.open.insert(work.items[placed.item].hash, open);
            }
        }
        let placed: Vec<Placed> = items
            .into_iter()
            .filter_map(|item| {
                let open = self.open.get(&work.items[item].hash)?;
                Some(Placed { item, lease: open.lease, runs: open.runs.clone() })
            })
            .collect();
        copy(work, generation, lane, &placed, None)?;
        for placed in &placed {
            let hash = work.items[placed.item].hash;
            let shards = work.items[placed.item].shards(work.layout());
            let some = shards.iter().map(|&shard| shard as u32).collect();
            commit(work, lane, vec![placed.lease], Shards::Some(some))?;
            if let Some(open) = self.open.get_mut(&hash) {
                shards.iter().for_each(|&shard| open.copied[shard] = true);
                open.at = Instant::now();
                if open.copied.iter().all(|&copied| copied) {
                    self.open.remove(&hash);
                }
            }
        }
        lost.into_iter().for_each(|item| work.fail(item, ErrorKind::Unavailable));
        Ok(())
    }

    /// Returns the items of blocks whose earlier shards are lost. A block that comes with one of those is begun anew.
    fn still_lost(&mut self, work: &Work) -> HashSet<usize> {
        if self.lost.is_empty() {
            return HashSet::new();
        }
        let is_lost = |&item: &usize| {
            let hash = work.items[item].hash;
            let Some(lost) = self.lost.get(&hash) else { return false };
            let begins_anew = work.items[item].shards(work.layout()).iter().any(|&shard| lost.copied[shard]);
            if begins_anew {
                self.lost.remove(&hash);
            }
            !begins_anew
        };
        (0..work.items.len()).filter(is_lost).collect()
    }

    /// Ends the lane, and with it the slots of all blocks.
    fn lose_all(&mut self) {
        self.lane = None;
        for (hash, open) in self.open.drain() {
            lose(&mut self.lost, hash, open);
        }
    }

    /// Gives up blocks that have got no shard for as long as a task may take, because the request was aborted.
    fn end_late(&mut self, work: &Work) {
        let (now, patience) = (Instant::now(), work.state.time_limit());
        let is_late = |at: Instant| now.saturating_duration_since(at) > patience;
        if self.lost.len() > LOST_MAX {
            self.lost.retain(|_, lost| !is_late(lost.at));
        }
        let mut leases = Vec::new();
        for (hash, open) in self.open.extract_if(|_, open| is_late(open.at)) {
            leases.push(open.lease);
            lose(&mut self.lost, hash, open);
        }
        let Some((_, lane)) = &mut self.lane else { return };
        if leases.chunks(CHUNK_BLOCKS).try_for_each(|leases| release(work, lane, leases.to_vec())).is_err() {
            self.lose_all();
        }
    }
}

/// Notes that a block's slot is gone.
fn lose(lost: &mut HashMap<BlockHash, Lost>, hash: BlockHash, open: Open) {
    if open.copied.contains(&true) {
        lost.insert(hash, Lost { copied: open.copied, at: Instant::now() });
    }
}
