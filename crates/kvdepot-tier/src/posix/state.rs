//! The state under the tier's one lock: pure, without I/O.
//!
//! Invariants under the lock, which is never held across I/O, and never for longer than a bounded piece of work
//! (`PIECE` files):
//! - `bytes` counts every indexed file, every reservation, every file whose unlink is outstanding (`leaving`), every
//!   file set aside (`bad`), every file that cannot be named (`unnamed`), what lies in directories of past epochs under
//!   unknown names (`waste`), and, until all files have been counted, those that may exist in addition (`assumed`);
//!   with a cap it grows only through `reserve` (P5) or when existing files are found;
//! - a key is in at most one of `index`, `leaving`, and, once its bytes are reserved, `reserved`.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hashbrown::{HashMap, HashSet};
use hashlink::LruCache;
use kvdepot_core::limits::{
    ABSENT_KEYS_MAX, ABSENT_TTL_MS, QUARANTINE_FILES_MAX, TOUCH_INTERVAL_MS, TOUCH_QUEUE_MAX,
};
use kvdepot_core::{BlockHash, BlockKey, NamespaceId};

use super::chores::{Chores, SweepReport};
use super::events::Events;
use super::index::{Index, Taken};
use super::leaving::{BadFile, BadFiles, Leaving};
use super::ledger::leftovers::Leftovers;
use super::ledger::member::Survey;
use super::ledger::purse::Purse;
use super::space::Space;
use super::waste::Waste;
use crate::{Done, Written};

/// Files handled while the lock is held once.
pub(super) const PIECE: usize = 128;
/// Slots of the index examined while the lock is held once.
pub(super) const PIECE_SLOTS: u32 = 4096;
/// Removals remembered until the checkpoint has been replayed; if there are more, the checkpoint is not used.
const REMOVED_EARLY_MAX: usize = 65_536;
/// The most blocks noted as gone while a directory is listed.
const GONE_MAX: usize = 1 << 20;

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
    /// Writes that wait until something changes: the end of a read, a write or an unlink.
    pub(super) writes_waiting: usize,
    pub(super) leaving: HashMap<BlockKey, Leaving>,
    pub(super) leaving_pending: VecDeque<BlockKey>,
    /// Files whose unlink failed.
    pub(super) leaving_failed: Vec<BlockKey>,
    /// Number of files being unlinked now.
    pub(super) leaving_running: usize,
    /// Number of files whose unlink waits for a read.
    pub(super) leaving_read: usize,
    pub(super) bad: HashMap<NamespaceId, BadFiles>,
    /// Files set aside whose unlink failed when there were too many, or space was short.
    pub(super) bad_failed: Vec<BadFile>,
    pub(super) waste: Waste,
    /// Bytes of namespaces whose description cannot be read, per directory.
    pub(super) unnamed: HashMap<(NamespaceId, usize), u64>,
    pub(super) bytes: u64,
    /// Bytes that the directories may hold in files not found yet; 0 once `counted`.
    assumed: u64,
    /// Whether `assumed` is an upper bound, so that the cap can be kept before all files have been counted.
    bounded: bool,
    /// Upper bound of `bytes` that the directories record for the next start; `None` = not recorded.
    pub(super) total: Option<u64>,
    /// Whether every file that existed at the start has been counted.
    pub(super) counted: bool,
    /// Whether all namespace directories have been listed once.
    pub(super) discovered: bool,
    /// Whether a checkpoint provided most files and their recency.
    pub(super) replayed: bool,
    /// Keys removed before the checkpoint was replayed; replay must not bring them back. `None` afterwards.
    pub(super) removed_early: Option<HashSet<BlockKey>>,
    /// Blocks whose files disappeared while a directory is being listed: the listing may still name them.
    gone: Option<HashSet<BlockKey>>,
    /// Files indexed or removed since the last checkpoint.
    pub(super) changes: u64,
    /// The account with the ledger, if the cap covers what other depots write.
    pub(super) purse: Option<Purse>,
    /// When the directories were last listed to find blocks of others to evict.
    pub(super) looked: Option<Instant>,
    /// Whether a write waits until other depots give something up.
    pub(super) is_waiting_for_others: bool,
    /// This depot's survey for the ledger.
    pub(super) survey: Survey,
    /// Whether the last one failed, which is reported once.
    pub(super) has_survey_failed: bool,
    /// Failed writes whose bytes still count as used in the ledger.
    pub(super) leftovers: Leftovers,
    pub(super) chores: Chores,
    pub(super) events: Events,
    pub(super) swept: SweepReport,
    pub(super) absent: LruCache<BlockKey, Instant>,
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

