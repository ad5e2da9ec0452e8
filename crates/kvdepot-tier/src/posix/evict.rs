//! P5: space is made and reserved before the first byte is written, below the cap and above the floor of free space.

use std::path::Path;
use std::time::{Duration, Instant};

use kvdepot_core::limits::BLOCK_ALIGN_BYTES;
use kvdepot_core::{BlockKey, Error, ErrorKind, Result};

use kvdepot_io::{DeviceFile, IoBuf};

use super::held::Held;
use super::index::{Taken, seconds};
use super::leaving::{BadFile, Leave};
use super::ledger::purse::{Purse, Refused};
use super::shared::Shared;
use super::space::home;
use super::state::State;

/// A file must be more than this many seconds newer on the disk than we know to count as used by another node.
const FOREIGN_USE_MIN_S: u32 = 1;
/// Space to evict when a file system has none left, as a multiple of the size of the block that is written.
const EVICT_WHEN_FULL: u64 = 8;
/// How often a write that waits for the ledger looks whether it may wait any longer.
const FENCE_INTERVAL: Duration = Duration::from_millis(250);
/// How often the directories are listed because no block is known that could be evicted.
const LOOK_INTERVAL: Duration = Duration::from_secs(10);
/// Failed unlinks after which a write on a full file system gives up.
const FAILURES_MAX: u32 = 8;
/// Part of the cap that is evicted in advance, so that writes need not wait for unlinks.
const HEADROOM_PART: u64 = 256;
/// The smallest number of files that makes the headroom worth having.
const HEADROOM_FILES_MIN: u64 = 32;

const FENCED: &str =
    "the ledger of a shared directory cannot be kept now, so that the cap of all depots cannot be kept";

/// The next thing to give up.
pub(super) enum Victim {
    Leaving(BlockKey),
    Bad(BadFile),
    Cold(Box<Taken>),
}

/// The place for a block's bytes.
#[derive(Debug)]
pub(super) enum Room {
    /// Into a new file.
    New,
    /// Over the file that was renamed to the temporary name.
    Over(Box<dyn DeviceFile>),
}

impl Shared {
    /// Reserves a block's bytes for a write, evicting the least recently used blocks. `NoSpace` if it can never fit,
    /// `Busy` if other reservations do not end by the deadline.
    pub(super) fn reserve(
        &self,
        key: BlockKey,
        bytes: u64,
        sealed: &IoBuf,
        temporary: &Path,
        deadline: Instant,
    ) -> Result<Room> {
        let cap = {
            let state = self.lock();
            if state.purse.as_ref().is_some_and(|purse| purse.is_fenced(self.now_ms())) {
                // Nothing is evicted for a write that will be refused.
                return Err(self.no_ledger(FENCED, bytes));
            }
            self.cap_in(&state)
        };
        if cap > 0 && bytes > cap {
            return Err(Error::new(ErrorKind::NoSpace, "a block is larger than the tier's cap")
                .with("file_bytes", bytes)
                .with("capacity_bytes", cap));
        }
        let directory = home(key.hash, self.devices.len());
        self.keep_floor(directory, bytes, Some(deadline))?;
        loop {
            let victim = {
                let mut state = self.lock();
                if let Some(taken) = self.take_to_overwrite(&mut state, &key, bytes) {
                    drop(state);
                    match self.rename_to_overwrite(taken, key, sealed, temporary)? {
                        Some(file) => return Ok(Room::Over(file)),
                        None => continue,
                    }
                }
                let cap = self.cap_in(&state);
                let fits = cap == 0 || (state.is_bounded() && state.bytes + bytes <= cap);
                if fits
                    && let Some(total) = state.total
                    && state.bytes + bytes > total
                {
                    let needed = state.bytes + bytes;
                    drop(state);
                    self.raise_total(needed);
                    continue;
                }
                if fits && self.spend(&mut state, bytes, deadline)? {
                    state.bytes += bytes;
                    state.reserved.insert(key, bytes);
                    self.free_space.debit(directory, bytes);
                    let ahead = self.is_over_headroom(&state);
                    drop(state);
                    if ahead {
                        self.unlinks.notify_one();
                    }
                    return Ok(Room::New);
                }
                match state.knows_recency().then(|| state.next_victim(None)).flatten() {
                    Some(victim) => victim,
                    None => {
                        if fits && state.purse.is_some() {
                            self.look_for_others(&mut state, bytes);
                        }
                        self.wait_for_room(&mut state, bytes, deadline)?;
                        continue;
                    }
                }
            };
            self.give_up_now(victim)?;
        }
    }

    /// Spends a write's bytes in the ledger, if there is one; waits for it if it may grant them. `false` if something
    /// has to be unlinked first, or if the state may have changed meanwhile.
    fn spend(&self, state: &mut Held<'_, State>, bytes: u64, deadline: Instant) -> Result<bool> {
        loop {
            let what = match state.spend(bytes, self.now_ms()) {
                Ok(()) => {
                    if state.purse.as_ref().is_some_and(|purse| purse.is_low() || purse.is_fed()) {
                        self.ledger.notify_one();
                    }
                    return Ok(true);
                }
                Err(Refused::Empty) => return Ok(false),
                Err(refused @ (Refused::Ask | Refused::Crowded)) => {
                    if refused == Refused::Ask {
                        self.ledger.notify_one();
                    }
                    // The membership may end while the ledger's thread hangs.
                    state.wait_until(&self.changed, deadline.min(Instant::now() + FENCE_INTERVAL));
                    if Instant::now() < deadline && state.chores.stop_at.is_none() {
                        // Others may have spent and charged in the meantime.
                        if state.bytes + bytes > self.cap_in(state) {
                            return Ok(false);
                        }
                        continue;
                    }
                    if refused == Refused::Crowded {
                        "too many writes to a shared directory are stuck"
                    } else {
                        "the ledger of a shared directory did not answer in time"
                    }
                }
                Err(Refused::Fenced) => FENCED,
            };
            return Err(self.no_ledger(what, bytes));
        }
    }

