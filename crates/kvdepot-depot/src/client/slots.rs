//! Slots of a task's blocks: reserved and committed at the depot, and copied to or from.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvdepot_copy::{CopyBatch, DeviceEvent, Direction, GroupSink};
use kvdepot_core::runs::{Run, Runs};
use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_io::MemRun;
use parking_lot::{Condvar, Mutex};
use smallvec::SmallVec;

use crate::client::device::RegisteredPool;
use crate::client::generation::Generation;
use crate::client::lane::{Lane, unexpected};
use crate::client::lane_guard::LaneGuard;
use crate::client::task::Counted;
use crate::client::tier_memory::{self, Lent};
use crate::client::work::Work;
use crate::message::{Grant, Hashes, Request, Response, Shards, hash_bytes};
use crate::pool::PoolMapping;

/// Number of blocks in a chunk.
pub(crate) const CHUNK_BLOCKS: usize = 512;

/// Returns the number of blocks in a chunk of `bytes`. The chunks that are copied at a time have no more shards together
/// than `running_queue_depth`, unless a single block has more.
pub(crate) fn chunk_blocks(work: &Work, generation: &Generation, bytes: u64, at_a_time: usize) -> usize {
    let by_bytes = usize::try_from(bytes / work.layout().block_bytes().max(1)).unwrap_or(usize::MAX);
    let chunk = by_bytes.clamp(1, CHUNK_BLOCKS).div_ceil(at_a_time);
    chunk.min(blocks_at_a_time(work, generation, work.layout().shard_count()) / at_a_time).max(1)
}

/// Returns how many blocks may be copied at a time if so many shards of each are: one at least.
pub(crate) fn blocks_at_a_time(work: &Work, generation: &Generation, shards: usize) -> usize {
    let depths = work.base.attachment.queue_depths(generation);
    usize::try_from(depths.running / shards as u64).unwrap_or(usize::MAX).max(1)
}

/// A block with the slot that it is copied to or from.
pub(crate) struct Placed {
    pub(crate) item: usize,
    pub(crate) lease: u64,
    pub(crate) runs: Runs,
}

/// The result of a reservation.
pub(crate) struct Reserved {
    /// Items that got a slot.
    pub(crate) placed: Vec<Placed>,
    /// Items for which the pool has no space now.
    pub(crate) full: Vec<usize>,
}

/// Returns a lane for a task, on which the depot knows the task's device.
pub(crate) fn lane_of(work: &Work, generation: &Arc<Generation>) -> Result<LaneGuard> {
    let left = time_left(work)?;
    let mut lane = work.base.attachment.lane(generation, left)?;
    if generation.welcome.is_divided {
        lane.wish_near(work.base.device.node(), Instant::now() + left)?;
    }
    Ok(lane)
}

/// Returns the remaining time of the task.
pub(crate) fn time_left(work: &Work) -> Result<Duration> {
    let left = work.state.deadline().saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(Error::new(
            ErrorKind::Timeout,
            "the task's time is over: raise timeout_ms or move less at a time",
        ));
    }
    Ok(left)
}

/// Reserves slots for these items. Those that the depot has already count as arrived; those that it refuses have
/// failed.
pub(crate) fn reserve(
    work: &Work,
    generation: &Arc<Generation>,
    lane: &mut LaneGuard,
    items: &[usize],
) -> Result<Reserved> {
    let namespace = work.base.attachment.handle(generation, &work.base.spec)?;
    let hashes = Hashes(hash_bytes(items.iter().map(|&item| &work.items[item].hash)).into());
    let deadline = Instant::now() + time_left(work)?;
    let answer =
        lane.call_patiently(Request::Reserve { namespace, hashes, priority: work.priority }, deadline)?;
    let Response::Grants(grants) = answer else { return Err(unexpected()) };
    if grants.len() != items.len() {
        return Err(unexpected());
    }
    let (mut placed, mut full) = (Vec::new(), Vec::new());
    for (&item, grant) in items.iter().zip(grants) {
        match grant {
            Grant::Leased { lease, runs } => placed.push(Placed { item, lease, runs }),
            Grant::Refused { kind } if kind == ErrorKind::NoSpace.as_str() => full.push(item),
            Grant::Have => {
                work.items[item].shards(work.layout()).into_iter().for_each(|s| work.state.arrived(s, 1))
            }
            Grant::Refused { kind } => {
                work.fail(item, ErrorKind::from_name(&kind).unwrap_or(ErrorKind::Busy))
            }
        }
    }
    Ok(Reserved { placed, full })
}

