//! Writes: space first (P5), then the payload, then the header that makes the block visible (P1); each is on the medium
//! before the next.

use std::sync::Arc;
use std::time::Instant;

use hashbrown::hash_map::Entry as MapEntry;
use kvdepot_core::limits::WRITERS_WAITING_MAX;
use kvdepot_core::{BlockKey, Error, ErrorKind, Result};
use kvdepot_io::mapped::Piece;
use kvdepot_io::{Call, Class, Op, Request, SlotBuf};

use super::ahead::Extent;
use super::state::{Shared, no_namespace, small_slot};
use crate::{Done, WriteItem, Written};

/// Bytes and blocks that share the flushes of one job.
const JOB_BYTES: u64 = 16 << 20;
const JOB_BLOCKS: usize = 64;

/// A block that one job writes.
#[derive(Debug)]
pub(super) struct Put {
    key: BlockKey,
    src: SlotBuf,
    bytes: u32,
}

/// A block that has a place.
struct Placed {
    put: Put,
    unit: u32,
    checksum: u64,
}

/// The memory of a block that is visible now, and the callers to notify.
type Visible = (SlotBuf, Vec<Done<Written>>);
/// Writes that have ended.
type Ends = Vec<(Put, Result<Written>)>;

impl Shared {
    /// Returns the jobs of a batch. What need not be written ends here.
    pub(super) fn begin_writes(self: &Arc<Self>, writes: Vec<WriteItem>, deadline: Instant) -> Vec<Request> {
        if deadline <= Instant::now() {
            let late = Request::expired();
            writes.into_iter().for_each(|write| write.end(Err(late.clone())));
            return Vec::new();
        }
        let mut jobs: Vec<(u64, Vec<Put>)> = Vec::new();
        for write in writes {
            let Some(put) = self.admit(write) else { continue };
            let bytes = u64::from(put.bytes);
            match jobs.last_mut() {
                Some((sum, job)) if *sum + bytes <= JOB_BYTES && job.len() < JOB_BLOCKS => {
                    *sum += bytes;
                    job.push(put);
                }
                _ => jobs.push((bytes, vec![put])),
            }
        }
        let request = |(_, job): (u64, Vec<Put>)| {
            let shared = Arc::clone(self);
            let run = Box::new(move |begun: Result<()>| match begun {
                Ok(()) => shared.write_job(job),
                Err(error) => shared.end_writes(job.into_iter().map(|put| (put, Err(error.clone())))),
            });
            Request { class: Class::Write, deadline, op: Op::Call(Call { run }) }
        };
        jobs.into_iter().map(request).collect()
    }

    /// Returns what this call must write, if anything.
    fn admit(&self, write: WriteItem) -> Option<Put> {
        let WriteItem { key, src, done } = write;
        let answer = |src: SlotBuf, done: Done<Written>, outcome| {
            drop(src);
            done(outcome);
            None
        };
        let mut state = self.lock();
        let open = state.spaces.get(&key.namespace).filter(|_| !self.owner.is_lost());
        let Some(block_bytes) = open.map(|space| space.spec.layout().block_bytes()) else {
            drop(state);
            return answer(src, done, Err(no_namespace(&key)));
        };
        if state.slots.contains(&key) {
            state.slots.touch(&key);
            drop(state);
            return answer(src, done, Ok(Written::AlreadyThere));
        }
        if (src.len() as u64) < block_bytes {
            drop(state);
            let error = small_slot(src.len(), block_bytes);
            return answer(src, done, Err(error));
        }
        let bytes = u32::try_from(block_bytes).expect("BLOCK_BYTES_MAX fits 32 bits");
        match state.writing.entry(key) {
            MapEntry::Vacant(vacant) => {
                vacant.insert(super::state::InFlight { dones: vec![done], ..Default::default() });
                Some(Put { key, src, bytes })
            }
            MapEntry::Occupied(mut other) if other.get().dones.len() < WRITERS_WAITING_MAX => {
                other.get_mut().dones.push(done);
                drop(state);
                drop(src);
                None
            }
            MapEntry::Occupied(_) => {
                drop(state);
                let error = Error::new(ErrorKind::Busy, "too many writers of one block").with("key", key);
                answer(src, done, Err(error))
            }
        }
    }

