//! The comparison of a record with what the log says about it: the bytes are trusted only if every checksum matches (P1, P8).

use kvdepot_core::{BlockKey, BlockLayout, Error, ErrorKind, Result};
use kvdepot_io::IoBuf;

use super::codec::PAGE;
use super::index::Place;
use crate::format;

/// Checks that a record at this place has the length of its block.
pub(super) fn check_length(place: Place, record_bytes: u64) -> Result<()> {
    if u64::from(place.pages) * PAGE == record_bytes {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Corrupt, "a record has another length than its block"))
}

/// Verifies a record that was read.
pub(super) fn verify(key: BlockKey, layout: &BlockLayout, place: Place, read: &IoBuf) -> Result<()> {
    is_of(place, read.head())?;
    format::verify(key, layout, read).map(drop)
}

/// Checks that this is the record that was written last, and not an earlier one of the same block that lay at the same
/// place (P1).
pub(super) fn is_of(place: Place, head: &[u8]) -> Result<()> {
    match format::header_tag(head) {
        Some(tag) if tag == place.tag => Ok(()),
        _ => Err(Error::new(ErrorKind::Corrupt, "a record is not the one that was written there last")),
    }
}