/// The initial knowledge about the directories, before they are scanned.
#[derive(Clone, Copy, Debug)]
pub(super) struct Prior {
    /// Upper bound of the bytes of all block files, if there is one.
    pub(super) bound: Option<u64>,
    /// The total that the directories record; 0 if they are to record one, `None` if not.
    pub(super) total: Option<u64>,
    /// The directories' set: as recorded, or a new one.
    pub(super) set: BlockHash,
}

impl State {
    pub(super) fn new(devices: usize, prior: Prior, cap: u64, purse: Option<Purse>) -> Self {
        let assumed = prior.bound.filter(|_| cap > 0).unwrap_or(0);
        Self {
            spaces: HashMap::new(),
            roots: HashMap::new(),
            scanned: HashSet::new(),
            index: Index::new(devices),
            writing: HashMap::new(),
            reserved: HashMap::new(),
            writes_waiting: 0,
            leaving: HashMap::new(),
            leaving_pending: VecDeque::new(),
            leaving_failed: Vec::new(),
            leaving_running: 0,
            leaving_read: 0,
            bad: HashMap::new(),
            bad_failed: Vec::new(),
            waste: Waste::default(),
            unnamed: HashMap::new(),
            bytes: assumed,
            assumed,
            bounded: prior.bound.is_some(),
            total: prior.total,
            counted: false,
            discovered: false,
            replayed: false,
            removed_early: Some(HashSet::new()),
            gone: None,
            changes: 0,
            purse,
            looked: None,
            is_waiting_for_others: false,
            survey: Survey::None,
            has_survey_failed: false,
            leftovers: Leftovers::default(),
            chores: Chores::default(),
            events: Events::default(),
            swept: SweepReport::default(),
            absent: LruCache::new(ABSENT_KEYS_MAX),
        }
    }

    /// Returns whether the index knows every file of a namespace.
    pub(super) fn is_complete(&self, namespace: NamespaceId, shared: bool) -> bool {
        !shared && self.scanned.contains(&namespace)
    }

    /// Returns whether `bytes` is at least what the directories hold.
    pub(super) const fn is_bounded(&self) -> bool {
        self.counted || self.bounded
    }

    /// Returns whether the coldest file of the index is among the coldest of all.
    pub(super) const fn knows_recency(&self) -> bool {
        self.counted || (self.bounded && self.replayed)
    }

    /// `bytes` without those that are only assumed.
    pub(super) const fn found_bytes(&self) -> u64 {
        self.bytes - self.assumed
    }

    /// Remembers for a while that a block does not exist.
    pub(super) fn note_absent(&mut self, key: BlockKey) {
        self.absent.insert(key, Instant::now() + Duration::from_millis(ABSENT_TTL_MS));
    }

    /// Returns whether a block was found absent a short while ago.
    pub(super) fn is_noted_absent(&self, key: &BlockKey) -> bool {
        self.absent.peek(key).is_some_and(|until| *until > Instant::now())
    }

    /// Charges bytes found on the disk: they first consume the assumed bytes.
    pub(super) fn charge_found(&mut self, bytes: u64) {
        let expected = bytes.min(self.assumed);
        self.assumed -= expected;
        self.bytes += bytes - expected;
    }

    /// Takes back the charge of a file that was not found where it was expected. Until all files have been counted it
    /// may never have existed, if an outdated checkpoint listed it: then its bytes may be those of other files.
    pub(super) fn uncharge_missing(&mut self, bytes: u64) {
        if self.counted {
            self.bytes -= bytes;
        } else {
            self.assumed += bytes;
        }
    }

    /// Keeps bytes of a past epoch charged that are not found under their known name.
    pub(super) fn keep_as_waste(&mut self, space: &Space, directory: usize, bytes: u64) {
        if !self.counted {
            // Counting ends when the past epochs' directories are gone.
            self.uncharge_missing(bytes);
            return;
        }
        if self.waste.keep(space, directory, bytes) {
            // The scan that looks for them may be over.
            self.chores.discover = true;
        }
    }

    /// Called before a directory is listed.
    pub(super) fn begin_listing(&mut self) {
        self.gone = Some(HashSet::new());
    }

    /// Called when everything in the listing has been taken in; returns whether more files disappeared than can be
    /// noted.
    pub(super) fn end_listing(&mut self) -> bool {
        self.gone.take().is_some_and(|gone| gone.len() >= GONE_MAX)
    }

    /// Notes that a block's file no longer exists.
    pub(super) fn note_gone(&mut self, key: BlockKey) {
        if let Some(gone) = self.gone.as_mut().filter(|gone| gone.len() < GONE_MAX) {
            gone.insert(key);
        }
    }

