//! Unlinks files that are no longer blocks.

use std::sync::Arc;
use std::time::Instant;

use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId, Result};

use super::index::{Taken, time_of};
use super::leaving::{BadFile, Leave, Leaving};
use super::shared::Shared;
use super::space::Space;
use super::state::State;

impl Shared {
    /// Unlinks a file that the caller has claimed (`Leave::Running`), and releases its bytes.
    pub(super) fn unlink_leaving(&self, key: &BlockKey) -> Result<()> {
        self.unlink_all(std::slice::from_ref(key)).map(drop)
    }

    /// Unlinks files that the caller has claimed (`Leave::Running`: one unlink per file, because a late second one
    /// would hit its successor), releases the bytes of each, and wakes callers that wait for space. Returns the freed
    /// bytes; an error if one of the files could not be unlinked.
    pub(super) fn unlink_all(&self, keys: &[BlockKey]) -> Result<u64> {
        let files: Vec<(BlockKey, Arc<Space>, usize)> = {
            let state = self.lock();
            let file = |key: &BlockKey| {
                state.leaving.get(key).map(|file| (*key, Arc::clone(&file.space), file.directory))
            };
            keys.iter().filter_map(file).collect()
        };
        let (mut freed, mut first) = (0, Ok(()));
        for (key, space, directory) in files {
            let path = space.block_path(key.hash);
            let unlinking = self.begin_unlink(directory, &path);
            let outcome = self.device(directory).unlink(&path);
            match outcome {
                Ok(unlinked) => {
                    let mut state = self.lock();
                    let bytes = state.end_leaving(&key, unlinked);
                    state.end_unlink(unlinking, bytes);
                    let look = state.chores.discover;
                    drop(state);
                    // A file that was not there gave nothing back to the file system.
                    self.free_space.credit(directory, bytes);
                    freed += bytes;
                    if look {
                        self.work.notify_one();
                    }
                }
                Err(error) => {
                    // On a read-only disk all blocks are equally impossible to remove.
                    let keeps_order = self.device(directory).is_read_only();
                    let mut state = self.lock();
                    state.fail_leaving(key, keeps_order);
                    state.end_unlink(unlinking, 0);
                    drop(state);
                    first = Err(error.with("key", key));
                }
            }
            self.changed.notify_all();
        }
        first.map(|()| freed)
    }

    /// Before a block is written: has its old file unlinked, on this thread unless another has started.
    pub(super) fn unlink_predecessor(&self, key: &BlockKey, deadline: Instant) -> Result<()> {
        loop {
            {
                let mut state = self.lock();
                let is_read = state.index.is_read(key);
                match state.leaving.get_mut(key) {
                    None => return Ok(()),
                    Some(leaving) if matches!(leaving.step, Leave::Running | Leave::Read) => {
                        let what = "the block's old file is being removed";
                        if self.wait_for_change(&mut state, deadline) {
                            return Err(Error::new(ErrorKind::Busy, what).with("key", key));
                        }
                        continue;
                    }
                    Some(leaving) if is_read => {
                        leaving.step = Leave::Read;
                        state.leaving_read += 1;
                        continue;
                    }
                    Some(leaving) => leaving.step = Leave::Running,
                }
                state.leaving_running += 1;
            }
            self.unlink_leaving(key)?;
        }
    }

    /// Unlinks a file that was set aside and whose bytes are still charged. If that fails they stay charged, and the
    /// next sweep has it retried. Returns the freed bytes.
    pub(super) fn unlink_bad(&self, file: BadFile) -> Result<u64> {
        let outcome = self.unlink_counted(file.directory, &file.path);
        let mut state = self.lock();
        let (bytes, directory) = (file.bytes, file.directory);
        match outcome {
            Ok(true) => state.bytes -= bytes,
            Ok(false) => state.uncharge_missing(bytes),
            Err(error) => {
                state.bad_failed.push(file);
                return Err(error);
            }
        }
        drop(state);
        self.free_space.credit(directory, bytes);
        self.changed.notify_all();
        Ok(bytes)
    }

    /// Unlinks corrupt files of which too many are kept; what cannot be removed is found again by the next sweep.
    pub(super) fn unlink_surplus(&self, surplus: Vec<BadFile>) {
        for file in surplus {
            if let Err(error) = self.unlink_bad(file) {
                tracing::warn!(%error, "cannot remove a corrupt block file");
            }
        }
    }
}

impl State {
    /// Takes a block out of the index; its file goes in the background. A block being evicted goes for good.
    pub(super) fn leave(&mut self, key: &BlockKey) {
        if let Some(taken) = self.take(key) {
            self.begin_leaving(taken, Leave::Pending);
        } else if let Some(leaving) = self.leaving.get_mut(key) {
            leaving.used_s = None;
        }
    }

