//! State shared by the threads of an engine on queues of the kernel: who waits for work, who is stuck.
//!
//! Invariants, all under the one lock:
//! - a thread serves one class, so writes never keep reads from a thread;
//! - when a request is queued, a thread of its class with capacity is awake, or there is none with capacity;
//! - a thread is written off when one of its own steps passes a request's deadline, or when its capacity is used up by
//!   operations that the kernel holds past their deadlines. It takes nothing more, and ends when the kernel has
//!   returned everything.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::Result;
use kvdepot_core::limits::{IO_WATCHDOG_TICK_MS, IO_WORKERS_WRITTEN_OFF_MAX};
use parking_lot::{Condvar, Mutex};

use super::{QueuedConfig, thread};
use crate::desk::Desk;
use crate::engine::{Class, EngineStats, Request};
use crate::kernel::{MakeQueue, Wake};
use crate::watchdog::{Found, Stuck, Watched};

/// The longest time for a step that begins after its request's deadline.
const STEP_MAX: Duration = Duration::from_secs(1);

/// How long a thread whose queue broke is not replaced: the first and the last value when queues keep breaking.
const REPLACE_AFTER: Duration = Duration::from_millis(50);
const REPLACE_AFTER_MAX: Duration = Duration::from_secs(10);
/// Breaks that are further apart do not count as a series.
const BREAKS_APART: Duration = Duration::from_secs(60);

#[derive(Debug)]
struct Thread {
    class: Class,
    wake: Arc<Wake>,
    /// With how many requests in flight it sleeps and would take more; `None` while it is awake or full.
    asleep: Option<usize>,
    /// When its current step should be finished.
    step_until: Option<Instant>,
    written_off: bool,
}

#[derive(Debug)]
struct State {
    desk: Desk,
    threads: HashMap<usize, Thread>,
    numbered: usize,
    written_off: usize,
    /// Classes of threads to be replaced, and the earliest time for it.
    replace: Vec<(Class, Instant)>,
    /// Number of breaks in the current series, and the time of the last one.
    breaks: u32,
    broke_at: Option<Instant>,
    /// When the watchdog checks next; `None` while it checks or sleeps without a timeout.
    watch_at: Option<Instant>,
}

/// State shared by the threads of one engine.
pub(super) struct Shared {
    pub(super) name: &'static str,
    pub(super) config: QueuedConfig,
    pub(super) make: Box<MakeQueue>,
    state: Mutex<State>,
    watch: Condvar,
    idle: Condvar,
}

/// The next action of a thread.
pub(super) enum Next {
    /// Begin this request.
    Begin(Request),
    /// Wait for completions.
    Wait,
    /// Terminate.
    Stop,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("name", &self.name).field("state", &*self.state.lock()).finish()
    }
}

impl Shared {
    pub(super) fn new(name: &'static str, config: QueuedConfig, make: Box<MakeQueue>) -> Self {
        let state = State {
            desk: Desk::new(config.queue_depth),
            threads: HashMap::new(),
            numbered: 0,
            written_off: 0,
            replace: Vec::new(),
            breaks: 0,
            broke_at: None,
            watch_at: None,
        };
        let (watch, idle) = (Condvar::new(), Condvar::new());
        Self { name, config, make, state: Mutex::new(state), watch, idle }
    }

    pub(super) fn submit(&self, batch: Vec<Request>) {
        let now = Instant::now();
        let (mut failed, mut woken) = (Vec::new(), Vec::new());
        {
            let mut state = self.state.lock();
            for request in batch {
                let (class, deadline) = (request.class, request.deadline);
                match state.desk.admit(request, now) {
                    Some(refused) => failed.push(refused),
                    None => {
                        self.watch_by(&mut state, deadline);
                        woken.extend(state.rouse(class));
                    }
                }
            }
        }
        woken.iter().for_each(|wake| wake.wake());
        for (request, error) in failed {
            request.fail(error);
        }
    }

