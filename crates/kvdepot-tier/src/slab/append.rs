//! The append thread writes groups of waiting blocks, the ends of segments, and the blocks that outlive their segment.
//! The sync thread syncs, so that the next group can be written meanwhile.

use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvdepot_core::{BlockKey, Error, ErrorKind, Result};
use kvdepot_io::{AlignedBuf, IoBuf, Request, SlotBuf};

use super::codec::{PAGE, size};
use super::group::{ENTRIES_MAX, Entry};
use super::index::{Known, Place};
use super::log::{Group, Log};
use super::medium::pages;
use super::recycle;
use super::state::{Answers, Appended, PIECE, Record, Shared, State};
use super::syncs::Mark;
use crate::{Written, format};

/// The most bytes of records in a group; a single record may exceed it.
const GROUP_BYTES_MAX: u64 = 16 << 20;
/// The most groups waiting for a sync: the memory of their blocks is already free, but nobody has been notified.
const UNSYNCED_MAX: usize = 8;
/// Consecutive failed writes after which a segment is left as it is and the next one is tried.
const FAILURES_MAX: u32 = 3;

/// How long removals wait after a failed write.
const RETRY: Duration = Duration::from_secs(1);

/// The next step of the append thread.
enum Step {
    /// Write this batch: removals first.
    Write(Batch),
    /// The open segment is full, or a part of it could not be synced.
    Roll,
    /// The segment is new: its first groups must be written.
    Begin,
    /// Nothing is left, and nothing more will come.
    Stop,
}

/// The contents of a group.
#[derive(Default)]
struct Batch {
    removals: Vec<BlockKey>,
    records: Vec<Record>,
}

impl Batch {
    const fn len(&self) -> usize {
        self.removals.len() + self.records.len()
    }
}

/// A block that was written again: its old and its new place.
type Moved = (BlockKey, Known, Place);

/// The append thread.
pub(super) fn run(shared: &Shared, mut log: Log) {
    // A medium that accepts no blocks costs one segment, not one after another.
    let (mut failures, mut passed_over) = (0, false);
    // From before the first group of the open segment that this tier writes.
    let mut began = shared.medium.mark();
    loop {
        match shared.next_step(&mut log) {
            Step::Write(batch) => {
                let has_records = !batch.records.is_empty();
                if shared.write_batch(&mut log, batch) {
                    failures = 0;
                    passed_over &= !has_records;
                } else {
                    failures += 1;
                    shared.pause();
                }
                if failures >= FAILURES_MAX && !passed_over {
                    (failures, passed_over) = (0, true);
                    shared.roll(&mut log, began);
                }
            }
            Step::Roll => shared.roll(&mut log, began),
            Step::Begin => {
                began = shared.medium.mark();
                if let Err(error) = shared.begin_segment(&mut log, began) {
                    tracing::warn!(%error, "a segment cannot be started: waiting writes fail, and nothing is evicted");
                    log.restart();
                    shared.fail_pending(&error);
                    shared.pause();
                }
            }
            Step::Stop => break,
        }
        shared.rest();
    }
    if !shared.config.durable
        && let Err(error) = shared.sync(began)
    {
        tracing::warn!(%error, "a Slab tier's last blocks may be missing after a power loss");
    }
}

/// The sync thread.
pub(super) fn run_sync(shared: &Shared) {
    loop {
        let mut state = shared.lock();
        while !state.commit.begin() {
            // Of its three threads, the append thread ends first.
            if state.stopping && state.threads <= 1 {
                return;
            }
            shared.sync.wait(&mut state);
        }
        let mark = state.commit.first().map_or_else(|| shared.medium.mark(), |group| group.mark);
        drop(state);
        let outcome = shared.sync(mark);
        let mut answers = Answers::new();
        let mut state = shared.lock();
        let groups = match &outcome {
            Ok(()) => state.commit.end(),
            Err(error) => {
                state.doubt = Some(error.clone());
                state.commit.fail()
            }
        };
        for group in groups {
            state.end_group(group, &outcome, &mut answers);
        }
        drop(state);
        shared.append.notify_one();
        shared.answer(answers);
    }
}

