//! What the tier's calls, its I/O threads and its maintenance thread share.
//!
//! Invariants, under the one lock, which is never held across I/O:
//! - `bytes` counts every indexed file, every reservation, every file on its way out (`leaving`), every file kept
//!   aside (`bad`) and every file that cannot be named (`unnamed`); with a cap it only grows by `reserve` (P5) or by
//!   finding files that are there already;
//! - a key is in at most one of `index`, `leaving`, and, once its bytes are reserved, `reserved`.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hashbrown::{HashMap, HashSet};
use hashlink::LruCache;
use kvdepot_core::limits::{
    ABSENT_KEYS_MAX, ABSENT_TTL_MS, QUARANTINE_FILES_MAX, TOUCH_INTERVAL_MS, TOUCH_QUEUE_MAX,
};
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId, Result};
use kvdepot_io::Device;
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::PosixConfig;
use super::identity::Identity;
use super::index::{Entry, Index};
use super::scan::ScanJob;
use super::space::Space;
use crate::{Done, Written};

/// How far a file on its way out is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leave {
    /// Nobody has taken it up.
    Pending,
    /// Someone unlinks it now.
    Running,
    /// The device refused; tried again by the next sweep.
    Failed,
}

/// A file that is no block any more and not unlinked yet.
#[derive(Debug)]
pub(super) struct Leaving {
    pub(super) entry: Entry,
    pub(super) step: Leave,
}

/// A corrupt file kept aside.
#[derive(Debug)]
pub(super) struct BadFile {
    pub(super) directory: usize,
    pub(super) path: PathBuf,
    pub(super) bytes: u64,
}

/// The namespaces whose files are not all known, and what has been asked of the maintenance thread.
#[derive(Debug, Default)]
pub(super) struct Chores {
    /// Whether the directories shall be searched for namespaces.
    pub(super) discover: bool,
    pub(super) scans: VecDeque<ScanJob>,
    pub(super) touches: VecDeque<BlockKey>,
    /// Directories of earlier epochs: which device, which path.
    pub(super) reclaims: VecDeque<(usize, PathBuf)>,
    /// Whether the maintenance thread is at work.
    pub(super) busy: bool,
    pub(super) stop: bool,
}

impl Chores {
    pub(super) fn is_idle(&self) -> bool {
        let queues = self.scans.is_empty() && self.touches.is_empty() && self.reclaims.is_empty();
        !self.discover && !self.busy && queues
    }
}

pub(super) struct State {
    /// By the id that keys carry: only current epochs.
    pub(super) spaces: HashMap<NamespaceId, Arc<Space>>,
    /// From root to current id.
    pub(super) roots: HashMap<NamespaceId, NamespaceId>,
    /// Ids whose files are all known.
    pub(super) scanned: HashSet<NamespaceId>,
    pub(super) index: Index,
    pub(super) writing: HashMap<BlockKey, Vec<Done<Written>>>,
    pub(super) reserved: HashMap<BlockKey, u64>,
    pub(super) leaving: HashMap<BlockKey, Leaving>,
    pub(super) leaving_pending: VecDeque<BlockKey>,
    pub(super) bad: HashMap<NamespaceId, VecDeque<BadFile>>,
    /// Bytes of namespaces whose description cannot be read.
    pub(super) unnamed: HashMap<NamespaceId, u64>,
    pub(super) bytes: u64,
    /// Whether every file that was there at the start is counted: before that a cap cannot be kept.
    pub(super) counted: bool,
    /// Whether all namespace directories could be listed once.
    pub(super) discovered: bool,
    pub(super) chores: Chores,
    pub(super) swept: super::SweepReport,
    absent: LruCache<BlockKey, Instant>,
}

/// See the module's page.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) config: PosixConfig,
    pub(super) devices: Vec<Arc<dyn Device>>,
    /// Host name as block headers carry it.
    pub(super) host: String,
    /// How far each device's clock is ahead of ours, in seconds.
    pub(super) skew_s: Vec<i64>,
    /// One opening or moving of a namespace at a time.
    pub(super) namespaces: Mutex<()>,
    state: Mutex<State>,
    /// Rung whenever room, chores or their end appear.
    pub(super) changed: Condvar,
    temporaries: AtomicU64,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State")
            .field("blocks", &self.index.len())
            .field("bytes", &self.bytes)
            .field("counted", &self.counted)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Chore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Discover => "Discover",
            Self::Scan(_) => "Scan",
            Self::Unlink(_) => "Unlink",
            Self::Touch(_) => "Touch",
            Self::Reclaim(..) => "Reclaim",
        })
    }
}

