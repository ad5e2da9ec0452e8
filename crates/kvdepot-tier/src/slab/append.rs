//! The thread that writes: groups of what waits, the ends of segments, and the blocks that outlive their segment. And the
//! thread that syncs, so that the next group is written meanwhile.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvdepot_core::{BlockKey, Error, ErrorKind, Result};
use kvdepot_io::{AlignedBuf, IoBuf, Request, SlotBuf};

use super::codec::size;
use super::group::{ENTRIES_MAX, Entry};
use super::index::Known;
use super::log::{Group, Log};
use super::medium::pages;
use super::recycle;
use super::shape::PAGE;
use super::state::{Answers, Appended, PIECE, Pending, Shared, State};
use crate::Written;

/// Bytes of records in a group, at most, or one record.
const GROUP_BYTES_MAX: u64 = 16 << 20;
/// Groups that wait for a sync, at most: the memory of their blocks is free, but nobody was told of them.
const UNSYNCED_MAX: usize = 8;
/// Failed writes in a row after which a segment is left as it is, and the next one tried.
const FAILURES_MAX: u32 = 3;

/// How long removals wait after a failed write.
const RETRY: Duration = Duration::from_secs(1);

/// What the append thread does next.
enum Step {
    /// Write these.
    Write(Vec<Pending>),
    /// The open segment is full.
    Roll,
    /// Nothing is left, and nothing more comes.
    Stop,
}

/// The append thread.
pub(super) fn run(shared: &Shared, mut log: Log) {
    let mut failures = 0;
    loop {
        match shared.next_step(&mut log) {
            Step::Write(batch) => {
                failures = if shared.write_batch(&mut log, batch) { 0 } else { failures + 1 };
                if failures > 0 {
                    shared.pause();
                }
                if failures >= FAILURES_MAX {
                    failures = 0;
                    shared.roll(&mut log);
                }
            }
            Step::Roll => shared.roll(&mut log),
            Step::Stop => break,
        }
        shared.rest();
    }
    if !shared.config.durable
        && let Err(error) = shared.sync()
    {
        tracing::warn!(%error, "a Slab tier's last blocks may be missing after a power loss");
    }
}

/// The sync thread.
pub(super) fn run_sync(shared: &Shared) {
    loop {
        let mut state = shared.lock();
        while !state.commit.begin() {
            // Of its three threads the append thread ends first.
            if state.stopping && state.threads <= 1 {
                return;
            }
            shared.sync.wait(&mut state);
        }
        drop(state);
        let outcome = shared.sync();
        let mut answers = Answers::new();
        let mut state = shared.lock();
        for group in state.commit.end() {
            state.end_group(group, &outcome, &mut answers);
        }
        drop(state);
        shared.append.notify_one();
        shared.answer(answers);
    }
}

impl Shared {
    fn sync(&self) -> Result<()> {
        // Relaxed: figures that nothing is ordered by, here and below.
        self.counters.syncs.fetch_add(1, Ordering::Relaxed);
        self.volume().sync()
    }

    /// After a failure: does not try removals again and again that nothing else goes with.
    fn pause(&self) {
        let mut state = self.lock();
        if state.pending.iter().any(|item| matches!(item, Pending::Record { .. })) {
            return;
        }
        if state.stopping && !state.pending.is_empty() {
            tracing::warn!(
                blocks = state.pending.len(),
                "removals are not stored: the blocks may be back after the next start"
            );
            state.pending.clear();
        } else if !state.pending.is_empty() {
            self.append.wait_for(&mut state, RETRY);
        }
    }

    fn rest(&self) {
        self.lock().appending = false;
        self.changed.notify_all();
    }

