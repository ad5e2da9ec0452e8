//! The layout of the medium: superblocks, tables of namespaces, then segments to its end.

use kvdepot_core::limits::NAMESPACES_STORED_MAX;
use kvdepot_core::{Error, ErrorKind, Result};

use super::codec::PAGE;
use super::footer;
use super::group;
use super::index::Place;
use super::table;

/// The fewest segments: the open one, the clear one, and one that holds blocks.
pub(super) const SEGMENTS_MIN: u64 = 3;
/// The smallest segment that makes sense at all.
pub(super) const SEGMENT_BYTES_MIN: u64 = 16 * PAGE;
/// The largest segment: page numbers within it, and page counts of its records, stay far below their limits.
pub(super) const SEGMENT_BYTES_MAX: u64 = 4 << 30;
/// Smaller media keep fewer namespaces.
const SMALL_BYTES: u64 = 256 << 20;
const SMALL_TABLE_BYTES: u64 = 16 * PAGE;

/// Sizes chosen when a medium is formatted; they never change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) segment_bytes: u64,
    pub(super) segments: u64,
    pub(super) table_bytes: u64,
}

impl Shape {
    /// The shape of a medium of `bytes`.
    pub(super) fn of(bytes: u64, segment_bytes: u64) -> Result<Self> {
        let large = table::bytes_for(NAMESPACES_STORED_MAX);
        let table_bytes = if bytes < SMALL_BYTES { SMALL_TABLE_BYTES } else { large };
        let segments = bytes.saturating_sub(2 * PAGE + 2 * table_bytes) / segment_bytes.max(1);
        let shape = Self { segment_bytes, segments, table_bytes };
        if shape.is_possible() {
            return Ok(shape);
        }
        Err(Error::new(
            ErrorKind::Config,
            "a Slab tier needs space for at least three segments: give it more capacity or smaller segments",
        )
        .with("capacity_bytes", bytes)
        .with("segment_bytes", segment_bytes))
    }

    /// Returns whether a medium can have these sizes at all.
    pub(super) fn is_possible(&self) -> bool {
        let whole = |bytes: u64| bytes.is_multiple_of(PAGE);
        let segments = self.segments >= SEGMENTS_MIN && self.segments < u64::from(u32::MAX);
        let length = self.segments.checked_mul(self.segment_bytes).is_some_and(|bytes| bytes < 1 << 62);
        let tables = self.table_bytes >= PAGE && self.table_bytes <= table::bytes_for(NAMESPACES_STORED_MAX);
        let sizes = whole(self.segment_bytes)
            && (SEGMENT_BYTES_MIN..=SEGMENT_BYTES_MAX).contains(&self.segment_bytes);
        segments && length && tables && sizes && whole(self.table_bytes)
    }

    /// Bytes of the medium.
    pub(super) const fn bytes(&self) -> u64 {
        self.segment_at(self.segments)
    }

    /// Offset of one of the two superblocks.
    pub(super) const fn superblock_at(copy: u64) -> u64 {
        copy * PAGE
    }

    /// Offset of one of the two tables of namespaces.
    pub(super) const fn table_at(&self, copy: u64) -> u64 {
        2 * PAGE + copy * self.table_bytes
    }

    /// Offset of a segment.
    pub(super) const fn segment_at(&self, segment: u64) -> u64 {
        2 * PAGE + 2 * self.table_bytes + segment * self.segment_bytes
    }

    /// Offset of a record.
    pub(super) fn record_at(&self, place: Place) -> u64 {
        self.segment_at(place.segment.into()) + u64::from(place.page) * PAGE
    }

    /// The segment of a sequence number: segments are written in a ring.
    pub(super) const fn segment_of(&self, sequence: u64) -> u32 {
        (sequence % self.segments) as u32
    }

    /// The longest record that a segment takes, after a first group without entries.
    pub(super) const fn record_bytes_max(&self) -> u64 {
        self.segment_bytes - group::head_bytes(0) - group::head_bytes(1) - footer::bytes(1)
    }
}
