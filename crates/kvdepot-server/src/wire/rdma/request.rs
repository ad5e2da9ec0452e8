//! A client's request: values to fetch from its memory (W), or to put there (A).

use std::time::Instant;

use kvdepot_core::{BlockHash, ErrorKind};
use kvdepot_depot::values::{Found, Value, ValueSlot, Values};
use kvdepot_io::SlotBuf;
use kvdepot_verbs::{Flags, Operation, Payload, Remote};
use kvdepot_wire::infini::{RemoteMeta, code, op};

use super::super::counters::Timed;
use super::means::Means;

/// The state of a request.
#[derive(Debug)]
enum State {
    /// W: reserves slots, and waits for space.
    Reserving { slots: Vec<ValueSlot>, until: Instant },
    /// A: waits for tiers.
    Finding { values: Vec<Option<Value>>, asked: usize },
    /// W: READs fill the slots.
    Filling(Vec<ValueSlot>, Progress),
    /// A: WRITEs send the values.
    Sending(Vec<Value>, Progress),
    /// Refused; nothing was begun.
    Refused(i32),
}

/// The progress of posting work requests.
#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    value: usize,
    offset: usize,
    /// Why no more are posted. Those that were posted must still complete before their memory is released (P4).
    failed: Option<i32>,
}

/// What a request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waits {
    /// Nothing, or an event that will be reported.
    No,
    /// Space in the pool or a registration: retry soon.
    Time,
    /// The completion of other requests' work requests.
    Budget,
}

/// The answer to a request, once its turn has come.
#[derive(Debug)]
pub(super) enum Outcome {
    /// A status code.
    Code(i32),
    /// 200, after the posted WRITEs. The leases end when the answer has been taken.
    Sent(Vec<Value>),
}

#[derive(Debug)]
pub(super) struct Request {
    hashes: Vec<BlockHash>,
    addresses: Vec<u64>,
    block_bytes: usize,
    rkey: u32,
    state: State,
    /// Its last work request; 0 = none.
    last: u64,
    /// None: it was not understood.
    _timed: Option<Timed>,
}

impl Request {
    /// Decodes the bytes of a SEND and starts the request: values in the pool are leased, and the others requested by
    /// `ask`.
    pub(super) fn begin(
        bytes: &[u8],
        values: &Values,
        means: &Means<'_>,
        mut ask: impl FnMut(usize, BlockHash),
    ) -> Self {
        let refused = |code| Self {
            hashes: Vec::new(),
            addresses: Vec::new(),
            block_bytes: 0,
            rkey: 0,
            state: State::Refused(code),
            last: 0,
            _timed: None,
        };
        let meta = match RemoteMeta::decode(bytes) {
            Ok(meta) => meta,
            Err(error) => {
                means.counters.failed(error.kind());
                tracing::warn!("a request over RDMA was refused: {error}");
                return refused(code::INVALID);
            }
        };
        let hashes: Vec<BlockHash> = meta.keys.iter().map(|key| Values::hash(key)).collect();
        let is_write = meta.op == op::RDMA_WRITE;
        let timed = means.counters.request(if is_write { "infini_rdma_write" } else { "infini_rdma_read" });
        let state = if is_write {
            State::Reserving { slots: Vec::new(), until: Instant::now() + means.put_wait }
        } else {
            let mut asked = 0;
            let found = hashes.iter().enumerate().map(|(index, &hash)| match values.get_now(hash) {
                Found::Here(value) => Some(value),
                Found::Absent => None,
                Found::Ask => {
                    ask(index, hash);
                    asked += 1;
                    None
                }
            });
            State::Finding { values: found.collect(), asked }
        };
        let (block_bytes, rkey, addresses) = (meta.block_bytes as usize, meta.rkey, meta.addresses);
        Self { hashes, addresses, block_bytes, rkey, state, last: 0, _timed: Some(timed) }
    }

    /// Returns the number of keys that it keeps in memory.
    pub(super) const fn keys(&self) -> usize {
        self.hashes.len()
    }

    /// Handles a tier's answer.
    pub(super) fn found(&mut self, index: usize, value: Option<Value>) {
        if let State::Finding { values, asked } = &mut self.state {
            *asked = asked.saturating_sub(1);
            if let Some(place) = values.get_mut(index) {
                *place = value;
            }
        }
    }

