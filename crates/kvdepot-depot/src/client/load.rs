//! Carries out a load: leases slots, copies from them and releases them, as many blocks at a time as the pool has space
//! for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_copy::Direction;
use kvdepot_copy::bounded::late;
use kvdepot_core::{Error, ErrorKind, Result};

use crate::client::generation::Generation;
use crate::client::lane::unexpected;
use crate::client::lane_guard::LaneGuard;
use crate::client::slots::{
    CHUNK_BLOCKS, Placed, Sink, begin, blocks_at_a_time, chunk_blocks, lane_of, time_left,
};
use crate::client::work::Work;
use crate::message::{Grant, Hashes, NamespaceHandle, Request, Response, hash_bytes};

/// Size of a chunk if a block is one shard: copies overlap with the reads of the next chunk, and with its acquisition.
const CHUNK_BYTES: u64 = 16 << 20;
/// Size of a chunk if the engine waits layer by layer: its first layer is available when all blocks are.
const LAYERED_CHUNK_BYTES: u64 = 512 << 20;

/// The first and the longest wait of a load that has nothing to copy before it checks again. The wait doubles each
/// time.
const FIRST_WAIT: Duration = Duration::from_millis(1);
const LONGEST_WAIT: Duration = Duration::from_millis(64);

/// Runs a load task to completion.
pub(crate) fn run(work: Work) {
    let mut rest: Vec<usize> = (0..work.items.len()).collect();
    let mut under_way = Vec::new();
    let Err(error) = load_chunks(&work, &mut rest, &mut under_way) else {
        work.finish();
        return;
    };
    let failed = Arc::new(Failed { work, rest, error });
    for sink in under_way {
        sink.end_with(Box::new(Arc::clone(&failed)));
    }
}

/// A failed load; its task ends when this value is dropped, but not while the device may still write into the engine's
/// pages (P1). Callers that wait have their own limit (P2), and this thread continues with other tasks.
struct Failed {
    work: Work,
    rest: Vec<usize>,
    error: Error,
}

impl Drop for Failed {
    fn drop(&mut self) {
        self.rest.iter().for_each(|&item| self.work.fail(item, self.error.kind()));
        self.work.base.attachment.stats.failed("load", &self.error);
        self.work.kept.clear();
        self.work.state.finish();
    }
}

/// Loads from the front of `rest`, which keeps the undecided items if an error ends it. `under_way` are then the copies
/// that the device has not finished.
fn load_chunks(work: &Work, rest: &mut Vec<usize>, under_way: &mut Vec<Arc<Sink>>) -> Result<()> {
    let attachment = &work.base.attachment;
    let patience = work.patience.unwrap_or(Duration::MAX).min(time_left(work)?);
    let generation = attachment.generation_by(Instant::now() + patience)?;
    let namespace = attachment.handle(&generation, &work.base.spec)?;
    let mut lane = lane_of(work, &generation)?;
    // If the processor copies, there is nothing to overlap. Two chunks together are no larger than one.
    let shards = work.layout().shard_count();
    let goes_ahead = work.base.device.engine().may_hang() && blocks_at_a_time(work, &generation, shards) > 1;
    let bytes = if shards > 1 { LAYERED_CHUNK_BYTES } else { CHUNK_BYTES };
    let chunk = chunk_blocks(work, &generation, bytes, if goes_ahead { 2 } else { 1 });
    if rest.len() > chunk {
        let ahead = &rest[chunk..rest.len().min(CHUNK_BLOCKS * 4)];
        let hashes = Hashes(hash_bytes(ahead.iter().map(|&item| &work.items[item].hash)).into());
        lane.call(Request::Prefetch { namespace, hashes }, Instant::now() + time_left(work)?)?;
    }
    let limit = work.base.device.engine().may_hang().then(|| work.state.deadline());
    let in_place = !work.base.device.engine().may_hang() && generation.reads_in_place();
    let (moving, spare) = (Vec::new(), vec![lane]);
    let mut load = Load { work, generation, namespace, chunk, limit, in_place, goes_ahead, moving, spare };
    let outcome = load.run(rest, under_way);
    for moving in std::mem::take(&mut load.moving) {
        // The first error is that of the load.
        let _ = load.end(moving, rest, under_way);
    }
    outcome?;
    load.spare.into_iter().for_each(LaneGuard::finish);
    Ok(())
}

/// A load in progress: while a chunk is copied the next one is acquired, on a separate lane. An error on that lane does
/// not end the leases under which the device copies (P1).
struct Load<'a> {
    work: &'a Work,
    generation: Arc<Generation>,
    namespace: NamespaceHandle,
    chunk: usize,
    limit: Option<Instant>,
    /// Whether blocks may be leased in a tier's memory. A device copies from the pool, which is registered with it.
    in_place: bool,
    /// Whether a chunk is acquired while another one is copied.
    goes_ahead: bool,
    /// Chunks that the device holds, two at most.
    moving: Vec<Moving>,
    /// Lanes without leases.
    spare: Vec<LaneGuard>,
}

/// A chunk that the device copies, and the lane that holds its leases.
struct Moving {
    sink: Arc<Sink>,
    lane: LaneGuard,
    leases: Vec<u64>,
    items: Vec<usize>,
}

