//! Opens a medium only to read it, and recognises the tier that it belongs to. Nothing on it is changed, and a depot may
//! use it meanwhile.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvdepot_core::{Error, ErrorKind, NamespaceId, Result};
use kvdepot_io::mapped::{Medium, open_to_read};
use kvdepot_io::owner::has_owner;
use kvdepot_io::{FileVolume, Volume};

use crate::dax::DaxSource;
use crate::slab::SlabSource;
use crate::stored::{Check, InUse, Source, Stored};

/// A medium that is read.
#[derive(Clone, Debug)]
pub struct Scan {
    source: Arc<dyn Source>,
}

impl Scan {
    /// Opens the medium in a file or on a device.
    pub fn open(path: &Path) -> Result<Self> {
        let kind = path
            .metadata()
            .map_err(|error| Error::io("cannot open a medium", error).with("path", path.display()))?;
        let kind = kind.file_type();
        if !(kind.is_file() || kind.is_block_device() || kind.is_char_device()) {
            // Opening a FIFO would release who waits at its other end.
            return Err(nothing_on(path));
        }
        if !kind.is_char_device() {
            let volume = Arc::new(FileVolume::open_to_read(path)?);
            if let Some(source) = SlabSource::open(volume, in_use(path))? {
                return Ok(Self { source: Arc::new(source) });
            }
            if kind.is_block_device() {
                return Err(nothing_on(path));
            }
        }
        Self::of_medium(open_to_read(path)?, in_use(path))
    }

    /// Reads a Slab tier's medium on the caller's own volume.
    pub fn of_volume(volume: Arc<dyn Volume>, in_use: InUse) -> Result<Self> {
        let path = volume.path().to_owned();
        let source = SlabSource::open(volume, in_use)?.ok_or_else(|| nothing_on(&path))?;
        Ok(Self { source: Arc::new(source) })
    }

    /// Reads a Dax tier's medium, which the caller has opened.
    pub fn of_medium(medium: Arc<dyn Medium>, in_use: InUse) -> Result<Self> {
        let path = medium.path().to_owned();
        let source = DaxSource::open(medium, in_use)?.ok_or_else(|| nothing_on(&path))?;
        Ok(Self { source: Arc::new(source) })
    }

    /// The name of the tier that the medium belongs to.
    pub fn tier(&self) -> &'static str {
        self.source.tier()
    }

    /// Where the medium is.
    pub fn path(&self) -> &Path {
        self.source.path()
    }

    /// Lists namespaces and blocks, as the next start of a depot would find them.
    pub fn list(&self) -> Result<Stored> {
        self.source.list()
    }

    /// Begins a check of the listed blocks of all namespaces, or of one.
    pub fn check(&self, stored: &Stored, root: Option<NamespaceId>) -> Check {
        Check::new(Arc::clone(&self.source), stored, root)
    }
}

fn in_use(path: &Path) -> InUse {
    let path = PathBuf::from(path);
    Box::new(move || has_owner(&path))
}

fn nothing_on(path: &Path) -> Error {
    Error::new(
        ErrorKind::Config,
        "neither a Slab nor a Dax tier's medium is there: it is blank, was not formatted to the end, or holds something else",
    )
    .with("path", path.display())
}
