//! Reads and probes: nothing is trusted before it has been verified (P1, P8).

use std::sync::Arc;
use std::time::Instant;

use kvdepot_core::limits::BLOCK_ALIGN_BYTES;
use kvdepot_core::{BlockKey, Error, ErrorKind, Result};
use kvdepot_io::transfer::read_file;
use kvdepot_io::{Call, Class, FileStat, IoBuf, Op, ReadFile, Request, SlotBuf};

use super::leaving::BadFile;
use super::shared::Shared;
use super::space::{Space, home};
use super::state::{Adopt, PIECE, State};
use crate::{Done, Fetched, ReadItem, format};

/// A read in flight.
struct Reading {
    shared: Arc<Shared>,
    space: Arc<Space>,
    key: BlockKey,
    directory: usize,
    /// Whether the index had it when the read began: if the index no longer has it when the read ends, the file was
    /// evicted.
    known: bool,
    /// Files published after this generation are not the one that was read.
    generation: u64,
    is_use: bool,
}

impl Shared {
    /// Returns the I/O of the reads, with one lookup in the index per piece of the batch; reads that need no I/O end
    /// here.
    pub(super) fn begin_reads(self: &Arc<Self>, reads: Vec<ReadItem>, deadline: Instant) -> Vec<Request> {
        let mut requests = Vec::with_capacity(reads.len());
        let mut reads = reads.into_iter();
        loop {
            let some: Vec<ReadItem> = reads.by_ref().take(PIECE).collect();
            if some.is_empty() {
                return requests;
            }
            let found: Vec<Option<Reading>> = {
                let mut state = self.lock();
                some.iter().map(|read| self.look_up(&mut state, read)).collect()
            };
            for (read, reading) in some.into_iter().zip(found) {
                match reading {
                    Some(reading) => requests.extend(self.begin_read(reading, read, deadline)),
                    None => read.end(Ok(Fetched::Miss)),
                }
            }
        }
    }

    fn begin_read(&self, reading: Reading, read: ReadItem, deadline: Instant) -> Option<Request> {
        let ReadItem { key, dst, done, .. } = read;
        let (head, body) = (reading.space.header_bytes, reading.space.slot_bytes);
        let dst_bytes = dst.len();
        let Some(buf) = IoBuf::for_read(head, dst, body) else {
            done(Err(Error::new(ErrorKind::Config, "a slot is smaller than its block's payload")
                .with("slot_bytes", dst_bytes)
                .with("slot_bytes_expected", body)));
            return None;
        };
        let device = Arc::clone(self.device(reading.directory));
        let path = reading.space.block_path(key.hash);
        let fewest_bytes = reading.space.fewest_bytes();
        let done = Box::new(move |outcome| done(reading.end(outcome)));
        let op = Op::Read(ReadFile { device, path, buf, fewest_bytes, done });
        Some(Request { class: Class::Read, deadline, op })
    }

    /// Returns what a read needs to know; `None` for a block known to be absent.
    fn look_up(self: &Arc<Self>, state: &mut State, read: &ReadItem) -> Option<Reading> {
        let (key, is_use) = (read.key, read.is_use);
        let space = state.spaces.get(&key.namespace).map(Arc::clone)?;
        let known = state.index.get(&key).map(|entry| entry.directory);
        let gone = state.leaving.contains_key(&key);
        if gone || (known.is_none() && state.is_complete(space.id, self.config.shared)) {
            return None;
        }
        let directory = known.unwrap_or_else(|| home(key.hash, self.devices.len()));
        let generation = state.index.generation();
        state.index.begin_read(key);
        let (shared, known) = (Arc::clone(self), known.is_some());
        Some(Reading { shared, space, key, directory, known, generation, is_use })
    }

    /// Returns the I/O of a probe; `None` if it needs none and has ended.
    pub(super) fn begin_probe(
        self: &Arc<Self>,
        keys: Vec<BlockKey>,
        deadline: Instant,
        done: Done<usize>,
    ) -> Option<Request> {
        let shared = Arc::clone(self);
        let known = shared.count_leading_known(&keys);
        if known == keys.len() {
            done(Ok(known));
            return None;
        }
        let run = Box::new(move |begun: Result<()>| {
            done(begun.and_then(|()| shared.count_leading(&keys, known, deadline)));
        });
        Some(Request { class: Class::Read, deadline, op: Op::Call(Call { run }) })
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        let was_last = state.index.end_read(&self.key, self.is_use);
        let leaves = was_last && state.leave_after_read(self.key);
        let due = leaves || self.shared.is_over_cap(&state) || self.shared.is_in_debt(&state);
        // It may wait for the room of this block.
        let is_awaited = was_last && state.writes_waiting > 0;
        drop(state);
        if is_awaited {
            self.shared.changed.notify_all();
        }
        if due {
            self.shared.unlinks.notify_one();
        }
    }
}

