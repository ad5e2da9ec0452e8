//! Deadlines for an engine whose device may never answer (P2).
//!
//! A copy cannot be revoked from a device. So the batch's sink, and with it the pool memory that the device may still
//! touch, is kept until the engine drops it (P1). A dump's groups are reported as failed at the deadline: late writes
//! into the pages of a failed dump do no harm, because that dump is never visible. A load that has begun is not
//! reported at the deadline: a report returns the pages to the reader, and the device may still write into them. The
//! caller that waits for a load needs its own limit.

use std::fmt;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use kvdepot_core::{Error, ErrorKind, Result};
use parking_lot::{Condvar, Mutex};

use crate::event::DeviceEvent;
use crate::limit::{close_wait, thread_of_an_engine, within};
use crate::mutation;
use crate::pool::{DeviceMemory, PoolRegistration};
use crate::{CopyBatch, CopyEngine, Direction, GroupSink};

/// Deliberate mistakes for tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mistake {
    /// At its deadline a batch releases memory that the device may still touch.
    LetGoAtDeadline,
    /// A load is reported at its deadline although the device may still write.
    ReportLoadAtDeadline,
}

/// The deliberate mistake of an engine, if any.
pub(crate) type Mutation = mutation::Mutation<Mistake>;

/// An engine that reports every dump by its batch's deadline and never blocks its caller.
///
/// While a batch is past its deadline and the device has not finished it, its direction refuses further batches
/// (`Unavailable`): only the copies that were in flight hang, and no more.
pub struct Bounded {
    engine: Option<Arc<dyn CopyEngine>>,
    load: Lane,
    dump: Lane,
    watch: Arc<Watch>,
    watcher: Option<JoinHandle<()>>,
    mutation: Mutation,
}

/// One direction: a thread that calls the engine and may block in its driver.
struct Lane {
    queue: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    /// Batches that the device has not finished.
    under_way: Mutex<Vec<Weak<Passing>>>,
}

struct Job {
    batch: CopyBatch,
    passing: Arc<Passing>,
}

/// The sink between the engine and the caller's sink. The engine drops it when nothing touches the batch's memory any
/// more.
struct Passing {
    direction: Direction,
    deadline: Option<Instant>,
    state: Mutex<Groups>,
}

struct Groups {
    /// `None` only after a deliberate mistake.
    sink: Option<Arc<dyn GroupSink>>,
    ended: Vec<bool>,
    /// Whether the batch was passed to the engine.
    begun: bool,
    late: bool,
}

/// Pending deadlines.
#[derive(Default)]
struct Watch {
    state: Mutex<Watched>,
    changed: Condvar,
}

#[derive(Default)]
struct Watched {
    batches: Vec<(Instant, Weak<Passing>)>,
    closed: bool,
}

impl Bounded {
    /// Wraps an engine with deadlines.
    pub fn new(engine: Arc<dyn CopyEngine>) -> Result<Self> {
        Self::with(engine, Mutation::default())
    }

    pub(crate) fn with(engine: Arc<dyn CopyEngine>, mutation: Mutation) -> Result<Self> {
        let watch = Arc::new(Watch::default());
        let watching = Arc::clone(&watch);
        // Complete from here on, so that a failed thread start leaves no other thread behind.
        let mut this = Self {
            load: Lane::start("kvdepot-load", &engine)?,
            dump: Lane::start("kvdepot-dump", &engine)?,
            engine: Some(engine),
            watch,
            watcher: None,
            mutation,
        };
        this.watcher = Some(spawn("kvdepot-deadline", move || watching.run(mutation))?);
        Ok(this)
    }

    /// Makes the deadlines of all batches in flight pass now, so that tests need no clock.
    #[cfg(test)]
    pub(crate) fn pass_deadlines(&self) {
        self.watch.state.lock().batches.iter_mut().for_each(|(deadline, _)| *deadline = Instant::now());
        self.watch.changed.notify_all();
    }

    /// Returns whether the device owes a copy past its deadline.
    pub(crate) fn is_late(&self) -> bool {
        self.load.is_late() || self.dump.is_late()
    }

