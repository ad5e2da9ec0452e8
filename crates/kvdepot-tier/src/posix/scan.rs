//! Finds out what lies on the disk: takes files into the index and removes what was left behind (P4).
//!
//! A job is a list of directories still to be listed, taken one at a time, so that it can be set aside for a more
//! urgent job and continued where it stopped. Files that the index already knows, from a checkpoint or from before, are
//! not examined one by one: their names are enough. All others are, by several threads, because on a network mount each
//! of these calls is a round trip.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use kvdepot_core::limits::FOREIGN_TEMPORARY_AGE_S;
use kvdepot_core::{BlockHash, Error, ErrorKind, NamespaceId, Result};
use kvdepot_io::directory::PROBE_PREFIX;
use kvdepot_io::{FileStat, ListEntry};

use super::chores::{ReclaimJob, ScanJob};
use super::identity::Identity;
use super::leaving::BadFile;
use super::shared::Shared;
use super::space::{BAD_SUFFIX, BLOCK_SUFFIX, NamespaceFile, below_of_dir, epoch_of_dir, is_shard_dir};
use super::state::{Adopt, PIECE, PIECE_SLOTS};

/// Failed listings after which a job gives up until the next sweep.
const ATTEMPTS_MAX: u32 = 3;
/// Names of a directory that are handled together.
const NAMES_AT_A_TIME: usize = 4096;
/// Threads that examine the files of one directory.
const STAT_THREADS: usize = 8;
/// The fewest files that a thread examines.
const STATS_PER_THREAD: usize = 64;

/// A file found by a listing.
struct Found {
    name: String,
    stat: FileStat,
}

/// Returns whether an NFS client has given this name to a removed file that one of its processes still had open: `.nfs`,
/// the file's number and a counter, in hexadecimal. The client removes it when the file is closed, but not after a
/// crash. Where a read is still running, its bytes stay or it becomes a miss.
fn is_kept_by_nfs(name: &str) -> bool {
    let number = name.strip_prefix(".nfs").unwrap_or_default();
    number.len() == 24 && number.bytes().all(|byte| byte.is_ascii_hexdigit())
}

impl Shared {
    /// Searches the directories for namespaces, so that the cap also counts those that nobody opens (P5).
    pub(super) fn discover(&self) {
        let mut complete = true;
        for (directory, device) in self.devices.iter().enumerate() {
            let mut names = Vec::new();
            if let Err(error) = device.list(Path::new(""), &mut |entry| names.push(entry)) {
                tracing::warn!(%error, "a tier's directory cannot be listed; the next sweep tries again");
                complete = false;
            }
            if complete {
                let there = |root: NamespaceId| names.iter().any(|entry| entry.name == root.to_string());
                self.forget_unnamed(directory, there);
            }
            for entry in names {
                match NamespaceId::from_hex(&entry.name) {
                    Some(root) if entry.is_dir => complete &= self.discover_one(directory, root),
                    _ => self.sweep_temporary(directory, Path::new(""), &entry),
                }
            }
        }
        if complete {
            // Unless a directory without a description turns out to be unreadable later.
            self.lock().discovered = true;
        } else {
            tracing::debug!("not every namespace could be scanned; the next sweep tries again");
        }
    }

    /// Enqueues a namespace's scan; `false` if that must be retried.
    fn discover_one(&self, directory: usize, root: NamespaceId) -> bool {
        if !self.lock().roots.contains_key(&root) {
            // It is being opened or moved, or waits for that: when that ends, all directories are examined again.
            let Some(turn) = self.try_turn(root).filter(|_| !self.namespaces.is_wanted(root)) else {
                return false;
            };
            match self.described(root) {
                Ok(Some(file)) => self.install_unless_wanted(file),
                outcome => {
                    if let Err(error) = outcome {
                        tracing::warn!(%error, %root, "a namespace directory without a readable namespace.json");
                    }
                    // It may be large, and opening the namespace must not wait for that.
                    drop(turn);
                    self.lock().chores.unnamed.push_back((directory, root));
                    return true;
                }
            }
        }
        let mut state = self.lock();
        if let Some(space) = state.roots.get(&root).and_then(|id| state.spaces.get(id)).map(Arc::clone) {
            state.chores.enqueue_scan(&space, self.devices.len(), false);
            self.work.notify_one();
        }
        true
    }

