//! Files that are no blocks any more and not unlinked yet.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId, Result};

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
    /// Unlinks a file that the caller has taken up (`Leave::Running`), and releases its bytes.
    pub(super) fn unlink_leaving(&self, key: &BlockKey) -> Result<()> {
        self.unlink_all(std::slice::from_ref(key)).map(drop)
    }

    /// Unlinks files that the caller has taken up (`Leave::Running`: one unlink a file, else a late second one would
    /// hit its successor), releases their bytes, and wakes callers that wait for room. The bytes that this freed; an
    /// error if one of the files could not be unlinked.
    pub(super) fn unlink_all(&self, keys: &[BlockKey]) -> Result<u64> {
        let files: Vec<(BlockKey, Arc<Space>, usize)> = {
            let state = self.lock();
            let file = |key: &BlockKey| {
                state.leaving.get(key).map(|file| (*key, Arc::clone(&file.space), file.directory))
            };
            keys.iter().filter_map(file).collect()
        };
        let unlink = |(key, space, directory): &(BlockKey, Arc<Space>, usize)| {
            self.device(*directory).unlink(&space.block_path(key.hash))
        };
        let outcomes: Vec<Result<bool>> = files.iter().map(unlink).collect();
        let (mut freed, mut first) = (0, Ok(()));
        let mut state = self.lock();
        for ((key, _, directory), outcome) in files.into_iter().zip(outcomes) {
            match outcome {
                // A file that was not there gave the file system nothing back.
                Ok(unlinked) => {
                    let bytes = state.end_leaving(&key, unlinked);
                    self.free_space.credit(directory, if unlinked { bytes } else { 0 });
                    freed += bytes;
                }
                Err(error) => {
                    state.fail_leaving(key);
                    first = Err(error.with("key", key));
                }
            }
        }
        let look = state.chores.discover;
        drop(state);
        if look {
            self.work.notify_one();
        }
        self.changed.notify_all();
        first.map(|()| freed)
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
                        if state.wait_until(&self.changed, deadline) {
                            return Err(Error::new(ErrorKind::Busy, what).with("key", key));
                        }
                        continue;
                    }
                    Some(leaving) => leaving.step = Leave::Running,
                }
                state.leaving_running += 1;
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
        match step {
            Leave::Pending => self.leaving_pending.push_back(key),
            Leave::Running => self.leaving_running += 1,
            Leave::Failed => self.leaving_failed.push(key),
        }
    }

    /// Releases a file that is gone, or was not there; its bytes.
    fn end_leaving(&mut self, key: &BlockKey, unlinked: bool) -> u64 {
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

    fn fail_leaving(&mut self, key: BlockKey) {
        self.leaving_running -= 1;
        if let Some(leaving) = self.leaving.get_mut(&key) {
            leaving.step = Leave::Failed;
            self.leaving_failed.push(key);
        }
    }

    /// The next file to unlink, marked as taken up.
    pub(super) fn take_leaving(&mut self) -> Option<BlockKey> {
        while let Some(key) = self.leaving_pending.pop_front() {
            if let Some(leaving) = self.leaving.get_mut(&key).filter(|l| l.step == Leave::Pending) {
                leaving.step = Leave::Running;
                self.leaving_running += 1;
                return Some(key);
            }
        }
        None
    }

    /// Has the unlinks tried again that failed.
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

    /// Whether no unlink is outstanding but those that failed.
    pub(super) fn has_unlinked(&self) -> bool {
        self.leaving_pending.is_empty() && self.leaving_running == 0
    }
}

/// Corrupt files that are kept of one namespace.
pub(super) type BadFiles = VecDeque<super::state::BadFile>;
