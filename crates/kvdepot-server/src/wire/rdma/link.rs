//! A client's connection: its queue pair, and its requests from arrival to answer.
//!
//! Answers carry no id: the client matches them by order. So every request is answered, whatever its outcome, and in
//! the order of arrival, while the bytes of several requests move side by side.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kvdepot_core::{BlockHash, Error, ErrorKind, Result};
use kvdepot_depot::values::{Value, Values};
use kvdepot_verbs::{Flags, Operation, Payload, Qp, SendList};
use kvdepot_wire::infini::code;
use tokio::sync::Notify;

use super::means::Means;
use super::request::{Outcome, Request, Waits};

/// Limit of a client's unanswered requests. Its own library uses up to 128.
const REQUESTS_MAX: usize = 1024;
/// Limit of the keys of all of a client's unanswered requests.
const KEYS_MAX: usize = 1 << 20;
/// How long an ending connection waits for the completion of its work requests.
const ENDING_MAX: Duration = Duration::from_secs(1);
/// The id of the marker, the work request after the last one.
const MARKER: u64 = (1 << 63) - 1;

/// The phase of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Open,
    /// Stopped: waits until the device has completed every work request.
    Ending {
        until: Instant,
    },
    Ended,
}

/// A connection. Dropping it destroys its queue pair first, so that no bytes move any more when slots and leases are
/// returned (P4): keep `qp` the first field.
#[derive(Debug)]
pub(super) struct Link {
    qp: Qp,
    serial: u64,
    /// The generation of the inbox of its receives.
    generation: u32,
    /// Whether a completion has returned the receive for the message in progress when the queue pair failed.
    gave_back: bool,
    values: Values,
    requests: VecDeque<Request>,
    /// Number of the first queued request.
    first: u64,
    keys: usize,
    /// Values leased until the work request of this number has completed.
    sent: VecDeque<(u64, Vec<Value>)>,
    posted: u64,
    ended: u64,
    /// When something completed, or was posted with nothing else outstanding.
    moved: Instant,
    phase: Phase,
    /// Notifies the TCP connection that this one is over: its peer may have no other way to know.
    over: Arc<Notify>,
    _counted: Counted,
}

/// Counts a link for as long as it lives.
#[derive(Debug)]
pub(super) struct Counted(Arc<AtomicUsize>);