    /// Waits for work and takes as much as one write shall have.
    fn next_step(&self, log: &mut Log) -> Step {
        let mut answers = Answers::new();
        let mut state = self.lock();
        let step = loop {
            log.synced(state.synced.0, state.synced.1);
            if state.commit.len() < UNSYNCED_MAX {
                let taken = state.take_batch(log, &mut answers);
                if !matches!(&taken, Step::Write(batch) if batch.is_empty()) {
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

    /// Writes a group; whether it was written.
    fn write_batch(&self, log: &mut Log, batch: Vec<Pending>) -> bool {
        let (mut entries, mut bufs, mut tokens, mut removals) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        bufs.push(pages(AlignedBuf::zeroed(0)));
        for item in batch {
            match item {
                Pending::Removal(key) => {
                    entries.push(Entry { key, pages: 0 });
                    removals.push(key);
                }
                Pending::Record { key, token, buf, .. } => {
                    tokens.push((entries.len(), key, token));
                    entries.push(Entry { key, pages: (buf.len() as u64 / PAGE) as u32 });
                    bufs.push(buf);
                }
            }
        }
        let ordinal = log.ordinal();
        let (group, outcome) = self.write_group(log, entries, &mut bufs);
        // The slots are free before anybody is told.
        drop(bufs);
        let records = tokens.into_iter().map(|(at, key, token)| (key, token, group.places[at])).collect();
        let appended = Appended { sequence: log.sequence(), ordinal, records };
        let (written, mut answers) = (outcome.is_ok(), Answers::new());
        let mut state = self.lock();
        if self.config.durable && written {
            state.commit.written(appended);
            self.sync.notify_one();
        } else {
            let doubt = state.doubt;
            state.end_group(appended, &outcome, &mut answers);
            // A group that failed is written over; only a sync that failed leaves a doubt.
            state.doubt = doubt;
            if !self.config.durable {
                state.synced = (0, 0);
            }
            if !written {
                // Before all that came meanwhile: a block that is written anew comes after its removal.
                removals.into_iter().rev().for_each(|key| state.pending.push_front(Pending::Removal(key)));
            }
        }
        drop(state);
        self.answer(answers);
        written
    }

    /// Writes a group behind its head, for which `bufs` begins with an empty buffer.
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

    /// Ends the open segment and begins the next one of the ring, then makes the one after that free.
    fn roll(&self, log: &mut Log) {
        // All that is in the segment is on the medium before its footer says so, and before the next one, which holds
        // the originals of blocks that were written again here, is written over.
        let mut state = self.lock();
        while state.commit.len() > 0 {
            self.sync.notify_one();
            self.changed.wait(&mut state);
        }
        let doubt = std::mem::take(&mut state.doubt);
        drop(state);
        if doubt || self.sync().is_err() {
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
        self.clear_next(log);
    }

    /// Writes the hot blocks of the next segment of the ring into the open one, and gives up the others.
    fn clear_next(&self, log: &mut Log) {
        let segment = log.next_segment();
        let blocks = self.lock().index.of_segment(segment, usize::MAX);
        let kept = recycle::keep(log.shape(), blocks);
        if let Err(error) = self.rewrite(log, &kept) {
            tracing::warn!(%error, "blocks that were in use are given up: they cannot be written again");
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
        self.deliver_events();
    }

    /// Writes blocks again, in groups. They are found at their new places from then on.
    fn rewrite(&self, log: &mut Log, blocks: &[(BlockKey, Known)]) -> Result<()> {
        let mut left = blocks;
        while !left.is_empty() {
            let (mut entries, mut moved) = (Vec::new(), Vec::new());
            let (mut bufs, mut bytes) = (vec![pages(AlignedBuf::zeroed(0))], 0);
            while let [(key, known), rest @ ..] = left {
                let record = u64::from(known.place.pages) * PAGE;
                let full = bytes > 0 && (bytes + record > GROUP_BYTES_MAX || entries.len() >= ENTRIES_MAX);
                if full {
                    break;
                }
                if !log.fits(entries.len() + 1, bytes + record) {
                    // Nothing more: what is left was used longest ago.
                    left = &[];
                    break;
                }
                left = rest;
                let slot = SlotBuf::anonymous(size(record));
                let mut buf = IoBuf::payload(slot, size(record)).expect("a slot of that length");
                let offset =
                    log.shape().segment_at(known.place.segment.into()) + u64::from(known.place.page) * PAGE;
                if let Err(error) = self.volume().read_at(&mut buf, offset) {
                    tracing::debug!(%error, %key, "a block in use cannot be read and is given up");
                    continue;
                }
                bytes += record;
                entries.push(Entry { key: *key, pages: known.place.pages });
                moved.push((*key, *known));
                bufs.push(buf);
            }
            if entries.is_empty() {
                continue;
            }
            let (group, outcome) = self.write_group(log, entries, &mut bufs);
            outcome?;
            self.counters.rewritten.fetch_add(bytes, Ordering::Relaxed);
            for (moved, places) in moved.chunks(PIECE).zip(group.places.chunks(PIECE)) {
                let mut state = self.lock();
                for ((key, known), place) in moved.iter().zip(places) {
                    if state.index.get(key).is_some_and(|now| now.place == known.place) {
                        state.index.insert(*key, *place, known.unproven);
                    }
                }
            }
        }
        Ok(())
    }
}

impl State {
    /// Takes what one write shall have: nothing if nothing waits.
    fn take_batch(&mut self, log: &Log, answers: &mut Answers) -> Step {
        let (mut batch, mut bytes, now) = (Vec::new(), 0, Instant::now());
        while let Some(first) = self.pending.front() {
            let length = match first {
                Pending::Removal(_) => 0,
                Pending::Record { key, token, buf, deadline } => {
                    let length = buf.len() as u64;
                    let ended = if *deadline <= now {
                        Some(Err(Request::expired()))
                    } else if self.spaces.get(key).is_none() {
                        Some(Err(Shared::no_namespace(key)))
                    } else {
                        // It was removed before it was written.
                        (!self.counts(key, *token)).then_some(Ok(Written::New))
                    };
                    if let Some(outcome) = ended {
                        let token = *token;
                        self.pending.pop_front();
                        self.pending_bytes -= length;
                        self.end(token, &outcome, answers);
                        continue;
                    }
                    length
                }
            };
            if !batch.is_empty() && (bytes + length > GROUP_BYTES_MAX || batch.len() >= ENTRIES_MAX) {
                break;
            }
            if !log.fits(batch.len() + 1, bytes + length) {
                if batch.is_empty() {
                    return Step::Roll;
                }
                break;
            }
            bytes += length;
            self.pending_bytes -= length;
            batch.extend(self.pending.pop_front());
        }
        Step::Write(batch)
    }

    /// Ends records whose deadline has passed while they waited.
    pub(super) fn expire(&mut self, now: Instant, answers: &mut Answers) {
        let mut kept = std::collections::VecDeque::with_capacity(self.pending.len());
        for item in std::mem::take(&mut self.pending) {
            match item {
                Pending::Record { token, buf, deadline, .. } if deadline <= now => {
                    self.pending_bytes -= buf.len() as u64;
                    drop(buf);
                    self.end(token, &Err(Request::expired()), answers);
                }
                item => kept.push_back(item),
            }
        }
        self.pending = kept;
    }
}

/// The error of a write that meets the tier's end.
pub(super) fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the tier is closing")
}