impl Reading {
    fn end(self, outcome: Result<IoBuf>) -> Result<Fetched> {
        let layout = self.space.spec.layout();
        let verified = outcome.and_then(|buf| {
            self.shared.transform.verify(self.key, layout, &buf)?;
            Ok((buf.filled() as u64).next_multiple_of(BLOCK_ALIGN_BYTES))
        });
        match verified {
            Ok(bytes) => {
                self.found(bytes);
                Ok(Fetched::Whole)
            }
            Err(error) if self.is_miss(&error) => {
                self.shared.lock().forget(&self.key, self.generation);
                self.shared.changed.notify_all();
                self.shared.deliver_events();
                Ok(Fetched::Miss)
            }
            Err(error) => {
                if error.kind() == ErrorKind::Corrupt {
                    self.quarantine(&error);
                }
                Err(error.with("key", self.key))
            }
        }
    }

    /// Returns whether there is no block: no file, one that was evicted in the meantime, or one in an encoding that
    /// this build does not read.
    fn is_miss(&self, error: &Error) -> bool {
        match error.kind() {
            ErrorKind::NotFound => true,
            // Another process may have overwritten the file while it was read.
            ErrorKind::Corrupt => self.has_gone() || self.is_foreign(),
            ErrorKind::Unsupported => self.is_foreign(),
            _ => false,
        }
    }

    /// Returns whether nothing has the block's name any more.
    fn has_gone(&self) -> bool {
        let stat = self.shared.device(self.directory).stat(&self.space.block_path(self.key.hash));
        stat.is_ok_and(|stat| stat.is_none())
    }

    /// Returns whether the file is intact as far as its header tells, and in an encoding that only another build can
    /// read: such a file may have any length, and is left alone.
    fn is_foreign(&self) -> bool {
        let header = self.shared.header(&self.space, self.directory, &self.key);
        header.is_err_and(|error| error.kind() == ErrorKind::Unsupported)
    }

    fn found(&self, bytes: u64) {
        let mut state = self.shared.lock();
        if !self.known {
            // Another node's file, or one that the scan has not reached yet.
            let space = Arc::clone(&self.space);
            state.adopt(self.key, Adopt { space, directory: self.directory, bytes, used: None });
        }
        // What a file has beyond its block was not read.
        if state.index.get(&self.key).is_some_and(|entry| entry.bytes <= self.space.file_bytes) {
            state.correct(&self.key, self.generation, bytes);
        }
        let due = self.is_use && state.touch(&self.key);
        let over = self.shared.is_over_cap(&state);
        drop(state);
        if due {
            self.shared.work.notify_one();
        }
        if over {
            self.shared.unlinks.notify_one();
        }
    }

    /// Sets a corrupt file aside, so that it is not served again and can be inspected.
    fn quarantine(&self, error: &Error) {
        tracing::warn!(key = %self.key, %error, "quarantined a corrupt block file");
        let kept = self.shared.put_aside_counted(&self.space, self.directory, self.key);
        let mut state = self.shared.lock();
        let bytes = state.index.get(&self.key).map_or(self.space.file_bytes, |entry| entry.bytes);
        state.note_gone(self.key);
        state.forget(&self.key, self.generation);
        let path = self.space.bad_path(self.key.hash);
        let surplus = if kept {
            state.keep_bad(self.space.root, BadFile { directory: self.directory, path, bytes })
        } else {
            Vec::new()
        };
        drop(state);
        self.shared.unlink_surplus(surplus);
        self.shared.changed.notify_all();
        self.shared.deliver_events();
    }
}

impl Shared {
    /// Like `put_aside`, but removes the file if others that survey the directories cannot be told.
    fn put_aside_counted(&self, space: &Space, directory: usize, key: BlockKey) -> bool {
        if self.lock().purse.is_none() {
            return self.put_aside(space, directory, key, true);
        }
        let stat = self.device(directory).stat(&space.block_path(key.hash)).ok().flatten();
        let bytes = stat.map_or(0, |stat| stat.bytes.next_multiple_of(BLOCK_ALIGN_BYTES));
        let now_ms = self.now_ms();
        let keep = self.lock().begin_move(bytes, now_ms);
        let kept = self.put_aside(space, directory, key, keep);
        if let Some(purse) = self.lock().purse.as_mut().filter(|_| keep) {
            purse.end_move(bytes);
        }
        kept
    }