    fn engine(&self) -> Result<&Arc<dyn CopyEngine>> {
        self.engine.as_ref().ok_or_else(closed)
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the copy engine is shutting down")
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    let run = move || {
        thread_of_an_engine();
        run();
    };
    std::thread::Builder::new()
        .name(name.into())
        .spawn(run)
        .map_err(|e| Error::io("cannot start a copy thread", e))
}

impl Lane {
    fn start(name: &str, engine: &Arc<dyn CopyEngine>) -> Result<Self> {
        let (sender, receiver) = crossbeam_channel::unbounded();
        let engine = Arc::clone(engine);
        let thread = spawn(name, move || carry_out(&*engine, &receiver))?;
        Ok(Self { queue: Some(sender), thread: Some(thread), under_way: Mutex::default() })
    }

    /// Adds a batch, unless an earlier one is past its deadline.
    fn admit(&self, passing: &Arc<Passing>) -> Result<()> {
        let mut under_way = self.under_way.lock();
        under_way.retain(|batch| batch.strong_count() > 0);
        // Dropped after the lock is released: dropping the last reference to a sink may be expensive.
        let batches: Vec<_> = under_way.iter().filter_map(Weak::upgrade).collect();
        if let Some(late) = batches.iter().find(|batch| batch.is_late()) {
            drop(under_way);
            let since = late.deadline.map_or(0, |deadline| deadline.elapsed().as_millis());
            return Err(Error::new(
                ErrorKind::Unavailable,
                "a copy has passed its deadline and still runs; new copies in that direction are refused until it ends",
            )
            .with("late_ms", since));
        }
        under_way.push(Arc::downgrade(passing));
        drop(under_way);
        Ok(())
    }

    fn is_late(&self) -> bool {
        let batches: Vec<_> = self.under_way.lock().iter().filter_map(Weak::upgrade).collect();
        batches.iter().any(|batch| batch.is_late())
    }
}

/// The thread of a lane. Callers wait for the batches that they submit, so there are no more jobs than callers.
fn carry_out(engine: &dyn CopyEngine, jobs: &Receiver<Job>) {
    for Job { batch, passing } in jobs {
        if !passing.begin() {
            continue;
        }
        // SAFETY: the contract of `Bounded::run`, whose caller's sink `passing` keeps.
        let begun = unsafe { engine.run(batch, Arc::clone(&passing) as Arc<dyn GroupSink>) };
        if let Err(error) = begun {
            passing.fail(&error);
        }
    }
}

impl Passing {
    fn is_late(&self) -> bool {
        self.state.lock().late
    }

    /// Returns whether the batch should be passed to the engine: not after its deadline.
    fn begin(&self) -> bool {
        let mut state = self.state.lock();
        state.begun = !state.late;
        state.begun
    }

    /// Reports the error for all groups without an outcome.
    fn fail(&self, error: &Error) {
        self.state.lock().fail(error);
    }

    /// Handles the passing of the deadline. Whoever sees that the batch is late also sees its reports.
    fn expire(&self, mutation: Mutation) {
        let mut state = self.state.lock();
        if state.ended.iter().all(|&ended| ended) {
            return;
        }
        state.late = true;
        let may_write = self.direction == Direction::ToDevice && state.begun;
        if !may_write || mutation.is(Mistake::ReportLoadAtDeadline) {
            state.fail(&late());
        }
        let let_go = if mutation.is(Mistake::LetGoAtDeadline) { state.sink.take() } else { None };
        drop(state);
        drop(let_go);
    }
}

/// The error of a batch that did not complete by its deadline.
pub fn late() -> Error {
    Error::new(
        ErrorKind::Timeout,
        "the copy did not end by the task's deadline; its memory stays reserved until the device has finished (see the \
         kernel's log, or raise timeout_ms if the device was only busy)",
    )
}

impl Groups {
    fn fail(&mut self, error: &Error) {
        for group in 0..self.ended.len() {
            self.end(group, Err(error.clone()));
        }
    }

    fn end(&mut self, group: usize, outcome: Result<()>) {
        if let Some(ended) = self.ended.get_mut(group)
            && !std::mem::replace(ended, true)
            && let Some(sink) = &self.sink
        {
            sink.group_ended(group, outcome);
        }
    }
}

/// Reports under the lock, so that none follows the report of the deadline.
impl GroupSink for Passing {
    fn group_submitted(&self, group: usize, event: DeviceEvent) {
        let state = self.state.lock();
        if state.ended.get(group) == Some(&false)
            && let Some(sink) = &state.sink
        {
            sink.group_submitted(group, event);
        }
    }

