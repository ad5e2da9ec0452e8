//! Writes up to the queue of the append thread: one writer per key, checksums computed on the I/O threads.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use hashbrown::hash_map::Entry;
use kvdepot_core::limits::WRITERS_WAITING_MAX;
use kvdepot_core::{BlockKey, Error, ErrorKind, Result};
use kvdepot_io::{Call, Class, IoBuf, Op, Request, SlotBuf};

use super::append::closed;
use super::codec::size;
use super::spaces::Space;
use super::state::{Answers, Record, Shared};
use crate::format::{self, Writer};
use crate::{Done, WriteItem, Written};

/// The most removals waiting for a failing medium, after which it gets no more blocks: each failed write adds one.
const REMOVALS_MAX: usize = 1 << 16;

/// The decision about a call to write.
enum Admitted {
    /// This call writes, under this token.
    Write(Arc<Space>, u64),
    /// Another call writes the same block; this one is notified when that ends.
    Wait,
    /// Nothing needs to be written.
    Answer(Done<Written>, Result<Written>),
}

impl Shared {
    /// Returns the first step of a write; `None` if it has ended, or ends with another one.
    pub(super) fn begin_write(self: &Arc<Self>, write: WriteItem, deadline: Instant) -> Option<Request> {
        let WriteItem { key, src, done } = write;
        let (space, token) = match self.admit(key, done) {
            Admitted::Write(space, token) => (space, token),
            Admitted::Wait => return None,
            Admitted::Answer(done, answer) => {
                drop(src);
                done(answer);
                return None;
            }
        };
        let shared = Arc::clone(self);
        let run = Box::new(move |begun: Result<()>| {
            let sealed = begun.and_then(|()| shared.seal(key, &space, &src));
            drop(src);
            let queued = sealed.and_then(|buf| shared.queue(key, token, buf, deadline));
            if let Err(error) = queued {
                let mut answers = Answers::new();
                shared.lock().end(token, &Err(error), &mut answers);
                shared.answer(answers);
            }
        });
        Some(Request { class: Class::Write, deadline, op: Op::Call(Call { run }) })
    }

    fn admit(&self, key: BlockKey, done: Done<Written>) -> Admitted {
        let mut state = self.lock();
        let Some(space) = state.spaces.get(&key).map(Arc::clone) else {
            return Admitted::Answer(done, Err(Self::no_namespace(&key)));
        };
        if state.index.get(&key).is_some() {
            state.index.touch(&key);
            return Admitted::Answer(done, Ok(Written::AlreadyThere));
        }
        if let Entry::Occupied(token) = state.writing.entry(key) {
            let token = *token.get();
            if let Some(inflight) = state.inflight.get_mut(&token) {
                if inflight.waiters.len() >= WRITERS_WAITING_MAX {
                    let error = Error::new(ErrorKind::Busy, "too many writers of one block").with("key", key);
                    return Admitted::Answer(done, Err(error));
                }
                inflight.waiters.push(done);
                return Admitted::Wait;
            }
        }
        let most = self.medium.shape.record_bytes_max();
        if space.record_bytes > most {
            let error = Error::new(
                ErrorKind::Config,
                "a block is larger than a segment of the Slab tier: format the medium with larger segments",
            );
            let error = error.with("record_bytes", space.record_bytes).with("record_bytes_max", most);
            return Admitted::Answer(done, Err(error));
        }
        if state.failing && state.removals.len() >= REMOVALS_MAX {
            let error = Error::new(
                ErrorKind::Busy,
                "the medium of the Slab tier accepts no writes until failed removals are recorded on it",
            );
            return Admitted::Answer(done, Err(error.with("removals", state.removals.len())));
        }
        let token = state.begin(key, space.record_bytes, done);
        Admitted::Write(space, token)
    }

    fn seal(&self, key: BlockKey, space: &Space, src: &SlotBuf) -> Result<IoBuf> {
        let layout = space.spec.layout();
        let sealed = self.transform.seal(space.spec.root(), key, layout, src, Writer::now(&self.host))?;
        match self.volume().direct() {
            Some(align) if !sealed.fits(align) => {
                // Pieces that O_DIRECT does not accept are copied. Only a plain record has such: an encoded one lies in
                // pages of its own.
                let copy = SlotBuf::anonymous(space.slot_bytes);
                let mut bytes = vec![0; size(layout.block_bytes())];
                src.read_at(0, &mut bytes);
                copy.write_at(0, &bytes);
                format::seal(key, layout, &copy, Writer::now(&self.host))
            }
            _ => Ok(sealed),
        }
    }

    /// Hands a record to the append thread; waits for space until the deadline.
    fn queue(&self, key: BlockKey, token: u64, buf: IoBuf, deadline: Instant) -> Result<()> {
        let bytes = buf.len() as u64;
        let mut state = self.lock();
        state.correct(token, bytes);
        while state.pending_bytes > 0 && state.pending_bytes + bytes > self.config.pending_bytes_max {
            if state.stopping {
                return Err(closed());
            }
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                return Err(Request::expired());
            }
        }
        if state.stopping {
            return Err(closed());
        }
        state.pending_bytes += bytes;
        // Relaxed: a figure that orders nothing.
        self.counters.accepted.fetch_add(bytes, Ordering::Relaxed);
        state.pending.push_back(Record { key, token, buf, deadline });
        drop(state);
        self.append.notify_one();
        Ok(())
    }
}
