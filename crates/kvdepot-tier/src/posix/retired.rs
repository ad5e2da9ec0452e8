//! Namespaces whose epoch has passed: their files go before live blocks do.

use std::path::Path;

use kvdepot_core::NamespaceId;

use super::chores::RetireJob;
use super::index::time_of;
use super::leaving::{BadFiles, Leave};
use super::shared::Shared;
use super::space::{Space, epoch_dir};
use super::state::{Adopt, PIECE, State};

/// Slots examined together for files of past epochs: all of them may be taken out.
const RETIRED_SLOTS: u32 = PIECE as u32;
/// Such pieces of the index that are searched before a live block is evicted.
const RETIRED_PIECES: usize = 8;

impl Shared {
    /// Makes an epoch's blocks unreachable; their files go in the background, and the scan of the next epoch finds the
    /// directory.
    pub(super) fn retire_namespace(&self, root: NamespaceId) {
        let mut state = self.lock();
        let Some(id) = state.roots.remove(&root) else { return };
        let space = state.spaces.remove(&id);
        if !state.scanned.remove(&id) && !state.counted {
            // Its files were not counted, and no scan of its own will count them now.
            state.discovered = false;
        }
        state.chores.scans.retain(|job| job.space.id != id);
        if let Some(space) = space {
            state.retire_bad(&space);
        }
        if let Some(number) = state.index.retire(id) {
            state.chores.retired.push_back(RetireJob { number, cursor: 0 });
        }
        drop(state);
        self.unlinks.notify_one();
    }
}

impl State {
    /// Counts the set-aside files of a past epoch as waste: they go with the epoch's directory.
    fn retire_bad(&mut self, space: &Space) {
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
        !self.counted || self.waste.has_found(root, directory, top)
    }

    /// Charges what lies in a past epoch's directory that cannot be removed.
    pub(super) fn charge_stuck(&mut self, root: NamespaceId, directory: usize, top: &Path, bytes: u64) {
        let before = self.waste.find(root, directory, top, bytes);
        self.uncharge_missing(before);
        self.charge_found(bytes);
    }

    /// Notes that a file was removed from a past epoch's directory that a reset had renamed.
    pub(super) fn release_waste(&mut self, root: NamespaceId, directory: usize, bytes: u64) {
        self.bytes -= self.waste.release(root, directory, bytes);
    }

    /// Notes that every directory of earlier epochs that a scan found was removed, or is stuck.
    pub(super) fn settle_waste(&mut self, space: &Space) {
        if !self.spaces.contains_key(&space.id) {
            // The namespace moved on in the meantime, perhaps by renaming what was to be removed; its own scan settles.
            return;
        }
        self.bytes -= self.waste.settle(space);
    }

    /// Queues the unlinks of a piece of the index's files of past epochs; `false` if there are none.
    pub(super) fn pull_retired(&mut self) -> bool {
        let Some(job) = self.chores.retired.pop_front() else { return false };
        let (taken, next) = self.index.take_retired(job.number, job.cursor, RETIRED_SLOTS);
        for taken in taken {
            if self.spaces.contains_key(&taken.space.id) {
                // Opened again in the same epoch: the files are its own.
                let (bytes, used) = (taken.entry.bytes, Some(time_of(taken.entry.used_s)));
                self.uncharge_missing(bytes);
                let (space, directory) = (taken.space, taken.entry.directory);
                self.adopt(taken.key, Adopt { space, directory, bytes, used });
            } else {
                self.note_removed(taken.key);
                self.begin_leaving(taken, Leave::Pending);
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kvdepot_core::{BlockHash, BlockLayout, NamespaceSpec};
    use kvdepot_io::faults::MemoryDevice;

    use super::super::PosixConfig;
    use super::super::state::Prior;
    use super::*;

    /// A scan finds a torn file, a write replaces it, and a reset comes before the write ends: one file, which two
    /// parts of the tier release.
    #[test]
    fn a_file_that_is_given_up_twice_is_released_once() {
        let device: Arc<dyn kvdepot_io::Device> = Arc::new(MemoryDevice::default());
        let prior = Prior { bound: None, total: None, set: BlockHash([0; 16]) };
        let config = PosixConfig { shared: false, ..PosixConfig::new("memory") };
        let shared = Shared::new(config, vec![device], vec![0], 1 << 20, prior);
        let layout = BlockLayout::new(vec![vec![4096]]).expect("a layout");
        let spec = NamespaceSpec::new(r#"{"model":"m"}"#, layout).expect("a description");
        let space = Arc::new(Space::new(spec, 0, true));
        let key = space.key(BlockHash([1; 16]));
        let mut state = shared.lock();
        state.spaces.insert(space.id, Arc::clone(&space));
        state.roots.insert(space.root, space.id);
        state.counted = true;
        state.adopt(key, Adopt { space: Arc::clone(&space), directory: 0, bytes: 4096, used: None });
        state.bytes += 8192;
        state.reserved.insert(key, 8192);
        drop(state);
        shared.retire_namespace(space.root);
        let mut state = shared.lock();
        state.keep_reserved(key, Arc::clone(&space), 0);
        assert!(state.pull_retired());
        assert_eq!((state.bytes, state.leaving.len(), state.leaving_pending.len()), (8192, 1, 1));
        let taken = state.take_leaving().expect("one file");
        assert!(state.take_leaving().is_none());
        assert_eq!((taken, state.end_leaving(&key, true), state.bytes), (key, 8192, 0));
        assert!(state.has_unlinked());
    }
}
