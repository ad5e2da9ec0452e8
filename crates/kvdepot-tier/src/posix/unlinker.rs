//! The thread that unlinks: removed blocks, evictions ahead of need, files of epochs that have passed.
//!
//! A thread of its own, because on some file systems an unlink takes longer than the write of a small block.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use kvdepot_core::{NamespaceId, Result};

use super::leaving::Leave;
use super::state::{PIECE, PIECE_SLOTS, Shared, State};

/// How often the floor of free space is looked at while nothing is written.
const FLOOR_INTERVAL: Duration = Duration::from_secs(5);

/// A directory of an earlier epoch, to be removed with all that is in it.
#[derive(Debug)]
pub(super) struct ReclaimJob {
    directory: usize,
    /// Directories below it, and last itself, as far as they were listed.
    todo: Vec<(PathBuf, bool)>,
}

impl ReclaimJob {
    pub(super) fn new(directory: usize, path: PathBuf) -> Self {
        Self { directory, todo: vec![(path, false)] }
    }
}

/// A namespace whose epoch has passed: its files are unreachable, and still in the index.
#[derive(Debug)]
pub(super) struct RetireJob {
    number: u32,
    cursor: u32,
}

enum Chore {
    Unlink(kvdepot_core::BlockKey),
    Retire(RetireJob),
    Reclaim(ReclaimJob),
    Floor,
    Trim,
}

pub(super) fn run(shared: &Shared) {
    let mut floor_at = Instant::now() + FLOOR_INTERVAL;
    while let Some(chore) = shared.next_unlink(&mut floor_at) {
        let failed = shared.do_unlink(chore).is_err();
        shared.deliver_events();
        let mut state = shared.lock();
        state.check_counted();
        state.chores.trim_failed = failed;
        state.chores.unlinking = false;
        drop(state);
        shared.changed.notify_all();
    }
}

impl Shared {
    fn next_unlink(&self, floor_at: &mut Instant) -> Option<Chore> {
        let mut state = self.lock();
        loop {
            if state.chores.stop {
                return None;
            }
            let over = self.is_over_cap(&state) || self.is_over_headroom(&state);
            let trim = over && !state.chores.trim_failed;
            if let Some(chore) = state.take_unlink().or_else(|| trim.then_some(Chore::Trim)) {
                state.chores.unlinking = true;
                return Some(chore);
            }
            if self.unlinks.wait_until(&mut state, *floor_at).timed_out() {
                *floor_at = Instant::now() + FLOOR_INTERVAL;
                state.chores.floor = self.config.free_floor_percent > 0;
            }
            state.chores.trim_failed = false;
        }
    }

    /// An error only where work is left that is not queued.
    fn do_unlink(&self, chore: Chore) -> Result<()> {
        match chore {
            Chore::Unlink(key) => {
                if let Err(error) = self.unlink_leaving(&key) {
                    tracing::warn!(%error, "a block file stays until the next sweep");
                }
            }
            Chore::Retire(job) => self.clear_retired(job),
            Chore::Reclaim(job) => {
                let (directory, whole) = (job.directory, job.todo.first().map(|(path, _)| path.clone()));
                let rest = self.reclaim_step(job);
                let mut state = self.lock();
                state.chores.looks -= 1;
                match rest {
                    Ok(Some(rest)) => state.chores.reclaims.push_front(rest),
                    Ok(None) => state.swept.epochs += 1,
                    Err(error) => {
                        state.discovered &= state.counted;
                        tracing::warn!(
                            %error, directory, path = ?whole,
                            "an earlier epoch's directory stays until the next sweep"
                        );
                    }
                }
            }
            Chore::Floor => self.restore_floor(),
            Chore::Trim => return self.trim(PIECE).map(drop),
        }
        Ok(())
    }

    /// Makes an epoch's blocks unreachable; their files go in the background, and the scan of the next epoch finds
    /// the directory.
    pub(super) fn retire_namespace(&self, root: NamespaceId) {
        let mut state = self.lock();
        let Some(id) = state.roots.remove(&root) else { return };
        state.spaces.remove(&id);
        if !state.scanned.remove(&id) && !state.counted {
            // Its files were not counted, and now no scan of its own will.
            state.discovered = false;
        }
        state.chores.scans.retain(|job| job.space.id != id);
        if let Some(number) = state.index.retire(id) {
            state.chores.retired.push_back(RetireJob { number, cursor: 0 });
        }
        drop(state);
        self.unlinks.notify_one();
    }

    fn clear_retired(&self, job: RetireJob) {
        let mut state = self.lock();
        let (taken, next) = state.index.take_retired(job.number, job.cursor, PIECE_SLOTS / 8);
        let keys: Vec<_> = taken.iter().map(|taken| taken.key).collect();
        for taken in taken {
            state.note_removed(taken.key);
            state.begin_leaving(taken, Leave::Running);
        }
        drop(state);
        for key in keys {
            if let Err(error) = self.unlink_leaving(&key) {
                tracing::warn!(%error, "a block file of an earlier epoch stays until the next sweep");
            }
        }
        if let Some(cursor) = next {
            self.lock().chores.retired.push_front(RetireJob { cursor, ..job });
        }
    }

    /// Clears or removes one directory; gives the job back if there is more.
    fn reclaim_step(&self, mut job: ReclaimJob) -> Result<Option<ReclaimJob>> {
        let Some((path, cleared)) = job.todo.pop() else { return Ok(None) };
        let device = self.device(job.directory);
        if cleared {
            if job.todo.is_empty() {
                // The epoch's own directory: the only witness of its number may be about to go.
                self.keep_epoch_of(job.directory, &path)?;
            }
            device.remove_dir(&path)?;
        } else {
            let (mut files, mut dirs) = (Vec::new(), Vec::new());
            device.list(&path, &mut |entry| {
                if entry.is_dir { dirs.push(entry.name) } else { files.push(entry.name) }
            })?;
            for some in files.chunks(PIECE) {
                if self.lock().chores.stop {
                    job.todo.push((path, false));
                    return Ok(Some(job));
                }
                some.iter().try_for_each(|file| device.unlink(&path.join(file)).map(drop))?;
            }
            let is_top = job.todo.is_empty();
            job.todo.push((path.clone(), true));
            if is_top {
                job.todo.extend(dirs.into_iter().map(|dir| (path.join(dir), false)));
            }
        }
        Ok((!job.todo.is_empty()).then_some(job))
    }
}

impl State {
    /// The most urgent unlink: single blocks first, whose keys may be written again.
    fn take_unlink(&mut self) -> Option<Chore> {
        if let Some(key) = self.take_leaving() {
            return Some(Chore::Unlink(key));
        }
        if std::mem::take(&mut self.chores.floor) {
            return Some(Chore::Floor);
        }
        if let Some(job) = self.chores.retired.pop_front() {
            return Some(Chore::Retire(job));
        }
        let job = self.chores.reclaims.pop_front()?;
        self.chores.looks += 1;
        Some(Chore::Reclaim(job))
    }
}
