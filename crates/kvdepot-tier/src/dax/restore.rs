//! Reads: a batch is reserved, planned and copied wave by wave. A block's reader is notified when the last piece of the
//! block has ended, however it ended. So nobody uses its memory any more when it is given back (P4), even if another
//! piece failed or the tier closes.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use kvdepot_core::{BlockKey, Error, ErrorKind, Result};
use kvdepot_io::mapped::{Piece, combined};
use kvdepot_io::{Call, Class, IoEngine, Op, Request, SlotBuf};
use parking_lot::Mutex;

use super::clock::Waits;
use super::later::later;
use super::leases::wrong_checksum;
use super::plan::{Limits, Region, Run, Span, Wave, plan};
use super::slots::Found;
use super::state::{Shared, small_slot};
use crate::{Fetched, ReadItem};

/// Blocks looked up while the lock is held once.
const PIECE: usize = 256;

/// A block that is to be found.
pub(super) struct Wanted {
    pub(super) key: BlockKey,
    /// Bytes that it is to be read into.
    pub(super) slot_bytes: usize,
    /// Whether it counts as used.
    pub(super) is_use: bool,
}

/// The state of a block's pieces.
struct Parts {
    /// Bytes whose pieces have not ended.
    left: usize,
    /// Offset, length and checksum of each piece; none for a piece of a block that is trusted.
    sums: Vec<(usize, usize, Option<u64>)>,
    error: Option<Error>,
    read: Option<ReadItem>,
}

struct Item {
    key: BlockKey,
    found: Found,
    parts: Mutex<Parts>,
}

/// A batch that is being read.
pub(super) struct Restore {
    shared: Arc<Shared>,
    engine: Weak<dyn IoEngine>,
    items: Vec<Item>,
    waves: Mutex<VecDeque<Wave>>,
    /// Regions of the current wave that have not ended.
    running: AtomicUsize,
    deadline: Instant,
}

impl Shared {
    /// Begins a batch of reads. What cannot be read ends here.
    pub(super) fn begin_reads(
        self: &Arc<Self>,
        engine: &Arc<dyn IoEngine>,
        reads: Vec<ReadItem>,
        deadline: Instant,
    ) {
        if deadline <= Instant::now() {
            let late = Request::expired();
            return reads.into_iter().for_each(|read| read.end(Err(late.clone())));
        }
        let (mut items, mut spans, mut wrong) = (Vec::new(), Vec::new(), Vec::new());
        let wanted =
            |read: &ReadItem| Wanted { key: read.key, slot_bytes: read.dst.len(), is_use: read.is_use };
        for (read, found) in self.find_each(reads, wanted, &mut wrong) {
            match found {
                Ok(Some(found)) => {
                    let bytes = found.header.bytes as usize;
                    let at = self.geometry.payload_at(found.unit);
                    spans.push(Span { item: items.len(), at, from: 0, bytes });
                    let key = read.key;
                    let parts = Parts { left: bytes, sums: Vec::new(), error: None, read: Some(read) };
                    items.push(Item { key, found, parts: Mutex::new(parts) });
                }
                Ok(None) => read.end(Ok(Fetched::Miss)),
                Err(error) => read.end(Err(error)),
            }
        }
        if !wrong.is_empty() {
            self.clear_wrong(&**engine, wrong);
        }
        if items.is_empty() {
            return;
        }
        let regions = match self.config.restore_max_regions {
            0 => self.config.restore_workers,
            most => most,
        };
        let wave_bytes = usize::try_from(self.config.retrieve_staging_slab_bytes).unwrap_or(usize::MAX);
        let waves = Mutex::new(plan(spans, Limits { regions, wave_bytes }).into());
        let (shared, engine) = (Arc::clone(self), Arc::downgrade(engine));
        let running = AtomicUsize::new(0);
        let restore = Arc::new(Restore { shared, engine, items, waves, running, deadline });
        self.clock.watch(&restore);
        restore.next_wave();
    }

    /// Finds and pins the blocks of a batch. Those that cannot be right are added to `wrong`. The lock is held for a part of
    /// the batch at a time.
    pub(super) fn find_each<T>(
        &self,
        items: Vec<T>,
        wanted: impl Fn(&T) -> Wanted,
        wrong: &mut Vec<u32>,
    ) -> Vec<(T, Result<Option<Found>>)> {
        let mut found: Vec<Result<Option<Found>>> = Vec::with_capacity(items.len());
        for some in items.chunks(PIECE) {
            let is_ours = !self.owner.is_lost();
            let mut state = self.lock();
            found.extend(some.iter().map(
                |item| {
                    if is_ours { state.find(&wanted(item), wrong) } else { Ok(None) }
                },
            ));
        }
        items.into_iter().zip(found).collect()
    }

