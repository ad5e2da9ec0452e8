//! Files that are no blocks any more and not unlinked yet.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use kvdepot_core::{BlockKey, Error, ErrorKind, Result};

use super::index::Taken;
use super::space::Space;
use super::state::{Shared, State};

/// How far the removal of a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leave {
    /// Nobody has taken it up.
    Pending,
    /// A thread unlinks it now.
    Running,
    /// The device refused; tried again by the next sweep.
    Failed,
}

/// A file whose unlink is outstanding; its bytes stay charged until then.
#[derive(Debug)]
pub(super) struct Leaving {
    pub(super) space: Arc<Space>,
    pub(super) directory: usize,
    pub(super) bytes: u64,
    pub(super) step: Leave,
}

impl Leaving {
    pub(super) fn new(taken: Taken, step: Leave) -> Self {
        Self { space: taken.space, directory: taken.entry.directory, bytes: taken.entry.bytes, step }
    }
}

impl Shared {
    /// Unlinks a file that the caller has taken up (`Leave::Running`: one unlink a file, else a late second one would
    /// hit its successor), releases its bytes, and wakes callers that wait for room.
    pub(super) fn unlink_leaving(&self, key: &BlockKey) -> Result<()> {
        let (directory, path) = {
            let state = self.lock();
            let Some(leaving) = state.leaving.get(key) else { return Ok(()) };
            let (space, directory) = (Arc::clone(&leaving.space), leaving.directory);
            drop(state);
            (directory, space.block_path(key.hash))
        };
        let outcome = self.device(directory).unlink(&path);
        let mut state = self.lock();
        let mut freed = 0;
        match outcome {
            Ok(unlinked) => {
                if let Some(leaving) = state.leaving.remove(key) {
                    state.bytes -= leaving.bytes;
                    // A file that was not there gave the file system nothing back.
                    freed = if unlinked { leaving.bytes } else { 0 };
                }
            }
            Err(_) => {
                if let Some(leaving) = state.leaving.get_mut(key) {
                    leaving.step = Leave::Failed;
                }
            }
        }
        drop(state);
        self.free_space.credit(directory, freed);
        self.changed.notify_all();
        outcome.map(drop)
    }

    /// Before a block is written: has its old file unlinked, on this thread if no other has begun.
    pub(super) fn unlink_predecessor(&self, key: &BlockKey, deadline: Instant) -> Result<()> {
        loop {
            {
                let mut state = self.lock();
                match state.leaving.get_mut(key) {
                    None => return Ok(()),
                    Some(leaving) if leaving.step == Leave::Running => {
                        let what = "the block's old file is being removed";
                        if self.changed.wait_until(&mut state, deadline).timed_out() {
                            return Err(Error::new(ErrorKind::Busy, what).with("key", key));
                        }
                        continue;
                    }
                    Some(leaving) => leaving.step = Leave::Running,
                }
            }
            self.unlink_leaving(key)?;
        }
    }
}

impl State {
    /// Takes a block out of the index; its file goes in the background.
    pub(super) fn leave(&mut self, key: &BlockKey) {
        if let Some(taken) = self.take(key) {
            self.begin_leaving(taken, Leave::Pending);
        }
    }

    pub(super) fn begin_leaving(&mut self, taken: Taken, step: Leave) {
        let key = taken.key;
        self.leaving.insert(key, Leaving::new(taken, step));
        if step == Leave::Pending {
            self.leaving_pending.push_back(key);
        }
    }

    /// The next file to unlink, marked as taken up.
    pub(super) fn take_leaving(&mut self) -> Option<BlockKey> {
        while let Some(key) = self.leaving_pending.pop_front() {
            if let Some(leaving) = self.leaving.get_mut(&key).filter(|l| l.step == Leave::Pending) {
                leaving.step = Leave::Running;
                return Some(key);
            }
        }
        None
    }

    /// Has the unlinks tried again that failed.
    pub(super) fn retry_leaving(&mut self) {
        let Self { leaving, leaving_pending, .. } = self;
        let failed = leaving.iter_mut().filter(|(_, file)| file.step == Leave::Failed);
        leaving_pending.extend(failed.map(|(key, file)| {
            file.step = Leave::Pending;
            *key
        }));
    }

    /// Whether no unlink is outstanding but those that failed.
    pub(super) fn has_unlinked(&self) -> bool {
        self.leaving_pending.is_empty() && self.leaving.values().all(|file| file.step == Leave::Failed)
    }
}

/// Corrupt files that are kept of one namespace.
pub(super) type BadFiles = VecDeque<super::state::BadFile>;
