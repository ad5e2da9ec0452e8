//! Opening a medium: formats an empty one, refuses what is not ours, and reads what ours holds.

use hashbrown::HashSet;
use kvdepot_core::{Error, ErrorKind, NamespaceId, Result};
use kvdepot_io::mapped::Medium;

use super::epochs::Epochs;
use super::layout::{
    EPOCH_BYTES, Entry, FORMATTING, Geometry, HEADER_BYTES, Header, MAGIC, PAGE_BYTES, SUPERBLOCK_BYTES,
};
use super::owner::Owner;
use super::recover::{Recovered, recover};
use crate::blank;

/// Bytes read or zeroed at a time.
const STEP_BYTES: u64 = 1 << 20;

/// The content of an open medium.
pub(super) struct Opened {
    pub(super) geometry: Geometry,
    pub(super) epochs: Epochs,
    pub(super) recovered: Recovered,
    pub(super) units_max: u32,
}

/// Opens a medium of ours, or makes an empty one ours with this id. Anything else is refused and left untouched.
pub(super) fn open(
    medium: &dyn Medium,
    max_bytes: u64,
    capacity_bytes: u64,
    new_id: [u8; 16],
    owner: &Owner,
) -> Result<Opened> {
    let (geometry, is_new) = match look(medium)? {
        None => (format(medium, new_id, owner)?, true),
        Some(geometry) => (geometry, false),
    };
    if max_bytes > 0 && medium.bytes() / geometry.unit_bytes > geometry.medium_bytes / geometry.unit_bytes {
        tracing::warn!(
            path = %medium.path().display(), bytes = medium.bytes(), bytes_formatted = geometry.medium_bytes,
            "a medium was formatted for fewer bytes than are configured: it stays as it is; zero its first and last MiB to change that"
        );
    }
    if !is_new {
        owner.take(medium)?;
    }
    let mut units_max = geometry.units;
    if capacity_bytes > 0 {
        let units = u32::try_from(capacity_bytes / geometry.unit_bytes).unwrap_or(u32::MAX);
        units_max = units_max.min(units);
    }
    let mut entries = Vec::new();
    each_header(medium, &geometry, |unit, line| {
        let entry = Header::parse(line, unit, &geometry);
        if entry != Entry::Empty {
            entries.push((unit, entry));
        }
    })?;
    let mut table = vec![0; geometry.epochs as usize * 2 * EPOCH_BYTES];
    medium.read(geometry.epochs_at(), &mut table)?;
    if !is_new && !medium.is_memory() {
        // What was read may be in the page cache only: after a write-back that failed, Linux takes its pages for written. A
        // reset that counts from here on must not be undone by a power loss (P1).
        medium.write(geometry.epochs_at(), &table)?;
        medium.persist()?;
        owner.check(medium, &geometry)?;
    }
    let good = entries.iter().filter_map(|(_, entry)| entry.good());
    let named: HashSet<(NamespaceId, u32)> =
        good.map(|header| (header.key.namespace, header.epoch)).collect();
    let mut epochs = Epochs::parse(&table, geometry, &named.into_iter().collect::<Vec<_>>());
    let mut repairs = epochs.take_repairs();
    if !repairs.is_empty() {
        tracing::warn!(
            path = %medium.path().display(), places = repairs.len(),
            "epochs on a medium are damaged: their namespaces begin anew"
        );
    }
    while !repairs.is_empty() {
        owner.check(medium, &geometry)?;
        repairs.iter().try_for_each(|change| medium.write(change.at, &change.bytes))?;
        medium.persist()?;
        repairs.iter().for_each(|change| epochs.stored(change));
        repairs = repairs.iter().filter_map(|change| change.other(&epochs)).collect();
    }
    let recovered = recover(entries, &epochs.current(), &geometry, units_max);
    owner.check(medium, &geometry)?;
    for unit in &recovered.clear {
        medium.write(geometry.header_at(*unit), &[0; HEADER_BYTES])?;
    }
    if !recovered.clear.is_empty() {
        medium.persist()?;
    }
    owner.check(medium, &geometry)?;
    Ok(Opened { geometry, epochs, recovered, units_max })
}

