//! A task: blocks in flight, counted shard by shard, with any number of waiting callers.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use kvdepot_copy::DeviceEvent;
use kvdepot_core::{ErrorKind, Result};
use parking_lot::{Condvar, Mutex};
use rustix::event::EventfdFlags;

use crate::task_line::{Operation, TaskLine};

struct Progress {
    /// Number of each shard's blocks that have neither arrived nor failed.
    left: Vec<usize>,
    /// Number of each shard's blocks for which there is no device event either.
    unsubmitted: Vec<usize>,
    /// By shard: events behind blocks in flight on the device.
    events: Vec<Vec<DeviceEvent>>,
    failed: Vec<(usize, ErrorKind)>,
    done: bool,
    /// Counts the task as in flight until it is done or dropped.
    counted: Option<Counted>,
}

/// Number of tasks of a store whose memory may still be touched.
#[derive(Default)]
pub(crate) struct UnderWay {
    tasks: Mutex<usize>,
    none: Condvar,
}

/// Counts a task as in flight. A task, and each of its copies that the device has not finished, have one.
pub(crate) struct Counted(Arc<UnderWay>);

impl UnderWay {
    fn count(this: &Arc<Self>) -> Counted {
        *this.tasks.lock() += 1;
        Counted(Arc::clone(this))
    }

    /// Waits until no task is in flight, at most `timeout`. Returns whether none is.
    pub(crate) fn wait(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut tasks = self.tasks.lock();
        while *tasks > 0 {
            if self.none.wait_until(&mut tasks, deadline).timed_out() {
                return *tasks == 0;
            }
        }
        true
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut tasks = self.0.tasks.lock();
        *tasks -= 1;
        if *tasks == 0 {
            self.0.none.notify_all();
        }
    }
}

/// The progress of a task.
pub struct TaskState {
    line: TaskLine,
    block_count: usize,
    begun: Instant,
    deadline: Instant,
    progress: Mutex<Progress>,
    changed: Condvar,
    event: OnceLock<Option<OwnedFd>>,
}

impl TaskState {
    pub(crate) fn new(
        line: TaskLine,
        left: Vec<usize>,
        block_count: usize,
        wait: Duration,
        under_way: &Arc<UnderWay>,
    ) -> Self {
        let begun = Instant::now();
        line.dispatching();
        Self {
            line,
            block_count,
            begun,
            deadline: begun + wait,
            progress: Mutex::new(Progress {
                unsubmitted: left.clone(),
                events: vec![Vec::new(); left.len()],
                left,
                failed: Vec::new(),
                done: false,
                counted: Some(UnderWay::count(under_way)),
            }),
            changed: Condvar::new(),
            event: OnceLock::new(),
        }
    }

    /// Returns the number of the task in this process.
    pub fn id(&self) -> u64 {
        self.line.id
    }

    /// Returns the number of blocks (or shards, for tasks by address) that the task moves.
    pub fn block_count(&self) -> usize {
        self.block_count
    }

    pub(crate) fn operation(&self) -> Operation {
        self.line.operation
    }

    /// Returns how long the task may take.
    pub(crate) fn time_limit(&self) -> Duration {
        self.deadline - self.begun
    }

    /// Counts the task for another holder, beyond its end. `None` after the task's end.
    pub(crate) fn counted(&self) -> Option<Counted> {
        self.progress.lock().counted.as_ref().map(|counted| UnderWay::count(&counted.0))
    }

    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Returns whether everything has ended: the engine's memory is free again (dump) or filled (load).
    pub fn done(&self) -> bool {
        self.progress.lock().done
    }

