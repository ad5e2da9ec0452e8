//! The desk of an engine under its lock, with those who wait for it: the watchdog, and callers until it is idle.

use std::time::{Duration, Instant};

use kvdepot_core::Error;
use kvdepot_core::limits::IO_WATCHDOG_TICK_MS;
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::desk::Desk;
use crate::engine::{Class, EngineStats, Request};
use crate::watchdog::{Found, Stuck};

/// How long the drop of an engine waits for running work. Threads that are stuck longer end on their own.
const CLOSE_WAIT_MAX: Duration = Duration::from_secs(2);

/// What the lock protects. An engine adds what it knows of its threads.
#[derive(Debug)]
pub(crate) struct State<Own> {
    pub(crate) desk: Desk,
    /// Number of threads that are written off.
    pub(crate) written_off: usize,
    pub(crate) own: Own,
    /// When the watchdog checks next; `None` while it checks or sleeps without a timeout.
    watch_at: Option<Instant>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Intake<Own> {
    state: Mutex<State<Own>>,
    watch: Condvar,
    idle: Condvar,
}

impl<Own> Intake<Own> {
    pub(crate) fn new(queue_depth: usize, own: Own) -> Self {
        let state = State { desk: Desk::new(queue_depth), written_off: 0, own, watch_at: None };
        Self { state: Mutex::new(state), watch: Condvar::new(), idle: Condvar::new() }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State<Own>> {
        self.state.lock()
    }

    /// Queues requests, and calls `queued` under the lock for each of them. Returns those that were refused, which the
    /// caller must fail.
    pub(crate) fn admit(
        &self,
        batch: Vec<Request>,
        mut queued: impl FnMut(&mut State<Own>, Class),
    ) -> Vec<(Request, Error)> {
        let now = Instant::now();
        let mut refused = Vec::new();
        let mut state = self.lock();
        for request in batch {
            let (class, deadline) = (request.class, request.deadline);
            match state.desk.admit(request, now) {
                Some(one) => refused.push(one),
                None => {
                    self.watch_by(&mut state, deadline);
                    queued(&mut state, class);
                }
            }
        }
        refused
    }

    /// Notes that a request handed out by the desk has completed.
    pub(crate) fn ended(&self, state: &mut State<Own>) {
        state.desk.ended();
        self.tell_if_idle(state);
    }

    fn tell_if_idle(&self, state: &State<Own>) {
        if state.desk.is_idle() {
            self.idle.notify_all();
        }
    }

    /// Has the watchdog check at this time, or earlier.
    pub(crate) fn watch_by(&self, state: &mut State<Own>, at: Instant) {
        if state.watch_at.is_none_or(|planned| at < planned) {
            state.watch_at = Some(at);
            self.watch.notify_one();
        }
    }

    /// Blocks the watchdog until its next check. `check` finds the threads to be replaced, and returns when they, or those
    /// that are not stuck yet, must be checked again.
    pub(crate) fn watch(
        &self,
        check: impl FnOnce(&mut State<Own>, Instant) -> (Vec<Stuck>, Option<Instant>),
    ) -> Found {
        let mut state = self.lock();
        if !state.desk.is_closed() {
            match state.watch_at {
                Some(at) => drop(self.watch.wait_until(&mut state, at)),
                None => self.watch.wait(&mut state),
            }
        }
        let now = Instant::now();
        let (expired, closed) = (state.desk.expire(now), state.desk.is_closed());
        let (replace, next) = check(&mut state, now);
        let next = state.desk.next_deadline().into_iter().chain(next).min();
        let tick = Duration::from_millis(IO_WATCHDOG_TICK_MS);
        state.watch_at = next.map(|at| at.max(now + tick));
        Found { expired, replace, closed }
    }

    /// Notes that the expired requests of the last `watch` have been failed.
    pub(crate) fn expired_ended(&self) {
        let mut state = self.lock();
        state.desk.expired_ended();
        self.tell_if_idle(&state);
    }

    /// Refuses new work, and fails the requests that had not begun. `wake` wakes the engine's threads, which are to end;
    /// it is called under the lock. Then waits for running work, within a limit.
    pub(crate) fn close(&self, wake: impl FnOnce(&State<Own>)) {
        let waiting = {
            let mut state = self.lock();
            let waiting = state.desk.close();
            wake(&state);
            waiting
        };
        self.watch.notify_all();
        for request in waiting {
            request.fail(Request::closed());
        }
        self.drain(Instant::now() + CLOSE_WAIT_MAX);
    }

    /// Waits until nothing is queued or running. Returns `false` if the deadline passes first.
    pub(crate) fn drain(&self, deadline: Instant) -> bool {
        let mut state = self.lock();
        while !state.desk.is_idle() {
            if self.idle.wait_until(&mut state, deadline).timed_out() {
                return state.desk.is_idle();
            }
        }
        true
    }

    pub(crate) fn stats(&self) -> EngineStats {
        let state = self.lock();
        EngineStats { written_off: state.written_off, ..state.desk.stats() }
    }
}
