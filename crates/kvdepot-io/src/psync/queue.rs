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
use std::time::Instant;

use kvdepot_core::Result;
use kvdepot_core::limits::{IO_READS_IN_A_ROW_MAX, IO_WORKERS_WRITTEN_OFF_MAX};
use parking_lot::Condvar;

use super::{PsyncConfig, worker};
use crate::engine::{Class, Request};
use crate::intake::{self, Intake};
use crate::watchdog::{Found, Stuck, Watched};

/// The request that a thread runs.
#[derive(Debug)]
struct Running {
    class: Class,
    deadline: Instant,
    written_off: bool,
}

type State = intake::State<Threads>;

#[derive(Debug, Default)]
pub(super) struct Threads {
    /// By the number that each taken request gets.
    running: HashMap<u64, Running>,
    taken: u64,
    writes_busy: usize,
    reads_in_a_row: usize,
}

/// State shared by the threads of one engine.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) config: PsyncConfig,
    pub(super) intake: Intake<Threads>,
    work: Condvar,
}

/// The next action of a thread.
#[expect(
    clippy::large_enum_variant,
    reason = "each lives for one step of a thread; a box would cost an allocation"
)]
pub(super) enum Next {
    /// Run this request, then report its number.
    Run(u64, Request),
    /// Terminate.
    Stop,
}

impl Shared {
    pub(super) fn new(config: PsyncConfig) -> Self {
        let intake = Intake::new(config.queue_depth, Threads::default());
        Self { config, intake, work: Condvar::new() }
    }

    pub(super) fn submit(&self, batch: Vec<Request>) {
        let refused = self.intake.admit(batch, |_, _| {
            self.work.notify_one();
        });
        for (request, error) in refused {
            request.fail(error);
        }
    }

    /// Blocks a thread until it has work or should terminate.
    pub(super) fn next(&self) -> Next {
        let mut state = self.intake.lock();
        loop {
            if let Some(request) = state.take(self.config.write_threads) {
                let threads = &mut state.own;
                let number = threads.taken;
                threads.taken += 1;
                if request.class == Class::Write {
                    threads.writes_busy += 1;
                }
                let running =
                    Running { class: request.class, deadline: request.deadline, written_off: false };
                threads.running.insert(number, running);
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
        let mut state = self.intake.lock();
        let running = state.own.running.remove(&number).expect("a number from `next`, reported once");
        self.intake.ended(&mut state);
        if running.written_off {
            state.written_off -= 1;
        } else if running.class == Class::Write {
            state.own.writes_busy -= 1;
            // A write that waited for a writer to finish can now be taken by a sleeping thread.
            self.work.notify_one();
        }
        !running.written_off
    }

    /// Ends the engine.
    pub(super) fn close(&self) {
        self.intake.close(|_| {
            self.work.notify_all();
        });
    }
}

impl Watched for Shared {
    fn name(&self) -> &str {
        &self.config.name
    }

    fn watch(&self) -> Found {
        self.intake.watch(|state, now| (vec![None; state.write_off(now)], state.next_deadline()))
    }

    fn expired_ended(&self) {
        self.intake.expired_ended();
    }

    fn replace(self: &Arc<Self>, _: Stuck) -> Result<()> {
        worker::start(self)
    }
}

impl State {
    fn take(&mut self, write_threads: usize) -> Option<Request> {
        let may_write = self.own.writes_busy < write_threads && self.desk.waiting(Class::Write) > 0;
        if may_write
            && (self.desk.waiting(Class::Read) == 0 || self.own.reads_in_a_row >= IO_READS_IN_A_ROW_MAX)
        {
            self.own.reads_in_a_row = 0;
            return self.desk.take(Class::Write);
        }
        let read = self.desk.take(Class::Read);
        self.own.reads_in_a_row = if read.is_some() { self.own.reads_in_a_row + 1 } else { 0 };
        read
    }

    /// Writes off threads that have passed their request's deadline, within the limit. Returns their number.
    fn write_off(&mut self, now: Instant) -> usize {
        let mut count = 0;
        for running in self.own.running.values_mut() {
            let room = self.written_off < IO_WORKERS_WRITTEN_OFF_MAX;
            if room && !running.written_off && running.deadline <= now {
                running.written_off = true;
                self.written_off += 1;
                self.own.writes_busy -= usize::from(running.class == Class::Write);
                count += 1;
            }
        }
        count
    }

    /// Returns the next deadline of requests whose threads can still be written off.
    fn next_deadline(&self) -> Option<Instant> {
        self.own.running.values().filter(|running| !running.written_off).map(|running| running.deadline).min()
    }
}