    fn watch_by(&self, state: &mut State, deadline: Instant) {
        if state.watch_at.is_none_or(|at| deadline < at) {
            state.watch_at = Some(deadline);
            self.watch.notify_one();
        }
    }

    /// Registers a thread and returns its number.
    pub(super) fn enter(&self, class: Class, wake: Arc<Wake>) -> usize {
        let mut state = self.state.lock();
        let number = state.numbered;
        state.numbered += 1;
        let thread = Thread { class, wake, asleep: None, step_until: None, written_off: false };
        state.threads.insert(number, thread);
        number
    }

    /// Returns the next action of a thread with `flights` requests in flight.
    pub(super) fn next(&self, number: usize, flights: usize, has_room: bool) -> Next {
        let mut state = self.state.lock();
        let State { desk, threads, .. } = &mut *state;
        let Some(thread) = threads.get_mut(&number) else { return Next::Stop };
        thread.step_until = None;
        if has_room && !thread.written_off {
            let class = thread.class;
            if let Some(request) = desk.take(class) {
                thread.step_until = Some(request.deadline);
                thread.asleep = None;
                let next = (desk.waiting(class) > 0).then(|| state.rouse(class)).flatten();
                drop(state);
                if let Some(wake) = next {
                    wake.wake();
                }
                return Next::Begin(request);
            }
        }
        if flights == 0 && (thread.written_off || desk.is_closed()) {
            return Next::Stop;
        }
        thread.asleep = (has_room && !thread.written_off).then_some(flights);
        Next::Wait
    }

    /// Notes that a thread is about to take steps of its own for a request.
    pub(super) fn step(&self, number: usize, deadline: Instant) {
        let until = deadline.max(Instant::now() + STEP_MAX);
        let mut state = self.state.lock();
        if let Some(thread) = state.threads.get_mut(&number) {
            thread.asleep = None;
            thread.step_until = Some(until);
        }
        self.watch_by(&mut state, until);
    }

    /// Notes that a request handed out by `next` has completed.
    pub(super) fn ended(&self) {
        let mut state = self.state.lock();
        state.desk.ended();
        if state.desk.is_idle() {
            self.idle.notify_all();
        }
    }

    /// Writes off a thread at capacity whose requests are all past their deadline, so that another one replaces it.
    /// Returns `false` if too many threads are written off.
    pub(super) fn is_clogged(&self, number: usize) -> bool {
        let mut state = self.state.lock();
        let written_off = state.write_off(number);
        if written_off {
            state.watch_at = Some(Instant::now());
            self.watch.notify_one();
        }
        written_off
    }

    /// Removes a thread whose queue has become useless. Another one replaces it after a pause.
    pub(super) fn retire(&self, number: usize) {
        let mut state = self.state.lock();
        let Some(thread) = state.threads.remove(&number) else { return };
        if thread.written_off {
            // It has been replaced already.
            state.written_off -= 1;
            return;
        }
        let now = Instant::now();
        let at = now + state.pause(now);
        state.replace.push((thread.class, at));
        self.watch_by(&mut state, at);
    }

    /// Notes that a thread terminates.
    pub(super) fn leave(&self, number: usize) {
        let mut state = self.state.lock();
        if let Some(thread) = state.threads.remove(&number) {
            state.written_off -= usize::from(thread.written_off);
        }
    }

    /// Refuses new work and returns the requests that had not begun.
    pub(super) fn close(&self) -> Vec<Request> {
        let (waiting, wakes) = {
            let mut state = self.state.lock();
            let wakes: Vec<_> = state.threads.values().map(|thread| Arc::clone(&thread.wake)).collect();
            (state.desk.close(), wakes)
        };
        wakes.iter().for_each(|wake| wake.wake());
        self.watch.notify_all();
        waiting
    }

    pub(super) fn drain(&self, deadline: Instant) -> bool {
        let mut state = self.state.lock();
        while !state.desk.is_idle() {
            if self.idle.wait_until(&mut state, deadline).timed_out() {
                return state.desk.is_idle();
            }
        }
        true
    }

