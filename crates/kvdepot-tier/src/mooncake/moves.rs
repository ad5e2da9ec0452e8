//! Reads and writes: batches on their way through the staging memory.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use kvdepot_core::limits::{BLOCK_ALIGN_BYTES, MOONCAKE_BATCH_BLOCKS_MAX};
use kvdepot_core::{BlockKey, Error, ErrorKind, Result};
use kvdepot_io::checksum::crc64_slot;
use kvdepot_io::{SharedMemory, SlotBuf};
use parking_lot::Mutex;

use super::link::{Answered, Call};
use super::names::{self, HEAD_BYTES};
use super::protocol::MooncakeOp;
use super::shared::{Place, Shared, code, in_time, one_more, refused};
use super::staging::Extent;
use super::waiting::{Limits, Waiting};
use crate::owed::Answer;
use crate::{BlockingCalls, Done, Fetched, Presence, ReadItem, WriteItem, Written};

/// Largest part of the staging memory that one call takes.
const STAGING_SHARE: usize = 8;
/// Number of tries of a read whose lease ends too early.
const FETCH_TRIES: u32 = 3;

/// A block on its way.
pub(super) struct Move<T> {
    key: BlockKey,
    place: Place,
    slot: SlotBuf,
    answer: Answer<T>,
}

impl<T> Move<T> {
    /// Returns the bytes that it takes in the staging memory.
    fn staged_bytes(&self) -> usize {
        (HEAD_BYTES + self.place.block_bytes()).next_multiple_of(BLOCK_ALIGN_BYTES as usize)
    }

    fn value_bytes(&self) -> usize {
        HEAD_BYTES + self.place.block_bytes()
    }

    /// Completes it. The slot is released first, because the caller may use its memory immediately.
    fn end(self, outcome: Result<T>) {
        drop(self.slot);
        self.answer.end(outcome);
    }
}

/// Threads for the calls of one direction, and the blocks that wait for a call.
pub(super) struct Moves<T> {
    pub(super) calls: BlockingCalls,
    waiting: Arc<Mutex<Waiting<Move<T>>>>,
}

impl<T: Send + 'static> Moves<T> {
    pub(super) fn new(calls: BlockingCalls) -> Self {
        Self { calls, waiting: Arc::default() }
    }

    /// Lets `work` move blocks, each call on a thread. A call also takes blocks that came with others.
    fn begin(
        &self,
        shared: &Arc<Shared>,
        moves: Vec<Move<T>>,
        deadline: Instant,
        work: fn(&Arc<Shared>, Vec<Move<T>>, Instant),
    ) {
        let limits =
            Limits { blocks: MOONCAKE_BATCH_BLOCKS_MAX, bytes: shared.config.staging_bytes / STAGING_SHARE };
        let moves = moves.into_iter().map(|one| (one.staged_bytes(), one));
        let batches = self.waiting.lock().push(moves, deadline, limits);
        for own in batches {
            let (shared, waiting, batch) = (Arc::clone(shared), Arc::clone(&self.waiting), own.clone());
            let call = move || {
                let taken = waiting.lock().take(&batch, limits, Instant::now());
                let Some((moves, deadline)) = taken else { return Ok(()) };
                match in_time(deadline) {
                    Ok(()) => work(&shared, moves, shared.patience(deadline)),
                    Err(late) => moves.into_iter().for_each(|one| one.end(Err(late.clone()))),
                }
                Ok(())
            };
            let waiting = Arc::clone(&self.waiting);
            let done: Done<()> = Box::new(move |outcome| {
                if let Err(error) = outcome {
                    let rest = waiting.lock().take_back(&own);
                    rest.into_iter().for_each(|one| one.end(Err(error.clone())));
                }
            });
            self.calls.run_to_end(deadline, call, done);
        }
    }
}

impl Shared {
    /// See [`crate::Tier::read`].
    pub(super) fn read(self: &Arc<Self>, to: &Moves<Fetched>, reads: Vec<ReadItem>, deadline: Instant) {
        if let Err(late) = in_time(deadline) {
            return reads.into_iter().for_each(|read| read.end(Err(late.clone())));
        }
        let places: Vec<Option<Place>> = {
            let (named, writing) = (self.named.lock(), self.beliefs.writing.lock());
            let place = |read: &ReadItem| named.place(&read.key).ok().filter(|_| !writing.holds(&read.key));
            reads.iter().map(place).collect()
        };
        let mut moves = Vec::with_capacity(reads.len());
        for (read, place) in reads.into_iter().zip(places) {
            let Some(place) = place else {
                read.end(Ok(Fetched::Miss));
                continue;
            };
            if let Err(error) = fits(&read.dst, &place) {
                read.end(Err(error));
                continue;
            }
            let ReadItem { key, dst, done, .. } = read;
            moves.push(Move { key, place, slot: dst, answer: self.owed.answer(done) });
        }
        to.begin(self, moves, deadline, Self::read_now);
    }

