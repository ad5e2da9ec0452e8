//! The two queues and who may take from them.
//!
//! Invariants, all under the one lock:
//! - at most `write_threads` threads that are not written off are busy with writes, so a read always finds one of
//!   the others;
//! - a thread takes a read if there is one, but after `IO_READS_IN_A_ROW_MAX` reads a waiting write is next;
//! - a request is in a queue or with exactly one thread, so it ends exactly once (P2).

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use kvdepot_core::limits::{IO_READS_IN_A_ROW_MAX, IO_WATCHDOG_TICK_MS, IO_WORKERS_WRITTEN_OFF_MAX};
use parking_lot::{Condvar, Mutex};

use super::PsyncConfig;
use crate::engine::{Class, EngineStats, Request};

/// What one thread is busy with.
#[derive(Debug)]
struct Running {
    class: Class,
    deadline: Instant,
    written_off: bool,
}

#[derive(Debug, Default)]
struct State {
    reads: VecDeque<Request>,
    writes: VecDeque<Request>,
    /// By a number that each taken request gets.
    running: HashMap<u64, Running>,
    taken: u64,
    /// Expired requests that the watchdog has taken out and not yet ended.
    expiring: usize,
    writes_busy: usize,
    written_off: usize,
    reads_in_a_row: usize,
    closed: bool,
    /// When the watchdog looks next; `None` while it looks now or sleeps without end.
    watch_at: Option<Instant>,
    stats: EngineStats,
}

/// What the threads of one engine share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) config: PsyncConfig,
    state: Mutex<State>,
    work: Condvar,
    watch: Condvar,
    idle: Condvar,
}

/// What a thread does next.
pub(super) enum Next {
    /// Run this, then report its number.
    Run(u64, Request),
    /// End.
    Stop,
}

/// What the watchdog found.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// Requests that had not begun by their deadline.
    pub(super) expired: Vec<Request>,
    /// Threads to start in place of those written off.
    pub(super) replace: usize,
    pub(super) closed: bool,
}

impl Shared {
    pub(super) fn new(config: PsyncConfig) -> Self {
        let (work, watch, idle) = (Condvar::new(), Condvar::new(), Condvar::new());
        Self { config, state: Mutex::default(), work, watch, idle }
    }

    pub(super) fn submit(&self, batch: Vec<Request>) {
        let now = Instant::now();
        let mut failed = Vec::new();
        {
            let mut state = self.state.lock();
            for request in batch {
                let depth = self.config.queue_depth;
                if state.closed {
                    failed.push((request, Request::closed()));
                } else if request.deadline <= now {
                    state.stats.expired += 1;
                    failed.push((request, Request::expired()));
                } else if state.queue(request.class).len() >= depth {
                    state.stats.refused += 1;
                    failed.push((request, Request::refused(depth)));
                } else {
                    if state.watch_at.is_none_or(|at| request.deadline < at) {
                        state.watch_at = Some(request.deadline);
                        self.watch.notify_one();
                    }
                    let class = request.class;
                    state.queue(class).push_back(request);
                    self.work.notify_one();
                }
            }
        }
        for (request, error) in failed {
            request.fail(error);
        }
    }

    /// Blocks a thread until it has work or shall end.
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
            if state.closed {
                return Next::Stop;
            }
            self.work.wait(&mut state);
        }
    }

    /// Notes that a request ended; `false` if its thread was written off meanwhile and must end.
    pub(super) fn ended(&self, number: u64) -> bool {
        let mut state = self.state.lock();
        let running = state.running.remove(&number).expect("a number from `next`, reported once");
        state.stats.ended += 1;
        if running.written_off {
            state.written_off -= 1;
        } else if running.class == Class::Write {
            state.writes_busy -= 1;
            // A write that waited for a free place among the writers may be taken by a sleeping thread now.
            self.work.notify_one();
        }
        if state.is_idle() {
            self.idle.notify_all();
        }
        !running.written_off
    }

    /// Blocks the watchdog until the next deadline, then collects what is past it.
    pub(super) fn watch(&self) -> Found {
        let mut state = self.state.lock();
        if !state.closed {
            match state.watch_at {
                Some(at) => drop(self.watch.wait_until(&mut state, at)),
                None => self.watch.wait(&mut state),
            }
        }
        let now = Instant::now();
        let mut found = Found { closed: state.closed, ..Found::default() };
        let State { reads, writes, .. } = &mut *state;
        for queue in [reads, writes] {
            if queue.iter().any(|request| request.deadline <= now) {
                let (expired, kept): (Vec<_>, Vec<_>) =
                    queue.drain(..).partition(|request| request.deadline <= now);
                found.expired.extend(expired);
                *queue = kept.into();
            }
        }
        state.stats.expired += found.expired.len() as u64;
        state.expiring = found.expired.len();
        found.replace = state.write_off(now);
        let tick = Duration::from_millis(IO_WATCHDOG_TICK_MS);
        state.watch_at = state.next_deadline().map(|at| at.max(now + tick));
        found
    }

    /// Notes that the expired requests of the last `watch` have ended.
    pub(super) fn expired_ended(&self) {
        let mut state = self.state.lock();
        state.expiring = 0;
        if state.is_idle() {
            self.idle.notify_all();
        }
    }

    /// Refuses new work; returns what had not begun.
    pub(super) fn close(&self) -> Vec<Request> {
        let mut state = self.state.lock();
        state.closed = true;
        self.work.notify_all();
        self.watch.notify_all();
        let State { reads, writes, .. } = &mut *state;
        reads.drain(..).chain(writes.drain(..)).collect()
    }

    pub(super) fn drain(&self, deadline: Instant) -> bool {
        let mut state = self.state.lock();
        while !state.is_idle() {
            if self.idle.wait_until(&mut state, deadline).timed_out() {
                return state.is_idle();
            }
        }
        true
    }

    pub(super) fn stats(&self) -> EngineStats {
        let state = self.state.lock();
        EngineStats {
            reads_queued: state.reads.len(),
            writes_queued: state.writes.len(),
            running: state.running.len(),
            written_off: state.written_off,
            ..state.stats
        }
    }
}

impl State {
    const fn queue(&mut self, class: Class) -> &mut VecDeque<Request> {
        match class {
            Class::Read => &mut self.reads,
            Class::Write => &mut self.writes,
        }
    }

    fn take(&mut self, write_threads: usize) -> Option<Request> {
        let may_write = self.writes_busy < write_threads && !self.writes.is_empty();
        if may_write && (self.reads.is_empty() || self.reads_in_a_row >= IO_READS_IN_A_ROW_MAX) {
            self.reads_in_a_row = 0;
            return self.writes.pop_front();
        }
        let read = self.reads.pop_front();
        self.reads_in_a_row = if read.is_some() { self.reads_in_a_row + 1 } else { 0 };
        read
    }

    /// Writes off threads that are past their request's deadline, within the limit; returns how many.
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

    /// The next deadline to look at: of waiting requests, and of running ones whose threads may yet be written off.
    fn next_deadline(&self) -> Option<Instant> {
        let waiting = self.reads.iter().chain(&self.writes).map(|request| request.deadline);
        let running = self.running.values().filter(|r| !r.written_off).map(|r| r.deadline);
        waiting.chain(running).min()
    }

    fn is_idle(&self) -> bool {
        self.reads.is_empty() && self.writes.is_empty() && self.running.is_empty() && self.expiring == 0
    }
}