    fn group_ended(&self, group: usize, outcome: Result<()>) {
        self.state.lock().end(group, outcome);
    }
}

impl fmt::Debug for Passing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Passing(late: {})", self.is_late())
    }
}

impl Watch {
    fn add(&self, passing: &Arc<Passing>) {
        if let Some(deadline) = passing.deadline {
            self.state.lock().batches.push((deadline, Arc::downgrade(passing)));
            self.changed.notify_all();
        }
    }

    /// Runs the watching thread, which ends after the engine.
    fn run(&self, mutation: Mutation) {
        let mut state = self.state.lock();
        while !state.closed {
            state.batches.retain(|(_, batch)| batch.strong_count() > 0);
            let now = Instant::now();
            let due = state.batches.iter().position(|(deadline, _)| *deadline <= now);
            if let Some(due) = due {
                let batch = state.batches.swap_remove(due).1.upgrade();
                // Sinks are called, and perhaps dropped, without the lock.
                parking_lot::MutexGuard::unlocked(&mut state, || {
                    if let Some(batch) = batch {
                        batch.expire(mutation);
                    }
                });
                continue;
            }
            match state.batches.iter().map(|(deadline, _)| *deadline).min() {
                Some(deadline) => {
                    self.changed.wait_until(&mut state, deadline);
                }
                None => self.changed.wait(&mut state),
            }
        }
    }

    fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_all();
    }
}

impl CopyEngine for Bounded {
    fn name(&self) -> &'static str {
        self.engine.as_ref().map_or("closed", |engine| engine.name())
    }

    unsafe fn run(&self, batch: CopyBatch, sink: Arc<dyn GroupSink>) -> Result<()> {
        batch.check()?;
        let lane = match batch.direction {
            Direction::ToHost => &self.dump,
            Direction::ToDevice => &self.load,
        };
        let ended = vec![false; batch.ends.len()];
        let state = Mutex::new(Groups { sink: Some(sink), ended, begun: false, late: false });
        let passing = Arc::new(Passing { direction: batch.direction, deadline: batch.deadline, state });
        lane.admit(&passing)?;
        self.watch.add(&passing);
        let queue = lane.queue.as_ref().ok_or_else(closed)?;
        queue.send(Job { batch, passing }).map_err(|_| closed())
    }

    fn may_hang(&self) -> bool {
        true
    }

    fn numa_node(&self) -> Option<u32> {
        self.engine.as_ref()?.numa_node()
    }

    unsafe fn register_pool(&self, base: *mut u8, len: usize) -> Result<PoolRegistration> {
        // SAFETY: the caller's contract.
        unsafe { self.engine()?.register_pool(base, len) }
    }

    unsafe fn register_reserved_pool(&self, base: *mut u8, len: usize) -> Result<PoolRegistration> {
        // SAFETY: the caller's contract.
        unsafe { self.engine()?.register_reserved_pool(base, len) }
    }

    unsafe fn register_device(&self, address: u64, len: usize) -> Result<DeviceMemory> {
        // SAFETY: the caller's contract.
        unsafe { self.engine()?.register_device(address, len) }
    }
}

impl Drop for Bounded {
    fn drop(&mut self) {
        self.load.queue = None;
        self.dump.queue = None;
        let threads = [self.load.thread.take(), self.dump.thread.take()];
        let (engine, watcher) = (self.engine.take(), self.watcher.take());
        let watch = Arc::clone(&self.watch);
        let closing = move || {
            for thread in threads.into_iter().flatten() {
                let _ = thread.join();
            }
            // This ends the engine's threads, and with them all batches: only then is no deadline left.
            drop(engine);
            watch.close();
            if let Some(watcher) = watcher {
                let _ = watcher.join();
            }
        };
        // Do not wait again for an engine that already owes something.
        let late = self.is_late();
        let wait = if late { Duration::ZERO } else { close_wait() };
        if let Err(error) = within("closing a copy engine", wait, closing)
            && (late || !wait.is_zero())
        {
            tracing::warn!("a copy engine is closed in the background: {error}");
        }
    }
}

impl fmt::Debug for Bounded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.engine {
            Some(engine) => write!(f, "Bounded({engine:?}, {:?})", self.mutation),
            None => f.write_str("Bounded(closed)"),
        }
    }
}

#[cfg(test)]
mod tests;
