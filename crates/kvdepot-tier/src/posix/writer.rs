//! Writes: one writer per key, space first (P5), published when complete (P1).

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use hashbrown::hash_map::Entry as MapEntry;
use kvdepot_core::limits::WRITERS_WAITING_MAX;
use kvdepot_core::{BlockKey, Error, ErrorKind, Result};
use kvdepot_io::{Class, FileWritten, Op, Prepared, Request, SlotBuf, WriteFile};

use super::identity::temporary_name;
use super::leaving::{Leave, Leaving};
use super::reserve::Room;
use super::shared::Shared;
use super::space::{Space, home};
use super::state::State;
use crate::format::Writer;
use crate::{Done, WriteItem, Written};

/// The decision about a call to write.
enum Admitted {
    /// This call writes.
    Write(Arc<Space>),
    /// Another call writes the same block; this one is notified when that ends.
    Wait,
    /// Nothing needs to be written.
    Answer(Done<Written>, Result<Written>),
}

impl Shared {
    /// Returns the I/O of a write; `None` if it has ended, or ends with another one.
    pub(super) fn begin_write(self: &Arc<Self>, write: WriteItem, deadline: Instant) -> Option<Request> {
        let WriteItem { key, src, done } = write;
        let space = match self.admit(key, done) {
            Admitted::Write(space) => space,
            Admitted::Wait => return None,
            Admitted::Answer(done, answer) => {
                drop(src);
                done(answer);
                return None;
            }
        };
        let directory = home(key.hash, self.devices.len());
        let temporary = space.block_dir(key.hash).join(temporary_name());
        let (shared, mine, path) = (Arc::clone(self), Arc::clone(&space), temporary.clone());
        let prepare = Box::new(move || shared.prepare(key, &mine, &src, &path, deadline));
        let (shared, file_bytes) = (Arc::clone(self), space.file_bytes);
        let make_room = Box::new(move || shared.make_room(directory, file_bytes, deadline));
        let (shared, mine, path) = (Arc::clone(self), Arc::clone(&space), temporary.clone());
        let done = Box::new(move |outcome| shared.end_write(key, mine, directory, path, outcome));
        let op = Op::Write(WriteFile {
            device: Arc::clone(self.device(directory)),
            temporary,
            target: space.block_path(key.hash),
            durable: self.config.durable,
            prepare,
            make_room,
            done,
        });
        Some(Request { class: Class::Write, deadline, op })
    }

    fn admit(&self, key: BlockKey, done: Done<Written>) -> Admitted {
        let mut state = self.lock();
        let Some(space) = state.spaces.get(&key.namespace).map(Arc::clone) else {
            return Admitted::Answer(done, Err(Self::no_namespace(&key)));
        };
        if state.index.get(&key).is_some() {
            state.touch(&key);
            return Admitted::Answer(done, Ok(Written::AlreadyThere));
        }
        match state.writing.entry(key) {
            MapEntry::Vacant(vacant) => {
                vacant.insert(vec![done]);
                Admitted::Write(space)
            }
            MapEntry::Occupied(mut waiting) if waiting.get().len() < WRITERS_WAITING_MAX => {
                waiting.get_mut().push(done);
                Admitted::Wait
            }
            MapEntry::Occupied(_) => {
                let error = Error::new(ErrorKind::Busy, "too many writers of one block").with("key", key);
                Admitted::Answer(done, Err(error))
            }
        }
    }

    /// On the I/O thread: does the block exist already, is there space for it, what are its bytes.
    fn prepare(
        &self,
        key: BlockKey,
        space: &Arc<Space>,
        src: &SlotBuf,
        temporary: &Path,
        deadline: Instant,
    ) -> Result<Prepared> {
        let complete = {
            let state = self.lock();
            if !state.is_current(space) {
                return Err(Self::no_namespace(&key));
            }
            state.is_complete(space.id, self.config.shared)
        };
        self.unlink_predecessor(&key, deadline)?;
        if !complete && self.find(space, &key)? {
            return Ok(Prepared::Skip);
        }
        let (layout, writer) = (space.spec.layout(), Writer::now(&self.host));
        let sealed = self.transform.seal(space.root, key, layout, src, writer)?;
        match self.reserve(key, sealed.len() as u64, &sealed, temporary, deadline)? {
            Room::New => Ok(Prepared::Buf(sealed)),
            Room::Over(file) => Ok(Prepared::Over(sealed, file)),
        }
    }

    fn end_write(
        &self,
        key: BlockKey,
        space: Arc<Space>,
        directory: usize,
        temporary: PathBuf,
        outcome: Result<FileWritten>,
    ) {
        let (outcome, in_doubt) = match outcome {
            // The block's file is there, whosesoever it is: it counts as the one that was written.
            Ok(FileWritten::InDoubt(_)) if self.find(&space, &key).unwrap_or(false) => {
                (Ok(FileWritten::Published), false)
            }
            Ok(FileWritten::InDoubt(error)) => (Err(error), true),
            outcome => (outcome, false),
        };
        if outcome.as_ref().is_err_and(|error| error.kind() == ErrorKind::Io) {
            // The next write of this block must not run into it again. This is the I/O thread: other threads never end
            // with `Io`.
            self.clear_name(&space, directory, key);
        }
        let mut state = self.lock();
        let waiting = state.writing.remove(&key).unwrap_or_default();
        let first = match outcome {
            Ok(FileWritten::Published) => {
                let current = state.is_current(&space);
                state.keep_reserved(key, space, directory);
                if current { Ok(Written::New) } else { Err(Self::no_namespace(&key)) }
            }
            Ok(_) => Ok(Written::AlreadyThere),
            Err(error) => {
                state.drop_reserved(&key, directory, temporary, in_doubt);
                Err(error.with("key", key))
            }
        };
        let (stale, left) = (!state.leaving_pending.is_empty(), state.leftovers.has_new());
        drop(state);
        self.changed.notify_all();
        if left {
            self.ledger.notify_one();
        }
        if stale {
            self.unlinks.notify_one();
        }
        let rest = first.clone().map(|_| Written::AlreadyThere);
        let mut answers = std::iter::once(first).chain(std::iter::repeat(rest));
        for done in waiting {
            done(answers.next().expect("an endless iterator"));
        }
    }
}

impl State {
    /// Turns a reservation into a file.
    pub(super) fn keep_reserved(&mut self, key: BlockKey, space: Arc<Space>, directory: usize) {
        let Some(bytes) = self.reserved.remove(&key) else { return };
        self.absent.remove(&key);
        if let Some(purse) = &mut self.purse {
            purse.done(bytes);
        }
        let stale = !self.is_current(&space);
        // A file of the same key that the scan found under the old name was replaced by the rename.
        if let Some(before) = self.index.remove(&key) {
            self.uncharge_missing(before.entry.bytes);
        }
        if stale {
            self.add_leaving(key, Leaving { space, directory, bytes, step: Leave::Pending, used_s: None });
        } else {
            self.changes += 1;
            self.index.insert(key, space, directory, bytes, None);
        }
    }

    /// Gives the reservation of a failed write back. `in_doubt`: its file may have its final name.
    fn drop_reserved(&mut self, key: &BlockKey, directory: usize, temporary: PathBuf, in_doubt: bool) {
        if let Some(bytes) = self.reserved.remove(key) {
            self.bytes -= bytes;
            if let Some(purse) = &mut self.purse {
                let membership = purse.fail(bytes);
                self.leftovers.add(directory, temporary, bytes, membership, in_doubt);
            }
        }
    }
}