impl Shared {
    fn sync(&self, since: Mark) -> Result<()> {
        // Relaxed: figures that order nothing, here and below.
        self.counters.syncs.fetch_add(1, Ordering::Relaxed);
        self.medium.sync(since)
    }

    /// After a failure: pauses instead of retrying removals over and over when nothing else is to be written.
    fn pause(&self) {
        let mut state = self.lock();
        if !state.pending.is_empty() {
            return;
        }
        if state.stopping && !state.removals.is_empty() {
            tracing::warn!(
                blocks = state.removals.len(),
                "removals are not stored: the blocks may come back after the next start"
            );
            state.removals.clear();
        } else if !state.removals.is_empty() {
            self.append.wait_for(&mut state, RETRY);
        }
    }

    /// Ends all waiting records: there is no segment for them.
    fn fail_pending(&self, error: &Error) {
        let mut answers = Answers::new();
        let mut state = self.lock();
        state.failing = true;
        while let Some(Record { token, buf, .. }) = state.pending.pop_front() {
            state.pending_bytes -= buf.len() as u64;
            drop(buf);
            state.end(token, &Err(error.clone()), &mut answers);
        }
        drop(state);
        self.answer(answers);
    }

    fn rest(&self) {
        self.lock().appending = false;
        self.changed.notify_all();
    }

    /// Waits for work and takes as much as one write may contain.
    fn next_step(&self, log: &mut Log) -> Step {
        let mut answers = Answers::new();
        let mut state = self.lock();
        let step = loop {
            log.synced(state.synced.0, state.synced.1);
            if state.commit.len() < UNSYNCED_MAX {
                let taken = state.take_batch(log, &mut answers);
                if !matches!(&taken, Step::Write(batch) if batch.len() == 0) {
                    state.appending = true;
                    break taken;
                }
                if !answers.is_empty() {
                    drop(state);
                    self.answer(std::mem::take(&mut answers));
                    state = self.lock();
                    continue;
                }
                if state.stopping {
                    break Step::Stop;
                }
            }
            self.append.wait(&mut state);
        };
        drop(state);
        self.answer(answers);
        step
    }

    /// Writes a group; returns whether it was written.
    fn write_batch(&self, log: &mut Log, batch: Batch) -> bool {
        let Batch { removals, records } = batch;
        let mut entries: Vec<Entry> =
            removals.iter().map(|key| Entry { key: *key, pages: 0, tag: 0 }).collect();
        let (mut bufs, mut tokens) = (vec![pages(AlignedBuf::zeroed(0))], Vec::new());
        for Record { key, token, buf, .. } in records {
            tokens.push((entries.len(), key, token));
            let tag = format::header_tag(buf.head()).unwrap_or(0);
            entries.push(Entry { key, pages: (buf.len() as u64 / PAGE) as u32, tag });
            bufs.push(buf);
        }
        let (ordinal, mark) = (log.ordinal(), self.medium.mark());
        let (group, outcome) = self.write_group(log, entries, &mut bufs);
        // The slots are released before anybody is notified.
        drop(bufs);
        let records = tokens.into_iter().map(|(at, key, token)| (key, token, group.places[at])).collect();
        let appended = Appended { sequence: log.sequence(), ordinal, mark, records, removals };
        let (written, mut answers) = (outcome.is_ok(), Answers::new());
        let mut state = self.lock();
        state.failing = !written;
        // A walk does not find what was written after a group that could not be synced.
        let outcome = state.doubt.clone().map_or(outcome, Err);
        if self.config.durable && outcome.is_ok() {
            state.commit.written(appended);
            self.sync.notify_one();
        } else {
            state.end_group(appended, &outcome, &mut answers);
            if !self.config.durable {
                state.synced = (0, 0);
            }
        }
        drop(state);
        self.answer(answers);
        written
    }