    fn read_now(self: &Arc<Self>, reads: Vec<Move<Fetched>>, deadline: Instant) {
        let removals = self.beliefs.removals();
        let total: usize = reads.iter().map(Move::staged_bytes).sum();
        let extent = match self.staging.take(total, deadline) {
            Ok(extent) => extent,
            Err(error) => return reads.into_iter().for_each(|read| read.end(Err(error.clone()))),
        };
        let (call, values) = self.of_moves(MooncakeOp::Get, &reads, extent.at());
        let at = call.at.clone();
        match self.fetch(call, extent, deadline) {
            Ok((codes, extent)) => {
                for (read, value) in reads.into_iter().zip(values) {
                    self.finish_read(read, codes[value], extent.memory(), at[value], removals);
                }
            }
            Err(error) => reads.into_iter().for_each(|read| read.end(Err(error.clone()))),
        }
    }

    /// Reads values into an extent, again if Mooncake's lease on one of them ended before its bytes had arrived.
    pub(super) fn fetch(
        &self,
        call: Call,
        mut extent: Extent,
        deadline: Instant,
    ) -> Result<(Vec<i64>, Extent)> {
        for tries in 1.. {
            let answered = self.link.call(call.clone(), Some(extent), deadline, None);
            let Answered { codes, lent } = answered.map_err(|failed| failed.error)?;
            let Some(back) = lent else { break };
            if tries == FETCH_TRIES || !codes.contains(&code::LEASE_ENDED) {
                return Ok((codes, back));
            }
            extent = back;
        }
        Err(Error::new(ErrorKind::Protocol, "a call of Mooncake kept its memory"))
    }

    fn finish_read(
        self: &Arc<Self>,
        read: Move<Fetched>,
        code: i64,
        memory: &SharedMemory,
        at: usize,
        removals: u64,
    ) {
        let (key, bytes) = (read.key, read.place.block_bytes());
        let outcome = match code {
            code::NOT_FOUND | code::NOT_READY => {
                let was_sure = self.beliefs.known.lock().presence(&key, Instant::now()) == Presence::Present;
                self.beliefs.note_absent(key);
                if was_sure {
                    self.tell_lost(key);
                }
                Ok(Fetched::Miss)
            }
            ..0 => Err(refused(code, &names::block(&self.config.prefix, &key, read.place.token))),
            _ => arrive(&read, code, memory, at).map(|()| {
                self.note_present(key, bytes, removals);
                Fetched::Whole
            }),
        };
        if let Err(error) = &outcome
            && error.kind() == ErrorKind::Corrupt
        {
            one_more(&self.figures.corrupt);
            tracing::warn!(%key, %error, "a corrupt block in Mooncake is removed");
            self.set_aside(key);
            self.tell_lost(key);
        }
        // A reset that began in the meantime has hidden it.
        let is_same = self.named.lock().place(&key).is_ok_and(|place| place.token == read.place.token);
        read.end(if is_same { outcome } else { outcome.map(|_| Fetched::Miss) });
    }

    /// See [`crate::Tier::write`].
    pub(super) fn write(self: &Arc<Self>, to: &Moves<Written>, writes: Vec<WriteItem>, deadline: Instant) {
        if let Err(late) = in_time(deadline) {
            return writes.into_iter().for_each(|write| write.end(Err(late.clone())));
        }
        let mut moves = Vec::with_capacity(writes.len());
        for write in writes {
            let place = self.named.lock().place(&write.key);
            let place = place.and_then(|place| fits(&write.src, &place).map(|()| place));
            let place = match place {
                Ok(place) => place,
                Err(error) => {
                    write.end(Err(error));
                    continue;
                }
            };
            let WriteItem { key, src, done } = write;
            let entered = {
                let mut writing = self.beliefs.writing.lock();
                if !writing.holds(&key)
                    && self.beliefs.known.lock().presence(&key, Instant::now()) == Presence::Present
                {
                    drop((writing, src));
                    done(Ok(Written::AlreadyThere));
                    continue;
                }
                writing.enter(key, done)
            };
            match entered {
                None => {}
                Some(Ok(done)) => {
                    let answer = self.owed.answer(self.for_all(key, done));
                    moves.push(Move { key, place, slot: src, answer });
                }
                Some(Err((done, error))) => {
                    drop(src);
                    done(Err(error));
                }
            }
        }
        to.begin(self, moves, deadline, Self::write_now);
    }

    /// Returns a `Done` that completes the write of a key for all callers that wait for it.
    fn for_all(self: &Arc<Self>, key: BlockKey, done: Done<Written>) -> Done<Written> {
        let shared = Arc::clone(self);
        Box::new(move |outcome: Result<Written>| {
            let waiting = shared.beliefs.writing.lock().written(&key);
            shared.written.notify_all();
            let rest = outcome.clone().map(|_| Written::AlreadyThere);
            done(outcome);
            waiting.into_iter().for_each(|done| done(rest.clone()));
        })
    }

