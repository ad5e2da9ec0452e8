//! Finding out what lies on the disk: files into the index, what is left behind out of the way (P4).
//!
//! A job is a list of directories still to be listed, taken one at a time, so that it can be put aside for a more
//! urgent one and taken up again where it stood.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use kvdepot_core::limits::FOREIGN_TEMPORARY_AGE_S;
use kvdepot_core::{BlockHash, NamespaceId, Result};
use kvdepot_io::directory::PROBE_PREFIX;
use kvdepot_io::{FileStat, ListEntry};

use super::identity::Identity;
use super::space::{BAD_SUFFIX, BLOCK_SUFFIX, NamespaceFile, Space, epoch_of_dir, is_shard_dir};
use super::state::{Adopt, BadFile, Shared, State};

/// How often a directory that cannot be listed is tried in one job.
const ATTEMPTS_MAX: u32 = 3;

/// What is left of a namespace to look at.
#[derive(Debug)]
pub(super) struct ScanJob {
    pub(super) space: Arc<Space>,
    /// Directories to list: which device, which path.
    todo: Vec<(usize, PathBuf)>,
    /// Files that came later are not expected to be seen.
    generation: u64,
    failures: u32,
}

/// A file that a listing found.
struct Found {
    name: String,
    stat: FileStat,
}

impl ScanJob {
    pub(super) fn new(space: &Arc<Space>, devices: usize, state: &mut State) -> Self {
        let todo = (0..devices).map(|device| (device, space.root_dir())).collect();
        Self { space: Arc::clone(space), todo, generation: state.index.next_generation(), failures: 0 }
    }
}

impl Shared {
    /// Searches the directories for namespaces, so that the cap counts those too that nobody opens (P5).
    pub(super) fn discover(&self) {
        let mut complete = true;
        for (directory, device) in self.devices.iter().enumerate() {
            let mut names = Vec::new();
            complete &= device.list(Path::new(""), &mut |entry| names.push(entry)).is_ok();
            for entry in names {
                match NamespaceId::from_hex(&entry.name) {
                    Some(root) if entry.is_dir => complete &= self.discover_one(directory, root),
                    _ => self.sweep_temporary(directory, Path::new(""), &entry),
                }
            }
        }
        if complete {
            self.lock().discovered = true;
        } else {
            tracing::warn!("a tier's directories cannot be listed; the next sweep tries again");
        }
    }

    /// Enqueues a namespace's scan; `false` if its directory cannot be read.
    fn discover_one(&self, directory: usize, root: NamespaceId) -> bool {
        let _one_at_a_time = self.namespaces.lock();
        let known = self.lock().roots.get(&root).copied();
        if known.is_none() {
            match self.read_namespace(root) {
                Ok(Some(file)) => self.install(file),
                Ok(None) => return self.count_unnamed(directory, root).is_ok(),
                Err(error) => {
                    tracing::warn!(%error, %root, "a namespace directory without a readable namespace.json");
                    return self.count_unnamed(directory, root).is_ok();
                }
            }
        }
        let mut state = self.lock();
        if let Some(space) = state.roots.get(&root).and_then(|id| state.spaces.get(id)).map(Arc::clone) {
            self.enqueue_scan(&mut state, &space, false);
        }
        true
    }

    /// What the directories say of a namespace: of several the newest epoch.
    pub(super) fn read_namespace(&self, root: NamespaceId) -> Result<Option<NamespaceFile>> {
        let (mut newest, mut failed) = (None::<NamespaceFile>, None);
        for device in &self.devices {
            match NamespaceFile::read(&**device, root) {
                Ok(Some(file)) if newest.as_ref().is_none_or(|known| known.epoch < file.epoch) => {
                    newest = Some(file)
                }
                Ok(_) => {}
                Err(error) => failed = Some(error),
            }
        }
        match (newest, failed) {
            (Some(file), _) => Ok(Some(file)),
            (None, Some(error)) => Err(error),
            (None, None) => Ok(None),
        }
    }

    /// Makes a namespace known that its directory describes.
    pub(super) fn install(&self, file: NamespaceFile) {
        let space = Arc::new(Space::new(file.spec, file.epoch, file.sharded));
        let mut state = self.lock();
        if let Some(bytes) = state.unnamed.remove(&space.root) {
            state.bytes -= bytes;
        }
        state.roots.insert(space.root, space.id);
        state.spaces.insert(space.id, space);
    }