    /// Renames whatever stands under a block's name to the name of a corrupt file, or removes it if that is not possible
    /// or not to be. Returns whether it is no longer there and was a file.
    fn put_aside(&self, space: &Space, directory: usize, key: BlockKey, keep: bool) -> bool {
        let device = self.device(directory);
        let (from, to) = (space.block_path(key.hash), space.bad_path(key.hash));
        let is_dir = device.stat(&from).ok().flatten().is_some_and(|stat| stat.is_dir);
        let mut kept = false;
        if keep || is_dir {
            kept = device.publish(&from, &to).is_ok();
            if !kept {
                // A directory does not replace a file, nor a file a directory.
                let _ = device.unlink(&to).and_then(|_| device.remove_dir(&to));
                kept = device.publish(&from, &to).is_ok();
            }
        }
        // What can be neither renamed nor removed stays, and stays a miss: its checksum does not get better.
        !is_dir && (kept || device.unlink(&from).is_ok())
    }

    /// Sets a directory aside that stands where a block's file belongs.
    pub(super) fn clear_name(&self, space: &Space, directory: usize, key: BlockKey) {
        let stat = self.device(directory).stat(&space.block_path(key.hash));
        if stat.ok().flatten().is_some_and(|stat| stat.is_dir) {
            tracing::warn!(%key, "quarantined a directory that is in the place of a block");
            self.put_aside(space, directory, key, true);
        }
    }

    /// Returns how many leading keys are known without I/O.
    fn count_leading_known(&self, keys: &[BlockKey]) -> usize {
        let state = self.lock();
        keys.iter().take_while(|key| state.index.get(key).is_some()).count()
    }

    /// Continues after `known`, checking the disk for each key that is not known; what is found by the deadline counts.
    fn count_leading(&self, keys: &[BlockKey], known: usize, deadline: Instant) -> Result<usize> {
        for (position, key) in keys.iter().enumerate().skip(known) {
            if Instant::now() >= deadline || !self.is_there(key)? {
                return Ok(position);
            }
        }
        Ok(keys.len())
    }

    fn is_there(&self, key: &BlockKey) -> Result<bool> {
        let space = {
            let state = self.lock();
            if state.index.get(key).is_some() {
                return Ok(true);
            }
            let Some(space) = state.spaces.get(&key.namespace).map(Arc::clone) else { return Ok(false) };
            if state.leaving.contains_key(key) || state.is_complete(space.id, self.config.shared) {
                return Ok(false);
            }
            space
        };
        let found = self.find(&space, key)?;
        let mut state = self.lock();
        if !found {
            state.note_absent(*key);
        }
        Ok(found)
    }

    /// Reads the header of a block's file.
    fn header(&self, space: &Space, directory: usize, key: &BlockKey) -> Result<format::BlockHeader> {
        let pages = SlotBuf::anonymous(space.header_bytes);
        let mut buf = IoBuf::payload(pages.clone(), space.header_bytes).expect("a slot of this length");
        read_file(&**self.device(directory), &space.block_path(key.hash), &mut buf)?;
        let mut header = vec![0; space.header_bytes];
        pages.read_at(0, &mut header);
        format::BlockHeader::parse(&header)
    }

    /// Returns whether a file has the length of its block: that of a plain one, or what the header of an encoded one
    /// says.
    fn is_whole(&self, space: &Space, directory: usize, key: &BlockKey, stat: &FileStat) -> bool {
        if stat.is_dir || stat.bytes >= space.file_bytes {
            return !stat.is_dir && stat.bytes == space.file_bytes;
        }
        let header = self.header(space, directory, key);
        header.is_ok_and(|header| header.key == *key && header.file_bytes() == stat.bytes)
    }

    /// Looks for a complete file on the disk and takes it into the index.
    pub(super) fn find(&self, space: &Arc<Space>, key: &BlockKey) -> Result<bool> {
        let directory = home(key.hash, self.devices.len());
        let stat = self.device(directory).stat(&space.block_path(key.hash))?;
        let Some(stat) = stat.filter(|stat| self.is_whole(space, directory, key, stat)) else {
            return Ok(false);
        };
        let used = Some(stat.modified);
        self.lock().adopt(*key, Adopt { space: Arc::clone(space), directory, bytes: stat.bytes, used });
        Ok(true)
    }
}