    fn write_now(self: &Arc<Self>, writes: Vec<Move<Written>>, deadline: Instant) {
        let total: usize = writes.iter().map(Move::staged_bytes).sum();
        let staged = self.staging.take(total, deadline).and_then(|extent| {
            let (call, _) = self.of_moves(MooncakeOp::Put, &writes, extent.at());
            debug_assert_eq!(call.keys.len(), writes.len(), "each key has one writer at a time");
            for (write, &at) in writes.iter().zip(&call.at) {
                depart(write, extent.memory(), at)?;
            }
            Ok((extent, call))
        });
        let (extent, call) = match staged {
            Ok(staged) => staged,
            Err(error) => return writes.into_iter().for_each(|write| write.end(Err(error.clone()))),
        };
        // The slots are free from here on: the bytes are in the staging memory.
        let writes: Vec<_> = writes.into_iter().map(|one| (one.key, one.place, one.answer)).collect();
        let keys: Vec<BlockKey> = writes.iter().map(|(key, ..)| *key).collect();
        // Until Mooncake has answered, or its client is dead, it may still store them.
        self.beliefs.writing.lock().doubt(&keys);
        let late = {
            let (shared, keys) = (Arc::clone(self), keys.clone());
            Box::new(move || shared.beliefs.writing.lock().settle(&keys))
        };
        let outcome = self.link.call(call, Some(extent), deadline, Some(late));
        if !matches!(&outcome, Err(failed) if failed.is_open) {
            self.beliefs.writing.lock().settle(&keys);
        }
        let codes: Vec<Result<i64>> = match outcome {
            Ok(answered) => answered.codes.into_iter().map(Ok).collect(),
            Err(failed) => writes.iter().map(|_| Err(failed.error.clone())).collect(),
        };
        for ((key, place, answer), code) in writes.into_iter().zip(codes) {
            let outcome = code.and_then(|code| match code {
                0 => Ok(Written::New),
                1 | code::IS_THERE => Ok(Written::AlreadyThere),
                other => Err(refused(other, &names::block(&self.config.prefix, &key, place.token))),
            });
            if outcome.is_ok() {
                let named = self.named.lock();
                let is_same = named.place(&key).is_ok_and(|now| now.token == place.token);
                let writing = self.beliefs.writing.lock();
                if is_same && !writing.is_leaving(&key) {
                    self.beliefs.known.lock().note(key, true, place.block_bytes() as u64);
                }
            }
            answer.end(outcome);
        }
    }

    /// Returns the call for these blocks, whose values lie one after another from `start` on, and which value is each
    /// block's. Blocks of one key share a value: of several buffers for one key, Mooncake fills the last only, and
    /// reports success for all.
    fn of_moves<T>(&self, op: MooncakeOp, moves: &[Move<T>], start: usize) -> (Call, Vec<usize>) {
        let mut call = Call { op, keys: Vec::new(), at: Vec::new(), bytes: Vec::new() };
        let (mut next, mut values) = (start, HashMap::new());
        let value = |one: &Move<T>| {
            *values.entry((one.key, one.place.token)).or_insert_with(|| {
                call.keys.push(names::block(&self.config.prefix, &one.key, one.place.token));
                call.at.push(next);
                call.bytes.push(one.value_bytes());
                next += one.staged_bytes();
                call.keys.len() - 1
            })
        };
        let values = moves.iter().map(value).collect();
        (call, values)
    }
}

fn fits(slot: &SlotBuf, place: &Place) -> Result<()> {
    if slot.len() >= place.block_bytes() {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Config, "a slot is smaller than its block")
        .with("slot_bytes", slot.len())
        .with("block_bytes", place.block_bytes()))
}

/// Copies a block with its head into the staging memory.
fn depart(write: &Move<Written>, memory: &SharedMemory, at: usize) -> Result<()> {
    let bytes = write.place.block_bytes();
    let crc64 = crc64_slot(&write.slot, 0, bytes)
        .ok_or_else(|| Error::new(ErrorKind::Config, "a slot is smaller than its block"))?;
    memory.write(at, &names::head(&write.key, write.place.token, bytes, crc64))?;
    memory.write_slot(at + HEAD_BYTES, &write.slot, bytes)
}

/// Copies a block out of the staging memory and checks what has arrived in the slot, which nobody else writes.
fn arrive(read: &Move<Fetched>, code: i64, memory: &SharedMemory, at: usize) -> Result<()> {
    let (key, bytes) = (&read.key, read.place.block_bytes());
    if usize::try_from(code) != Ok(HEAD_BYTES + bytes) {
        return Err(Error::new(ErrorKind::Corrupt, "a value in Mooncake has another length")
            .with("key", key)
            .with("bytes", code)
            .with("bytes_expected", HEAD_BYTES + bytes));
    }
    let mut head = [0; HEAD_BYTES];
    memory.read(at, &mut head)?;
    let expected = names::check(&head, key, read.place.token, bytes)?;
    memory.read_slot(at + HEAD_BYTES, &read.slot, bytes)?;
    if crc64_slot(&read.slot, 0, bytes) == Some(expected) {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Corrupt, "a block's bytes changed in Mooncake or on their way")
        .with("key", key))
}