    /// Adds a scan unless one is waiting; urgent ones come first.
    pub(super) fn enqueue_scan(&self, state: &mut State, space: &Arc<Space>, urgent: bool) {
        let waiting = state.chores.scans.iter().position(|job| job.space.id == space.id);
        let job = match waiting.and_then(|at| state.chores.scans.remove(at)) {
            Some(job) => job,
            None => ScanJob::new(space, self.devices.len(), state),
        };
        if urgent {
            state.chores.scans.push_front(job);
        } else {
            state.chores.scans.push_back(job);
        }
        self.changed.notify_all();
    }

    /// Does one directory of a job; gives the job back if there is more.
    pub(super) fn scan_step(&self, mut job: ScanJob) -> Option<ScanJob> {
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
            self.end_scan(&job);
            return None;
        }
        Some(job)
    }

    fn scan_directory(&self, job: &mut ScanJob, directory: usize, path: &Path) -> Result<()> {
        let device = self.device(directory);
        let mut names: Vec<ListEntry> = Vec::new();
        device.list(path, &mut |entry| names.push(entry))?;
        let at_root = path == job.space.root_dir();
        let mut found = Vec::new();
        for entry in names {
            if entry.is_dir {
                self.enter(job, directory, path, &entry.name, at_root);
            } else if entry.name.ends_with(BLOCK_SUFFIX) || entry.name.ends_with(BAD_SUFFIX) {
                // A file that went between the listing and now is not there.
                if let Some(stat) = device.stat(&path.join(&entry.name))? {
                    found.push(Found { name: entry.name, stat });
                }
            } else {
                self.sweep_temporary(directory, path, &entry);
            }
        }
        self.take_in(job, directory, path, found);
        Ok(())
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
                self.lock().chores.reclaims.push_back((directory, whole));
            }
            // A later epoch is another node's: it says so in namespace.json, and the next open here follows.
            _ => {}
        }
    }

    /// Takes a directory's files into the index under one lock.
    fn take_in(&self, job: &ScanJob, directory: usize, path: &Path, found: Vec<Found>) {
        let mut surplus = Vec::new();
        let mut state = self.lock();
        for Found { name, stat } in found {
            let bytes = stat.bytes.next_multiple_of(kvdepot_core::limits::BLOCK_ALIGN_BYTES);
            if let Some(hash) = name.strip_suffix(BLOCK_SUFFIX).and_then(BlockHash::from_hex) {
                let key = job.space.key(hash);
                // Only where look-ups would look, else the path in the index would be another file's.
                if path == job.space.block_dir(hash) {
                    let space = Arc::clone(&job.space);
                    state.adopt(key, Adopt { space, directory, bytes, used: Some(stat.modified) });
                    let known = state.index.get_mut(&key);
                    let second = known.as_ref().is_some_and(|entry| entry.directory != directory);
                    if let Some(entry) = known.filter(|_| !second) {
                        entry.seen = job.generation;
                    }
                    // A second copy, from a time with another number of directories, goes aside.
                    if !second {
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

    fn end_scan(&self, job: &ScanJob) {
        let mut state = self.lock();
        if !state.is_current(&job.space) {
            return;
        }
        let id = job.space.id;
        let unseen =
            |entry: &super::index::Entry| entry.seen < job.generation && entry.generation < job.generation;
        let vanished: Vec<_> = state
            .index
            .iter()
            .filter(|(key, entry)| key.namespace == id && unseen(entry))
            .map(|(key, _)| *key)
            .collect();
        for key in vanished {
            state.forget(&key, job.generation);
        }
        state.scanned.insert(id);
    }

    /// Removes a temporary file whose writer is dead, or too old to have one that this host cannot see.
    fn sweep_temporary(&self, directory: usize, path: &Path, entry: &ListEntry) {
        let alive = match Identity::of_temporary(&entry.name) {
            Some(writer) => writer.is_alive(),
            None if entry.name.starts_with(PROBE_PREFIX) => None,
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
        if orphaned && device.unlink(&whole).is_ok_and(|was_there| was_there) {
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

    /// Charges what lies in a namespace directory that has no readable description.
    fn count_unnamed(&self, directory: usize, root: NamespaceId) -> Result<()> {
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
        let before = state.unnamed.get(&root).copied().unwrap_or(0);
        // With several directories the sum counts; a second sweep counts them anew from the first.
        let after = if directory == 0 { bytes } else { before + bytes };
        state.unnamed.insert(root, after);
        state.bytes = state.bytes - before + after;
        Ok(())
    }
}
