//! The comparison of a record with what the log says about it: the bytes are trusted only if every checksum matches (P1, P8).

use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_io::{IoBuf, SlotBuf};

use super::codec::{PAGE, size};
use super::index::Place;
use crate::format;

/// Checks that a record at this place has a length that its block may have: a plain one has all of `record_bytes`, an
/// encoded one is shorter, and has at least a page of payload. Which of both it is, only its header tells: a plain record
/// that is too short is noticed when it is verified.
pub(super) fn check_length(place: Place, header_bytes: usize, record_bytes: u64) -> Result<()> {
    if (header_bytes as u64 + PAGE..=record_bytes).contains(&place.bytes()) {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Corrupt, "a record has another length than its block"))
}

/// Makes a buffer for reading exactly the pages of a record, whose length was checked, into a slot. `None`: the slot is
/// shorter.
pub(super) fn buffer(place: Place, header_bytes: usize, slot: &SlotBuf) -> Option<IoBuf> {
    let payload_bytes = size(place.bytes()).checked_sub(header_bytes)?;
    IoBuf::for_read(header_bytes, slot.clone(), payload_bytes)
}

/// Checks that this is the record that was written last, and not an earlier one of the same block that lay at the same
/// place (P1).
pub(super) fn is_of(place: Place, head: &[u8]) -> Result<()> {
    match format::header_tag(head) {
        Some(tag) if tag == place.tag => Ok(()),
        _ => Err(Error::new(ErrorKind::Corrupt, "a record is not the one that was written there last")),
    }
}
