//! Carries out a dump: reserves slots, copies into them and commits, one chunk of blocks at a time.

use kvdepot_core::{ErrorKind, Result};
use parking_lot::Mutex;

use crate::client::partial::{self, Partial};
use crate::client::slots::{Reserved, chunk_blocks, commit, copy, lane_of, reserve};
use crate::client::work::Work;
use crate::message::Shards;

/// Size of a chunk: large enough to hide the calls, small enough that the first blocks are soon visible.
const CHUNK_BYTES: u64 = 32 << 20;

/// Runs a dump task to completion.
pub(crate) fn run(work: Work, partial: &Mutex<Partial>) {
    let whole = work.items.iter().all(|item| item.is_whole(work.layout()));
    let outcome = if whole {
        partial::end_late(&work, partial);
        run_whole(&work)
    } else {
        partial::run(&work, partial)
    };
    if let Err(error) = outcome {
        work.base.attachment.stats.failed("dump", &error);
    }
    work.finish();
}

fn run_whole(work: &Work) -> Result<()> {
    let mut rest: Vec<usize> = (0..work.items.len()).collect();
    let outcome = dump_chunks(work, &mut rest);
    if let Err(error) = &outcome {
        rest.iter().for_each(|&item| work.fail(item, error.kind()));
    }
    outcome
}

/// Dumps from the front of `rest`, which keeps the undecided items if an error ends it.
fn dump_chunks(work: &Work, rest: &mut Vec<usize>) -> Result<()> {
    let attachment = &work.base.attachment;
    let generation = attachment.generation()?;
    let mut lane = lane_of(work, &generation)?;
    let chunk = chunk_blocks(work, &generation, CHUNK_BYTES, 1);
    while !rest.is_empty() {
        let now: Vec<usize> = rest[..chunk.min(rest.len())].to_vec();
        let Reserved { placed, full } = reserve(work, &generation, &mut lane, &now)?;
        copy(work, &generation, &mut lane, &placed, None)?;
        let leases = placed.iter().map(|placed| placed.lease).collect();
        commit(work, &mut lane, leases, Shards::All)?;
        // Items that found no space alongside this chunk may find it in the chunk's place, once that is committed.
        if placed.is_empty() {
            full.iter().for_each(|&item| work.fail(item, ErrorKind::NoSpace));
            rest.drain(..now.len());
        } else {
            rest.splice(..now.len(), full);
        }
    }
    lane.finish();
    Ok(())
}
