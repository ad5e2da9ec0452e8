//! Carrying out a load: leases on slots, copied from, given back, as many blocks at a time as the pool has room for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_copy::Direction;
use kvdepot_copy::bounded::late;
use kvdepot_core::{Error, ErrorKind, Result};

use crate::client::dump::{self, Placed, Sink, chunk_blocks, time_left};
use crate::client::hash_bytes;
use crate::client::lane::unexpected;
use crate::client::store::Work;
use crate::message::{Grant, Hashes, Request, Response};

/// Bytes of a chunk when a block is one shard: copies overlap the reads of the next chunk.
const CHUNK_BYTES: u64 = 16 << 20;
/// Bytes of a chunk when the engine waits layer by layer: its first layer is there when all blocks are.
const LAYERED_CHUNK_BYTES: u64 = 512 << 20;

/// How long a load of which nothing is there to be copied waits before it looks what has come; twice as long each time, up
/// to the other one.
const FIRST_WAIT: Duration = Duration::from_millis(1);
const LONGEST_WAIT: Duration = Duration::from_millis(64);

/// Runs a load task to its end.
pub(crate) fn run(work: Work) {
    let mut rest: Vec<usize> = (0..work.items.len()).collect();
    let mut under_way = None;
    let Err(error) = load_chunks(&work, &mut rest, &mut under_way) else {
        work.finish();
        return;
    };
    let failed = Box::new(Failed { work, rest, error });
    if let Some(sink) = under_way {
        sink.end_with(failed);
    }
}

/// A load that failed; its task ends when this is dropped. While the device may still write into the engine's pages that
/// is not yet (P1): who waits has a limit of its own (P2), and this thread goes on with other tasks.
struct Failed {
    work: Work,
    rest: Vec<usize>,
    error: Error,
}

impl Drop for Failed {
    fn drop(&mut self) {
        self.rest.iter().for_each(|&item| self.work.fail(item, self.error.kind()));
        self.work.store.attachment.stats.failed("load", &self.error);
        self.work.kept.clear();
        self.work.state.finish();
    }
}

/// Loads from the front of `rest`, which keeps what has not been decided when an error ends it. `under_way` is the copy that
/// the device is not through with then.
fn load_chunks(work: &Work, rest: &mut Vec<usize>, under_way: &mut Option<Arc<Sink>>) -> Result<()> {
    let attachment = &work.store.attachment;
    let generation = attachment.generation()?;
    let namespace = attachment.handle(&generation, &work.store.spec)?;
    let mut lane = dump::lane_of(work, &generation)?;
    let layered = work.layout().shard_count() > 1;
    let chunk = chunk_blocks(work, &generation, if layered { LAYERED_CHUNK_BYTES } else { CHUNK_BYTES });
    if rest.len() > chunk {
        let ahead = &rest[chunk..rest.len().min(dump::CHUNK_BLOCKS * 4)];
        let hashes = Hashes(hash_bytes(ahead.iter().map(|&item| &work.items[item].hash)).into());
        lane.call(Request::Prefetch { namespace, hashes }, Instant::now() + time_left(work)?)?;
    }
    let limit = work.store.device.engine().may_hang().then(|| work.state.deadline());
    // What is in the pool is copied first, beside the reads of what is not; waited for is only when nothing can be copied.
    let mut waiting: Option<Waiting> = None;
    while !rest.is_empty() {
        let now: Vec<usize> = rest[..chunk.min(rest.len())].to_vec();
        let left = time_left(work)?;
        let (wait, last) =
            waiting.as_ref().map_or((Duration::ZERO, false), |waiting| waiting.next(work, left));
        let wait_ms = u32::try_from(wait.as_millis()).unwrap_or(u32::MAX);
        let hashes = Hashes(hash_bytes(now.iter().map(|&item| &work.items[item].hash)).into());
        // The depot answers by the deadline; what is added covers a busy machine.
        let deadline = Instant::now() + left + attachment.call_timeout;
        let answer = lane.call(Request::Acquire { namespace, hashes, wait_ms, last }, deadline)?;
        let Response::Grants(grants) = answer else { return Err(unexpected()) };
        if grants.len() != now.len() {
            return Err(unexpected());
        }
        let mut placed = Vec::new();
        let mut again = Vec::new();
        let mut missed = Vec::new();
        for (&item, grant) in now.iter().zip(grants) {
            match grant {
                Grant::Leased { lease, runs } => placed.push(Placed { item, lease, runs }),
                // No room while others of this chunk were leased: there will be when those are given back.
                Grant::Refused { kind } if kind == ErrorKind::NoSpace.as_str() => again.push(item),
                Grant::Refused { kind } if !last && kind == ErrorKind::Timeout.as_str() => again.push(item),
                Grant::Refused { kind } => {
                    missed.push((item, ErrorKind::from_name(&kind).unwrap_or(ErrorKind::NotFound)))
                }
                Grant::Have => return Err(unexpected()),
            }
        }
        if let Some(sink) = dump::begin(work, &generation, Direction::ToDevice, &placed, None)? {
            let outcome = sink.wait(limit);
            if !matches!(outcome, Some(Ok(()))) {
                sink.keep(&mut lane);
            }
            match outcome {
                Some(outcome) => outcome?,
                None => {
                    *under_way = Some(sink);
                    return Err(late());
                }
            }
        }
        waiting = Waiting::after(waiting, placed.is_empty());
        missed.iter().for_each(|&(item, kind)| work.fail(item, kind));
        rest.splice(..now.len(), again);
        let leases: Vec<u64> = placed.iter().map(|placed| placed.lease).collect();
        if !leases.is_empty() {
            lane.call(Request::Release { leases }, Instant::now() + left)?;
        }
    }
    lane.finish();
    Ok(())
}

/// A load of which, once at least, nothing was there to be copied.
struct Waiting {
    since: Instant,
    wait: Duration,
}

impl Waiting {
    /// What follows an answer of which `nothing` could be copied, or something. Patience counts from the first wait of a
    /// load, whatever has come since.
    fn after(before: Option<Self>, nothing: bool) -> Option<Self> {
        match (before, nothing) {
            (None, false) => None,
            (None, true) => Some(Self { since: Instant::now(), wait: FIRST_WAIT }),
            (Some(before), false) => Some(Self { wait: Duration::ZERO, ..before }),
            (Some(before), true) => {
                Some(Self { wait: (before.wait * 2).clamp(FIRST_WAIT, LONGEST_WAIT), ..before })
            }
        }
    }

    /// How long to wait now, and whether that is the last time.
    fn next(&self, work: &Work, left: Duration) -> (Duration, bool) {
        let patience = work.patience.map_or(left, |all| all.saturating_sub(self.since.elapsed()).min(left));
        (self.wait.min(patience), patience <= self.wait)
    }
}
