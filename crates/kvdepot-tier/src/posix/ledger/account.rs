//! What a tier does to its files, noted in its account with the ledger.

use std::path::Path;

use kvdepot_core::Result;
use kvdepot_core::limits::BLOCK_ALIGN_BYTES;

use super::purse::{Refused, Unlinking};
use crate::posix::shared::Shared;
use crate::posix::state::State;

impl Shared {
    /// Before a file is unlinked: notes its length in the ledger's account, if there is one.
    pub(in crate::posix) fn begin_unlink(&self, directory: usize, path: &Path) -> Option<Unlinking> {
        self.lock().purse.as_ref()?;
        // The index may have learned the length from a checkpoint; the ledger gets back what really lies there.
        let stat = self.device(directory).stat(path).ok().flatten()?;
        let bytes = stat.bytes.next_multiple_of(BLOCK_ALIGN_BYTES);
        self.lock().purse.as_mut().map(|purse| purse.begin_unlink(bytes))
    }

    /// Unlinks a file that is none of the index's, and notes in the ledger what that frees. Returns whether it existed.
    pub(in crate::posix) fn unlink_counted(&self, directory: usize, path: &Path) -> Result<bool> {
        // Only what lies in an epoch's directory was ever counted: no descriptions, checkpoints and probes.
        let is_counted = path.components().count() > 2;
        let unlinking = is_counted.then(|| self.begin_unlink(directory, path)).flatten();
        let unlinked = self.device(directory).unlink(path);
        let freed = if matches!(unlinked, Ok(true)) { u64::MAX } else { 0 };
        self.lock().end_unlink(unlinking, freed);
        unlinked
    }
}

impl State {
    /// Spends the bytes of a write in the ledger, if there is one.
    pub(in crate::posix) fn spend(&mut self, bytes: u64, now_ms: u64) -> std::result::Result<(), Refused> {
        self.purse.as_mut().map_or(Ok(()), |purse| purse.spend(bytes, now_ms))
    }

    /// After the attempt to unlink a file: notes that this freed its bytes, but not more than `freed`.
    pub(in crate::posix) fn end_unlink(&mut self, unlinking: Option<Unlinking>, freed: u64) {
        if let (Some(purse), Some(unlinking)) = (&mut self.purse, unlinking) {
            purse.end_unlink(unlinking, freed);
        }
    }

    /// Before a file is renamed: notes that in the ledger's account. `false` if it must not be.
    pub(in crate::posix) fn begin_move(&mut self, bytes: u64, now_ms: u64) -> bool {
        self.purse.as_mut().is_none_or(|purse| purse.begin_move(bytes, now_ms))
    }
}
