//! The epoch of a namespace as the directories store it, and how it advances.
//!
//! An epoch is stored in three ways, and the highest counts: `epoch` in `namespace.json`, a directory `e<N>`, and a
//! directory `below<N>`, which says that every epoch below N is over. `mkdir` is atomic on every file system, including
//! NFS, so exactly one of several nodes creates `e<N>` and owns the advance to N. A disk without space for a directory
//! entry can still rename: the directory of an earlier epoch becomes `below<N>`, which in the same step makes its
//! blocks unreachable for every reader.

use std::path::{Path, PathBuf};

use kvdepot_core::limits::EPOCH_CLAIMS_MAX;
use kvdepot_core::{Error, ErrorKind, NamespaceId, NamespaceSpec, Result, next_epoch};
use kvdepot_io::Device;

use super::identity::temporary_name;
use super::shared::Shared;
use super::space::{BLOCK_SUFFIX, NamespaceFile, below_of_dir, epoch_of_dir};

/// Blocks of a past epoch that are unlinked to make space for a directory.
const MAKE_ROOM_FILES: usize = 16;
/// Attempts to rename a directory that other nodes may rename too.
const RENAMES_MAX: usize = 4;

/// A directory whose name stores an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Mark {
    /// `e<N>`: epoch N has begun; its blocks lie here.
    Epoch(u32),
    /// `below<N>`: every epoch below N is over; what lies here is waste.
    Below(u32),
}

impl Mark {
    fn of(name: &str) -> Option<Self> {
        epoch_of_dir(name).map(Self::Epoch).or_else(|| below_of_dir(name).map(Self::Below))
    }

    const fn epoch(self) -> u32 {
        match self {
            Self::Epoch(epoch) | Self::Below(epoch) => epoch,
        }
    }

    fn path(self, root: NamespaceId) -> PathBuf {
        let name = match self {
            Self::Epoch(epoch) => format!("e{epoch}"),
            Self::Below(epoch) => format!("below{epoch}"),
        };
        root_dir(root).join(name)
    }
}

fn root_dir(root: NamespaceId) -> PathBuf {
    PathBuf::from(root.to_string())
}

fn marks(device: &dyn Device, root: NamespaceId) -> Result<Vec<Mark>> {
    let mut marks = Vec::new();
    device.list(&root_dir(root), &mut |entry| {
        marks.extend(Mark::of(&entry.name).filter(|_| entry.is_dir));
    })?;
    Ok(marks)
}

fn highest(marks: &[Mark]) -> u32 {
    marks.iter().map(|mark| mark.epoch()).max().unwrap_or(0)
}

/// One directory's record of a namespace.
#[derive(Debug)]
struct Here {
    file: Option<NamespaceFile>,
    epoch: u32,
}

impl Here {
    fn read(device: &dyn Device, root: NamespaceId) -> Result<Self> {
        let file = match NamespaceFile::read(device, root) {
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                tracing::warn!(%error, "a namespace.json cannot be read: its directories tell the epoch");
                None
            }
            other => other?,
        };
        let marked = highest(&marks(device, root)?);
        let epoch = file.as_ref().map_or(0, |file| file.epoch).max(marked);
        Ok(Self { file, epoch })
    }
}

/// All directories' records of a namespace.
#[derive(Debug)]
pub(super) struct Stored {
    here: Vec<Here>,
    /// The epoch, or 0 if nothing is stored.
    pub(super) epoch: u32,
}

impl Stored {
    /// Returns the newest description, if any.
    pub(super) fn file(&self) -> Option<&NamespaceFile> {
        self.here.iter().filter_map(|here| here.file.as_ref()).max_by_key(|file| file.epoch)
    }

    /// Returns whether every directory has this description.
    pub(super) fn is_described(&self, file: &NamespaceFile) -> bool {
        self.here.iter().all(|here| here.file.as_ref() == Some(file))
    }
}

/// Why an epoch could not be stored.
#[derive(Debug)]
pub(super) struct Unstored {
    /// The epoch that at least one directory has stored, so that no further epoch must be claimed.
    pub(super) decided: Option<u32>,
    pub(super) error: Error,
}

impl From<Error> for Unstored {
    fn from(error: Error) -> Self {
        Self { decided: None, error }
    }
}

