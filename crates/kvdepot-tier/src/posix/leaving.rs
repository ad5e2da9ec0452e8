//! Files that are no longer blocks but not unlinked yet.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;

use super::index::{Entry, Taken};
use super::space::Space;

/// The progress of a file's removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leave {
    /// Nobody has started on it.
    Pending,
    /// It is being read here: nobody starts before that has ended.
    Read,
    /// A thread is unlinking it now.
    Running,
    /// The device refused; the next sweep retries.
    Failed,
}

/// A file whose unlink is outstanding; its bytes stay charged until then.
#[derive(Debug)]
pub(super) struct Leaving {
    pub(super) space: Arc<Space>,
    pub(super) directory: usize,
    pub(super) bytes: u64,
    pub(super) step: Leave,
    /// When an evicted block was last used: if its unlink fails, it is put back. `None` if it is to go for good.
    pub(super) used_s: Option<u32>,
}

impl Leaving {
    pub(super) fn new(taken: Taken, step: Leave) -> Self {
        let Entry { directory, bytes, used_s, .. } = taken.entry;
        Self {
            space: taken.space,
            directory,
            bytes,
            step,
            used_s: (step == Leave::Running).then_some(used_s),
        }
    }
}

/// A corrupt file set aside.
#[derive(Debug)]
pub(super) struct BadFile {
    pub(super) directory: usize,
    pub(super) path: PathBuf,
    pub(super) bytes: u64,
}

/// Corrupt files kept of one namespace.
pub(super) type BadFiles = VecDeque<BadFile>;