    /// Returns what the directories say about a namespace, in the newest epoch that any of them knows.
    fn described(&self, root: NamespaceId) -> Result<Option<NamespaceFile>> {
        let stored = self.stored(root)?;
        Ok(stored.file().map(|file| NamespaceFile { epoch: stored.epoch, ..file.clone() }))
    }

    /// Handles one directory of a job; gives the job back if there is more.
    pub(super) fn scan_step(&self, mut job: ScanJob) -> Option<ScanJob> {
        job.begin(&mut self.lock().index);
        if let Some((directory, path)) = job.todo.pop()
            && let Err(error) = self.scan_directory(&mut job, directory, &path)
        {
            job.failures += 1;
            if job.failures >= ATTEMPTS_MAX {
                tracing::warn!(%error, "a namespace's scan gives up until the next sweep");
                return None;
            }
            job.todo.push((directory, path));
        }
        if job.todo.is_empty() {
            self.end_scan(&mut job);
            return None;
        }
        Some(job)
    }

    fn scan_directory(&self, job: &mut ScanJob, directory: usize, path: &Path) -> Result<()> {
        self.lock().begin_listing();
        let outcome = self.list_and_take_in(job, directory, path);
        let overflow = self.lock().end_listing();
        // What was left out because of that is not counted yet.
        outcome.and(if overflow {
            Err(Error::new(ErrorKind::Busy, "too many files disappeared while a directory was listed")
                .with("path", path.display()))
        } else {
            Ok(())
        })
    }

    fn list_and_take_in(&self, job: &mut ScanJob, directory: usize, path: &Path) -> Result<()> {
        let at_root = path == job.space.root_dir();
        if at_root {
            self.lock().waste.look_again(job.space.root, directory);
        }
        let (mut names, mut dirs, mut outcome) = (Vec::new(), Vec::new(), Ok(()));
        self.device(directory).list(path, &mut |entry| {
            if entry.is_dir {
                dirs.push(entry.name);
            } else if entry.name.ends_with(BLOCK_SUFFIX) || entry.name.ends_with(BAD_SUFFIX) {
                names.push(entry.name);
                if names.len() == NAMES_AT_A_TIME && outcome.is_ok() {
                    outcome = self.take_in(job, directory, path, std::mem::take(&mut names));
                }
            } else {
                self.sweep_temporary(directory, path, &entry);
            }
        })?;
        outcome?;
        self.take_in(job, directory, path, names)?;
        dirs.iter().for_each(|name| self.enter(job, directory, path, name, at_root));
        Ok(())
    }

    /// Takes files of a directory into the index.
    fn take_in(
        &self,
        job: &mut ScanJob,
        directory: usize,
        path: &Path,
        mut names: Vec<String>,
    ) -> Result<()> {
        let mut unknown = Vec::new();
        // Only where lookups would look: a copy in another place is not the file that the index knows.
        let shard = path.file_name().and_then(|name| u8::from_str_radix(name.to_str()?, 16).ok());
        let is_here = path == job.space.block_dir(BlockHash([shard.unwrap_or(0); 16]));
        let is_home = |hash: &BlockHash| is_here && (!job.space.sharded || shard == Some(hash.0[0]));
        let known = |name: &String| name.strip_suffix(BLOCK_SUFFIX).and_then(BlockHash::from_hex);
        let hashes: Vec<_> = names.iter().map(|name| known(name).filter(is_home)).collect();
        for (names, hashes) in names.chunks_mut(PIECE).zip(hashes.chunks(PIECE)) {
            let mut state = self.lock();
            if state.chores.stop_at.is_some() {
                return Ok(());
            }
            let (scan, _) = job.begin(&mut state.index);
            for (name, hash) in names.iter_mut().zip(hashes) {
                if !hash.is_some_and(|hash| state.index.see(&job.space.key(hash), directory, scan)) {
                    unknown.push(std::mem::take(name));
                }
            }
        }
        let mut found = self.stat_all(directory, path, unknown)?;
        while !found.is_empty() {
            let some: Vec<Found> = found.drain(found.len().saturating_sub(PIECE)..).collect();
            self.adopt_found(job, directory, path, some);
        }
        Ok(())
    }