impl Shared {
    /// Reads what is stored about a namespace. Every directory must answer: one that does not may know a later epoch.
    pub(super) fn stored(&self, root: NamespaceId) -> Result<Stored> {
        let here: Vec<Here> =
            self.devices.iter().map(|device| Here::read(&**device, root)).collect::<Result<_>>()?;
        let epoch = here.iter().map(|here| here.epoch).max().unwrap_or(0);
        Ok(Stored { here, epoch })
    }

    /// Stores an epoch of at least `at_least` in every directory; with `advance`, a new one that no node has stored
    /// before.
    pub(super) fn store_epoch(
        &self,
        spec: &NamespaceSpec,
        at_least: u32,
        advance: bool,
    ) -> Result<NamespaceFile, Unstored> {
        let root = spec.root();
        let stored = self.stored(root)?;
        let epoch = if advance { self.claim(root, at_least, &stored)? } else { stored.epoch.max(at_least) };
        self.raise(root, epoch).map_err(|error| Unstored { decided: Some(epoch), error })?;
        let file = self.describe(spec, epoch, &stored);
        match self.write_described(&file, &stored) {
            Err(error) if stored.file().is_none() => Err(Unstored { decided: Some(epoch), error }),
            _ => Ok(file),
        }
    }

    pub(super) fn describe(&self, spec: &NamespaceSpec, epoch: u32, stored: &Stored) -> NamespaceFile {
        let sharded = stored.file().map_or(self.config.shard_directories, |file| file.sharded);
        NamespaceFile { spec: spec.clone(), epoch, sharded }
    }

    /// Writes `namespace.json` where it is missing or differs.
    pub(super) fn write_described(&self, file: &NamespaceFile, stored: &Stored) -> Result<()> {
        let mut outcome = Ok(());
        for (device, here) in self.devices.iter().zip(&stored.here) {
            if here.file.as_ref() == Some(file) {
                continue;
            }
            if let Err(error) = file.write(&**device, &temporary_name()) {
                tracing::warn!(%error, "a namespace.json is out of date: the names of its directories count");
                outcome = Err(error);
            }
        }
        outcome
    }

    /// Claims an epoch above the stored one that no other node has claimed. The first directory decides.
    fn claim(&self, root: NamespaceId, at_least: u32, stored: &Stored) -> Result<u32, Unstored> {
        let device = &*self.devices[0];
        let mut target = next_epoch(stored.epoch, at_least)?;
        for _ in 0..EPOCH_CLAIMS_MAX {
            let mark = match mark(device, root, target) {
                Ok(mark) => mark,
                Err(error) => {
                    // The other directories are asked too when the namespace is opened next. This number is not decided
                    // yet, however: a node whose first directory works may claim it at this very moment.
                    for device in &self.devices[1..] {
                        if let Err(error) = raise_on(&**device, root, target) {
                            tracing::debug!(%error, namespace = %root, "an epoch is not stored here either");
                        }
                    }
                    return Err(Unstored { decided: None, error });
                }
            };
            // A node that claims by the other kind of mark checks too: of two concurrent claims at least one sees the
            // other's mark.
            let rivals: Vec<Mark> =
                marks(device, root)?.into_iter().filter(|other| Some(*other) != mark).collect();
            // Read after the list: a depot stores its epoch there before it removes a rival's mark.
            let described = match NamespaceFile::read(device, root) {
                Err(error) if error.kind() == ErrorKind::Corrupt => 0,
                file => file?.map_or(0, |file| file.epoch),
            };
            match (mark, highest(&rivals).max(described)) {
                (Some(_), rival) if rival < target => return Ok(target),
                (_, rival) => target = next_epoch(target.max(rival), 0)?,
            }
        }
        let error =
            Error::new(ErrorKind::Busy, "too many nodes advance a namespace's epoch at the same time");
        Err(error.with("namespace", root).with("epoch", target).into())
    }

    /// Stores an epoch in every directory that stores a lower one; tries all of them.
    fn raise(&self, root: NamespaceId, epoch: u32) -> Result<()> {
        let mut outcome = Ok(());
        for device in &self.devices {
            if let Err(error) = raise_on(&**device, root, epoch) {
                outcome = Err(error);
            }
        }
        outcome
    }