    /// Writes blocks, on an I/O thread.
    fn write_job(&self, job: Vec<Put>) {
        self.clear_left_over();
        let (placed, mut ends) = self.place(job);
        let (placed, failed) = self.write_payloads(placed);
        ends.extend(failed);
        let (placed, failed) = self.write_headers(placed);
        ends.extend(failed);
        let (gone, found) = self.publish(placed);
        let gone_units: Vec<u32> = gone.iter().map(|placed| placed.unit).collect();
        let cleared = self.clear_slots(&gone_units);
        for (placed, cleared) in gone.into_iter().zip(cleared) {
            ends.push((placed.put, cleared.map(|()| Written::New)));
        }
        self.tell(found);
        self.end_writes(ends);
        self.deliver_events();
    }

    /// Finds space, and clears the headers of what was evicted for it.
    fn place(&self, job: Vec<Put>) -> (Vec<Placed>, Ends) {
        let (mut placed, mut ends) = (Vec::new(), Vec::new());
        for put in job {
            match self.place_one(&put) {
                Ok(unit) => placed.push(Placed { put, unit, checksum: 0 }),
                Err(error) => ends.push((put, Err(error))),
            }
        }
        let units: Vec<u32> = placed.iter().map(|placed| placed.unit).collect();
        let cleared = self.clear(&units);
        let (mut kept, mut removals) = (Vec::new(), Vec::new());
        let mut state = self.lock();
        for (placed, outcome) in placed.into_iter().zip(cleared) {
            removals.extend(state.end_waiting(placed.unit, &outcome));
            match outcome {
                Ok(()) => {
                    state.slots.settle(placed.unit, self.geometry.units_of(u64::from(placed.put.bytes)));
                    kept.push(placed);
                }
                Err(error) => {
                    state.slots.leave(placed.unit);
                    state.slots.not_cleared(placed.unit);
                    ends.push((placed.put, Err(error)));
                }
            }
        }
        drop(state);
        drop(removals);
        (kept, ends)
    }

    /// Finds a place for one block while the lock is held once, which bounds the neighbours that are examined.
    fn place_one(&self, put: &Put) -> Result<u32> {
        let mut state = self.lock();
        let epoch = state
            .spaces
            .get(&put.key.namespace)
            .map(|space| space.epoch)
            .ok_or_else(|| no_namespace(&put.key))?;
        let units = self.geometry.units_of(u64::from(put.bytes));
        let reserved = state.slots.reserve(put.key, epoch, units, put.bytes).ok_or_else(|| {
            let error = if units <= self.units_max {
                Error::new(
                    ErrorKind::Busy,
                    "a medium has no space for a block now: the blocks in its place are in use",
                )
            } else {
                Error::new(ErrorKind::Config, "a block is larger than the cap of a medium")
            };
            let cap_bytes = u64::from(self.units_max) * self.geometry.unit_bytes;
            error.with("block_bytes", put.bytes).with("cap_bytes", cap_bytes)
        })?;
        reserved.victims.into_iter().for_each(|(_, key)| state.note_evicted(key));
        Ok(reserved.unit)
    }

    /// Gives back places that no header names, and has the others cleared later.
    fn abandon(&self, placed: &[Placed]) {
        let mut state = self.lock();
        for placed in placed {
            state.slots.leave(placed.unit);
            state.slots.not_cleared(placed.unit);
        }
    }

    fn write_payloads(&self, placed: Vec<Placed>) -> (Vec<Placed>, Ends) {
        let (mut written, mut failed, mut ends) = (Vec::new(), Vec::new(), Vec::new());
        for mut placed in placed {
            let piece = Piece { slot: &placed.put.src, from: 0, bytes: placed.put.bytes as usize };
            // Another depot's clients may read its blocks where they lie, without a checksum.
            let outcome = self
                .check_owner()
                .and_then(|()| self.medium.write_piece(self.geometry.payload_at(placed.unit), piece));
            match outcome {
                Ok(checksum) => {
                    placed.checksum = checksum;
                    written.push(placed);
                }
                Err(error) => failed.push((placed, error)),
            }
        }
        // A device is written through its mapping.
        if !self.medium.is_memory() {
            for placed in &written {
                let at = self.geometry.payload_at(placed.unit);
                self.ahead.written(Extent { at, bytes: placed.put.bytes as usize });
            }
        }
        if !written.is_empty()
            && let Err(error) = self.persist()
        {
            failed.extend(written.drain(..).map(|placed| (placed, error.clone())));
        }
        for (placed, error) in failed {
            self.abandon(std::slice::from_ref(&placed));
            ends.push((placed.put, Err(error)));
        }
        (written, ends)
    }