pub(crate) fn commit(work: &Work, lane: &mut LaneGuard, leases: Vec<u64>, shards: Shards) -> Result<()> {
    if leases.is_empty() {
        return Ok(());
    }
    // The bytes have arrived, so a commit is worth a short wait even if the task's time is over.
    let deadline = Instant::now() + time_left(work).unwrap_or(Duration::from_secs(1));
    lane.call_patiently(Request::Commit { leases, shards }, deadline).map(|_| ())
}

/// Gives slots back that will not be filled. No copy into them may be in flight.
pub(crate) fn release(work: &Work, lane: &mut LaneGuard, leases: Vec<u64>) -> Result<()> {
    let deadline = Instant::now() + time_left(work).unwrap_or(Duration::from_secs(1));
    lane.call_patiently(Request::Release { leases }, deadline).map(|_| ())
}

/// Dumps shards of placed blocks (`only` one, or all), and reports each as soon as it has arrived. Returns when all
/// bytes are in place, or at the task's deadline: then the device may still touch the slots, which have no other owner
/// until it has finished. So after an error the lane is taken away, and its leases end with the last copy (P1, P4).
pub(crate) fn copy(
    work: &Work,
    generation: &Generation,
    lane: &mut LaneGuard,
    placed: &[Placed],
    only: Option<usize>,
) -> Result<()> {
    let shards = only.map_or(work.layout().shard_count(), |_| 1);
    for piece in placed.chunks(blocks_at_a_time(work, generation, shards)) {
        let Some(sink) = begin(work, generation, Direction::ToHost, piece, only)? else { continue };
        // The engine reports dumps by their deadline.
        let outcome = sink.wait(None).unwrap_or(Ok(()));
        if outcome.is_err() {
            sink.keep(lane);
        }
        outcome?;
    }
    Ok(())
}

/// Begins to copy shards of placed blocks; returns `None` if there are none. The lane must keep their leases until
/// everything has succeeded, and otherwise be passed to the returned sink.
pub(crate) fn begin(
    work: &Work,
    generation: &Generation,
    direction: Direction,
    placed: &[Placed],
    only: Option<usize>,
) -> Result<Option<Arc<Sink>>> {
    if placed.is_empty() {
        return Ok(None);
    }
    let mapping = generation.pool.mapping()?;
    let lent = generation.memory.as_ref().filter(|_| direction == Direction::ToDevice);
    let resolve_run = |run: &Run| match run.in_place() {
        Some(at) => tier_memory::resolve(lent, *run, at),
        None => mapping.resolve(*run),
    };
    let resolve = |placed: &Placed| placed.runs.iter().map(resolve_run).collect();
    let slots: Vec<SmallVec<[MemRun; 2]>> = placed.iter().map(resolve).collect::<Result<_>>()?;
    let bytes = |placed: &Placed| placed.runs.iter().map(|run| run.len).sum::<u64>();
    if placed.iter().any(|placed| bytes(placed) < work.layout().block_bytes()) {
        return Err(unexpected());
    }
    let is_in_place = |placed: &Placed| placed.runs.iter().any(|run| run.in_place().is_some());
    let lent = lent.filter(|_| placed.iter().any(is_in_place)).cloned();
    let shards = only.map_or(0..work.layout().shard_count(), |shard| shard..shard + 1);
    let mut batch = CopyBatch::new(direction);
    batch.wait_event = work.wait_event;
    batch.deadline = Some(work.state.deadline());
    batch.decoding = work.base.device.is_decoding();
    let mut groups = Vec::new();
    for shard in shards {
        let mut count = 0;
        for (placed, slot) in placed.iter().zip(&slots) {
            let item = &work.items[placed.item];
            count += usize::from(item.plan(work.layout(), work.pages.as_deref(), shard, slot, &mut batch));
        }
        batch.end_group();
        groups.push((shard, count));
    }
    let sink = Arc::new(Sink {
        work: work.clone(),
        left: Mutex::new(groups.len()),
        announced: groups.iter().map(|_| AtomicBool::new(false)).collect(),
        groups,
        all: Condvar::new(),
        failed: Mutex::new(None),
        lane: Mutex::new(None),
        _pool: work.base.device.pool(&generation.pool)?,
        _mapping: mapping,
        lent,
        last: Mutex::new(None),
        counted: Mutex::new(None),
    });
    // SAFETY: device ranges are valid by the contract of the store's unsafe calls. The host ranges lie in leased slots,
    // which the sink keeps mapped, and leased: the lane belongs to the caller until everything has succeeded, and to
    // the sink otherwise.
    unsafe { work.base.device.engine().run(batch, Arc::clone(&sink) as Arc<dyn GroupSink>) }?;
    Ok(Some(sink))
}