    /// Returns whether a listed file may have disappeared since. The next sweep finds those that have not.
    pub(super) fn may_have_gone(&self, key: &BlockKey) -> bool {
        self.gone.as_ref().is_some_and(|gone| gone.len() >= GONE_MAX || gone.contains(key))
    }

    /// Adds an existing file: its bytes are charged whether or not they fit, because they already lie on the disk.
    pub(super) fn adopt(&mut self, key: BlockKey, entry: Adopt) {
        self.absent.remove(&key);
        let known = self.index.get(&key).is_some() || self.leaving.contains_key(&key);
        if known || self.reserved.contains_key(&key) || !self.is_current(&entry.space) {
            return;
        }
        self.charge_found(entry.bytes);
        self.changes += 1;
        self.index.insert(key, entry.space, entry.directory, entry.bytes, entry.used);
    }

    /// Charges what a file really has, unless it is younger than `generation`: another node may have written the block
    /// anew in another encoding, or this one between a checkpoint and a crash.
    pub(super) fn correct(&mut self, key: &BlockKey, generation: u64, bytes: u64) {
        match self.index.resize(key, generation, bytes) {
            Some(before) if before < bytes => self.charge_found(bytes - before),
            Some(before) => self.uncharge_missing(before - bytes),
            None => {}
        }
    }

    /// Returns whether a namespace is in the epoch of this space.
    pub(super) fn is_current(&self, space: &Arc<Space>) -> bool {
        self.spaces.contains_key(&space.id)
    }

    /// Takes a file out of the index; its bytes stay charged.
    pub(super) fn take(&mut self, key: &BlockKey) -> Option<Taken> {
        let taken = self.index.remove(key)?;
        self.note_removed(*key);
        Some(taken)
    }

    /// Notes that a file went, so that no checkpoint brings it back.
    pub(super) fn note_removed(&mut self, key: BlockKey) {
        self.changes += 1;
        if let Some(removed) = &mut self.removed_early {
            if removed.len() < REMOVED_EARLY_MAX {
                removed.insert(key);
            } else {
                self.chores.replay = false;
            }
        }
    }

    /// Checks whether every file that existed at the start has been counted by now.
    pub(super) fn check_counted(&mut self) {
        let looked = self.discovered && self.chores.has_looked();
        if !self.counted && looked && self.spaces.keys().all(|id| self.scanned.contains(id)) {
            self.counted = true;
            self.bytes -= std::mem::take(&mut self.assumed);
        }
    }

    /// Forgets a file that was found to be missing or corrupt, unless it is younger than `generation`.
    pub(super) fn forget(&mut self, key: &BlockKey, generation: u64) {
        if self.index.get(key).is_some_and(|entry| entry.generation <= generation)
            && let Some(taken) = self.take(key)
        {
            self.uncharge_missing(taken.entry.bytes);
            self.events.lost(*key);
        }
        if self.index.get(key).is_none() {
            self.note_absent(*key);
        }
    }

    /// Notes a use in memory, and for the disk if the last use stored there is old; returns whether it was noted for
    /// the disk.
    pub(super) fn touch(&mut self, key: &BlockKey) -> bool {
        const INTERVAL_S: u32 = (TOUCH_INTERVAL_MS / 1000) as u32;
        if self.index.touch(key, None).is_none() || self.chores.touches.len() >= TOUCH_QUEUE_MAX {
            return false;
        }
        let due = self.index.take_due(key, INTERVAL_S);
        if due {
            self.chores.touches.push_back(*key);
        }
        due
    }

    /// Charges a file set aside; returns surplus files, which must be unlinked and whose bytes are still charged.
    pub(super) fn keep_bad(&mut self, root: NamespaceId, file: BadFile) -> Vec<BadFile> {
        let kept = self.bad.entry(root).or_default();
        if kept.iter().any(|known| known.path == file.path && known.directory == file.directory) {
            return Vec::new();
        }
        let bytes = file.bytes;
        kept.push_back(file);
        let surplus: Vec<_> = kept.drain(..kept.len().saturating_sub(QUARANTINE_FILES_MAX)).collect();
        self.charge_found(bytes);
        surplus
    }

    /// Takes a file set aside, in one directory or in all, its bytes still charged: such files are the first to go when
    /// space is short.
    pub(super) fn take_bad(&mut self, directory: Option<usize>) -> Option<BadFile> {
        self.bad.values_mut().find_map(|kept| {
            let here = |file: &BadFile| directory.is_none_or(|directory| file.directory == directory);
            kept.iter().position(here).and_then(|at| kept.remove(at))
        })
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