impl Counted {
    /// Counts one more. Returns `None` if there are `max` already.
    pub(super) fn one_of(max: usize, links: &Arc<AtomicUsize>) -> Option<Self> {
        let counted = Self(Arc::clone(links));
        (links.fetch_add(1, Ordering::AcqRel) < max).then_some(counted)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Link {
    pub(super) fn new(
        serial: u64,
        qp: Qp,
        generation: u32,
        values: Values,
        over: Arc<Notify>,
        counted: Counted,
    ) -> Self {
        Self {
            qp,
            serial,
            generation,
            gave_back: false,
            values,
            requests: VecDeque::new(),
            first: 0,
            keys: 0,
            sent: VecDeque::new(),
            posted: 0,
            ended: 0,
            moved: Instant::now(),
            phase: Phase::Open,
            over,
            _counted: counted,
        }
    }

    pub(super) const fn serial(&self) -> u64 {
        self.serial
    }

    /// Returns the generation of the inbox of its receives.
    pub(super) const fn generation(&self) -> u32 {
        self.generation
    }

    /// Notes that a failed completion has returned a receive.
    pub(super) const fn set_gave_back(&mut self) {
        self.gave_back = true;
    }

    /// Returns whether it may have taken a receive with it that no completion names.
    pub(super) const fn may_hold_receive(&self) -> bool {
        !self.gave_back
    }

    pub(super) fn qp_number(&self) -> u32 {
        self.qp.number()
    }

    pub(super) const fn values(&self) -> &Values {
        &self.values
    }

    /// Returns the number of work requests not known to be complete.
    pub(super) const fn outstanding(&self) -> u32 {
        (self.posted - self.ended) as u32
    }

    pub(super) fn is_open(&self) -> bool {
        self.phase == Phase::Open
    }

    /// Handles a received request. `ask` requests a value from a tier: number of the request, index of the key, and its
    /// hash.
    pub(super) fn receive(
        &mut self,
        bytes: &[u8],
        means: &Means<'_>,
        mut ask: impl FnMut(u64, usize, BlockHash),
    ) -> Result<()> {
        let number = self.first + self.requests.len() as u64;
        let request = Request::begin(bytes, &self.values, means, |index, hash| ask(number, index, hash));
        self.keys += request.keys();
        self.requests.push_back(request);
        if self.requests.len() > REQUESTS_MAX || self.keys > KEYS_MAX {
            return Err(Error::new(
                ErrorKind::Protocol,
                "the client has more unanswered requests than allowed",
            )
            .with("requests", self.requests.len())
            .with("keys", self.keys));
        }
        Ok(())
    }

    /// Handles a tier's answer.
    pub(super) fn found(&mut self, request: u64, index: usize, value: Option<Value>) {
        let place = request.checked_sub(self.first).and_then(|place| usize::try_from(place).ok());
        if let Some(request) = place.and_then(|place| self.requests.get_mut(place)) {
            request.found(index, value);
        }
    }

    /// Advances all requests as far as possible, and answers those at the head of the queue. `room` limits the number
    /// of added work requests.
    pub(super) fn pump(&mut self, means: &mut Means<'_>) -> Result<Waits> {
        means.list.clear();
        means.last_id = self.posted;
        let mut waits = Waits::No;
        for request in &mut self.requests {
            match request.advance(&self.values, means) {
                Waits::No => {}
                // Later requests would only take the resources that this one waits for.
                Waits::Budget => {
                    waits = Waits::Budget;
                    break;
                }
                Waits::Time => waits = Waits::Time,
            }
        }
        while let Some(request) = self.requests.front_mut() {
            if means.room == 0 {
                waits = Waits::Budget;
                break;
            }
            let Some(outcome) = request.outcome(self.ended, means) else { break };
            let code = match &outcome {
                Outcome::Code(code) => *code,
                Outcome::Sent(_) => code::FINISH,
            };
            let id = means.next_id();
            // Four bytes in the client's byte order.
            means.list.push(id, Operation::SendImm(Payload::Sges(&[]), code.to_le_bytes()), Flags::SIGNALED);
            if let Outcome::Sent(values) = outcome {
                self.sent.push_back((id, values));
            }
            let answered = self.requests.pop_front();
            self.keys -= answered.map_or(0, |request| request.keys());
            self.first += 1;
        }
        if means.list.is_empty() {
            return Ok(waits);
        }
        // Its completion frees the places of all work requests before it.
        means.list.signal_last();
        if self.outstanding() == 0 {
            self.moved = Instant::now();
        }
        // Set before posting: requests may be in flight even if the call fails.
        self.posted = means.last_id;
        self.qp.post_send(means.list)?;
        Ok(waits)
    }

    /// Notes that a work request has completed, and with it all before it. Returns their number.
    pub(super) fn ended(&mut self, id: u64) -> u32 {
        if id == MARKER {
            self.phase = Phase::Ended;
            return 0;
        }
        let count = id.saturating_sub(self.ended).min(self.posted - self.ended) as u32;
        self.ended += u64::from(count);
        self.moved = Instant::now();
        while self.sent.front().is_some_and(|(last, _)| *last <= self.ended) {
            self.sent.pop_front();
        }
        count
    }

    /// Returns whether a completion's id is that of the marker.
    pub(super) const fn is_marker(id: u64) -> bool {
        id == MARKER
    }

    /// Returns whether the peer has stalled for that long.
    pub(super) fn is_stalled(&self, now: Instant, patience: Duration) -> bool {
        self.is_open() && self.outstanding() > 0 && now.saturating_duration_since(self.moved) > patience
    }

    /// Stops the queue pair; no more work is done for the client. Slots and leases stay until the link is dropped.
    pub(super) fn end(&mut self, list: &mut SendList) {
        if !self.is_open() {
            return;
        }
        self.over.notify_one();
        self.phase = Phase::Ending { until: Instant::now() + ENDING_MAX };
        list.clear();
        list.push(MARKER, Operation::Send(Payload::Sges(&[])), Flags::SIGNALED);
        let stopped = self.qp.stop().and_then(|()| Ok(self.qp.post_send(list)?));
        if let Err(error) = stopped {
            tracing::debug!("a queue pair is destroyed without being stopped: {error}");
            self.phase = Phase::Ended;
        }
    }

    /// Returns whether it may be dropped: all its work requests have completed, or the device was silent for too long.
    pub(super) fn is_over(&self, now: Instant) -> bool {
        match self.phase {
            Phase::Open => false,
            Phase::Ending { until } => now >= until,
            Phase::Ended => true,
        }
    }
}
