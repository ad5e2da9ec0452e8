//! One direction of an engine: a stream, and a thread that reports the work that the stream has completed.
//!
//! Loads and dumps have a lane each, so that neither waits for the other, on the device or here. Each lane limits its
//! work on the device, so that an engine's own small copies, which share the copy engines, do not wait for long.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender};
use kvdepot_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use crate::batch::{CopyBatch, CopyOp, Direction, GroupSink};
use crate::cuda::context::{Context, Stream};
use crate::cuda::events::{Event, EventPool};
use crate::cuda::gate::{Amount, Gate};
use crate::cuda::kernel::{Buffer, Buffers, DESCRIPTORS_MAX, TILE_BYTES};
use crate::cuda::mutation::{Mistake, Mutation};
use crate::cuda::plan::{self, PieceLimits, Range};
use crate::cuda::pools::Piece;
use crate::cuda::submit::{Method, Submitter};
use crate::cuda::types::Handle;
use crate::event::DeviceEvent;
use crate::limit::thread_of_an_engine;

/// Largest number of copies of a lane that the copy engine holds at a time: about a millisecond of the shortest ones.
const COPIES_IN_FLIGHT_MAX: usize = 1024;
/// Largest number of calls of a lane that its stream has not completed: half of what a device's queue takes (1,024 or
/// so).
const CALLS_IN_FLIGHT_MAX: usize = 512;
/// Each piece of work is a fraction of what may be in flight, so that one can run while another is reported.
pub(crate) const PIECES_IN_FLIGHT: usize = 4;
/// Largest number of calls before the engine's event is reached. Further ones wait for it here: inside the driver they
/// would block the engine's own calls.
const CALLS_BEFORE_EVENT_MAX: usize = 256;

/// Chooses a method for a group's ranges: `(direction, ranges, decoding)`.
pub(crate) type Choose = Arc<dyn Fn(Direction, &[Range], bool) -> Method + Send + Sync>;

/// State shared by both lanes of an engine.
pub(crate) struct LaneParts {
    pub(crate) context: Arc<Context>,
    pub(crate) submitter: Arc<Submitter>,
    pub(crate) events: Arc<EventPool>,
    pub(crate) choose: Choose,
    pub(crate) mutation: Mutation,
}

/// See the module.
pub(crate) struct Lane {
    direction: Direction,
    parts: Arc<LaneParts>,
    shared: Arc<Shared>,
    piece_bytes_max: usize,
    /// Locked for a complete batch: groups end in the order in which batches began.
    queue: Mutex<Option<Sender<Pending>>>,
    thread: Option<JoinHandle<()>>,
}

/// State shared with the thread.
struct Shared {
    parts: Arc<LaneParts>,
    stream: Stream,
    gate: Gate,
    buffers: Buffers,
}

/// A batch in flight.
struct Batch {
    sink: Arc<dyn GroupSink>,
    /// The first failure. Groups from there on fail.
    failed: Mutex<Option<Error>>,
}

/// What to wait for before a piece's memory is free.
enum After {
    Event(Arc<Event>),
    /// Everything queued, because no event could be made.
    Stream,
    /// Nothing was queued.
    Nothing,
}

/// A piece on the device.
struct Pending {
    batch: Arc<Batch>,
    after: After,
    amount: Option<Amount>,
    buffer: Option<Buffer>,
    failed: Option<Error>,
    /// The group that ends with this piece.
    group: Option<usize>,
}

