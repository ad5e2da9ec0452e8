//! Admission of an engine's requests: which ones wait, expire or are refused. No clock, no lock, no threads.

use std::collections::VecDeque;
use std::time::Instant;

use kvdepot_core::Error;

use crate::engine::{Class, EngineStats, Request};

/// Two queues and the count of running requests. A request is either queued or handed out once, so it completes exactly
/// once (P2).
#[derive(Debug)]
pub(crate) struct Desk {
    queue_depth: usize,
    reads: VecDeque<Request>,
    writes: VecDeque<Request>,
    running: usize,
    /// Expired requests that were handed out to be failed.
    expiring: usize,
    closed: bool,
    stats: EngineStats,
}

impl Desk {
    pub(crate) fn new(queue_depth: usize) -> Self {
        let (reads, writes, stats) = (VecDeque::new(), VecDeque::new(), EngineStats::default());
        Self { queue_depth, reads, writes, running: 0, expiring: 0, closed: false, stats }
    }

    const fn queue(&mut self, class: Class) -> &mut VecDeque<Request> {
        match class {
            Class::Read => &mut self.reads,
            Class::Write => &mut self.writes,
        }
    }

    pub(crate) fn waiting(&self, class: Class) -> usize {
        match class {
            Class::Read => self.reads.len(),
            Class::Write => self.writes.len(),
        }
    }

    /// Queues a request, or returns it with the reason for its refusal.
    pub(crate) fn admit(&mut self, request: Request, now: Instant) -> Option<(Request, Error)> {
        if self.closed {
            return Some((request, Request::closed()));
        }
        if request.deadline <= now {
            self.stats.expired += 1;
            return Some((request, Request::expired()));
        }
        let depth = self.queue_depth;
        if self.waiting(request.class) >= depth {
            self.stats.refused += 1;
            return Some((request, Request::refused(depth)));
        }
        let class = request.class;
        self.queue(class).push_back(request);
        None
    }

    /// Hands out the oldest request of a class.
    pub(crate) fn take(&mut self, class: Class) -> Option<Request> {
        let taken = self.queue(class).pop_front();
        self.running += usize::from(taken.is_some());
        taken
    }

    /// Notes that a request handed out by `take` has completed.
    pub(crate) const fn ended(&mut self) {
        self.running -= 1;
        self.stats.ended += 1;
    }

    /// Hands out the requests that had not begun by their deadline, to be failed before `expired_ended` is called.
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<Request> {
        let mut late = Vec::new();
        for queue in [&mut self.reads, &mut self.writes] {
            if queue.iter().any(|request| request.deadline <= now) {
                let (expired, kept): (Vec<_>, Vec<_>) =
                    queue.drain(..).partition(|request| request.deadline <= now);
                late.extend(expired);
                *queue = kept.into();
            }
        }
        self.stats.expired += late.len() as u64;
        self.expiring = late.len();
        late
    }

    pub(crate) const fn expired_ended(&mut self) {
        self.expiring = 0;
    }

    /// Refuses all requests from now on and hands out those that had not begun.
    pub(crate) fn close(&mut self) -> Vec<Request> {
        self.closed = true;
        self.reads.drain(..).chain(self.writes.drain(..)).collect()
    }

    pub(crate) const fn is_closed(&self) -> bool {
        self.closed
    }

    /// Returns the earliest deadline of the queued requests.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.reads.iter().chain(&self.writes).map(|request| request.deadline).min()
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.reads.is_empty() && self.writes.is_empty() && self.running == 0 && self.expiring == 0
    }

    pub(crate) fn stats(&self) -> EngineStats {
        EngineStats {
            reads_queued: self.reads.len(),
            writes_queued: self.writes.len(),
            running: self.running,
            ..self.stats
        }
    }
}
