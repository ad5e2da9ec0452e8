//! Reads: one system call into the caller's slot; the bytes are trusted only if every checksum matches (P1, P8).

use std::sync::Arc;
use std::time::Instant;

use kvdepot_core::{BlockKey, Error, ErrorKind, Result};
use kvdepot_io::{Call, Class, IoBuf, Op, Request, SlotBuf};

use super::index::{Known, Place};
use super::record;
use super::spaces::Space;
use super::state::Shared;
use crate::{Done, Fetched, ReadItem};

/// Attempts to read a block that moves while it is read.
const TRIES_MAX: usize = 3;

struct Reading {
    shared: Arc<Shared>,
    space: Arc<Space>,
    key: BlockKey,
    is_use: bool,
}

impl Shared {
    /// Returns the I/O of a read; `None` if it has ended.
    pub(super) fn begin_read(self: &Arc<Self>, read: ReadItem, deadline: Instant) -> Option<Request> {
        let found = {
            let state = self.lock();
            state.spaces.get(&read.key).map(|space| (Arc::clone(space), state.index.get(&read.key).is_some()))
        };
        if deadline <= Instant::now() {
            read.end(Err(Request::expired()));
            return None;
        }
        let Some((space, is_there)) = found else {
            read.end(Ok(Fetched::Miss));
            return None;
        };
        if read.dst.len() < space.slot_bytes {
            let error = Error::new(ErrorKind::Config, "a slot is smaller than its block")
                .with("slot_bytes", read.dst.len())
                .with("slot_bytes_expected", space.slot_bytes);
            read.end(Err(error));
            return None;
        }
        if !is_there {
            read.end(Ok(Fetched::Miss));
            return None;
        }
        let ReadItem { key, dst, done, is_use } = read;
        let reading = Reading { shared: Arc::clone(self), space, key, is_use };
        let run = Box::new(move |begun: Result<()>| reading.run(begun, dst, done));
        Some(Request { class: Class::Read, deadline, op: Op::Call(Call { run }) })
    }
}

impl Reading {
    fn run(self, begun: Result<()>, dst: SlotBuf, done: Done<Fetched>) {
        let outcome = begun.and_then(|()| self.fetch(&dst)).map_err(|error| error.with("key", self.key));
        drop(dst);
        self.shared.deliver_events();
        // The callback may drop the tier.
        drop(self);
        done(outcome);
    }

    fn fetch(&self, dst: &SlotBuf) -> Result<Fetched> {
        for _ in 0..TRIES_MAX {
            let known = {
                let mut state = self.shared.lock();
                if state.spaces.get(&self.key).is_none() {
                    return Ok(Fetched::Miss);
                }
                if self.is_use {
                    state.index.touch(&self.key);
                }
                state.index.get(&self.key)
            };
            let Some(known) = known else { return Ok(Fetched::Miss) };
            match self.read(known.place, dst) {
                Ok(()) => return Ok(Fetched::Whole),
                Err(error) => match self.judge(&known, error) {
                    // It moved or was removed: the next lookup tells.
                    None => {}
                    Some(outcome) => return outcome,
                },
            }
        }
        Ok(Fetched::Miss)
    }

    fn read(&self, place: Place, dst: &SlotBuf) -> Result<()> {
        let (space, volume) = (&self.space, self.shared.volume());
        record::check_length(place, space.header_bytes, space.record_bytes)?;
        let offset = self.shared.medium.shape.record_at(place);
        let buf = |slot: &SlotBuf| record::buffer(place, space.header_bytes, slot).expect("it was measured");
        let verify = |read: &IoBuf| {
            record::is_of(place, read.head())?;
            self.shared.transform.verify(self.key, space.spec.layout(), read).map(drop)
        };
        let mut direct = buf(dst);
        if volume.direct().is_none_or(|align| direct.fits(align)) {
            volume.read_at(&mut direct, offset)?;
            return verify(&direct);
        }
        // Pieces that O_DIRECT does not accept are copied.
        let copy = SlotBuf::anonymous(space.slot_bytes);
        let mut whole = buf(&copy);
        volume.read_at(&mut whole, offset)?;
        verify(&whole)?;
        let mut bytes = vec![0; space.slot_bytes];
        copy.read_at(0, &mut bytes);
        dst.write_at(0, &bytes);
        Ok(())
    }

    /// Decides what a failed read means; `None` if the block was no longer there.
    fn judge(&self, known: &Known, error: Error) -> Option<Result<Fetched>> {
        if !matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Unsupported) {
            return Some(Err(error));
        }
        let mut state = self.shared.lock();
        if state.index.get(&self.key).is_none_or(|now| now.place != known.place) {
            return None;
        }
        state.forget(&self.key);
        state.note_lost(self.key);
        drop(state);
        self.shared.append.notify_one();
        if known.unproven || error.kind() == ErrorKind::Unsupported {
            // A crash tore it before anybody was notified of it.
            tracing::debug!(key = %self.key, %error, "a record that was not synced is incomplete");
            return Some(Ok(Fetched::Miss));
        }
        tracing::warn!(key = %self.key, %error, "a corrupt record is dropped");
        Some(Err(error))
    }
}