impl Load<'_> {
    fn run(&mut self, rest: &mut Vec<usize>, under_way: &mut Vec<Arc<Sink>>) -> Result<()> {
        // Blocks in the pool are copied first, while the others are read. The load waits only if nothing can be copied.
        let mut waiting: Option<Waiting> = None;
        loop {
            let before = self.moving.len();
            if !rest.is_empty() && (self.goes_ahead || before == 0) {
                let placed = self.begin_next(rest, waiting.as_ref())?;
                // While a copy is in flight, there is no reason to wait just because nothing else has arrived yet.
                if placed || before == 0 {
                    waiting = Waiting::after(waiting, !placed);
                }
            }
            if before > 0 {
                let moving = self.moving.remove(0);
                let lane = self.end(moving, rest, under_way)?;
                self.spare.push(lane);
            } else if rest.is_empty() && self.moving.is_empty() {
                return Ok(());
            }
        }
    }

    /// Acquires the available blocks of the next chunk and begins to copy them. Returns whether there were any.
    fn begin_next(&mut self, rest: &mut Vec<usize>, waiting: Option<&Waiting>) -> Result<bool> {
        let (work, generation) = (self.work, Arc::clone(&self.generation));
        let attachment = &work.base.attachment;
        let mut lane = match self.spare.pop() {
            Some(lane) => lane,
            None => match lane_of(work, &generation) {
                Ok(lane) => lane,
                // One lane is enough: it is free again when the current chunk has been copied.
                Err(_) if !self.moving.is_empty() => return Ok(false),
                Err(error) => return Err(error),
            },
        };
        let now: Vec<usize> = rest[..self.chunk.min(rest.len())].to_vec();
        let left = time_left(work)?;
        let waits = waiting.filter(|_| self.moving.is_empty());
        let (wait, last) = waits.map_or((Duration::ZERO, false), |waiting| waiting.next(work, left));
        let wait_ms = u32::try_from(wait.as_millis()).unwrap_or(u32::MAX);
        let hashes = Hashes(hash_bytes(now.iter().map(|&item| &work.items[item].hash)).into());
        // The depot answers by the deadline; the extra time is for a busy machine.
        let deadline = Instant::now() + left + attachment.call_timeout;
        let (namespace, in_place) = (self.namespace, self.in_place);
        let request = Request::Acquire { namespace, hashes, wait_ms, last, in_place };
        let Response::Grants(grants) = lane.call(request, deadline)? else { return Err(unexpected()) };
        if grants.len() != now.len() {
            return Err(unexpected());
        }
        let (mut placed, mut again, mut missed) = (Vec::new(), Vec::new(), Vec::new());
        for (&item, grant) in now.iter().zip(grants) {
            match grant {
                Grant::Leased { lease, runs } => placed.push(Placed { item, lease, runs }),
                // No space while others were leased: there will be some when those are released.
                Grant::Refused { kind } if kind == ErrorKind::NoSpace.as_str() => again.push(item),
                Grant::Refused { kind } if !last && kind == ErrorKind::Timeout.as_str() => again.push(item),
                Grant::Refused { kind } => {
                    missed.push((item, ErrorKind::from_name(&kind).unwrap_or(ErrorKind::NotFound)))
                }
                Grant::Have => return Err(unexpected()),
            }
        }
        match begin(work, &generation, Direction::ToDevice, &placed, None)? {
            Some(sink) => {
                let leases = placed.iter().map(|placed| placed.lease).collect();
                let items = placed.iter().map(|placed| placed.item).collect();
                self.moving.push(Moving { sink, lane, leases, items });
            }
            None => self.spare.push(lane),
        }
        missed.iter().for_each(|&(item, kind)| self.work.fail(item, kind));
        rest.splice(..now.len(), again);
        Ok(!placed.is_empty())
    }

    /// Waits until a chunk has been copied, and releases its leases. Returns its lane. Items that were not copied go
    /// back to `rest`.
    fn end(
        &self,
        mut moving: Moving,
        rest: &mut Vec<usize>,
        under_way: &mut Vec<Arc<Sink>>,
    ) -> Result<LaneGuard> {
        let outcome = moving.sink.wait(self.limit);
        if !matches!(outcome, Some(Ok(()))) {
            moving.sink.keep(&mut moving.lane);
            rest.append(&mut moving.items);
        }
        match outcome {
            Some(outcome) => outcome?,
            None => {
                under_way.push(moving.sink);
                return Err(late());
            }
        }
        let deadline = Instant::now() + time_left(self.work)?;
        moving.lane.call(Request::Release { leases: moving.leases }, deadline)?;
        Ok(moving.lane)
    }
}

/// A load that at least once had nothing to copy.
struct Waiting {
    since: Instant,
    wait: Duration,
}

impl Waiting {
    /// Updates the wait after an answer with `nothing` to copy, or with something. Patience counts from the first wait
    /// of a load, whatever has arrived since.
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

    /// Returns how long to wait now, and whether it is the last time.
    fn next(&self, work: &Work, left: Duration) -> (Duration, bool) {
        let patience = work.patience.map_or(left, |all| all.saturating_sub(self.since.elapsed()).min(left));
        (self.wait.min(patience), patience <= self.wait)
    }
}