    /// Examines files of one directory; those that have disappeared in the meantime are left out.
    fn stat_all(&self, directory: usize, path: &Path, names: Vec<String>) -> Result<Vec<Found>> {
        let device = self.device(directory);
        let each = names.len().div_ceil(STAT_THREADS).max(STATS_PER_THREAD);
        let stats: Vec<Option<FileStat>> = if names.len() <= STATS_PER_THREAD {
            device.stat_in(path, &names)?
        } else {
            let parts: Vec<Result<_>> = std::thread::scope(|scope| {
                let look = |names| scope.spawn(move || device.stat_in(path, names));
                let threads: Vec<_> = names.chunks(each).map(look).collect();
                threads.into_iter().map(|thread| thread.join().expect("a look does not panic")).collect()
            });
            parts.into_iter().collect::<Result<Vec<_>>>()?.into_iter().flatten().collect()
        };
        let there = names.into_iter().zip(stats).filter_map(|(name, stat)| Some(Found { name, stat: stat? }));
        Ok(there.collect())
    }

    fn enter(&self, job: &mut ScanJob, directory: usize, path: &Path, name: &str, at_root: bool) {
        let whole = path.join(name);
        if !at_root {
            if is_shard_dir(name) {
                job.todo.push((directory, whole));
            }
            return;
        }
        match epoch_of_dir(name) {
            Some(epoch) if epoch == job.space.epoch => job.todo.push((directory, whole)),
            Some(epoch) if epoch < job.space.epoch => {
                self.lock().chores.reclaims.push_back(ReclaimJob::remove(job.space.root, directory, whole));
                self.unlinks.notify_one();
            }
            // A later epoch belongs to another node, and the next open here follows it.
            Some(_) => {}
            None if below_of_dir(name).is_some_and(|epoch| epoch <= job.space.epoch) => {
                self.lock().chores.reclaims.push_back(ReclaimJob::remove(job.space.root, directory, whole));
                self.unlinks.notify_one();
            }
            None => {}
        }
    }

    fn adopt_found(&self, job: &mut ScanJob, directory: usize, path: &Path, found: Vec<Found>) {
        let mut surplus = Vec::new();
        let mut state = self.lock();
        let (scan, _) = job.begin(&mut state.index);
        for Found { name, stat } in found {
            let bytes = stat.bytes.next_multiple_of(kvdepot_core::limits::BLOCK_ALIGN_BYTES);
            if let Some(hash) = name.strip_suffix(BLOCK_SUFFIX).and_then(BlockHash::from_hex) {
                let key = job.space.key(hash);
                // Only where lookups would look; otherwise the path in the index would be another file's.
                if path == job.space.block_dir(hash) {
                    if state.may_have_gone(&key) {
                        continue;
                    }
                    let space = Arc::clone(&job.space);
                    state.adopt(key, Adopt { space, directory, bytes, used: Some(stat.modified) });
                    // A second copy, from a time with another number of directories, is set aside.
                    if state.index.see(&key, directory, scan) || state.index.get(&key).is_none() {
                        continue;
                    }
                }
            }
            surplus
                .extend(state.keep_bad(job.space.root, BadFile { directory, path: path.join(name), bytes }));
        }
        drop(state);
        self.unlink_surplus(surplus);
    }

