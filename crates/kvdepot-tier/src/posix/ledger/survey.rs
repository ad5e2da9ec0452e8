//! Counts the bytes that lie in the directories, whoever wrote them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvdepot_core::limits::BLOCK_ALIGN_BYTES;
use kvdepot_core::{BlockHash, Error, ErrorKind, NamespaceId, Result};

use super::member::Survey;
use crate::posix::identity::TEMPORARY_PREFIX;
use crate::posix::shared::Shared;
use crate::posix::space::{BLOCK_SUFFIX, Space};
use crate::posix::state::PIECE;

/// How often a namespace is listed before a survey gives up.
const ATTEMPTS_MAX: usize = 4;
/// Directories below an epoch's are not searched deeper than this.
const DEPTH_MAX: usize = 4;

/// The thread of one survey.
pub(super) fn run(shared: &Shared) {
    shared.survey_ended(shared.survey());
}

impl Shared {
    pub(super) fn survey_ended(&self, outcome: Result<u64>) {
        let mut state = self.lock();
        match outcome {
            Ok(bytes) => (state.survey, state.has_survey_failed) = (Survey::Bytes(bytes), false),
            Err(error) => {
                state.survey = Survey::Failed;
                let is_closing = state.chores.stop_at.is_some();
                if !std::mem::replace(&mut state.has_survey_failed, true) && !is_closing {
                    tracing::warn!(
                        %error, path = %self.device(0).root().display(),
                        "the files of a shared directory cannot be counted: until they are, less is stored there than its \
                         capacity, or nothing. It is tried again by itself"
                    );
                }
            }
        }
        drop(state);
        self.ledger.notify_all();
    }

    fn survey(&self) -> Result<u64> {
        let mut bytes = 0;
        for (directory, device) in self.devices.iter().enumerate() {
            let mut roots = Vec::new();
            device.list(Path::new(""), &mut |entry| {
                roots.extend(NamespaceId::from_hex(&entry.name).filter(|_| entry.is_dir));
            })?;
            for root in roots {
                // A reset renames directories: what moved may have been listed nowhere.
                let mut attempts = (0..ATTEMPTS_MAX).map(|_| self.survey_namespace(directory, root));
                let found = attempts.find_map(Result::transpose);
                bytes += found.unwrap_or_else(|| {
                    Err(Error::new(ErrorKind::Busy, "a namespace is reset faster than it can be surveyed")
                        .with("path", device.root().join(root.to_string()).display()))
                })?;
            }
        }
        Ok(bytes)
    }

    /// Returns a namespace's bytes; `None` if its epochs changed meanwhile.
    fn survey_namespace(&self, directory: usize, root: NamespaceId) -> Result<Option<u64>> {
        let top = PathBuf::from(root.to_string());
        let space = {
            let state = self.lock();
            state.roots.get(&root).and_then(|id| state.spaces.get(id)).map(Arc::clone)
        };
        let before = self.epochs_of(directory, &top)?;
        let (mut todo, mut bytes) = (vec![(top.clone(), 0)], 0);
        while let Some((path, depth)) = todo.pop() {
            bytes += self.survey_directory(directory, &path, depth, space.as_ref(), &mut todo)?;
        }
        Ok((self.epochs_of(directory, &top)? == before).then_some(bytes))
    }

    fn epochs_of(&self, directory: usize, top: &Path) -> Result<Vec<String>> {
        let mut names = Vec::new();
        self.device(directory).list(top, &mut |entry| {
            if entry.is_dir {
                names.push(entry.name);
            }
        })?;
        names.sort_unstable();
        Ok(names)
    }

    fn survey_directory(
        &self,
        directory: usize,
        path: &Path,
        depth: usize,
        space: Option<&Arc<Space>>,
        todo: &mut Vec<(PathBuf, usize)>,
    ) -> Result<u64> {
        let mut names = Vec::new();
        self.device(directory).list(path, &mut |entry| {
            if entry.is_dir && depth < DEPTH_MAX {
                todo.push((path.join(entry.name), depth + 1));
            } else if !entry.is_dir && depth > 0 {
                // Not the description beside the epochs, and what becomes one: they are no blocks.
                names.push(entry.name);
            }
        })?;
        let current = space.filter(|space| path.starts_with(space.epoch_dir()));
        let (mut bytes, mut unknown) = (0, Vec::new());
        for names in names.chunks(PIECE) {
            let state = self.lock();
            if state.chores.stop_at.is_some() {
                return Err(Error::new(ErrorKind::Closed, "the tier is being closed"));
            }
            for name in names {
                let hash = name.strip_suffix(BLOCK_SUFFIX).and_then(BlockHash::from_hex);
                let key = current.zip(hash).filter(|(space, hash)| path == space.block_dir(*hash));
                let known = key.and_then(|(space, hash)| state.index.get(&space.key(hash)));
                match known.filter(|entry| entry.directory == directory) {
                    Some(entry) => bytes += entry.bytes,
                    None => unknown.push(name.clone()),
                }
            }
        }
        let stats = self.device(directory).stat_in(path, &unknown)?;
        for (name, stat) in unknown.iter().zip(stats) {
            let Some(stat) = stat else { continue };
            // A file that is being written has its full length soon.
            let least = match space {
                Some(space) if name.starts_with(TEMPORARY_PREFIX) => space.file_bytes,
                _ => 0,
            };
            bytes += stat.bytes.max(least).next_multiple_of(BLOCK_ALIGN_BYTES);
        }
        Ok(bytes)
    }
}