impl Lane {
    pub(crate) fn start(
        direction: Direction,
        parts: Arc<LaneParts>,
        stream: Stream,
        bytes_in_flight_max: u64,
    ) -> Result<Self> {
        let piece_bytes_max = usize::try_from(bytes_in_flight_max).unwrap_or(usize::MAX) / PIECES_IN_FLIGHT;
        let in_flight_max =
            Amount { bytes: bytes_in_flight_max, copies: COPIES_IN_FLIGHT_MAX, calls: CALLS_IN_FLIGHT_MAX };
        let shared = Arc::new(Shared {
            stream,
            gate: Gate::new(in_flight_max),
            buffers: Buffers::new(&parts.context),
            parts: Arc::clone(&parts),
        });
        let (sender, receiver) = crossbeam_channel::unbounded();
        let for_thread = Arc::clone(&shared);
        let name = if direction == Direction::ToHost { "kvdepot-dumped" } else { "kvdepot-loaded" };
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || for_thread.report_all(&receiver))
            .map_err(|e| Error::io("cannot start a completion thread", e))?;
        let queue = Mutex::new(Some(sender));
        Ok(Self { direction, parts, shared, piece_bytes_max, queue, thread: Some(thread) })
    }

    /// # Safety
    /// As for `CopyEngine::run`.
    pub(crate) unsafe fn run(
        &self,
        batch: &CopyBatch,
        sink: Arc<dyn GroupSink>,
        pieces: &[Piece],
    ) -> Result<()> {
        let queue = self.queue.lock();
        let closed = || Error::new(ErrorKind::Closed, "the copy engine is shutting down");
        let queue = queue.as_ref().ok_or_else(closed)?;
        let _entered = self.parts.context.enter()?;
        if batch.wait_event != 0 && !self.parts.mutation.is(Mistake::SkipComputeWait) {
            self.shared.stream.wait_event(batch.wait_event as Handle)?;
        }
        let under_way = Arc::new(Batch { sink, failed: Mutex::default() });
        let mut failed: Option<Error> = None;
        let mut early = Early { calls: 0, is_over: false };
        for group in 0..batch.ends.len() {
            if let Some(error) = &failed {
                let failed = Some(error.clone());
                let batch = Arc::clone(&under_way);
                let pending = Pending {
                    batch,
                    after: After::Nothing,
                    amount: None,
                    buffer: None,
                    failed,
                    group: Some(group),
                };
                let _ = queue.send(pending);
                continue;
            }
            // SAFETY: the caller's contract.
            let submitted = unsafe { self.submit_group(batch, group, &under_way, pieces, queue, &mut early) };
            if !self.parts.mutation.is(Mistake::GoOnAfterFailure) {
                failed = submitted.err();
            }
        }
        Ok(())
    }

    /// Queues a group piece by piece. The piece that ends it, or that fails, carries its report.
    ///
    /// # Safety
    /// As for `CopyEngine::run`.
    unsafe fn submit_group(
        &self,
        batch: &CopyBatch,
        group: usize,
        under_way: &Arc<Batch>,
        registered: &[Piece],
        queue: &Sender<Pending>,
        early: &mut Early,
    ) -> Result<()> {
        let ranges = plan::split(&self.merge(batch.group(group)), registered);
        let method = (self.parts.choose)(self.direction, &ranges, batch.decoding);
        let mut pieces = plan::pieces(&ranges, &self.limits(method, &ranges));
        let event = if early.is_too_much(method, &ranges) { self.wait_on_host() } else { Ok(()) };
        if pieces.is_empty() {
            // An empty group has an event too: waiting for it means waiting for everything before it.
            pieces.push(Vec::new());
        }
        let last = pieces.len() - 1;
        for (index, piece) in pieces.iter().enumerate() {
            let amount = method.amount(piece);
            self.shared.enter_gate(amount);
            // The gate, the event, and earlier driver calls may have taken long.
            let (outcome, after, buffer) = match event.clone().and_then(|()| batch.check_deadline()) {
                // SAFETY: the caller's contract.
                Ok(()) => unsafe { self.submit_piece(method, piece, batch.decoding) },
                Err(late) => (Err(late), After::Nothing, None),
            };
            let ends = index == last || outcome.is_err();
            if let (Direction::ToDevice, true, Ok(()), After::Event(event)) =
                (self.direction, ends, &outcome, &after)
            {
                under_way.sink.group_submitted(group, DeviceEvent::new(Arc::clone(event) as _));
            }
            let pending = Pending {
                batch: Arc::clone(under_way),
                after,
                amount: Some(amount),
                buffer,
                failed: outcome.as_ref().err().cloned(),
                group: ends.then_some(group),
            };
            // The thread ends only after the sender was dropped.
            let _ = queue.send(pending);
            outcome?;
        }
        Ok(())
    }

    /// # Safety
    /// As for `CopyEngine::run`.
    unsafe fn submit_piece(
        &self,
        method: Method,
        piece: &[Range],
        decoding: bool,
    ) -> (Result<()>, After, Option<Buffer>) {
        let mut buffer = None;
        if method == Method::Kernel && !piece.is_empty() {
            match self.shared.buffers.take() {
                Ok(taken) => buffer = Some(taken),
                Err(error) => return (Err(error), After::Nothing, None),
            }
        }
        let (stream, submitter) = (&self.shared.stream, &self.parts.submitter);
        // SAFETY: the caller's contract; the buffer is kept until the stream has completed this piece.
        let submitted =
            unsafe { submitter.submit(method, self.direction, stream, piece, buffer.as_mut(), decoding) };
        if self.parts.mutation.is(Mistake::ReuseDescriptors)
            && let Some(buffer) = buffer.take()
        {
            self.shared.buffers.give_back(buffer);
        }
        let recorded = self.parts.events.take().and_then(|event| {
            if !self.parts.mutation.is(Mistake::SkipGroupRecord) {
                event.record(stream)?;
            }
            Ok(event)
        });
        match recorded {
            Ok(event) => (submitted, After::Event(event), buffer),
            Err(error) => (submitted.and(Err(error)), After::Stream, buffer),
        }
    }

    /// Returns the limits of a piece of these ranges.
    fn limits(&self, method: Method, ranges: &[Range]) -> PieceLimits {
        let each_is_a_call = ranges.iter().any(|range| method.is_plain(range));
        let ranges = match method {
            _ if each_is_a_call => CALLS_IN_FLIGHT_MAX / PIECES_IN_FLIGHT,
            Method::Kernel => usize::MAX,
            Method::Memcpy | Method::Batch => COPIES_IN_FLIGHT_MAX / PIECES_IN_FLIGHT,
        };
        PieceLimits { bytes: self.piece_bytes_max, ranges, tiles: DESCRIPTORS_MAX, tile_bytes: TILE_BYTES }
    }

    /// Waits on the host until the stream has reached the event of this batch and those of earlier ones.
    fn wait_on_host(&self) -> Result<()> {
        let event = self.parts.events.take()?;
        event.record(&self.shared.stream)?;
        event.synchronize()
    }

    fn merge(&self, ops: &[CopyOp]) -> Vec<Range> {
        // Allocations looked up, by their start; engines have few.
        let mut known: BTreeMap<u64, u64> = BTreeMap::new();
        plan::merge(ops, |address| {
            let found = known.range(..=address).next_back().map(|(_, &end)| end);
            if let Some(end) = found.filter(|&end| address < end) {
                return Some(end);
            }
            let (start, end) = self.allocation(address)?;
            known.insert(start, end);
            Some(end)
        })
    }

    fn allocation(&self, address: u64) -> Option<(u64, u64)> {
        let (mut base, mut len) = (0, 0);
        let table = self.parts.context.table();
        // SAFETY: the pointers live during the call.
        let code = unsafe { (table.mem_get_address_range)(&raw mut base, &raw mut len, address) };
        (code == 0).then_some((base, base + len as u64))
    }

    /// Returns the largest number of bytes that were submitted to the device and not yet reported.
    pub(crate) fn bytes_in_flight_most(&self) -> u64 {
        self.shared.gate.bytes_most()
    }
}

