//! P5: makes space, below the cap and above the floor of free space.

use std::time::Instant;

use kvdepot_core::limits::BLOCK_ALIGN_BYTES;
use kvdepot_core::{BlockKey, Error, ErrorKind, Result};

use super::index::{Taken, seconds};
use super::leaving::{BadFile, Leave};
use super::ledger::purse::Purse;
use super::shared::Shared;
use super::state::State;

/// A file must be more than this many seconds newer on the disk than we know to count as used by another node.
const FOREIGN_USE_MIN_S: u32 = 1;
/// Space to evict when a file system has none left, as a multiple of the size of the block that is written.
const EVICT_WHEN_FULL: u64 = 8;
/// Failed unlinks after which a write on a full file system gives up.
const FAILURES_MAX: u32 = 8;
/// Part of the cap that is evicted in advance, so that writes need not wait for unlinks.
const HEADROOM_PART: u64 = 256;
/// The smallest number of files that makes the headroom worth having.
const HEADROOM_FILES_MIN: u64 = 32;

/// The next thing to give up.
pub(super) enum Victim {
    Leaving(BlockKey),
    Bad(BadFile),
    Cold(Box<Taken>),
}

impl Shared {
    /// Evicts from a directory until its file system has `bytes` more than the floor free; `NoSpace` if nothing is left
    /// to evict there, `Busy` if that takes longer than the deadline or the tier is being closed.
    pub(super) fn keep_floor(&self, directory: usize, bytes: u64, deadline: Option<Instant>) -> Result<()> {
        let device = self.device(directory);
        while self.free_space.shortage(device, directory, bytes) > 0 {
            let mut state = self.lock();
            let late = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if late || state.chores.stop_at.is_some() {
                return Err(Error::new(
                    ErrorKind::Busy,
                    "the disk is below `posix_free_floor_percent`, and eviction did not free enough in time",
                )
                .with("path", device.root().display()));
            }
            let Some(victim) = state.next_victim(Some(directory)) else {
                if let Some(deadline) = deadline.filter(|_| state.frees_later(directory)) {
                    self.wait_for_change(&mut state, deadline);
                    continue;
                }
                return Err(Error::new(
                    ErrorKind::NoSpace,
                    "the disk is below `posix_free_floor_percent`, and the tier has no block there to evict; free space or \
                     lower the floor",
                )
                .with("path", device.root().display())
                .with("free_floor_percent", self.config.free_floor_percent));
            };
            drop(state);
            self.give_up_now(victim)?;
        }
        Ok(())
    }

    /// Evicts where others have filled a file system beyond the floor.
    pub(super) fn restore_floor(&self) {
        for directory in 0..self.devices.len() {
            self.free_space.expire(directory);
            // If this fails, the next write is refused.
            let _ = self.keep_floor(directory, 0, None);
        }
    }

    /// After `NoSpace` of a write: evicts some files of the same directory, and returns whether space was freed in time,
    /// here or by others. `Busy` if reads and unlinks that will free some do not end by the deadline.
    pub(super) fn make_room(&self, directory: usize, bytes: u64, deadline: Instant) -> Result<bool> {
        self.free_space.expire(directory);
        let (mut freed, mut failures, mut has_waited) = (0, 0, false);
        while freed < bytes * EVICT_WHEN_FULL && failures < FAILURES_MAX {
            let mut state = self.lock();
            let is_late = Instant::now() >= deadline;
            let victim = if is_late { None } else { state.next_victim(Some(directory)) };
            let Some(victim) = victim else {
                if freed >= bytes || !state.frees_later(directory) {
                    break;
                }
                if is_late || state.chores.stop_at.is_some() {
                    if freed > 0 {
                        break;
                    }
                    let what = "the disk is full, and reads and removals under way did not end in time";
                    let path = self.device(directory).root().display();
                    return Err(Error::new(ErrorKind::Busy, what).with("path", path));
                }
                self.wait_for_change(&mut state, deadline);
                has_waited = true;
                continue;
            };
            drop(state);
            let outcome = self.give_up_now(victim);
            failures += u32::from(outcome.is_err());
            freed += outcome.unwrap_or(0);
        }
        Ok(freed > 0 || has_waited)
    }

    /// Evicts until the bytes are below the cap by the headroom; needed for files that existed at the start. Handles a
    /// bounded number of files and returns whether there may be more to do.
    pub(super) fn trim(&self, files_max: usize) -> Result<bool> {
        for _ in 0..files_max {
            let victim = {
                let mut state = self.lock();
                let over = state.bytes > self.cap_less(HEADROOM_PART, &state) || self.is_in_debt(&state);
                if self.cap > 0 && state.counted && over { state.next_victim(None) } else { None }
            };
            match victim {
                Some(victim) => self.give_up(victim)?,
                None => return Ok(false),
            };
        }
        Ok(true)
    }

    /// Returns whether the cap is exceeded and something can be given up.
    pub(super) fn is_over_cap(&self, state: &State) -> bool {
        self.cap > 0 && state.counted && state.bytes > self.cap_in(state) && state.has_victims()
    }