    pub(super) fn stats(&self) -> EngineStats {
        let state = self.state.lock();
        EngineStats { written_off: state.written_off, ..state.desk.stats() }
    }
}

impl Watched for Shared {
    fn name(&self) -> &str {
        &self.config.name
    }

    fn watch(&self) -> Found {
        let mut state = self.state.lock();
        if !state.desk.is_closed() {
            match state.watch_at {
                Some(at) => drop(self.watch.wait_until(&mut state, at)),
                None => self.watch.wait(&mut state),
            }
        }
        let now = Instant::now();
        let (expired, closed) = (state.desk.expire(now), state.desk.is_closed());
        let stuck = |thread: &Thread| !thread.written_off && thread.step_until.is_some_and(|at| at <= now);
        let late: Vec<usize> =
            state.threads.iter().filter(|(_, thread)| stuck(thread)).map(|(number, _)| *number).collect();
        for number in late {
            state.write_off(number);
        }
        let (due, later) = state.replace.drain(..).partition::<Vec<_>, _>(|(_, at)| *at <= now);
        state.replace = later;
        let replace = due.into_iter().map(|(class, _)| Some(class)).collect();
        let tick = Duration::from_millis(IO_WATCHDOG_TICK_MS);
        state.watch_at = state.next_deadline().map(|at| at.max(now + tick));
        Found { expired, replace, closed }
    }

    fn expired_ended(&self) {
        let mut state = self.state.lock();
        state.desk.expired_ended();
        if state.desk.is_idle() {
            self.idle.notify_all();
        }
    }

    fn replace(self: &Arc<Self>, stuck: Stuck) -> Result<()> {
        let class = stuck.unwrap_or(Class::Read);
        let replaced = thread::replace(self, class);
        if replaced.is_err() {
            let mut state = self.state.lock();
            let now = Instant::now();
            let at = now + state.pause(now);
            state.replace.push((class, at));
            self.watch_by(&mut state, at);
        }
        replaced
    }
}

impl State {
    /// Returns the wake of the idlest sleeping thread of the class, for a queued request.
    fn rouse(&mut self, class: Class) -> Option<Arc<Wake>> {
        let able = self.threads.values_mut().filter(|t| t.class == class && !t.written_off);
        let thread = able.filter(|t| t.asleep.is_some()).min_by_key(|t| t.asleep)?;
        thread.asleep = None;
        Some(Arc::clone(&thread.wake))
    }

    fn write_off(&mut self, number: usize) -> bool {
        let Some(thread) = self.threads.get_mut(&number) else { return false };
        if thread.written_off || self.written_off >= IO_WORKERS_WRITTEN_OFF_MAX {
            return thread.written_off;
        }
        thread.written_off = true;
        thread.asleep = None;
        self.written_off += 1;
        self.replace.push((thread.class, Instant::now()));
        true
    }

    /// Returns the pause before a thread that ends now, or could not be started, is replaced.
    fn pause(&mut self, now: Instant) -> Duration {
        let apart = self.broke_at.is_none_or(|at| now.saturating_duration_since(at) > BREAKS_APART);
        self.breaks = if apart { 0 } else { self.breaks.saturating_add(1) };
        self.broke_at = Some(now);
        (REPLACE_AFTER * 2_u32.pow(self.breaks.min(16))).min(REPLACE_AFTER_MAX)
    }

    /// Returns the next time to check: deadlines of queued requests, steps of threads that can still be written off,
    /// and due replacements.
    fn next_deadline(&self) -> Option<Instant> {
        let able = self.threads.values().filter(|thread| !thread.written_off);
        let steps = able.filter_map(|thread| thread.step_until);
        let replacements = self.replace.iter().map(|(_, at)| *at);
        self.desk.next_deadline().into_iter().chain(steps).chain(replacements).min()
    }
}