/// The driver calls of a batch before its event is reached.
struct Early {
    calls: usize,
    is_over: bool,
}

impl Early {
    /// Returns whether to wait for the event before these ranges. A call with memory that is not registered waits for
    /// it inside the driver; other calls do when there are more of them than a device's queue takes.
    fn is_too_much(&mut self, method: Method, ranges: &[Range]) -> bool {
        if self.is_over {
            return false;
        }
        self.calls += method.amount(ranges).calls;
        self.is_over =
            self.calls > CALLS_BEFORE_EVENT_MAX || ranges.iter().any(|range| range.mapped.is_none());
        self.is_over
    }
}

impl Shared {
    fn enter_gate(&self, amount: Amount) {
        if self.parts.mutation.is(Mistake::IgnoreBudget) {
            self.gate.count(amount)
        } else {
            self.gate.enter(amount)
        }
    }

    /// The thread: reports groups in order until the lane is dropped and everything has completed.
    fn report_all(&self, queue: &Receiver<Pending>) {
        thread_of_an_engine();
        let entered = self.parts.context.enter();
        for pending in queue {
            let outcome = entered.as_ref().map_err(Clone::clone).and_then(|_| self.wait(&pending.after));
            if let Some(buffer) = pending.buffer {
                self.buffers.give_back(buffer);
            }
            if let Some(amount) = pending.amount {
                self.gate.leave(amount);
            }
            let mut failed = pending.batch.failed.lock();
            if failed.is_none() {
                *failed = pending.failed.or(outcome.err());
            }
            let outcome = failed.clone().map_or(Ok(()), Err);
            if self.parts.mutation.is(Mistake::GoOnAfterFailure) {
                *failed = None;
            }
            drop(failed);
            if let Some(group) = pending.group {
                pending.batch.sink.group_ended(group, outcome);
            }
        }
    }

    /// Waits until nothing touches a piece's memory any more. If even the stream cannot be waited for, the context is
    /// lost, and with it everything queued.
    fn wait(&self, after: &After) -> Result<()> {
        if self.parts.mutation.is(Mistake::ReportAtOnce) {
            return Ok(());
        }
        match after {
            After::Nothing => Ok(()),
            After::Stream => self.stream.synchronize(),
            After::Event(event) => event.synchronize().inspect_err(|_| {
                let _ = self.stream.synchronize();
            }),
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        *self.queue.get_mut() = None;
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}