/// One piece of the maintenance thread's work.
pub(super) enum Chore {
    Discover,
    Scan(ScanJob),
    Unlink(BlockKey),
    Touch(BlockKey),
    Reclaim(usize, PathBuf),
}

impl Shared {
    pub(super) fn new(config: PosixConfig, devices: Vec<Arc<dyn Device>>, skew_s: Vec<i64>) -> Self {
        let state = State {
            spaces: HashMap::new(),
            roots: HashMap::new(),
            scanned: HashSet::new(),
            index: Index::default(),
            writing: HashMap::new(),
            reserved: HashMap::new(),
            leaving: HashMap::new(),
            leaving_pending: VecDeque::new(),
            bad: HashMap::new(),
            unnamed: HashMap::new(),
            bytes: 0,
            counted: false,
            discovered: false,
            chores: Chores { discover: true, ..Chores::default() },
            swept: super::SweepReport::default(),
            absent: LruCache::new(ABSENT_KEYS_MAX),
        };
        Self {
            config,
            devices,
            host: super::identity::host_name(),
            skew_s,
            namespaces: Mutex::new(()),
            state: Mutex::new(state),
            changed: Condvar::new(),
            temporaries: AtomicU64::new(0),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// A new temporary name.
    pub(super) fn temporary_name(&self) -> String {
        // Relaxed: only uniqueness counts.
        Identity::own().temporary_name(self.temporaries.fetch_add(1, Ordering::Relaxed))
    }

    pub(super) fn device(&self, directory: usize) -> &Arc<dyn Device> {
        &self.devices[directory]
    }

    /// The error of a key whose namespace is not open here, or not in this epoch.
    pub(super) fn no_namespace(key: &BlockKey) -> Error {
        Error::new(ErrorKind::NotFound, "a block's namespace is not open, or its epoch has passed")
            .with("key", key)
    }

    /// Unlinks a file that is leaving and that the caller has taken up (`Leave::Running`: one unlink a file, else a
    /// late second one would hit its successor), gives its bytes back, and says so to whoever waits for room.
    pub(super) fn unlink_leaving(&self, key: &BlockKey) -> Result<()> {
        let (device, path) = {
            let state = self.lock();
            let Some(leaving) = state.leaving.get(key) else { return Ok(()) };
            let entry = &leaving.entry;
            (Arc::clone(self.device(entry.directory)), entry.space.block_path(key.hash))
        };
        let outcome = device.unlink(&path);
        let mut state = self.lock();
        match outcome {
            Ok(_) => {
                if let Some(leaving) = state.leaving.remove(key) {
                    state.bytes -= leaving.entry.bytes;
                }
            }
            Err(_) => {
                if let Some(leaving) = state.leaving.get_mut(key) {
                    leaving.step = Leave::Failed;
                }
            }
        }
        self.changed.notify_all();
        outcome.map(drop)
    }
}

impl State {
    /// Whether nothing is known or suspected of a key beyond what the index says.
    pub(super) fn is_complete(&self, namespace: NamespaceId, shared: bool) -> bool {
        !shared && self.scanned.contains(&namespace)
    }

    /// Remembers that a block is not there, for a while.
    pub(super) fn note_absent(&mut self, key: BlockKey) {
        self.absent.insert(key, Instant::now() + Duration::from_millis(ABSENT_TTL_MS));
    }

    /// Whether a block was found absent a short while ago.
    pub(super) fn is_noted_absent(&self, key: &BlockKey) -> bool {
        self.absent.peek(key).is_some_and(|until| *until > Instant::now())
    }

    /// Adds a file that is there: bytes are charged whether or not they fit, because they lie on the disk already.
    pub(super) fn adopt(&mut self, key: BlockKey, entry: Adopt) {
        self.absent.remove(&key);
        let known = self.index.get(&key).is_some() || self.leaving.contains_key(&key);
        if known || self.reserved.contains_key(&key) || !self.is_current(&entry.space) {
            return;
        }
        self.bytes += entry.bytes;
        self.index.insert(key, entry.space, entry.directory, entry.bytes, entry.used);
    }

    /// Turns a reservation into a file.
    pub(super) fn keep_reserved(&mut self, key: BlockKey, space: Arc<Space>, directory: usize) {
        let Some(bytes) = self.reserved.remove(&key) else { return };
        self.absent.remove(&key);
        let stale = !self.is_current(&space);
        // A file of the same key that the scan found under the old name was replaced by the rename.
        if let Some(before) = self.index.remove(&key) {
            self.bytes -= before.bytes;
        }
        self.index.insert(key, space, directory, bytes, None);
        if stale {
            self.leave(&key);
        }
    }

    /// Gives a reservation back.
    pub(super) fn drop_reserved(&mut self, key: &BlockKey) {
        if let Some(bytes) = self.reserved.remove(key) {
            self.bytes -= bytes;
        }
    }

    /// Whether a namespace is in the epoch of this space.
    pub(super) fn is_current(&self, space: &Arc<Space>) -> bool {
        self.spaces.contains_key(&space.id)
    }

    /// Takes a block out of the index; its file goes in the background.
    pub(super) fn leave(&mut self, key: &BlockKey) {
        if let Some(entry) = self.index.remove(key) {
            self.leaving.insert(*key, Leaving { entry, step: Leave::Pending });
            self.leaving_pending.push_back(*key);
        }
    }

    /// Takes a block out of the index for the caller to unlink; `false` if it is not there any more.
    pub(super) fn leave_taken(&mut self, key: &BlockKey) -> bool {
        let Some(entry) = self.index.remove(key) else { return false };
        self.leaving.insert(*key, Leaving { entry, step: Leave::Running });
        true
    }

    /// Notes whether every file that was there at the start is counted by now.
    pub(super) fn check_counted(&mut self) {
        let looked = self.discovered && !self.chores.discover;
        let listed = self.chores.scans.is_empty() && self.chores.reclaims.is_empty();
        self.counted |= looked && listed && self.spaces.keys().all(|id| self.scanned.contains(id));
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

    /// Forgets a file that turned out not to be there, unless it is younger than `generation`.
    pub(super) fn forget(&mut self, key: &BlockKey, generation: u64) {
        if self.index.get(key).is_some_and(|entry| entry.generation <= generation)
            && let Some(entry) = self.index.remove(key)
        {
            self.bytes -= entry.bytes;
        }
        if self.index.get(key).is_none() {
            self.note_absent(*key);
        }
    }

    /// Notes a use in memory, and for the disk if the last note there is old.
    pub(super) fn touch(&mut self, key: &BlockKey) -> bool {
        let Some(entry) = self.index.touch(key, None) else { return false };
        let used_ms =
            entry.used().duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
        let due = used_ms.saturating_sub(entry.persisted_ms) >= TOUCH_INTERVAL_MS;
        if due && self.chores.touches.len() < TOUCH_QUEUE_MAX {
            entry.persisted_ms = used_ms;
            self.chores.touches.push_back(*key);
            return true;
        }
        false
    }

    /// Charges a file kept aside; returns those that are too many now and must be unlinked, their bytes released.
    pub(super) fn keep_bad(&mut self, root: NamespaceId, file: BadFile) -> Vec<BadFile> {
        let kept = self.bad.entry(root).or_default();
        if kept.iter().any(|known| known.path == file.path && known.directory == file.directory) {
            return Vec::new();
        }
        self.bytes += file.bytes;
        kept.push_back(file);
        let surplus: Vec<_> = kept.drain(..kept.len().saturating_sub(QUARANTINE_FILES_MAX)).collect();
        self.bytes -= surplus.iter().map(|file| file.bytes).sum::<u64>();
        surplus
    }

    /// Takes the oldest file kept aside, its bytes still charged: the first to go when room is short.
    pub(super) fn take_bad(&mut self) -> Option<BadFile> {
        self.bad.values_mut().find_map(VecDeque::pop_front)
    }
}

/// A file that was found.
#[derive(Debug)]
pub(super) struct Adopt {
    pub(super) space: Arc<Space>,
    pub(super) directory: usize,
    pub(super) bytes: u64,
    pub(super) used: Option<std::time::SystemTime>,
}
