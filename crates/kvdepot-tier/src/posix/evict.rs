//! P5: room is made and reserved before the first byte is written.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::{BlockKey, Error, ErrorKind, Result};

use super::state::{BadFile, Shared, State};

/// How much newer than we know a file must be on the disk to count as used by another node.
const FOREIGN_USE_MIN: Duration = Duration::from_secs(1);

/// What to give up next.
enum Victim {
    Leaving(BlockKey),
    Bad(BadFile),
    Cold(BlockKey),
}

impl Shared {
    /// Reserves a block's bytes for a write, evicting what was used longest ago. `NoSpace` if it can never fit,
    /// `Busy` if others' reservations do not end by the deadline.
    pub(super) fn reserve(&self, key: BlockKey, bytes: u64, deadline: Instant) -> Result<()> {
        let cap = self.config.capacity_bytes;
        if cap > 0 && bytes > cap {
            return Err(Error::new(ErrorKind::NoSpace, "a block is larger than the tier's cap")
                .with("file_bytes", bytes)
                .with("capacity_bytes", cap));
        }
        loop {
            let victim = {
                let mut state = self.lock();
                if cap == 0 || (state.counted && state.bytes + bytes <= cap) {
                    state.bytes += bytes;
                    state.reserved.insert(key, bytes);
                    return Ok(());
                }
                match state.counted.then(|| state.next_victim()).flatten() {
                    Some(victim) => victim,
                    None => {
                        self.wait_for_room(&mut state, bytes, deadline)?;
                        continue;
                    }
                }
            };
            self.give_up(victim)?;
        }
    }

    /// Evicts until the cap holds; for files that were there already.
    pub(super) fn trim(&self) -> Result<()> {
        let cap = self.config.capacity_bytes;
        loop {
            let victim = {
                let mut state = self.lock();
                if cap == 0 || !state.counted || state.bytes <= cap {
                    return Ok(());
                }
                match state.next_victim() {
                    Some(victim) => victim,
                    None => return Ok(()),
                }
            };
            self.give_up(victim)?;
        }
    }

    /// Whether the cap is exceeded by something that can be given up.
    pub(super) fn is_over_cap(&self, state: &State) -> bool {
        let cap = self.config.capacity_bytes;
        let something = state.index.len() > 0 || state.bad.values().any(|kept| !kept.is_empty());
        cap > 0 && state.counted && state.bytes > cap && something
    }

    fn wait_for_room(
        &self,
        state: &mut parking_lot::MutexGuard<'_, State>,
        bytes: u64,
        deadline: Instant,
    ) -> Result<()> {
        let on_the_way = !state.counted || !state.reserved.is_empty() || !state.leaving.is_empty();
        if on_the_way && !state.chores.stop && !self.changed.wait_until(state, deadline).timed_out() {
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
            .with("capacity_bytes", self.config.capacity_bytes))
    }

    fn give_up(&self, victim: Victim) -> Result<()> {
        match victim {
            Victim::Leaving(key) => self.unlink_leaving(&key),
            Victim::Bad(file) => {
                // Not tried again: what cannot be unlinked now is found and charged anew by the next sweep.
                let outcome = self.device(file.directory).unlink(&file.path);
                self.lock().bytes -= file.bytes;
                self.changed.notify_all();
                outcome.map(drop)
            }
            Victim::Cold(key) => {
                if self.config.shared && self.was_used_elsewhere(&key) {
                    return Ok(());
                }
                if !self.lock().leave_taken(&key) {
                    return Ok(());
                }
                tracing::trace!(%key, "evict");
                self.unlink_leaving(&key)
            }
        }
    }

    /// Whether another node has used the file since we last knew, in which case it is filed anew.
    fn was_used_elsewhere(&self, key: &BlockKey) -> bool {
        let Some((device, path, used)) = self.lock().index.get(key).map(|entry| {
            let device = Arc::clone(self.device(entry.directory));
            (device, entry.space.block_path(key.hash), entry.used())
        }) else {
            return true;
        };
        match device.stat(&path) {
            Ok(Some(stat)) if stat.modified > used + FOREIGN_USE_MIN => {
                let mut state = self.lock();
                let filed = state.index.touch(key, Some(stat.modified));
                // A device clock ahead of ours must not keep a file for ever: only a real move counts.
                filed.is_some_and(|entry| entry.used() > used)
            }
            _ => false,
        }
    }
}

impl State {
    fn next_victim(&mut self) -> Option<Victim> {
        if let Some(key) = self.take_leaving() {
            return Some(Victim::Leaving(key));
        }
        if let Some(file) = self.take_bad() {
            return Some(Victim::Bad(file));
        }
        self.index.coldest().map(Victim::Cold)
    }
}