/// Returns the layout of a medium of ours that can be opened; `None`: it is empty, or was not formatted to the end.
pub(super) fn look(medium: &dyn Medium) -> Result<Option<Geometry>> {
    let said = |error: Error| error.with("path", medium.path().display());
    match kind_of(medium)? {
        Kind::Empty | Kind::Unfinished => Geometry::of(medium.bytes(), [0; 16]).map(|_| None).map_err(said),
        Kind::Ours(geometry) if geometry.medium_bytes > medium.bytes() => Err(said(
            Error::new(
                ErrorKind::Config,
                "a medium was formatted for more bytes than there are now: it was truncated, or its size was configured \
                 lower. Make it as long as it was, or zero its first and last MiB to have it formatted again",
            )
            .with("bytes", medium.bytes())
            .with("bytes_formatted", geometry.medium_bytes),
        )),
        Kind::Ours(geometry) => Ok(Some(geometry)),
    }
}

enum Kind {
    /// It holds nothing.
    Empty,
    /// A depot ended while formatting it.
    Unfinished,
    Ours(Geometry),
}

fn kind_of(medium: &dyn Medium) -> Result<Kind> {
    let foreign = || {
        Error::new(
            ErrorKind::Config,
            "a medium holds something that is not kvdepot's, so it is left alone: name another one, or zero its first and \
             last MiB if it may be overwritten",
        )
        .with("path", medium.path().display())
    };
    if medium.bytes() < PAGE_BYTES {
        return Err(Error::new(ErrorKind::Config, "a medium is too small to hold blocks")
            .with("path", medium.path().display())
            .with("medium_bytes", medium.bytes()));
    }
    let mut superblock = [0; SUPERBLOCK_BYTES];
    medium.read(0, &mut superblock)?;
    if superblock[..8] == MAGIC {
        let geometry = Geometry::parse(&superblock);
        return geometry.map(Kind::Ours).map_err(|error| error.with("path", medium.path().display()));
    }
    if superblock[..8] == FORMATTING {
        return Ok(Kind::Unfinished);
    }
    if !blank::is_blank(medium.bytes(), |at, page| medium.read(at, page), |_, page| blank::is_zero(page))? {
        return Err(foreign());
    }
    Ok(Kind::Empty)
}

/// Makes a medium ours. The first word tells the state of the medium and is written separately, so that a crash at any
/// moment leaves an empty medium, one that will be formatted anew, or one of ours.
fn format(medium: &dyn Medium, id: [u8; 16], owner: &Owner) -> Result<Geometry> {
    let geometry =
        Geometry::of(medium.bytes(), id).map_err(|error| error.with("path", medium.path().display()))?;
    medium.write(0, &FORMATTING)?;
    medium.persist()?;
    owner.take(medium)?;
    let superblock = geometry.encode();
    let zeros = vec![0; STEP_BYTES as usize];
    let mut at = PAGE_BYTES;
    while at < geometry.data_at() {
        let bytes = STEP_BYTES.min(geometry.data_at() - at);
        owner.check_word(medium)?;
        medium.write(at, &zeros[..bytes as usize])?;
        at += bytes;
    }
    owner.check_word(medium)?;
    medium.write(8, &superblock[8..])?;
    medium.persist()?;
    medium.write(0, &superblock[..8])?;
    medium.persist()?;
    tracing::info!(
        path = %medium.path().display(), bytes = geometry.medium_bytes, units = geometry.units,
        unit_bytes = geometry.unit_bytes, "an empty medium was formatted"
    );
    Ok(geometry)
}

/// Calls `each` with every slot header.
pub(super) fn each_header(
    medium: &dyn Medium,
    geometry: &Geometry,
    mut each: impl FnMut(u32, &[u8; HEADER_BYTES]),
) -> Result<()> {
    let mut bytes = vec![0; STEP_BYTES as usize];
    let in_step = STEP_BYTES as u32 / HEADER_BYTES as u32;
    let mut first = 0;
    while first < geometry.units {
        let count = in_step.min(geometry.units - first);
        let step = &mut bytes[..count as usize * HEADER_BYTES];
        medium.read(geometry.header_at(first), step)?;
        let (lines, _) = step.as_chunks::<HEADER_BYTES>();
        (first..).zip(lines).for_each(|(unit, line)| each(unit, line));
        first += count;
    }
    Ok(())
}
