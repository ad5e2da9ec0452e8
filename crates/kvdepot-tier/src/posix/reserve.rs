//! P5: space is reserved before the first byte is written, below the cap and above the floor of free space.

use std::path::Path;
use std::time::{Duration, Instant};

use kvdepot_core::{BlockKey, Error, ErrorKind, Result};
use kvdepot_io::{DeviceFile, IoBuf};

use super::held::Held;
use super::ledger::purse::{Purse, Refused};
use super::shared::Shared;
use super::space::home;
use super::state::State;

/// How often a write that waits for the ledger looks whether it may wait any longer.
const FENCE_INTERVAL: Duration = Duration::from_millis(250);
/// How often the directories are listed because no block is known that could be evicted.
const LOOK_INTERVAL: Duration = Duration::from_secs(10);

const FENCED: &str =
    "the ledger of a shared directory cannot be kept now, so that the cap of all depots cannot be kept";

/// The place for a block's bytes.
#[derive(Debug)]
pub(super) enum Room {
    /// Into a new file.
    New,
    /// Over the file that was renamed to the temporary name.
    Over(Box<dyn DeviceFile>),
}

impl Shared {
    /// Reserves a block's bytes for a write, evicting the least recently used blocks. `Config` if it can never fit,
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
            return Err(Error::new(ErrorKind::Config, "a block is larger than the tier's cap")
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
        // What is left in the index is being read.
        let reading = state.index.len() > 0;
        let on_the_way = !state.counted || !state.reserved.is_empty() || leaving || reading;
        if on_the_way && state.chores.stop_at.is_none() && !self.wait_for_change(state, deadline) {
            return Ok(());
        }
        let (kind, what) = if !state.counted {
            (ErrorKind::Busy, "the tier has not counted its files yet, so that its cap cannot be kept")
        } else if on_the_way {
            (ErrorKind::Busy, "the tier's cap is taken by reads, writes and removals under way")
        } else {
            (ErrorKind::NoSpace, "the tier's cap is taken by files that cannot be evicted")
        };
        Err(Error::new(kind, what)
            .with("file_bytes", bytes)
            .with("bytes", state.bytes)
            .with("capacity_bytes", self.cap_in(state)))
    }
}
