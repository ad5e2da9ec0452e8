//! The pending work of the background threads: the queues, and the state of a job between two steps.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use kvdepot_core::{BlockKey, Error, NamespaceId};

use super::index::Index;
use super::space::Space;

/// The pending work of the two background threads.
#[derive(Debug)]
pub(super) struct Chores {
    /// Whether to search the directories for namespaces.
    pub(super) discover: bool,
    /// Whether the checkpoint must still be read.
    pub(super) replay: bool,
    pub(super) scans: VecDeque<ScanJob>,
    /// Namespace directories without a readable description: device and root.
    pub(super) unnamed: VecDeque<(usize, NamespaceId)>,
    pub(super) touches: VecDeque<BlockKey>,
    /// Directories of earlier epochs.
    pub(super) reclaims: VecDeque<ReclaimJob>,
    /// Namespaces whose epoch has passed.
    pub(super) retired: VecDeque<RetireJob>,
    /// Number of directories being counted or reclaimed now.
    pub(super) looks: usize,
    /// Whether to check the floor of free space.
    pub(super) floor: bool,
    /// Whether the last background eviction failed: retried when something changes.
    pub(super) trim_failed: bool,
    /// Whether the maintenance thread is working.
    pub(super) busy: bool,
    /// Whether the unlink thread is working.
    pub(super) unlinking: bool,
    /// Set when the threads shall end: the time by which they finish what cannot be put off.
    pub(super) stop_at: Option<Instant>,
    /// Threads that are still running.
    pub(super) threads: usize,
}

impl Default for Chores {
    fn default() -> Self {
        Self {
            discover: true,
            replay: true,
            scans: VecDeque::new(),
            unnamed: VecDeque::new(),
            touches: VecDeque::new(),
            reclaims: VecDeque::new(),
            retired: VecDeque::new(),
            looks: 0,
            floor: false,
            trim_failed: false,
            busy: false,
            unlinking: false,
            stop_at: None,
            threads: 0,
        }
    }
}

impl Chores {
    pub(super) fn is_idle(&self) -> bool {
        let begun = self.busy || self.unlinking || self.discover || self.replay || self.floor;
        let queued = !self.touches.is_empty() || !self.retired.is_empty();
        !begun && !queued && self.has_looked()
    }

    /// Returns whether every known directory has been examined.
    pub(super) fn has_looked(&self) -> bool {
        let listed = self.scans.is_empty() && self.unnamed.is_empty() && self.looks == 0;
        !self.discover && listed && self.reclaims.is_empty()
    }

    /// Adds a scan unless one is waiting; urgent scans come first.
    pub(super) fn enqueue_scan(&mut self, space: &Arc<Space>, devices: usize, urgent: bool) {
        let waiting = self.scans.iter().position(|job| job.space.id == space.id);
        let job = match waiting.and_then(|at| self.scans.remove(at)) {
            Some(job) => job,
            None => ScanJob::new(space, devices),
        };
        if urgent {
            self.scans.push_front(job);
        } else {
            self.scans.push_back(job);
        }
    }
}

/// The rest of a namespace's scan.
#[derive(Debug)]
pub(super) struct ScanJob {
    pub(super) space: Arc<Space>,
    /// Directories to list: which device, which path.
    pub(super) todo: Vec<(usize, PathBuf)>,
    /// Set by the job's first step: its number, and the newest file at that time. The scan is not expected to see later
    /// files.
    began: Option<(u32, u64)>,
    pub(super) failures: u32,
}

impl ScanJob {
    fn new(space: &Arc<Space>, devices: usize) -> Self {
        let todo = (0..devices).map(|device| (device, space.root_dir())).collect();
        Self { space: Arc::clone(space), todo, began: None, failures: 0 }
    }

    /// Returns the job's number and the newest file at its beginning.
    pub(super) fn begin(&mut self, index: &mut Index) -> (u32, u64) {
        *self.began.get_or_insert_with(|| (index.next_scan(), index.generation()))
    }
}

/// Something that a scan found of past epochs.
#[derive(Debug)]
pub(super) enum ReclaimJob {
    /// A directory of an earlier epoch, to be removed with everything in it.
    Remove(Remove),
    /// The end of what a scan of this epoch found.
    Settle(Arc<Space>),
}

/// What is left to do about a directory of an earlier epoch.
#[derive(Debug)]
pub(super) struct Remove {
    pub(super) root: NamespaceId,
    pub(super) directory: usize,
    /// The epoch's directory.
    pub(super) top: PathBuf,
    /// What is left to list, or to remove once it is empty.
    pub(super) todo: Vec<(PathBuf, bool)>,
    /// Number of files that could not be removed, and the error of the last one.
    pub(super) failed: Option<(usize, Error)>,
}

impl ReclaimJob {
    pub(super) fn remove(root: NamespaceId, directory: usize, top: PathBuf) -> Self {
        Self::Remove(Remove { root, directory, todo: vec![(top.clone(), false)], failed: None, top })
    }
}

/// A namespace whose epoch has passed: its files are unreachable but still in the index.
#[derive(Debug)]
pub(super) struct RetireJob {
    pub(super) number: u32,
    pub(super) cursor: u32,
}

/// Totals of what sweeps have removed since the tier was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SweepReport {
    /// Temporary files of dead writers (P4).
    pub temporaries: u64,
    /// Directories of earlier epochs.
    pub epochs: u64,
}
