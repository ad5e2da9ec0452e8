//! What all parts of the medium have in common: pages, ids, and numbers in little-endian bytes that have not been validated.

use kvdepot_core::limits::BLOCK_ALIGN_BYTES;

/// Bytes of a page; everything begins and ends on a page boundary.
pub(super) const PAGE: u64 = BLOCK_ALIGN_BYTES;

/// A medium's id, drawn when it is formatted: what an earlier medium left at the same place is ignored.
pub(super) type MediumId = [u8; 16];

pub(super) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

pub(super) fn id_at(bytes: &[u8], at: usize) -> Option<[u8; 16]> {
    bytes.get(at..at + 16)?.try_into().ok()
}

/// Converts a number of bytes to a length in memory.
pub(super) fn size(bytes: u64) -> usize {
    usize::try_from(bytes).expect("a part of a segment fits an address")
}