    fn no_ledger(&self, what: &'static str, bytes: u64) -> Error {
        Error::new(ErrorKind::Busy, what)
            .with("path", self.device(0).root().display())
            .with("file_bytes", bytes)
    }

    /// Evicts from a directory until its file system has `bytes` more than the floor free; `NoSpace` if nothing is left
    /// to evict there, `Busy` if that takes longer than the deadline or the tier is being closed.
    fn keep_floor(&self, directory: usize, bytes: u64, deadline: Option<Instant>) -> Result<()> {
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
            let victim = state.next_victim(Some(directory));
            drop(state);
            let Some(victim) = victim else {
                return Err(Error::new(
                    ErrorKind::NoSpace,
                    "the disk is below `posix_free_floor_percent`, and the tier has no block there to evict; free space or \
                     lower the floor",
                )
                .with("path", device.root().display())
                .with("free_floor_percent", self.config.free_floor_percent));
            };
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

    /// After `NoSpace` of a write: evicts some files of the same directory, and returns whether any space was freed in
    /// time.
    pub(super) fn make_room(&self, directory: usize, bytes: u64, deadline: Instant) -> bool {
        self.free_space.expire(directory);
        let (mut freed, mut failures) = (0, 0);
        while freed < bytes * EVICT_WHEN_FULL && failures < FAILURES_MAX && Instant::now() < deadline {
            let victim = self.lock().next_victim(Some(directory));
            let Some(victim) = victim else { break };
            let outcome = self.give_up_now(victim);
            failures += u32::from(outcome.is_err());
            freed += outcome.unwrap_or(0);
        }
        freed > 0
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

    /// Returns whether the headroom holds enough files to be worth having.
    fn has_headroom(&self, state: &State) -> bool {
        let files = state.index.len() as u64;
        files > 0 && self.cap_in(state) / HEADROOM_PART >= HEADROOM_FILES_MIN * (state.bytes / files)
    }

    /// Has the directories listed, because what takes up the cap was written by others and is not known here.
    fn look_for_others(&self, state: &mut State, bytes: u64) {
        if let Some(purse) = &mut state.purse {
            state.is_waiting_for_others = purse.starve(bytes);
            self.ledger.notify_one();
        }
        if state.looked.is_none_or(|looked| looked.elapsed() >= LOOK_INTERVAL) {
            state.looked = Some(Instant::now());
            state.chores.discover = true;
            self.work.notify_one();
            if let Some(purse) = &mut state.purse {
                purse.doubt();
            }
        }
    }

    fn wait_for_room(&self, state: &mut Held<'_, State>, bytes: u64, deadline: Instant) -> Result<()> {
        let is_settling = state.purse.as_ref().is_some_and(Purse::is_settling);
        let is_looking = state.chores.busy || !state.chores.has_looked();
        let is_waiting = std::mem::take(&mut state.is_waiting_for_others) || is_looking;
        let looking = is_settling || state.purse.is_some() && is_waiting;
        let leaving = !state.has_unlinked() || state.has_waste_to_go() || looking;
        let on_the_way = !state.counted || !state.reserved.is_empty() || leaving;
        if on_the_way && state.chores.stop_at.is_none() && !state.wait_until(&self.changed, deadline) {
            return Ok(());
        }
        let (kind, what) = if !state.counted {
            (ErrorKind::Busy, "the tier has not counted its files yet, so that its cap cannot be kept")
        } else if on_the_way {
            (ErrorKind::Busy, "the tier's cap is taken by writes and removals under way")
        } else {
            (ErrorKind::NoSpace, "the tier's cap is taken by files that cannot be evicted")
        };
        Err(Error::new(kind, what)
            .with("file_bytes", bytes)
            .with("bytes", state.bytes)
            .with("capacity_bytes", self.cap_in(state)))
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

    fn give_up_now(&self, victim: Victim) -> Result<u64> {
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

    /// Unlinks a file that was set aside and whose bytes are still charged. If that fails they stay charged, and the
    /// next sweep has it retried. Returns the freed bytes.
    pub(super) fn unlink_bad(&self, file: BadFile) -> Result<u64> {
        let outcome = self.unlink_counted(file.directory, &file.path);
        let mut state = self.lock();
        let (bytes, directory) = (file.bytes, file.directory);
        match outcome {
            Ok(true) => state.bytes -= bytes,
            Ok(false) => state.uncharge_missing(bytes),
            Err(error) => {
                state.bad_failed.push(file);
                return Err(error);
            }
        }
        drop(state);
        self.free_space.credit(directory, bytes);
        self.changed.notify_all();
        Ok(bytes)
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
        let taken = self.index.take_coldest(directory)?;
        self.note_removed(taken.key);
        let again = Taken { key: taken.key, space: std::sync::Arc::clone(&taken.space), entry: taken.entry };
        self.begin_leaving(again, Leave::Running);
        Some(Victim::Cold(Box::new(taken)))
    }

    fn has_victims(&self) -> bool {
        self.index.len() > 0 || self.bad.values().any(|kept| !kept.is_empty())
    }
}