/// Held by the engine until the device has finished the batch, even if nothing waits for it.
pub(crate) struct Sink {
    // Dropped in this order: the leases, the registration, the mapping, the task. The work keeps the engine.
    /// The lane of a failed copy.
    lane: Mutex<Option<Lane>>,
    _pool: Arc<RegisteredPool>,
    _mapping: Arc<PoolMapping>,
    /// The tier's memory, if a block of the batch is leased there.
    lent: Lent,
    /// Dropped when the device has finished.
    last: Mutex<Option<Box<dyn Send>>>,
    work: Work,
    /// Shard and number of blocks of each group.
    groups: Vec<(usize, usize)>,
    /// Groups whose device event the task has.
    announced: Vec<AtomicBool>,
    left: Mutex<usize>,
    all: Condvar,
    failed: Mutex<Option<Error>>,
    /// Of a failed copy: until it is dropped the store does not count as closed.
    counted: Mutex<Option<Counted>>,
}

impl Sink {
    /// Returns the outcome of all groups; `None` if some have not ended by `deadline`.
    pub(crate) fn wait(&self, deadline: Option<Instant>) -> Option<Result<()>> {
        let mut left = self.left.lock();
        while *left > 0 {
            match deadline {
                None => self.all.wait(&mut left),
                Some(deadline) => {
                    if self.all.wait_until(&mut left, deadline).timed_out() && *left > 0 {
                        return None;
                    }
                }
            }
        }
        Some(self.failed.lock().take().map_or(Ok(()), Err))
    }

    /// Ends the lane's leases when the device has finished. Until then the task, which may be done before, counts as in
    /// flight for whoever closes the store.
    pub(crate) fn keep(&self, lane: &mut LaneGuard) {
        *self.counted.lock() = self.work.state.counted();
        *self.lane.lock() = lane.take();
    }

    /// Drops `last` when the device has finished.
    pub(crate) fn end_with(&self, last: Box<dyn Send>) {
        *self.last.lock() = Some(last);
    }
}

impl std::fmt::Debug for Sink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sink({:?})", self.work.state)
    }
}

impl GroupSink for Sink {
    fn group_submitted(&self, group: usize, event: DeviceEvent) {
        if self.lent.is_some() {
            // What was copied counts only after a check, which comes after the copy.
            return;
        }
        let (shard, count) = self.groups[group];
        self.announced[group].store(true, Ordering::Release);
        self.work.state.submitted(shard, count, event);
    }

    fn group_ended(&self, group: usize, outcome: Result<()>) {
        // The depot may have died meanwhile, and the next one may write to the memory that was copied from (P1).
        let checked = outcome.and_then(|()| self.lent.as_ref().map_or(Ok(()), |lent| lent.check()));
        match checked {
            Ok(()) => {
                let (shard, count) = self.groups[group];
                if self.announced[group].load(Ordering::Acquire) {
                    self.work.state.arrived_as_submitted(shard, count);
                } else {
                    self.work.state.arrived(shard, count);
                }
            }
            Err(error) => *self.failed.lock() = Some(error),
        }
        let mut left = self.left.lock();
        *left -= 1;
        if *left == 0 {
            self.all.notify_all();
        }
    }
}