    /// Writes a group after its head; the first buffer in `bufs` is empty and takes the head.
    fn write_group(&self, log: &mut Log, entries: Vec<Entry>, bufs: &mut [IoBuf]) -> (Group, Result<()>) {
        let mut group = log.plan(entries);
        bufs[0] = pages(std::mem::replace(&mut group.head, AlignedBuf::zeroed(0)));
        let outcome = self.volume().write_at(bufs, group.offset);
        if outcome.is_ok() {
            log.written(&group);
            self.counters.groups.fetch_add(1, Ordering::Relaxed);
            self.counters.written.fetch_add(group.bytes, Ordering::Relaxed);
        }
        (group, outcome)
    }

    /// Ends the open segment, which was begun at this mark, and moves on to the next one of the ring.
    fn roll(&self, log: &mut Log, began: Mark) {
        // Everything in the segment must be on the medium before its footer says so, and before the next segment is
        // overwritten.
        let mut state = self.lock();
        while state.commit.len() > 0 {
            self.sync.notify_one();
            self.changed.wait(&mut state);
        }
        let doubt = state.doubt.take();
        drop(state);
        if doubt.is_some() || self.sync(began).is_err() {
            log.doubt();
        }
        if let Some((offset, footer)) = log.footer() {
            let bytes = footer.len() as u64;
            match self.volume().write_at(&[pages(footer)], offset) {
                Ok(()) => drop(self.counters.written.fetch_add(bytes, Ordering::Relaxed)),
                Err(error) => {
                    tracing::warn!(%error, "a segment has no footer: the next start walks through it")
                }
            }
        }
        log.roll();
        self.counters.recycled.fetch_add(1, Ordering::Relaxed);
    }

    /// Writes the hot blocks of the ring's next segment into the new one and evicts the others, so that the next
    /// segment is clear. If that fails, nothing has changed.
    ///
    /// The medium records the start of the new segment before any block is evicted: otherwise a start would find those
    /// blocks, although they may have been removed in the meantime.
    fn begin_segment(&self, log: &mut Log, began: Mark) -> Result<()> {
        let segment = log.next_segment();
        let blocks = self.lock().index.of_segment(segment, usize::MAX);
        let moved = self.rewrite(log, &recycle::keep(log.shape(), blocks))?;
        if self.config.durable {
            self.sync(began)?;
            log.synced(log.sequence(), log.ordinal());
        }
        for moved in moved.chunks(PIECE) {
            let mut state = self.lock();
            for (key, known, place) in moved {
                if state.index.get(key).is_some_and(|now| now.place == known.place) {
                    state.index.insert(*key, *place, known.unproven);
                }
            }
        }
        loop {
            let mut state = self.lock();
            let gone = state.index.of_segment(segment, PIECE);
            for (key, _) in &gone {
                state.index.remove(key);
                state.note_evicted(*key);
            }
            drop(state);
            self.counters.evicted.fetch_add(gone.len() as u64, Ordering::Relaxed);
            if gone.is_empty() {
                break;
            }
        }
        log.begin();
        self.deliver_events();
        self.tell_cooling(log);
        Ok(())
    }

    /// Reports the blocks that will be evicted when the next segment begins.
    fn tell_cooling(&self, log: &Log) {
        let Some(listener) = self.listener().filter(|listener| listener.asks_for_cooling()) else { return };
        let Some(segment) = log.cooling_segment() else { return };
        let blocks = self.lock().index.of_segment(segment, usize::MAX);
        let kept: HashSet<BlockKey> =
            recycle::keep(log.shape(), blocks.clone()).into_iter().map(|(key, _)| key).collect();
        let keys: Vec<BlockKey> =
            blocks.into_iter().map(|(key, _)| key).filter(|key| !kept.contains(key)).collect();
        if !keys.is_empty() {
            listener.cooling(&keys);
        }
    }