    pub(super) fn begin_leaving(&mut self, taken: Taken, step: Leave) {
        self.add_leaving(taken.key, Leaving::new(taken, step));
    }

    pub(super) fn add_leaving(&mut self, key: BlockKey, new: Leaving) {
        if let Some(known) = self.leaving.get_mut(&key) {
            // A block was written over what a scan had found under its name, and both belong to a past epoch: there is
            // one file, and one unlink removes it.
            self.bytes -= known.bytes.min(new.bytes);
            known.bytes = known.bytes.max(new.bytes);
            known.used_s = None;
            return;
        }
        match new.step {
            Leave::Pending => self.leaving_pending.push_back(key),
            Leave::Read => self.leaving_read += 1,
            Leave::Running => self.leaving_running += 1,
            Leave::Failed => self.leaving_failed.push(key),
        }
        self.leaving.insert(key, new);
    }

    /// Releases a file that is gone or was not there; returns the freed bytes.
    pub(super) fn end_leaving(&mut self, key: &BlockKey, unlinked: bool) -> u64 {
        self.leaving_running -= 1;
        let Some(Leaving { space, directory, bytes, .. }) = self.leaving.remove(key) else { return 0 };
        self.note_gone(*key);
        if unlinked {
            self.bytes -= bytes;
        } else if self.is_current(&space) {
            self.uncharge_missing(bytes);
        } else if bytes > 0 {
            // A reset may have renamed its directory.
            self.keep_as_waste(&space, directory, bytes);
        }
        if unlinked { bytes } else { 0 }
    }

    /// The file stays. A block that was to be evicted becomes a block again: with its old recency, or else as if it
    /// were used now, so that the next victim is a different one.
    fn fail_leaving(&mut self, key: BlockKey, keeps_order: bool) {
        self.leaving_running -= 1;
        let Some(leaving) = self.leaving.get_mut(&key) else { return };
        let used_s = leaving.used_s.filter(|_| self.spaces.contains_key(&leaving.space.id));
        if let Some(used_s) = used_s.filter(|_| self.index.get(&key).is_none()) {
            let Some(Leaving { space, directory, bytes, .. }) = self.leaving.remove(&key) else { return };
            self.index.insert(key, space, directory, bytes, keeps_order.then(|| time_of(used_s)));
            return;
        }
        leaving.step = Leave::Failed;
        self.leaving_failed.push(key);
    }

    /// The next file to unlink, marked as claimed.
    pub(super) fn take_leaving(&mut self) -> Option<BlockKey> {
        while let Some(key) = self.leaving_pending.pop_front() {
            let Some(leaving) = self.leaving.get_mut(&key).filter(|l| l.step == Leave::Pending) else {
                continue;
            };
            // At the end it goes all the same, or the next start would find it.
            if self.index.is_read(&key) && self.chores.stop_at.is_none() {
                leaving.step = Leave::Read;
                self.leaving_read += 1;
                continue;
            }
            leaving.step = Leave::Running;
            self.leaving_running += 1;
            return Some(key);
        }
        None
    }

    /// Has a file unlinked that waits for a read; returns whether it does.
    pub(super) fn leave_after_read(&mut self, key: BlockKey) -> bool {
        let Some(leaving) = self.leaving.get_mut(&key).filter(|leaving| leaving.step == Leave::Read) else {
            return false;
        };
        leaving.step = Leave::Pending;
        self.leaving_read -= 1;
        self.leaving_pending.push_back(key);
        true
    }

    /// At the end of the tier: reads that hang keep no removed file.
    pub(super) fn leave_without_reads(&mut self) {
        for key in self.index.blocks_read() {
            self.leave_after_read(key);
        }
    }

    /// Has failed unlinks retried.
    pub(super) fn retry_leaving(&mut self) {
        for file in std::mem::take(&mut self.bad_failed) {
            let root = file.path.iter().next().and_then(|root| NamespaceId::from_hex(root.to_str()?));
            self.bad.entry(root.unwrap_or(NamespaceId([0; 16]))).or_default().push_back(file);
        }
        for key in std::mem::take(&mut self.leaving_failed) {
            if let Some(file) = self.leaving.get_mut(&key).filter(|file| file.step == Leave::Failed) {
                file.step = Leave::Pending;
                self.leaving_pending.push_back(key);
            }
        }
    }

    /// Returns whether no unlink is outstanding except those that failed.
    pub(super) fn has_unlinked(&self) -> bool {
        self.leaving_pending.is_empty() && self.leaving_running == 0 && self.leaving_read == 0
    }
}