    /// Returns whether the ledger wants files unlinked, and there are some.
    pub(super) fn is_in_debt(&self, state: &State) -> bool {
        state.counted && state.purse.as_ref().is_some_and(Purse::is_in_debt) && state.has_victims()
    }

    /// Returns whether less than the headroom is left below the cap.
    pub(super) fn is_over_headroom(&self, state: &State) -> bool {
        self.cap > 0
            && state.counted
            && self.has_headroom(state)
            && state.bytes > self.cap_less_headroom(state)
            && state.has_victims()
    }

    /// The number of bytes from which space is made: half of the headroom is used before the unlink thread restores all
    /// of it.
    pub(super) fn cap_less_headroom(&self, state: &State) -> u64 {
        self.cap_less(2 * HEADROOM_PART, state)
    }

    fn cap_less(&self, part: u64, state: &State) -> u64 {
        let cap = self.cap_in(state);
        cap - if self.has_headroom(state) { cap / part } else { 0 }
    }

    /// Returns whether the headroom holds enough files to be worth having. A depot that reads blocks before they are evicted
    /// needs them one by one, not all of a headroom at a time.
    fn has_headroom(&self, state: &State) -> bool {
        if state.events.cooling.is_some() {
            return false;
        }
        let files = state.index.len() as u64;
        files > 0 && self.cap_in(state) / HEADROOM_PART >= HEADROOM_FILES_MIN * (state.bytes / files)
    }

    /// Unlinks a victim and returns the freed bytes. The caller delivers the events.
    fn give_up(&self, victim: Victim) -> Result<u64> {
        match victim {
            Victim::Leaving(key) => self.unlink_all(&[key]),
            Victim::Bad(file) => self.unlink_bad(file),
            Victim::Cold(taken) if self.config.shared && self.was_used_elsewhere(&taken) => Ok(0),
            Victim::Cold(taken) => self.evict(taken.key),
        }
    }

    pub(super) fn give_up_now(&self, victim: Victim) -> Result<u64> {
        let freed = self.give_up(victim);
        self.deliver_events();
        freed
    }

    /// Unlinks the file of a block that was taken out of the index to be evicted.
    pub(super) fn evict(&self, key: BlockKey) -> Result<u64> {
        tracing::trace!(%key, "evict");
        let freed = self.unlink_all(&[key])?;
        self.lock().events.evicted(key);
        Ok(freed)
    }

    /// Returns whether another node has used the file since we last knew; if so, it is put back with that recency.
    pub(super) fn was_used_elsewhere(&self, taken: &Taken) -> bool {
        let entry = taken.entry;
        let path = taken.space.block_path(taken.key.hash);
        let Ok(Some(stat)) = self.device(entry.directory).stat(&path) else { return false };
        let mut state = self.lock();
        // A device clock ahead of ours must not keep a file forever: only real progress counts.
        let used_s = seconds(stat.modified).min(state.index.now_s());
        let known = state.index.get(&taken.key).is_some() || state.reserved.contains_key(&taken.key);
        if known || used_s <= entry.used_s + FOREIGN_USE_MIN_S || !state.is_current(&taken.space) {
            return false;
        }
        if state.leaving.remove(&taken.key).is_some() {
            state.leaving_running -= 1;
        }
        let (space, used) = (std::sync::Arc::clone(&taken.space), Some(stat.modified));
        state.index.insert(taken.key, space, entry.directory, entry.bytes, used);
        state.correct(&taken.key, u64::MAX, stat.bytes.next_multiple_of(BLOCK_ALIGN_BYTES));
        self.changed.notify_all();
        true
    }
}

impl State {
    /// The next file to give up, already out of the index; restricted to one directory if only that helps.
    pub(super) fn next_victim(&mut self, directory: Option<usize>) -> Option<Victim> {
        // Waste first: blocks of past epochs go before live ones.
        self.pull_some_retired();
        if let Some(key) = self.take_leaving() {
            return Some(Victim::Leaving(key));
        }
        if let Some(file) = self.take_bad(directory) {
            return Some(Victim::Bad(file));
        }
        // A block that is being read here keeps its file: as long as it is open, unlinking frees nothing.
        let taken = self.index.take_coldest(directory)?;
        self.note_removed(taken.key);
        let again = Taken { key: taken.key, space: std::sync::Arc::clone(&taken.space), entry: taken.entry };
        self.begin_leaving(again, Leave::Running);
        Some(Victim::Cold(Box::new(taken)))
    }

    fn has_victims(&self) -> bool {
        self.index.coldest(None).is_some() || self.bad.values().any(|kept| !kept.is_empty())
    }

    /// Returns whether something in a directory can still be given up: now, or once reads and unlinks under way have ended.
    /// Those of another directory count, too.
    fn frees_later(&self, directory: usize) -> bool {
        let has_blocks = self.index.coldest(Some(directory)).is_some() || self.index.has_read(directory);
        has_blocks || !self.has_unlinked()
    }
}