    /// Before a `below<N>` is removed: stores its epoch in `namespace.json`, where a node that claims N at this moment
    /// finds it, and as a directory of its own.
    pub(super) fn keep_epoch_of(&self, directory: usize, path: &Path) -> Result<()> {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let parent = path.parent().and_then(|parent| parent.to_str()).unwrap_or_default();
        match (below_of_dir(name), NamespaceId::from_hex(parent)) {
            (Some(epoch), Some(root)) => {
                let device = &**self.device(directory);
                let stored = NamespaceFile::read(device, root).ok().flatten();
                if stored.is_none_or(|file| file.epoch < epoch) {
                    self.current_file(root)?.write(device, &temporary_name())?;
                }
                device.create_dir(&Mark::Epoch(epoch).path(root))?;
                device.sync_dir(&root_dir(root))
            }
            _ => Ok(()),
        }
    }
}

impl Shared {
    /// Returns the description of an open namespace.
    fn current_file(&self, root: NamespaceId) -> Result<NamespaceFile> {
        let state = self.lock();
        let space = state.roots.get(&root).and_then(|id| state.spaces.get(id)).ok_or_else(|| {
            Error::new(ErrorKind::Busy, "the namespace is being moved to another epoch")
                .with("namespace", root)
        })?;
        Ok(NamespaceFile { spec: space.spec.clone(), epoch: space.epoch, sharded: space.sharded })
    }
}

fn raise_on(device: &dyn Device, root: NamespaceId, epoch: u32) -> Result<()> {
    if epoch == 0 || Here::read(device, root)?.epoch >= epoch {
        return Ok(());
    }
    mark(device, root, epoch)?;
    if highest(&marks(device, root)?) >= epoch {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Corrupt, "a file is in the place of an epoch's directory: remove it")
        .with("path", device.root().join(Mark::Epoch(epoch).path(root)).display()))
}

/// Marks an epoch as begun: returns the mark that this call made, or `None` if the name was taken.
fn mark(device: &dyn Device, root: NamespaceId, epoch: u32) -> Result<Option<Mark>> {
    let mark = Mark::Epoch(epoch);
    let create = || device.make_dir(&root_dir(root)).and_then(|()| device.create_dir(&mark.path(root)));
    let made = match create() {
        Ok(created) => created.then_some(mark),
        Err(error) => match rename_past(device, root, epoch) {
            Ok(Some(renamed)) => renamed,
            // There was nothing to rename, or the rename was refused: blocks of the past may be in the way.
            Ok(None) => return Err(error),
            Err(_) => {
                make_room(device, root, epoch);
                create().map_err(|_| error)?.then_some(mark)
            }
        },
    };
    device.sync_dir(&root_dir(root))?;
    Ok(made)
}

/// Turns the newest earlier directory into `below<epoch>`. Outer `None`: there is none. Inner `None`: the name is
/// taken.
fn rename_past(device: &dyn Device, root: NamespaceId, epoch: u32) -> Result<Option<Option<Mark>>> {
    let below = Mark::Below(epoch);
    for _ in 0..RENAMES_MAX {
        let there = marks(device, root)?;
        if there.contains(&below) {
            return Ok(Some(None));
        }
        let Some(past) = there.into_iter().filter(|mark| mark.epoch() < epoch).max_by_key(|m| m.epoch())
        else {
            return Ok(None);
        };
        if device.rename_new(&past.path(root), &below.path(root))? {
            return Ok(Some(Some(below)));
        }
    }
    Err(Error::new(ErrorKind::Busy, "other nodes rename a past epoch's directory at the same time"))
}

/// Unlinks some blocks of past epochs; nobody may read them any more.
fn make_room(device: &dyn Device, root: NamespaceId, epoch: u32) {
    let past = marks(device, root).unwrap_or_default().into_iter().filter(|mark| mark.epoch() < epoch);
    let mut todo: Vec<(PathBuf, bool)> = past.map(|mark| (mark.path(root), true)).collect();
    let mut left = MAKE_ROOM_FILES;
    while let Some((dir, is_top)) = todo.pop() {
        let mut names = Vec::new();
        let _ = device.list(&dir, &mut |entry| names.push(entry));
        for entry in names {
            let path = dir.join(&entry.name);
            if entry.is_dir && is_top {
                todo.push((path, false));
            } else if entry.name.ends_with(BLOCK_SUFFIX) && left > 0 {
                left -= usize::from(device.unlink(&path).unwrap_or(false));
            }
        }
        if left == 0 {
            return;
        }
    }
}
