//! The medium at a tier's start: formatted if it is new, refused if it belongs to something else; and its tables of
//! namespaces.

use std::path::Path;
use std::sync::Arc;

use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_io::{AlignedBuf, IoBuf, SlotBuf, Volume};

use super::codec::{MediumId, PAGE, size};
use super::config::SlabConfig;
use super::shape::Shape;
use super::superblock::{Superblock, decide};
use super::syncs::{Mark, Syncs};
use super::table::{self, Row};
use crate::blank;
use crate::media::{MediumFacts, MediumKind};

/// A formatted medium.
#[derive(Clone, Debug)]
pub(super) struct Medium {
    pub(super) volume: Arc<dyn Volume>,
    pub(super) id: MediumId,
    pub(super) shape: Shape,
    syncs: Arc<Syncs>,
}

/// Reads bytes at an offset.
pub(super) fn read(volume: &dyn Volume, offset: u64, bytes: u64) -> Result<Vec<u8>> {
    let slot = SlotBuf::anonymous(size(bytes));
    let mut buf = IoBuf::payload(slot.clone(), size(bytes)).expect("a slot of that length");
    volume.read_at(&mut buf, offset)?;
    let mut out = vec![0; size(bytes)];
    slot.read_at(0, &mut out);
    Ok(out)
}

/// Makes pages a buffer for writing.
pub(super) fn pages(pages: AlignedBuf) -> IoBuf {
    IoBuf::for_write(pages, SlotBuf::anonymous(0), 0).expect("no bytes of a slot")
}

impl Medium {
    pub(super) fn new(volume: Arc<dyn Volume>, id: MediumId, shape: Shape) -> Self {
        Self { volume, id, shape, syncs: Arc::default() }
    }

    /// See [`Syncs::mark`].
    pub(super) fn mark(&self) -> Mark {
        self.syncs.mark()
    }

    /// See [`Syncs::sync`].
    pub(super) fn sync(&self, since: Mark) -> Result<()> {
        self.syncs.sync(&*self.volume, since)
    }

    /// Checks what a volume is, and formats it if it is blank.
    pub(super) fn open(volume: Arc<dyn Volume>, config: &SlabConfig) -> Result<Self> {
        let at = |error: Error, volume: &Arc<dyn Volume>| error.with("path", volume.path().display());
        match look(&*volume, config).map_err(|e| at(e, &volume))? {
            Some(Superblock { id, shape }) => {
                if volume.can_grow() {
                    // A copy of a medium may have holes.
                    volume.allocate(volume.bytes()).map_err(|e| at(e, &volume))?;
                }
                let medium = Self::new(volume, id, shape);
                medium.repair_superblocks();
                Ok(medium)
            }
            None => Self::format(Arc::clone(&volume), config).map_err(|e| at(e, &volume)),
        }
    }

    fn format(volume: Arc<dyn Volume>, config: &SlabConfig) -> Result<Self> {
        let shape = shape_of(&*volume, config)?;
        if volume.can_grow() {
            // An existing file may have holes.
            volume.allocate(config.capacity_bytes.max(volume.bytes()))?;
        }
        let medium = Self::new(volume, kvdepot_io::random::id(), shape);
        // In this order: a medium whose first page is blank has neither blocks nor epochs.
        medium.store_rows(1, &[])?;
        for copy in [1, 0] {
            medium.store_superblock(copy)?;
        }
        Ok(medium)
    }

    fn store_superblock(&self, copy: u64) -> Result<()> {
        let superblock = Superblock { id: self.id, shape: self.shape };
        self.write_and_sync(superblock.encode(), Shape::superblock_at(copy))
    }

    fn write_and_sync(&self, bytes: AlignedBuf, at: u64) -> Result<()> {
        let mark = self.mark();
        self.volume.write_at(&[pages(bytes)], at)?;
        self.sync(mark)
    }

    /// Rewrites a superblock that is not what it should be.
    fn repair_superblocks(&self) {
        let right = Superblock { id: self.id, shape: self.shape }.encode();
        for copy in [1, 0] {
            let found = read(&*self.volume, Shape::superblock_at(copy), PAGE);
            if found.is_ok_and(|page| page == *right) {
                continue;
            }
            tracing::warn!(path = %self.volume.path().display(), copy, "a superblock is damaged and written again");
            if let Err(error) = self.store_superblock(copy) {
                tracing::warn!(%error, "a superblock cannot be written: the other one counts");
            }
        }
    }

    /// Returns the table of namespaces and its number, and changes nothing.
    pub(super) fn look_at_rows(&self) -> Result<(u64, Vec<Row>)> {
        self.newest(&self.copies_of_rows())
    }

    /// Returns the table of namespaces and its number; both copies hold it afterwards, so that an opened epoch is
    /// found again even if either copy is damaged later.
    pub(super) fn rows(&self) -> Result<(u64, Vec<Row>)> {
        let found = self.copies_of_rows();
        let (number, rows) = self.newest(&found)?;
        for (copy, found) in (0..).zip(&found) {
            if found.as_ref().is_none_or(|(other, _)| *other != number) {
                tracing::warn!(path = %self.volume.path().display(), copy, "a table of namespaces is written again");
                self.store_copy(copy, number, &rows)?;
            }
        }
        Ok((number, rows))
    }