    /// Writes blocks again, in groups; if that writes nothing, writes one empty group.
    fn rewrite(&self, log: &mut Log, blocks: &[(BlockKey, Known)]) -> Result<Vec<Moved>> {
        let (mut left, mut all) = (blocks, Vec::new());
        while !left.is_empty() {
            let (mut entries, mut moved) = (Vec::new(), Vec::new());
            let (mut bufs, mut bytes) = (vec![pages(AlignedBuf::zeroed(0))], 0);
            while let [(key, known), rest @ ..] = left {
                let record = known.place.bytes();
                let full = bytes > 0 && (bytes + record > GROUP_BYTES_MAX || entries.len() >= ENTRIES_MAX);
                if full {
                    break;
                }
                if !log.fits(entries.len() + 1, bytes + record) {
                    // Stop here: what is left was used least recently.
                    left = &[];
                    break;
                }
                left = rest;
                let slot = SlotBuf::anonymous(size(record));
                let mut buf = IoBuf::payload(slot, size(record)).expect("a slot of that length");
                let offset = log.shape().record_at(known.place);
                if let Err(error) = self.volume().read_at(&mut buf, offset) {
                    tracing::debug!(%error, %key, "a block in use cannot be read and is dropped");
                    continue;
                }
                bytes += record;
                entries.push(Entry { key: *key, pages: known.place.pages, tag: known.place.tag });
                moved.push((*key, *known));
                bufs.push(buf);
            }
            if entries.is_empty() {
                continue;
            }
            let (group, outcome) = self.write_group(log, entries, &mut bufs);
            outcome?;
            self.counters.rewritten.fetch_add(bytes, Ordering::Relaxed);
            all.extend(
                moved.into_iter().zip(&group.places).map(|((key, known), place)| (key, known, *place)),
            );
        }
        if log.ordinal() == 0 {
            self.write_group(log, Vec::new(), &mut [pages(AlignedBuf::zeroed(0))]).1?;
        }
        Ok(all)
    }
}

impl State {
    /// Takes what one write may contain: nothing if nothing waits.
    fn take_batch(&mut self, log: &Log, answers: &mut Answers) -> Step {
        let now = Instant::now();
        self.end_first(now, answers);
        let mut batch = Batch::default();
        if self.pending.is_empty() && self.removals.is_empty() {
            return Step::Write(batch);
        }
        if self.doubt.is_some() {
            return Step::Roll;
        }
        if !log.is_begun() {
            return Step::Begin;
        }
        let fitting = self.removals.iter().zip(1..=ENTRIES_MAX).take_while(|(_, count)| log.fits(*count, 0));
        batch.removals = fitting.map(|(key, _)| *key).collect();
        for key in &batch.removals {
            self.removals.remove(key);
        }
        let mut bytes = 0;
        // A block must not come before its own removal.
        while self.removals.is_empty()
            && let Some(first) = self.pending.front()
        {
            let length = first.buf.len() as u64;
            let full = bytes > 0 && bytes + length > GROUP_BYTES_MAX;
            if full || batch.len() >= ENTRIES_MAX || !log.fits(batch.len() + 1, bytes + length) {
                break;
            }
            bytes += length;
            self.pending_bytes -= length;
            batch.records.extend(self.pending.pop_front());
            self.end_first(now, answers);
        }
        if batch.len() == 0 { Step::Roll } else { Step::Write(batch) }
    }

    /// Ends the first waiting records, as far as they need not be written any more.
    fn end_first(&mut self, now: Instant, answers: &mut Answers) {
        while let Some(Record { key, token, deadline, .. }) = self.pending.front() {
            let outcome = if *deadline <= now {
                Err(Request::expired())
            } else if self.spaces.get(key).is_none() {
                Err(Shared::no_namespace(key))
            } else if self.counts(key, *token) {
                return;
            } else {
                // The block was removed before it was written.
                Ok(Written::New)
            };
            let Some(Record { token, buf, .. }) = self.pending.pop_front() else { return };
            self.pending_bytes -= buf.len() as u64;
            drop(buf);
            self.end(token, &outcome, answers);
        }
    }

    /// Ends records whose deadline passed while they waited.
    pub(super) fn expire(&mut self, now: Instant, answers: &mut Answers) {
        if self.pending.iter().all(|record| record.deadline > now) {
            return;
        }
        for record in std::mem::take(&mut self.pending) {
            if record.deadline > now {
                self.pending.push_back(record);
                continue;
            }
            self.pending_bytes -= record.buf.len() as u64;
            drop(record.buf);
            self.end(record.token, &Err(Request::expired()), answers);
        }
    }
}

/// The error for a write that comes while the tier is closing.
pub(super) fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the tier is closing")
}