    /// Makes sure that blocks which cannot be right are not served again.
    pub(super) fn clear_wrong(self: &Arc<Self>, engine: &dyn IoEngine, units: Vec<u32>) {
        let shared = Arc::clone(self);
        later(engine, move |begun| {
            match begun {
                Ok(()) => drop(shared.clear_slots(&units)),
                Err(error) => shared.put_off(&units, &error),
            }
            shared.deliver_events();
        });
    }
}

impl super::state::State {
    /// Finds and pins a block that is to be read into this many bytes. One that cannot be right is taken out and added
    /// to `wrong`.
    fn find(&mut self, wanted: &Wanted, wrong: &mut Vec<u32>) -> Result<Option<Found>> {
        let Wanted { key, slot_bytes, is_use } = wanted;
        let Some(space) = self.spaces.get(&key.namespace) else { return Ok(None) };
        let block_bytes = space.spec.layout().block_bytes();
        if (*slot_bytes as u64) < block_bytes {
            return Err(small_slot(*slot_bytes, block_bytes));
        }
        let Some(found) = self.slots.pin(key, *is_use) else { return Ok(None) };
        if u64::from(found.header.bytes) == block_bytes {
            return Ok(Some(found));
        }
        // A namespace's id determines its layout, so no writer of ours can have written it.
        self.slots.unpin(found.unit);
        self.note_lost(*key);
        wrong.extend(self.slots.take_out(key));
        Err(Error::new(ErrorKind::Corrupt, "a block on a medium has another length than its namespace says")
            .with("key", key)
            .with("block_bytes", found.header.bytes)
            .with("block_bytes_expected", block_bytes))
    }
}

impl Restore {
    /// Hands the next wave to the workers, and not earlier: another batch's wave may come in between, so that one long
    /// restore does not hold up the others.
    fn next_wave(self: Arc<Self>) {
        let Some(wave) = self.waves.lock().pop_front() else { return };
        self.running.store(wave.len(), Ordering::Release);
        let requests = wave.into_iter().map(|region| {
            let restore = Arc::clone(&self);
            let run = Box::new(move |begun| restore.run(&region, begun));
            Request { class: Class::Read, deadline: self.deadline, op: Op::Call(Call { run }) }
        });
        let requests: Vec<Request> = requests.collect();
        match self.engine.upgrade() {
            Some(engine) => engine.submit(requests),
            None => requests.into_iter().for_each(|request| request.fail(Request::closed())),
        }
    }

