//! The thread that unlinks: removed blocks, evictions in advance, files of past epochs.
//!
//! A separate thread, because on some file systems an unlink takes longer than writing a small block.

use std::path::Path;
use std::time::{Duration, Instant};

use kvdepot_core::limits::BLOCK_ALIGN_BYTES;
use kvdepot_core::{Error, ErrorKind, NamespaceId, Result};

use super::chores::{ReclaimJob, Remove};
use super::shared::Shared;
use super::space::below_of_dir;
use super::state::{PIECE, State};

/// How often the floor of free space is checked while nothing is written.
const FLOOR_INTERVAL: Duration = Duration::from_secs(5);

/// How many levels below a past epoch's directory are searched; deeper directories are not ours.
const DEPTH_MAX: usize = 8;
/// Failed removals after which a past epoch's directory is left alone until the next sweep.
const FAILURES_MAX: usize = 32;
/// Files that are claimed together.
const UNLINKS: usize = 32;

enum Chore {
    Unlink(Vec<kvdepot_core::BlockKey>),
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
            if let Some(until) = state.chores.stop_at {
                // Removed blocks must not reappear at the next start; everything else is found again.
                let in_time = Instant::now() + self.config.close_wait / 2 < until;
                state.leave_without_reads();
                let keys = if in_time { state.take_some_leaving() } else { Vec::new() };
                state.chores.unlinking = !keys.is_empty();
                return (!keys.is_empty()).then_some(Chore::Unlink(keys));
            }
            let over = self.is_over_cap(&state) || self.is_over_headroom(&state) || self.is_in_debt(&state);
            let trim = over && !state.chores.trim_failed;
            if let Some(chore) = state.take_unlink().or_else(|| trim.then_some(Chore::Trim)) {
                state.chores.unlinking = true;
                return Some(chore);
            }
            // The queue may have held only names that others had unlinked.
            self.changed.notify_all();
            if state.wait_until(&self.unlinks, *floor_at) {
                *floor_at = Instant::now() + FLOOR_INTERVAL;
                state.chores.floor = self.config.free_floor_percent > 0;
            }
            state.chores.trim_failed = false;
        }
    }

    /// An error only if work is left that is not queued.
    fn do_unlink(&self, chore: Chore) -> Result<()> {
        match chore {
            Chore::Unlink(keys) => {
                if let Err(error) = self.unlink_all(&keys) {
                    tracing::warn!(%error, "a block file stays until the next sweep");
                }
            }
            Chore::Reclaim(ReclaimJob::Settle(space)) => {
                let mut state = self.lock();
                state.chores.looks -= 1;
                state.settle_waste(&space);
            }
            Chore::Reclaim(ReclaimJob::Remove(job)) => {
                let (root, directory, top) = (job.root, job.directory, job.top.clone());
                let rest = self.reclaim_step(job);
                // Before this directory is done, which may be the last one before everything is counted.
                let is_counted = rest.is_ok() || self.count_stuck(root, directory, &top);
                let mut state = self.lock();
                state.chores.looks -= 1;
                match rest {
                    Ok(Some(rest)) => state.chores.reclaims.push_front(ReclaimJob::Remove(rest)),
                    Ok(None) => state.swept.epochs += 1,
                    Err(error) => {
                        state.discovered &= state.counted || is_counted;
                        state.waste.is_stuck(root, directory);
                        tracing::warn!(
                            %error, directory, path = %top.display(),
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

    /// Clears or removes one directory; gives the job back if there is more.
    fn reclaim_step(&self, mut job: Remove) -> Result<Option<Remove>> {
        let Some((path, cleared)) = job.todo.pop() else { return Ok(None) };
        let device = self.device(job.directory);
        if cleared {
            if let Some((_, error)) = job.failed.take_if(|_| job.todo.is_empty()) {
                return Err(error);
            }
            if job.todo.is_empty() {
                // The epoch's own directory: this may remove the only record of its number.
                self.keep_epoch_of(job.directory, &path)?;
            }
            if job.failed.is_none() && !device.remove_dir(&path)? && device.stat(&path)?.is_some() {
                return Err(Error::new(ErrorKind::Busy, "a past epoch's directory cannot be emptied")
                    .with("path", device.root().join(path).display()));
            }
        } else {
            let (mut files, mut dirs) = (Vec::new(), Vec::new());
            device.list(&path, &mut |entry| {
                if entry.is_dir { dirs.push(entry.name) } else { files.push(entry.name) }
            })?;
            for some in files.chunks(UNLINKS) {
                if self.lock().chores.stop_at.is_some() {
                    job.todo.push((path, false));
                    return Ok(Some(job));
                }
                for file in some {
                    if let Err(error) = self.reclaim_file(&job, &path.join(file)) {
                        let failures = job.failed.take().map_or(0, |(failures, _)| failures) + 1;
                        if failures >= FAILURES_MAX {
                            return Err(error);
                        }
                        job.failed = Some((failures, error));
                    }
                }
                self.changed.notify_all();
            }
            let depth = path.components().count() - job.top.components().count();
            job.todo.push((path.clone(), true));
            if depth < DEPTH_MAX {
                job.todo.extend(dirs.into_iter().map(|dir| (path.join(dir), false)));
            }
        }
        Ok((!job.todo.is_empty()).then_some(job))
    }

    /// Counts what lies in a directory that cannot be removed, unless it is already charged; returns whether it is
    /// charged now.
    fn count_stuck(&self, root: NamespaceId, directory: usize, top: &Path) -> bool {
        if !self.lock().is_to_count(root, directory, top) {
            return true;
        }
        let device = self.device(directory);
        let (mut todo, mut bytes) = (vec![(top.to_owned(), 0)], 0);
        while let Some((path, depth)) = todo.pop() {
            let mut names = Vec::new();
            if device.list(&path, &mut |entry| names.push(entry)).is_err() {
                return false;
            }
            for entry in names {
                let whole = path.join(&entry.name);
                if entry.is_dir && depth < DEPTH_MAX {
                    todo.push((whole, depth + 1));
                } else if !entry.is_dir {
                    match device.stat(&whole) {
                        Ok(stat) => bytes += stat.map_or(0, |s| s.bytes).next_multiple_of(BLOCK_ALIGN_BYTES),
                        Err(_) => return false,
                    }
                }
            }
        }
        self.lock().charge_stuck(root, directory, top, bytes);
        true
    }

    fn reclaim_file(&self, job: &Remove, path: &Path) -> Result<()> {
        let device = self.device(job.directory);
        // Files of a directory that a reset renamed are charged as waste, others by their names.
        let name = job.top.file_name().and_then(|name| name.to_str());
        let renamed = name.is_some_and(|name| below_of_dir(name).is_some());
        let charged = renamed && !self.lock().waste.is_empty();
        let bytes = if charged { device.stat(path)?.map_or(0, |stat| stat.bytes) } else { 0 };
        if self.unlink_counted(job.directory, path)? && bytes > 0 {
            let bytes = bytes.next_multiple_of(BLOCK_ALIGN_BYTES);
            self.lock().release_waste(job.root, job.directory, bytes);
            self.free_space.credit(job.directory, bytes);
        }
        Ok(())
    }
}

impl State {
    /// The most urgent unlink: single blocks first, because their keys may be written again.
    fn take_unlink(&mut self) -> Option<Chore> {
        let keys = self.take_some_leaving();
        if !keys.is_empty() {
            return Some(Chore::Unlink(keys));
        }
        if std::mem::take(&mut self.chores.floor) {
            return Some(Chore::Floor);
        }
        if self.pull_retired() {
            // It may have no files.
            return Some(Chore::Unlink(self.take_some_leaving()));
        }
        let job = self.chores.reclaims.pop_front()?;
        self.chores.looks += 1;
        Some(Chore::Reclaim(job))
    }

    /// Some files to unlink, marked as claimed.
    fn take_some_leaving(&mut self) -> Vec<kvdepot_core::BlockKey> {
        std::iter::from_fn(|| self.take_leaving()).take(UNLINKS).collect()
    }
}
