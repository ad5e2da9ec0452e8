//! Dumps of single shards: a block's slot stays reserved between tasks until all of its shards have arrived.

use std::sync::Arc;

use hashbrown::HashMap;
use kvdepot_core::{BlockHash, ErrorKind, Result};
use parking_lot::Mutex;

use crate::client::generation::Generation;
use crate::client::lane_guard::LaneGuard;
use crate::client::slots::{CHUNK_BLOCKS, Placed, Reserved, commit, copy, lane_of, reserve};
use crate::client::work::Work;
use crate::message::Shards;
use kvdepot_core::runs::Runs;

struct Open {
    lease: u64,
    runs: Runs,
    copied: Vec<bool>,
}

/// Blocks of a store of which some shards have arrived. They share one lane, and end with it.
#[derive(Default)]
pub(crate) struct Partial {
    lane: Option<(Arc<Generation>, LaneGuard)>,
    open: HashMap<BlockHash, Open>,
}

/// Runs a dump task that does not contain complete blocks.
pub(crate) fn run(work: &Work, partial: &Mutex<Partial>) -> Result<()> {
    let mut partial = partial.lock();
    let outcome = partial.dump(work);
    if let Err(error) = &outcome {
        partial.lane = None;
        partial.open.clear();
        for item in 0..work.items.len() {
            work.fail(item, error.kind());
        }
    }
    outcome
}

impl Partial {
    fn dump(&mut self, work: &Work) -> Result<()> {
        let current = work.base.attachment.generation()?;
        if !self.lane.as_ref().is_some_and(|(generation, _)| Arc::ptr_eq(generation, &current)) {
            self.open.clear();
            self.lane = Some((Arc::clone(&current), lane_of(work, &current)?));
        }
        let Some((generation, lane)) = &mut self.lane else { return Ok(()) };
        let new: Vec<usize> =
            (0..work.items.len()).filter(|&i| !self.open.contains_key(&work.items[i].hash)).collect();
        for chunk in new.chunks(CHUNK_BLOCKS) {
            let Reserved { placed, full } = reserve(work, generation, lane, chunk)?;
            full.iter().for_each(|&item| work.fail(item, ErrorKind::NoSpace));
            for placed in placed {
                let copied = vec![false; work.layout().shard_count()];
                let open = Open { lease: placed.lease, runs: placed.runs, copied };
                self.open.insert(work.items[placed.item].hash, open);
            }
        }
        let placed: Vec<Placed> = (0..work.items.len())
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
                if open.copied.iter().all(|&copied| copied) {
                    self.open.remove(&hash);
                }
            }
        }
        Ok(())
    }
}
