//! What is left of past epochs: bytes that stay charged until they are really gone (P5).
//!
//! A reset that is stored by a rename moves an epoch's blocks to a directory of another name, and corrupt files go with
//! their epoch. Neither is found under its known name, so they are charged here until a scan of a later epoch has found
//! no directory of a past one that could not be removed.

use std::path::{Path, PathBuf};

use hashbrown::{HashMap, HashSet};
use kvdepot_core::NamespaceId;

use super::chores::RetireJob;
use super::leaving::BadFiles;
use super::space::{Space, epoch_dir};
use super::state::{PIECE, State};

/// Slots examined together for files of past epochs: all of them may be taken out.
const RETIRED_SLOTS: u32 = PIECE as u32;
/// Such pieces of the index that are searched before a live block is evicted.
const RETIRED_PIECES: usize = 8;

/// Bytes of one namespace in one directory.
#[derive(Debug)]
struct Left {
    bytes: u64,
    /// The latest epoch to which the bytes belong.
    epoch: u32,
}

/// By namespace and directory.
#[derive(Debug, Default)]
pub(super) struct Waste {
    left: HashMap<(NamespaceId, usize), Left>,
    /// Where a past epoch's directory could not be removed since the last scan.
    stuck: HashSet<(NamespaceId, usize)>,
    /// Bytes of such directories that no tier knew when it found them.
    found: HashMap<(NamespaceId, usize, PathBuf), u64>,
}

impl Waste {
    /// Notes that a namespace's directories are scanned again.
    pub(super) fn look_again(&mut self, root: NamespaceId, directory: usize) {
        self.stuck.remove(&(root, directory));
    }

    pub(super) fn is_stuck(&mut self, root: NamespaceId, directory: usize) {
        self.stuck.insert((root, directory));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.left.is_empty()
    }
}

impl State {
    /// Keeps bytes of a past epoch charged that are not found under their known name.
    pub(super) fn keep_as_waste(&mut self, space: &Space, directory: usize, bytes: u64) {
        if !self.counted {
            // Counting ends when the past epochs' directories are gone.
            self.uncharge_missing(bytes);
            return;
        }
        let left = self.waste.left.entry((space.root, directory)).or_insert_with(|| {
            // The scan that looks for them may be over.
            self.chores.discover = true;
            Left { bytes: 0, epoch: 0 }
        });
        left.bytes += bytes;
        left.epoch = left.epoch.max(space.epoch);
    }

    /// Counts the set-aside files of a past epoch as waste: they go with the epoch's directory.
    pub(super) fn retire_bad(&mut self, space: &Space) {
        let dir = epoch_dir(space.root, space.epoch);
        let Some(kept) = self.bad.get_mut(&space.root) else { return };
        let (past, rest): (BadFiles, BadFiles) =
            std::mem::take(kept).into_iter().partition(|file| file.path.starts_with(&dir));
        *kept = rest;
        for file in past {
            self.keep_as_waste(space, file.directory, file.bytes);
        }
    }

    /// Returns whether a past epoch's directory that cannot be removed must be counted: none of its files are charged,
    /// because it existed at the start.
    pub(super) fn is_to_count(&self, root: NamespaceId, directory: usize, top: &Path) -> bool {
        !self.counted || self.waste.found.contains_key(&(root, directory, top.to_owned()))
    }

    /// Charges what lies in a past epoch's directory that cannot be removed.
    pub(super) fn charge_stuck(&mut self, root: NamespaceId, directory: usize, top: &Path, bytes: u64) {
        let before = self.waste.found.insert((root, directory, top.to_owned()), bytes).unwrap_or(0);
        self.uncharge_missing(before);
        self.charge_found(bytes);
    }

    /// Notes that a file was removed from a past epoch's directory that a reset had renamed.
    pub(super) fn release_waste(&mut self, root: NamespaceId, directory: usize, bytes: u64) {
        if let Some(left) = self.waste.left.get_mut(&(root, directory)) {
            let bytes = bytes.min(left.bytes);
            left.bytes -= bytes;
            self.bytes -= bytes;
        }
    }

    /// Notes that every directory of earlier epochs that a scan found was removed, or is stuck.
    pub(super) fn settle_waste(&mut self, space: &Space) {
        if !self.spaces.contains_key(&space.id) {
            // The namespace moved on in the meantime, perhaps by renaming what was to be removed; its own scan settles.
            return;
        }
        let Self { waste: Waste { left, stuck, found }, bytes, .. } = self;
        found.retain(|(root, directory, _), found| {
            let gone = *root == space.root && !stuck.contains(&(*root, *directory));
            if gone {
                *bytes -= *found;
            }
            !gone
        });
        left.retain(|(root, directory), left| {
            let gone =
                *root == space.root && left.epoch < space.epoch && !stuck.contains(&(*root, *directory));
            if gone {
                *bytes -= left.bytes;
            }
            !gone
        });
    }

    /// Queues the unlinks of a piece of the index's files of past epochs; `false` if there are none.
    pub(super) fn pull_retired(&mut self) -> bool {
        let Some(job) = self.chores.retired.pop_front() else { return false };
        let (taken, next) = self.index.take_retired(job.number, job.cursor, RETIRED_SLOTS);
        for taken in taken {
            if self.spaces.contains_key(&taken.space.id) {
                // Opened again in the same epoch: the files are its own.
                let (bytes, used) = (taken.entry.bytes, Some(super::index::time_of(taken.entry.used_s)));
                self.uncharge_missing(bytes);
                let (space, directory) = (taken.space, taken.entry.directory);
                self.adopt(taken.key, super::state::Adopt { space, directory, bytes, used });
            } else {
                self.note_removed(taken.key);
                self.begin_leaving(taken, super::leaving::Leave::Pending);
            }
        }
        if let Some(cursor) = next {
            self.chores.retired.push_front(RetireJob { cursor, ..job });
        }
        true
    }

    /// Looks for files of past epochs, which go before live blocks do.
    pub(super) fn pull_some_retired(&mut self) {
        for _ in 0..RETIRED_PIECES {
            if !self.leaving_pending.is_empty() || !self.pull_retired() {
                return;
            }
        }
    }

    /// Returns whether space will be freed in the background.
    pub(super) fn has_waste_to_go(&self) -> bool {
        let chores = &self.chores;
        !chores.retired.is_empty() || !chores.reclaims.is_empty() || chores.looks > 0
    }
}