    /// Advances as far as possible, adding work requests to the list.
    pub(super) fn advance(&mut self, values: &Values, means: &mut Means<'_>) -> Waits {
        match &mut self.state {
            State::Reserving { slots, until } => {
                while let Some(&hash) = self.hashes.get(slots.len()) {
                    match values.reserve(hash, self.block_bytes as u64) {
                        Ok(slot) => slots.push(slot),
                        Err(error) if error.kind() == ErrorKind::Busy && Instant::now() < *until => {
                            return Waits::Time;
                        }
                        Err(error) => {
                            means.counters.failed(error.kind());
                            tracing::debug!("values were not stored: {error}");
                            // Nothing was posted into the slots, so they may go immediately.
                            self.state = State::Refused(code::OUT_OF_MEMORY);
                            return Waits::No;
                        }
                    }
                }
                self.state = State::Filling(std::mem::take(slots), Progress::default());
            }
            State::Finding { asked: 1.., .. } => return Waits::No,
            State::Finding { values, .. } => {
                let found: Option<Vec<Value>> = std::mem::take(values).into_iter().collect();
                self.state = match found {
                    None => State::Refused(code::NOT_FOUND),
                    Some(values) if values.iter().any(|value| value.len() > self.block_bytes) => {
                        State::Refused(code::INVALID)
                    }
                    Some(values) => State::Sending(values, Progress::default()),
                };
            }
            _ => {}
        }
        self.post(means)
    }

    fn post(&mut self, means: &mut Means<'_>) -> Waits {
        let target = |index: usize, offset: usize| Remote {
            address: self.addresses[index].wrapping_add(offset as u64),
            rkey: self.rkey,
        };
        match &mut self.state {
            State::Filling(slots, progress) => {
                let each = slots.iter().map(|slot| (slot.memory(), slot.value_bytes()));
                let waits = progress.post(each, means, &mut self.last, |sges, index, offset| {
                    Operation::Read(sges, target(index, offset))
                });
                // The request waits for their completion, so it must be reported.
                means.list.signal_last();
                waits
            }
            State::Sending(values, progress) => {
                let each = values.iter().map(|value| (value.memory(), value.len()));
                progress.post(each, means, &mut self.last, |sges, index, offset| {
                    Operation::Write(Payload::Sges(sges), target(index, offset))
                })
            }
            _ => Waits::No,
        }
    }

    /// Returns the answer when there is one. Called only when all earlier requests are answered. `ended` is the last
    /// completed work request.
    pub(super) fn outcome(&mut self, ended: u64, means: &Means<'_>) -> Option<Outcome> {
        let outcome = match &mut self.state {
            State::Reserving { .. } | State::Finding { .. } => return None,
            State::Refused(code) => Outcome::Code(*code),
            State::Filling(slots, progress) => {
                if ended < self.last || !progress.is_over(slots.len()) {
                    return None;
                }
                let slots = std::mem::take(slots);
                match progress.failed {
                    Some(code) => Outcome::Code(code),
                    // P1: visible now, after the last byte.
                    None => Outcome::Code(publish(slots, means)),
                }
            }
            State::Sending(values, progress) => {
                if !progress.is_over(values.len()) {
                    return None;
                }
                if progress.failed.is_some() && ended < self.last {
                    return None;
                }
                match progress.failed {
                    Some(code) => Outcome::Code(code),
                    None => {
                        let bytes = values.iter().map(|value| value.len() as u64).sum();
                        means.counters.sent_bytes.inc_by(bytes);
                        Outcome::Sent(std::mem::take(values))
                    }
                }
            }
        };
        Some(outcome)
    }
}

fn publish(slots: Vec<ValueSlot>, means: &Means<'_>) -> i32 {
    let mut code = code::FINISH;
    for slot in slots {
        let bytes = slot.value_bytes() as u64;
        match slot.publish() {
            Ok(()) => drop(means.counters.received_bytes.inc_by(bytes)),
            Err(error) => {
                means.counters.failed(error.kind());
                tracing::warn!("a value was not stored: {error}");
                code = code::INTERNAL;
            }
        }
    }
    code
}

impl Progress {
    const fn is_over(&self, values: usize) -> bool {
        self.value == values || self.failed.is_some()
    }

    /// Adds work requests for the rest, as many as may be outstanding.
    fn post<'a>(
        &mut self,
        memories: impl Iterator<Item = (&'a SlotBuf, usize)>,
        means: &mut Means<'_>,
        last: &mut u64,
        operation: impl for<'s> Fn(&'s [kvdepot_verbs::Sge], usize, usize) -> Operation<'s>,
    ) -> Waits {
        if self.failed.is_some() {
            return Waits::No;
        }
        for (memory, bytes) in memories.skip(self.value) {
            while self.offset < bytes {
                if means.room == 0 {
                    return Waits::Budget;
                }
                let reach = means.regions.reach(memory, self.offset, bytes, means.sges_max, means.bytes_max);
                let (sges, taken) = match reach {
                    Ok(Some(reached)) => reached,
                    Ok(None) => return Waits::Time,
                    Err(error) => {
                        means.counters.failed(error.kind());
                        tracing::warn!("values were not moved: {error}");
                        self.failed = Some(code::INTERNAL);
                        return Waits::No;
                    }
                };
                *last = means.next_id();
                means.list.push(*last, operation(&sges, self.value, self.offset), Flags::SILENT);
                self.offset += taken;
            }
            self.value += 1;
            self.offset = 0;
        }
        Waits::No
    }
}