    /// Waits until the task is done, at most `timeout`. Returns whether it is.
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        self.wait_until(timeout, |progress| progress.done)
    }

    /// Waits until a shard of every block has arrived or failed. Returns whether it has. A shard that the task does not
    /// move counts as arrived.
    pub fn wait_shard(&self, shard: usize, timeout: Option<Duration>) -> bool {
        self.wait_until(timeout, |progress| {
            progress.done || progress.left.get(shard).is_none_or(|&left| left == 0)
        })
    }

    /// Waits until a shard of every block is in flight on the device, has arrived or has failed, and makes `stream`
    /// wait for the rest on the device (P3). Returns whether all that happened in time. Later failures are known when
    /// the task is done.
    pub fn wait_shard_on(&self, shard: usize, stream: u64, timeout: Option<Duration>) -> Result<bool> {
        let submitted = self.wait_until(timeout, |progress| {
            progress.done || progress.unsubmitted.get(shard).is_none_or(|&left| left == 0)
        });
        let events = self.progress.lock().events.get(shard).cloned().unwrap_or_default();
        events.iter().try_for_each(|event| event.wait_on_stream(stream))?;
        Ok(submitted)
    }

    fn wait_until(&self, timeout: Option<Duration>, ready: impl Fn(&Progress) -> bool) -> bool {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        let mut progress = self.progress.lock();
        while !ready(&progress) {
            match deadline {
                None => self.changed.wait(&mut progress),
                Some(deadline) => {
                    if self.changed.wait_until(&mut progress, deadline).timed_out() {
                        return ready(&progress);
                    }
                }
            }
        }
        true
    }

    /// Returns the blocks that were not moved, ascending, with the kind of the reason. Final when the task is done.
    pub fn failed(&self) -> Vec<(usize, ErrorKind)> {
        let mut failed = self.progress.lock().failed.clone();
        failed.sort_unstable_by_key(|&(block, _)| block);
        failed.dedup_by_key(|&mut (block, _)| block);
        failed
    }

    /// Notes that `count` blocks of a shard are in flight on the device, and have arrived when `event` is reached.
    pub(crate) fn submitted(&self, shard: usize, count: usize, event: DeviceEvent) {
        let mut progress = self.progress.lock();
        progress.events[shard].push(event);
        progress.unsubmitted[shard] = progress.unsubmitted[shard].saturating_sub(count);
        if progress.unsubmitted[shard] == 0 {
            self.changed.notify_all();
        }
    }

    /// Notes that `count` blocks of a shard have arrived.
    pub(crate) fn arrived(&self, shard: usize, count: usize) {
        let mut progress = self.progress.lock();
        progress.unsubmitted[shard] = progress.unsubmitted[shard].saturating_sub(count);
        self.less_left(&mut progress, shard, count);
    }

    /// Like `arrived`, for blocks that were `submitted` before.
    pub(crate) fn arrived_as_submitted(&self, shard: usize, count: usize) {
        self.less_left(&mut self.progress.lock(), shard, count);
    }

    fn less_left(&self, progress: &mut Progress, shard: usize, count: usize) {
        progress.left[shard] = progress.left[shard].saturating_sub(count);
        if progress.left[shard] == 0 {
            self.changed.notify_all();
        }
    }

    /// Notes that a block failed: it counts as ended for each of its shards.
    pub(crate) fn failed_block(&self, block: usize, shards: impl Iterator<Item = usize>, kind: ErrorKind) {
        let mut progress = self.progress.lock();
        progress.failed.push((block, kind));
        for shard in shards {
            progress.left[shard] = progress.left[shard].saturating_sub(1);
            progress.unsubmitted[shard] = progress.unsubmitted[shard].saturating_sub(1);
        }
        self.changed.notify_all();
    }

    /// Notes that everything has ended.
    pub(crate) fn finish(&self) {
        let mut progress = self.progress.lock();
        if progress.done {
            return;
        }
        progress.done = true;
        // Under the lock: a caller that has seen the end may close the store, and one that has waited for the store's
        // tasks sees their end.
        drop(progress.counted.take());
        self.changed.notify_all();
        let event = self.event.get().and_then(Option::as_ref);
        if let Some(event) = event {
            let _ = rustix::io::write(event, &1u64.to_le_bytes());
        }
        drop(progress);
        self.line.finished(self.begun.elapsed());
    }

    /// Returns a descriptor that is readable once the task is done.
    pub fn event(&self) -> Option<BorrowedFd<'_>> {
        // Under the lock, so that `finish` either sees the descriptor or runs before `done` is checked.
        let progress = self.progress.lock();
        let event = self.event.get_or_init(|| {
            let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok()?;
            if progress.done {
                let _ = rustix::io::write(&event, &1u64.to_le_bytes());
            }
            Some(event)
        });
        event.as_ref().map(AsFd::as_fd)
    }
}

impl fmt::Debug for TaskState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Task({}, {:?}, {} blocks, done: {})",
            self.line.id,
            self.line.operation,
            self.block_count,
            self.done()
        )
    }
}