    /// Copies a region, on a worker, or ends it with the reason why it cannot be copied.
    fn run(self: Arc<Self>, region: &Region, begun: Result<()>) {
        match begun {
            Ok(()) => {
                for run in region {
                    match self.over() {
                        None => self.copy(run),
                        Some(error) => self.fail(std::slice::from_ref(run), &error),
                    }
                }
            }
            Err(error) => {
                self.fail(region, &error);
                // Later waves would hit the same error, one after another.
                self.give_up(&error);
            }
        }
        // Acquire and release: the last worker sees everything that the others did.
        if self.running.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.next_wave();
        }
    }

    /// Why nothing more is to be copied, if so.
    fn over(&self) -> Option<Error> {
        if self.shared.clock.is_stopping() {
            return Some(Request::closed());
        }
        (self.deadline <= Instant::now()).then(Request::expired)
    }

    fn fail(&self, region: &[Run], error: &Error) {
        let spans = region.iter().flat_map(|run| &run.spans);
        spans.for_each(|span| self.ended(span, Err(error.clone())));
    }

    /// Copies a run. If that fails, copies each of its pieces separately: one bad piece must not cost the pieces of
    /// other blocks.
    fn copy(&self, run: &Run) {
        let sums = self.copy_spans(&run.spans);
        for (number, span) in run.spans.iter().enumerate() {
            let sum = match &sums {
                Ok(sums) => Ok(sums[number]),
                Err(error) if run.spans.len() == 1 => Err(error.clone()),
                Err(_) => match self.over() {
                    None => self.copy_spans(std::slice::from_ref(span)).map(|sums| sums[0]),
                    Some(error) => Err(error),
                },
            };
            self.ended(span, sum);
        }
    }

    /// Copies contiguous pieces and returns the checksum of each, unless all of their blocks are trusted. After an error
    /// nothing copied may be trusted.
    fn copy_spans(&self, spans: &[Span]) -> Result<Vec<Option<u64>>> {
        let slot = |span: &Span| {
            let parts = self.items[span.item].parts.lock();
            parts.read.as_ref().expect("a block is told after its last piece").dst.clone()
        };
        // Dropped at the end, before anybody is notified that the memory is free.
        let slots: Vec<SlotBuf> = spans.iter().map(slot).collect();
        let mut sums = Vec::with_capacity(spans.len());
        if let Some(first) = spans.first() {
            let of = |(span, slot)| piece(span, slot);
            let pieces: Vec<Piece<'_>> = spans.iter().zip(&slots).map(of).collect();
            let trusted = spans.iter().all(|span| self.shared.trusts(&self.items[span.item].found));
            self.shared.medium.read_pieces(first.at, &pieces, (!trusted).then_some(&mut sums))?;
            self.shared.check_owner()?;
        }
        let mut sums = sums.into_iter();
        Ok(spans.iter().map(|_| sums.next()).collect())
    }

    /// Notes the end of a piece; the last piece of a block ends the block.
    fn ended(&self, span: &Span, outcome: Result<Option<u64>>) {
        let item = &self.items[span.item];
        let read = {
            let mut parts = item.parts.lock();
            parts.left -= span.bytes;
            match outcome {
                Ok(sum) => parts.sums.push((span.from, span.bytes, sum)),
                Err(error) => drop(parts.error.get_or_insert(error)),
            }
            if parts.left > 0 {
                return;
            }
            parts.read.take()
        };
        let outcome = item.outcome();
        if outcome.as_ref().is_err_and(|error| error.kind() == ErrorKind::Corrupt) {
            self.shared.put_aside(item.key, item.found);
        }
        let mut state = self.shared.lock();
        if outcome.is_ok() {
            state.slots.checked(item.found.unit);
        }
        state.slots.unpin(item.found.unit);
        drop(state);
        if let Some(read) = read {
            read.end(outcome);
        }
        self.shared.deliver_events();
    }
}

impl Waits for Restore {
    /// Ends reads that are not in a queue yet. Those that workers are copying end on their own (P4).
    fn give_up(&self, error: &Error) {
        let rest = std::mem::take(&mut *self.waves.lock());
        rest.iter().flatten().for_each(|region| self.fail(region, error));
    }

    fn deadline(&self) -> Instant {
        self.deadline
    }

    fn has_waves(&self, count: usize) -> bool {
        self.waves.lock().len() >= count
    }
}

fn piece<'a>(span: &Span, slot: &'a SlotBuf) -> Piece<'a> {
    Piece { slot, from: span.from, bytes: span.bytes }
}

impl Item {
    fn outcome(&self) -> Result<Fetched> {
        let mut parts = self.parts.lock();
        if let Some(error) = parts.error.take() {
            return Err(error.with("key", self.key));
        }
        parts.sums.sort_unstable();
        let sums = parts.sums.iter().map(|(_, bytes, sum)| sum.map(|sum| (*bytes as u64, sum)));
        // Pieces without a checksum are those of a trusted block.
        let Some(sums) = sums.collect::<Option<Vec<(u64, u64)>>>() else { return Ok(Fetched::Whole) };
        let whole = sums
            .into_iter()
            .reduce(|(before, sum), (bytes, next)| (before + bytes, combined(sum, next, bytes)));
        if whole.is_some_and(|(_, sum)| sum == self.found.header.checksum) {
            return Ok(Fetched::Whole);
        }
        Err(wrong_checksum(self.found.unit).with("key", self.key))
    }
}

impl Shared {
    /// Returns whether a block is used without comparing its checksum.
    pub(super) const fn trusts(&self, found: &Found) -> bool {
        self.config.verify_first_read_only && found.is_checked
    }

    /// Makes sure that a corrupt block is not served again, unless another one has taken its place.
    pub(super) fn put_aside(&self, key: BlockKey, found: Found) {
        let unit = {
            let mut state = self.lock();
            let now = state.slots.pin(&key, false);
            if let Some(now) = now {
                state.slots.unpin(now.unit);
            }
            if !now.is_some_and(|now| now.is_same(&found)) {
                return;
            }
            state.note_lost(key);
            state.slots.take_out(&key)
        };
        if let Some(unit) = unit
            && let Some(error) = self.clear_slots(&[unit]).into_iter().find_map(Result::err)
        {
            tracing::warn!(%error, %key, "a corrupt block's header is still on the medium");
        }
    }
}