    fn copies_of_rows(&self) -> [Option<(u64, Vec<Row>)>; 2] {
        [0, 1].map(|copy| {
            // An unreadable copy counts as damaged: each intact copy has everything that was ever acknowledged.
            let bytes = read(&*self.volume, self.shape.table_at(copy), self.shape.table_bytes);
            table::parse(self.id, &bytes.ok()?)
        })
    }

    fn newest(&self, found: &[Option<(u64, Vec<Row>)>; 2]) -> Result<(u64, Vec<Row>)> {
        found.iter().flatten().max_by_key(|(number, _)| *number).cloned().ok_or_else(|| {
            Error::new(
                ErrorKind::Corrupt,
                "both tables of namespaces of a Slab tier are damaged, so it is unknown which blocks are current: \
                 remove the file or wipe the device, or name another one",
            )
            .with("path", self.volume.path().display())
        })
    }

    /// Stores a table of namespaces in both places, one after the other.
    pub(super) fn store_rows(&self, number: u64, rows: &[Row]) -> Result<()> {
        [1, 0].into_iter().try_for_each(|copy| self.store_copy(copy, number, rows))
    }

    fn store_copy(&self, copy: u64, number: u64, rows: &[Row]) -> Result<()> {
        self.write_and_sync(table::encode(self.id, number, rows), self.shape.table_at(copy))
    }
}

/// Returns what a medium of ours is that can be opened; `None`: it is blank, and can be formatted.
pub(super) fn look(volume: &dyn Volume, config: &SlabConfig) -> Result<Option<Superblock>> {
    if volume.bytes() >= 2 * PAGE {
        let head = read(volume, 0, 2 * PAGE)?;
        let (first, second) = head.split_at(size(PAGE));
        if let Some(superblock) = decide(Superblock::find(first), Superblock::find(second))? {
            check_size(volume, &superblock.shape, config)?;
            return Ok(Some(superblock));
        }
    }
    check_blank(volume)?;
    shape_of(volume, config).map(|_| None)
}

/// Returns the facts of a file that `open` would create.
pub(super) fn to_create(config: &SlabConfig) -> Result<MediumFacts> {
    let at = |error: Error| error.with("path", config.path.display());
    if !config.path.parent().is_some_and(Path::is_dir) {
        return Err(at(Error::new(
            ErrorKind::Config,
            "a Slab tier's file cannot be created: its directory does not exist, or the device is not there",
        )));
    }
    shape_for(config.capacity_bytes, config).map_err(at)?;
    Ok(MediumFacts { kind: MediumKind::Missing, bytes: config.capacity_bytes, formatted_bytes: None })
}

fn check_blank(volume: &dyn Volume) -> Result<()> {
    let is_short = (1..2 * PAGE).contains(&volume.bytes());
    let fill = |at: u64, page: &mut [u8]| {
        page.copy_from_slice(&read(volume, at, page.len() as u64)?);
        Ok(())
    };
    // The superblocks are blank, or were half written. Formatting may have been interrupted after the tables were written.
    let is_free =
        |at: u64, page: &[u8]| at < 2 * PAGE || blank::is_zero(page) || page.starts_with(&table::MAGIC);
    if is_short || !blank::is_blank(volume.bytes(), fill, is_free)? {
        return Err(Error::new(
            ErrorKind::Config,
            "a Slab tier's file or device holds something else, which is left alone: name another one, or zero its first \
             and last MiB if it may be overwritten",
        ));
    }
    Ok(())
}

/// Returns how a blank medium is divided, before anything of it is allocated: what cannot be formatted takes no space.
fn shape_of(volume: &dyn Volume, config: &SlabConfig) -> Result<Shape> {
    if config.capacity_bytes > volume.bytes() && !volume.can_grow() {
        let error = Error::new(ErrorKind::Config, "a Slab tier's capacity is larger than its device");
        return Err(error.with("capacity_bytes", config.capacity_bytes).with("bytes", volume.bytes()));
    }
    shape_for(if config.capacity_bytes > 0 { config.capacity_bytes } else { volume.bytes() }, config)
}

fn shape_for(bytes: u64, config: &SlabConfig) -> Result<Shape> {
    if bytes == 0 {
        return Err(Error::new(
            ErrorKind::Config,
            "a new file of a Slab tier needs a size: set capacity_bytes (slab_capacity_gb)",
        ));
    }
    Shape::of(bytes, config.segment_bytes)
}

/// Fails if a volume is shorter than the medium on it.
pub(super) fn check_length(volume: &dyn Volume, shape: &Shape) -> Result<()> {
    if shape.bytes() > volume.bytes() {
        return Err(Error::new(
            ErrorKind::Corrupt,
            "a Slab tier's file or device is shorter than it was when it was formatted: restore its length, or wipe it",
        )
        .with("bytes", volume.bytes())
        .with("bytes_expected", shape.bytes()));
    }
    Ok(())
}

fn check_size(volume: &dyn Volume, shape: &Shape, config: &SlabConfig) -> Result<()> {
    check_length(volume, shape)?;
    let asked = match config.capacity_bytes {
        0 => return Ok(()),
        bytes => Shape::of(bytes, shape.segment_bytes),
    };
    match asked {
        Ok(asked) if asked == *shape => Ok(()),
        _ => Err(Error::new(
            ErrorKind::Config,
            "a Slab tier's file or device was formatted with another size: configure that one, leave the size out, or \
             remove the file or wipe the device if its blocks are not needed",
        )
        .with("capacity_bytes", config.capacity_bytes)
        .with("formatted_bytes", shape.bytes())),
    }
}