    fn write_headers(&self, placed: Vec<Placed>) -> (Vec<Placed>, Ends) {
        let mut ends = Vec::new();
        let mut headers = Vec::new();
        {
            let mut state = self.lock();
            for placed in placed {
                // Removed or reset in the meantime: nothing must be found, so nothing names it.
                let is_open = state.spaces.contains_key(&placed.put.key.namespace);
                let is_cancelled = state.writing.get(&placed.put.key).is_none_or(|write| write.cancelled);
                let header = if is_open && !is_cancelled {
                    state.slots.begin_publish(placed.unit, placed.checksum)
                } else {
                    None
                };
                match header {
                    Some(header) => headers.push((placed, header)),
                    None => {
                        state.slots.leave(placed.unit);
                        let key = placed.put.key;
                        let end = if is_open { Ok(Written::New) } else { Err(no_namespace(&key)) };
                        ends.push((placed.put, end));
                    }
                }
            }
        }
        let mut outcome = Ok(());
        for (placed, header) in &headers {
            let line = header.encode(placed.unit, &self.geometry);
            outcome = outcome.and_then(|()| self.medium.write(self.geometry.header_at(placed.unit), &line));
        }
        let outcome = outcome.and_then(|()| if headers.is_empty() { Ok(()) } else { self.persist() });
        let placed: Vec<Placed> = headers.into_iter().map(|(placed, _)| placed).collect();
        match outcome {
            Ok(()) => (placed, ends),
            Err(error) => {
                self.abandon(&placed);
                ends.extend(placed.into_iter().map(|placed| (placed.put, Err(error.clone()))));
                (Vec::new(), ends)
            }
        }
    }

    /// Makes blocks visible whose headers are on the medium, and ends their writes in the same step. Those removed or
    /// reset in the meantime must be cleared.
    fn publish(&self, placed: Vec<Placed>) -> (Vec<Placed>, Vec<Visible>) {
        let (mut gone, mut found) = (Vec::new(), Vec::new());
        let mut state = self.lock();
        for placed in placed {
            let key = placed.put.key;
            let is_open = state.spaces.contains_key(&key.namespace);
            let is_cancelled = state.writing.get(&key).is_none_or(|write| write.cancelled);
            if is_open && !is_cancelled {
                state.slots.publish(placed.unit);
                let dones = state.writing.remove(&key).map_or_else(Vec::new, |write| write.dones);
                found.push((placed.put.src, dones));
            } else {
                state.slots.leave(placed.unit);
                gone.push(placed);
            }
        }
        (gone, found)
    }

    fn tell(&self, found: Vec<Visible>) {
        for (src, dones) in found {
            drop(src);
            let answers = std::iter::once(Written::New).chain(std::iter::repeat(Written::AlreadyThere));
            dones.into_iter().zip(answers).for_each(|(done, answer)| done(Ok(answer)));
        }
    }

    /// Ends writes that did not make a block visible.
    fn end_writes(&self, ends: impl IntoIterator<Item = (Put, Result<Written>)>) {
        for (put, outcome) in ends {
            let Some(write) = self.lock().writing.remove(&put.key) else { continue };
            drop(put.src);
            if let Err(error) = &outcome {
                write.removals.iter().for_each(|removal| {
                    // The block may be on the medium with an intact header, although the write failed.
                    if error.kind() == ErrorKind::Io {
                        removal.fail(error.clone());
                    }
                });
            }
            for done in write.dones {
                done(outcome.clone());
            }
        }
    }
}
