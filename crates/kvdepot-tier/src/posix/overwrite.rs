//! At the cap a write takes over the file of the block that it evicts: a rename and an overwrite instead of an unlink
//! and a new file. The file system neither allocates nor frees anything, so the write costs no more than one below the
//! cap.
//!
//! P1: the evicted block leaves the index before its file is renamed, and a block that is being read here is never
//! chosen. Readers in other processes, or after a power loss, may find bytes of both blocks under either name; then the
//! key in the header or a checksum does not match, and the read is a miss.

use std::path::Path;

use kvdepot_core::{BlockKey, Result};
use kvdepot_io::{DeviceFile, IoBuf};

use super::index::Taken;
use super::leaving::Leave;
use super::shared::Shared;
use super::space::home;
use super::state::State;

/// By how many seconds a block may be younger than the coldest of all and still go first because it lies in the
/// directory of the block that is written.
const YOUNGER_MAX_S: u32 = 60;

impl Shared {
    /// Takes a block out of the index whose file can be overwritten by a block of `bytes`; `None` if there is space
    /// below the cap, or no suitable file.
    pub(super) fn take_to_overwrite(&self, state: &mut State, key: &BlockKey, bytes: u64) -> Option<Taken> {
        let directory = home(key.hash, self.devices.len());
        let is_full = self.cap > 0 && state.bytes + bytes > self.cap_less_headroom(state);
        let is_at_cap = is_full || state.purse.as_ref().is_some_and(|purse| purse.is_empty_for(bytes));
        // Above the cap files must really go, and waste goes first.
        let is_above = state.bytes > self.cap_in(state);
        let is_member = state.purse.as_ref().is_none_or(|purse| purse.may_take_over(bytes, self.now_ms()));
        let may = !is_above && is_member && state.knows_recency() && !state.has_waste();
        let recorded = state.total.is_none_or(|total| state.bytes <= total);
        if !(is_at_cap && may && recorded && self.device(directory).overwrites()) {
            return None;
        }
        let (coldest_s, _) = state.index.coldest(None)?;
        let (_, slot) = state.index.coldest(Some(directory))?;
        let (victim, entry) = state.index.at(slot);
        // Under the same name a power loss could bring back the complete earlier value.
        let is_other = victim.hash != key.hash;
        if entry.bytes != bytes || !is_other || entry.used_s.saturating_sub(coldest_s) > YOUNGER_MAX_S {
            return None;
        }
        let taken = state.take(&victim)?;
        state.begin_leaving(taken.clone(), Leave::Running);
        Some(taken)
    }

    /// Renames the file of a taken block to the temporary name of the block that will overwrite it, which reserves the
    /// block's bytes; `None` if space has to be looked for again.
    pub(super) fn rename_to_overwrite(
        &self,
        taken: Taken,
        key: BlockKey,
        sealed: &IoBuf,
        temporary: &Path,
    ) -> Result<Option<Box<dyn DeviceFile>>> {
        if self.config.shared && self.was_used_elsewhere(&taken) {
            return Ok(None);
        }
        let (victim, bytes, directory) = (taken.key, taken.entry.bytes, taken.entry.directory);
        let (device, from) = (self.device(directory), taken.space.block_path(victim.hash));
        let direct = device.direct().is_some_and(|align| sealed.fits(align));
        // The membership may have ended since the victim was chosen.
        let now_ms = self.now_ms();
        let may_move = self.lock().begin_move(bytes, now_ms);
        // Fails if the new block's directory does not exist yet, or if the file system is read-only.
        let file = if may_move { device.take_over(&from, temporary, bytes, direct).ok() } else { None };
        let Some(file) = file else {
            if let Some(purse) = self.lock().purse.as_mut().filter(|_| may_move) {
                purse.end_move(bytes);
            }
            self.evict(victim)?;
            self.deliver_events();
            return Ok(None);
        };
        tracing::trace!(key = %victim, "evict");
        let mut state = self.lock();
        if file.is_some() {
            state.end_overwritten(&victim);
            state.reserved.insert(key, bytes);
            if let Some(purse) = &mut state.purse {
                purse.take_over(bytes);
            }
        } else {
            if let Some(purse) = &mut state.purse {
                purse.end_move(bytes);
            }
            state.end_leaving(&victim, true);
            self.free_space.credit(directory, bytes);
        }
        state.events.evicted(victim);
        drop(state);
        self.changed.notify_all();
        self.deliver_events();
        Ok(file)
    }
}

impl State {
    /// Returns whether there is anything to give up before live blocks.
    fn has_waste(&self) -> bool {
        let retired = !self.leaving_pending.is_empty() || !self.chores.retired.is_empty();
        retired || self.bad.values().any(|kept| !kept.is_empty())
    }

    /// Notes that a file lives on as another block's; its bytes stay charged.
    fn end_overwritten(&mut self, key: &BlockKey) {
        self.leaving_running -= 1;
        self.leaving.remove(key);
        self.note_gone(*key);
    }
}
