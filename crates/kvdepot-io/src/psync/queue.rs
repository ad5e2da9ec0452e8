//! The two queues and the rules for taking from them.
//!
//! Invariants, all under the one lock:
//! - at most `write_threads` threads that are not written off are busy with writes, so one of the others is always left
//!   for a read;
//! - a thread takes a read if there is one, but after `IO_READS_IN_A_ROW_MAX` consecutive reads a waiting write is
//!   next;
//! - a request is in a queue or with exactly one thread, so it completes exactly once (P2).

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::Result;
use kvdepot_core::limits::{IO_READS_IN_A_ROW_MAX, IO_WATCHDOG_TICK_MS, IO_WORKERS_WRITTEN_OFF_MAX};
use parking_lot::{Condvar, Mutex};

use super::{PsyncConfig, worker};
use crate::desk::Desk;
use crate::engine::{Class, EngineStats, Request};
use crate::watchdog::{Found, Stuck, Watched};

/// The request that a thread runs.
#[derive(Debug)]
struct Running {
    class: Class,
    deadline: Instant,
    written_off: bool,
}

#[derive(Debug)]
struct State {
    desk: Desk,
    /// By the number that each taken request gets.
    running: HashMap<u64, Running>,
    taken: u64,
    writes_busy: usize,
    written_off: usize,
    reads_in_a_row: usize,
    /// When the watchdog checks next; `None` while it checks or sleeps without a timeout.
    watch_at: Option<Instant>,
}

/// State shared by the threads of one engine.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) config: PsyncConfig,
    state: Mutex<State>,
    work: Condvar,
    watch: Condvar,
    idle: Condvar,
}

/// The next action of a thread.
pub(super) enum Next {
    /// Run this request, then report its number.
    Run(u64, Request),
    /// Terminate.
    Stop,
}

impl Shared {
    pub(super) fn new(config: PsyncConfig) -> Self {
        let (work, watch, idle) = (Condvar::new(), Condvar::new(), Condvar::new());
        let state = State {
            desk: Desk::new(config.queue_depth),
            running: HashMap::new(),
            taken: 0,
            writes_busy: 0,
            written_off: 0,
            reads_in_a_row: 0,
            watch_at: None,
        };
        Self { config, state: Mutex::new(state), work, watch, idle }
    }

    pub(super) fn submit(&self, batch: Vec<Request>) {
        let now = Instant::now();
        let mut failed = Vec::new();
        {
            let mut state = self.state.lock();
            for request in batch {
                let deadline = request.deadline;
                match state.desk.admit(request, now) {
                    Some(refused) => failed.push(refused),
                    None => {
                        if state.watch_at.is_none_or(|at| deadline < at) {
                            state.watch_at = Some(deadline);
                            self.watch.notify_one();
                        }
                        self.work.notify_one();
                    }
                }
            }
        }
        for (request, error) in failed {
            request.fail(error);
        }
    }

    /// Blocks a thread until it has work or should terminate.
    pub(super) fn next(&self) -> Next {
        let mut state = self.state.lock();
        loop {
            if let Some(request) = state.take(self.config.write_threads) {
                let number = state.taken;
                state.taken += 1;
                if request.class == Class::Write {
                    state.writes_busy += 1;
                }
                let running =
                    Running { class: request.class, deadline: request.deadline, written_off: false };
                state.running.insert(number, running);
                return Next::Run(number, request);
            }
            if state.desk.is_closed() {
                return Next::Stop;
            }
            self.work.wait(&mut state);
        }
    }

    /// Notes that a request completed. Returns `false` if its thread was written off meanwhile and must terminate.
    pub(super) fn ended(&self, number: u64) -> bool {
        let mut state = self.state.lock();
        let running = state.running.remove(&number).expect("a number from `next`, reported once");
        state.desk.ended();
        if running.written_off {
            state.written_off -= 1;
        } else if running.class == Class::Write {
            state.writes_busy -= 1;
            // A write that waited for a writer to finish can now be taken by a sleeping thread.
            self.work.notify_one();
        }
        if state.desk.is_idle() {
            self.idle.notify_all();
        }
        !running.written_off
    }

    /// Refuses new work and returns the requests that had not begun.
    pub(super) fn close(&self) -> Vec<Request> {
        let waiting = self.state.lock().desk.close();
        self.work.notify_all();
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
        let replace = vec![None; state.write_off(now)];
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

    fn replace(self: &Arc<Self>, _: Stuck) -> Result<()> {
        worker::start(self)
    }
}

impl State {
    fn take(&mut self, write_threads: usize) -> Option<Request> {
        let may_write = self.writes_busy < write_threads && self.desk.waiting(Class::Write) > 0;
        if may_write && (self.desk.waiting(Class::Read) == 0 || self.reads_in_a_row >= IO_READS_IN_A_ROW_MAX)
        {
            self.reads_in_a_row = 0;
            return self.desk.take(Class::Write);
        }
        let read = self.desk.take(Class::Read);
        self.reads_in_a_row = if read.is_some() { self.reads_in_a_row + 1 } else { 0 };
        read
    }

    /// Writes off threads that have passed their request's deadline, within the limit. Returns their number.
    fn write_off(&mut self, now: Instant) -> usize {
        let mut count = 0;
        for running in self.running.values_mut() {
            let room = self.written_off < IO_WORKERS_WRITTEN_OFF_MAX;
            if room && !running.written_off && running.deadline <= now {
                running.written_off = true;
                self.written_off += 1;
                self.writes_busy -= usize::from(running.class == Class::Write);
                count += 1;
            }
        }
        count
    }

    /// Returns the next deadline to check: of queued requests, and of running ones whose threads can still be written
    /// off.
    fn next_deadline(&self) -> Option<Instant> {
        let running = self.running.values().filter(|r| !r.written_off).map(|r| r.deadline);
        self.desk.next_deadline().into_iter().chain(running).min()
    }
}
