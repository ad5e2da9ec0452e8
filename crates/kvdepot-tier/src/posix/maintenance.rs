//! The thread that does what nobody waits for: scans, removals, recency, sweeps.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::limits::SWEEP_INTERVAL_S;
use kvdepot_core::{BlockKey, Error, Result};
use kvdepot_io::ListEntry;

use super::state::{Chore, Leave, Shared, State};

/// Starts the thread; it ends when `Chores::stop` is set.
pub(super) fn start(shared: &Arc<Shared>) -> Result<()> {
    let mine = Arc::clone(shared);
    std::thread::Builder::new()
        .name("kvd-posix-maint".to_owned())
        .spawn(move || run(&mine))
        .map(drop)
        .map_err(|e| Error::io("cannot start a tier's maintenance thread", e))
}

fn run(shared: &Shared) {
    let mut sweep_at = Instant::now() + Duration::from_secs(SWEEP_INTERVAL_S);
    while let Some(chore) = shared.next_chore(&mut sweep_at) {
        tracing::trace!(?chore, "begin");
        shared.do_chore(chore);
        shared.lock().check_counted();
        // A failure is the device's and comes up again at the next write.
        let _ = shared.trim();
        let mut state = shared.lock();
        state.chores.busy = false;
        shared.changed.notify_all();
    }
}

impl Shared {
    /// Asks for everything to be looked at again.
    pub(super) fn ask_for_sweep(&self) {
        let mut state = self.lock();
        let State { leaving, leaving_pending, chores, .. } = &mut *state;
        for (key, file) in leaving.iter_mut().filter(|(_, file)| file.step == Leave::Failed) {
            file.step = Leave::Pending;
            leaving_pending.push_back(*key);
        }
        chores.discover = true;
        self.changed.notify_all();
    }

    /// Waits until nothing is left to do, or the deadline passes.
    pub(super) fn wait_idle(&self, deadline: Instant) -> bool {
        let mut state = self.lock();
        let idle = |state: &State| {
            state.chores.is_idle() && state.leaving.values().all(|file| file.step == Leave::Failed)
        };
        while !idle(&state) {
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                return idle(&state);
            }
        }
        true
    }

    /// Tells the maintenance thread to end, and waits for what it is doing.
    pub(super) fn stop(&self, deadline: Instant) {
        let mut state = self.lock();
        state.chores.stop = true;
        self.changed.notify_all();
        while state.chores.busy && !self.changed.wait_until(&mut state, deadline).timed_out() {}
    }

    fn next_chore(&self, sweep_at: &mut Instant) -> Option<Chore> {
        let mut state = self.lock();
        loop {
            if state.chores.stop {
                return None;
            }
            if let Some(chore) = state.take_chore() {
                state.chores.busy = true;
                return Some(chore);
            }
            if self.is_over_cap(&state) {
                drop(state);
                // As in `run`: what cannot be evicted now is tried again when something changes.
                let failed = self.trim().is_err();
                state = self.lock();
                if !failed {
                    continue;
                }
            }
            if self.changed.wait_until(&mut state, *sweep_at).timed_out() {
                *sweep_at = Instant::now() + Duration::from_secs(SWEEP_INTERVAL_S);
                drop(state);
                self.ask_for_sweep();
                state = self.lock();
            }
        }
    }

    fn do_chore(&self, chore: Chore) {
        match chore {
            Chore::Discover => self.discover(),
            Chore::Scan(job) => {
                if let Some(rest) = self.scan_step(job) {
                    // Behind an urgent job that came meanwhile, before all others.
                    let mut state = self.lock();
                    let at = usize::from(!state.chores.scans.is_empty());
                    state.chores.scans.insert(at, rest);
                }
            }
            Chore::Unlink(key) => {
                if let Err(error) = self.unlink_leaving(&key) {
                    tracing::warn!(%error, "a block file stays until the next sweep");
                }
            }
            Chore::Touch(key) => self.persist_touch(&key),
            Chore::Reclaim(directory, path) => match self.reclaim(directory, &path) {
                Ok(()) => self.lock().swept.epochs += 1,
                Err(error) => {
                    tracing::warn!(%error, "an earlier epoch's directory stays until the next sweep")
                }
            },
        }
    }

    /// Recency lives in the file's modification time, where other nodes and the next start find it.
    fn persist_touch(&self, key: &BlockKey) {
        let Some((directory, path, used)) = self
            .lock()
            .index
            .get(key)
            .map(|entry| (entry.directory, entry.space.block_path(key.hash), entry.used()))
        else {
            return;
        };
        if let Err(error) = self.device(directory).set_modified(&path, used) {
            tracing::trace!(%error, "recency was not written");
        }
    }

    /// Removes an earlier epoch's directory with all that is in it.
    fn reclaim(&self, directory: usize, path: &Path) -> Result<()> {
        let device = self.device(directory);
        let mut dirs: Vec<PathBuf> = vec![path.to_owned()];
        let mut at = 0;
        while at < dirs.len() {
            let dir = dirs[at].clone();
            let mut names: Vec<ListEntry> = Vec::new();
            device.list(&dir, &mut |entry| names.push(entry))?;
            for entry in names {
                let whole = dir.join(&entry.name);
                if entry.is_dir && at == 0 {
                    dirs.push(whole);
                } else if !entry.is_dir {
                    device.unlink(&whole)?;
                }
            }
            at += 1;
        }
        for dir in dirs.iter().rev() {
            device.remove_dir(dir)?;
        }
        Ok(())
    }
}

impl State {
    /// The most urgent piece of work: room first, then knowledge, then recency.
    fn take_chore(&mut self) -> Option<Chore> {
        if let Some(key) = self.take_leaving() {
            return Some(Chore::Unlink(key));
        }
        if std::mem::take(&mut self.chores.discover) {
            return Some(Chore::Discover);
        }
        if let Some((directory, path)) = self.chores.reclaims.pop_front() {
            return Some(Chore::Reclaim(directory, path));
        }
        if let Some(job) = self.chores.scans.pop_front() {
            return Some(Chore::Scan(job));
        }
        self.chores.touches.pop_front().map(Chore::Touch)
    }
}