    /// Forgets files that the job did not see.
    fn end_scan(&self, job: &mut ScanJob) {
        let (id, mut cursor) = (job.space.id, 0);
        loop {
            let mut state = self.lock();
            if state.chores.stop_at.is_some() || !state.is_current(&job.space) {
                return;
            }
            let (scan, generation) = job.begin(&mut state.index);
            let (vanished, next) = state.index.unseen(id, generation, scan, cursor, PIECE_SLOTS);
            drop(state);
            for keys in vanished.chunks(PIECE) {
                let mut state = self.lock();
                keys.iter().for_each(|key| state.forget(key, generation));
            }
            match next {
                Some(next) => cursor = next,
                None => break,
            }
            self.deliver_events();
        }
        let mut state = self.lock();
        if state.is_current(&job.space) {
            state.scanned.insert(id);
            // Behind the directories of past epochs that were found.
            state.chores.reclaims.push_back(ReclaimJob::Settle(Arc::clone(&job.space)));
            drop(state);
            self.unlinks.notify_one();
        }
    }

    /// Removes a temporary file whose writer is dead, or too old to have one that this host cannot see.
    fn sweep_temporary(&self, directory: usize, path: &Path, entry: &ListEntry) {
        let alive = match Identity::of_temporary(&entry.name) {
            Some(writer) => writer.is_alive(),
            None if entry.name.starts_with(PROBE_PREFIX) || is_kept_by_nfs(&entry.name) => None,
            None => return,
        };
        let whole = path.join(&entry.name);
        let device = self.device(directory);
        let orphaned = match alive {
            Some(alive) => !alive,
            None => {
                device.stat(&whole).ok().flatten().is_some_and(|stat| self.is_old(directory, stat.modified))
            }
        };
        if !orphaned {
            return;
        }
        // The eviction or removal that made the client keep the file has counted its bytes as free already.
        let unlinked = if is_kept_by_nfs(&entry.name) {
            device.unlink(&whole)
        } else {
            self.unlink_counted(directory, &whole)
        };
        if unlinked.is_ok_and(|was_there| was_there) {
            self.lock().swept.temporaries += 1;
        }
    }

    /// By the device's own clock, which may differ from ours.
    fn is_old(&self, directory: usize, modified: SystemTime) -> bool {
        let now = SystemTime::now();
        let skew = Duration::from_secs(self.skew_s[directory].unsigned_abs());
        let now = if self.skew_s[directory] < 0 { now - skew } else { now + skew };
        now.duration_since(modified).is_ok_and(|age| age >= Duration::from_secs(FOREIGN_TEMPORARY_AGE_S))
    }

    /// Gives back what was charged for namespace directories that have gone.
    fn forget_unnamed(&self, directory: usize, is_there: impl Fn(NamespaceId) -> bool) {
        let mut state = self.lock();
        let mut gone = 0;
        state.unnamed.retain(|(root, at), charged| {
            let stays = *at != directory || is_there(*root);
            gone += if stays { 0 } else { *charged };
            stays
        });
        state.uncharge_missing(gone);
    }

    /// Charges what lies in a namespace directory that has no readable description.
    pub(super) fn count_unnamed(&self, directory: usize, root: NamespaceId) -> Result<()> {
        let device = self.device(directory);
        let (mut todo, mut bytes) = (vec![(PathBuf::from(root.to_string()), 0)], 0);
        while let Some((path, depth)) = todo.pop() {
            let mut names = Vec::new();
            device.list(&path, &mut |entry| names.push(entry))?;
            for entry in names {
                let whole = path.join(&entry.name);
                if entry.is_dir && depth < 2 {
                    todo.push((whole, depth + 1));
                } else if let Some(stat) = device.stat(&whole)? {
                    bytes += stat.bytes.next_multiple_of(kvdepot_core::limits::BLOCK_ALIGN_BYTES);
                }
            }
        }
        let mut state = self.lock();
        if state.roots.contains_key(&root) {
            // It was opened meanwhile, and its scan counts.
            return Ok(());
        }
        let before = state.unnamed.insert((root, directory), bytes).unwrap_or(0);
        state.uncharge_missing(before);
        state.charge_found(bytes);
        Ok(())
    }
}
