//! The open segment: where the next group goes, and whether it still fits. Does no I/O: the writer reports how that
//! went.
//!
//! Segments are written in a ring; each life of a segment has its own sequence number, one above the last. So the
//! oldest life is always the one that is recycled, and an entry that removes a block, or holds it anew, outlives every
//! older entry of that block.

use kvdepot_io::AlignedBuf;

use super::codec::{MediumId, PAGE};
use super::footer;
use super::group::{self, Entry};
use super::index::Place;
use super::shape::Shape;

/// The end of a segment's groups, where the next one goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tail {
    /// Bytes of the segment already used.
    pub(super) bytes: u64,
    /// Number of the next group.
    pub(super) ordinal: u32,
    /// Checksum of the last head.
    pub(super) before: u64,
}

impl Tail {
    pub(super) const BEGIN: Self = Self { bytes: 0, ordinal: 0, before: 0 };
}

/// A group that is to be written.
#[derive(Debug)]
pub(super) struct Group {
    /// Offset from the medium's beginning.
    pub(super) offset: u64,
    pub(super) head: AlignedBuf,
    /// The place of each entry's record; unused for a removal.
    pub(super) places: Vec<Place>,
    /// Bytes in total.
    pub(super) bytes: u64,
    entries: Vec<Entry>,
    checksum: u64,
}

/// The open segment.
#[derive(Debug)]
pub(super) struct Log {
    medium: MediumId,
    shape: Shape,
    sequence: u64,
    tail: Tail,
    rows: Vec<footer::Row>,
    /// Groups below this one are synced.
    durable: u32,
    /// Whether everything written to the segment is known to be there, so that a footer may say so.
    sound: bool,
    /// Whether the first groups of this life are on the medium, so that the next segment is clear.
    begun: bool,
}

impl Log {
    /// Continues in a segment that a walk has found, or begins the first one.
    pub(super) fn new(
        medium: MediumId,
        shape: Shape,
        sequence: u64,
        tail: Tail,
        rows: Vec<footer::Row>,
    ) -> Self {
        // No footer may list what a crash may have torn, unless there was nothing to tear.
        let sound = rows.is_empty();
        Self { medium, shape, sequence, tail, rows, durable: tail.ordinal, sound, begun: true }
    }

    pub(super) const fn shape(&self) -> &Shape {
        &self.shape
    }

    pub(super) const fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Number of the next group.
    pub(super) const fn ordinal(&self) -> u32 {
        self.tail.ordinal
    }

    /// The next segment in the ring.
    pub(super) const fn next_segment(&self) -> u32 {
        self.shape.segment_of(self.sequence + 1)
    }

    /// The segment that is cleared when the next one begins, unless it is the open one.
    pub(super) fn cooling_segment(&self) -> Option<u32> {
        let segment = self.shape.segment_of(self.sequence + 2);
        (segment != self.shape.segment_of(self.sequence)).then_some(segment)
    }

    /// Returns whether a group with this many entries and bytes of records fits, together with a footer for all.
    pub(super) const fn fits(&self, entries: usize, record_bytes: u64) -> bool {
        let group = group::head_bytes(entries) + record_bytes;
        self.tail.bytes + group + footer::bytes(self.rows.len() + entries) <= self.shape.segment_bytes
    }

    /// Lays out the next group, which must fit.
    pub(super) fn plan(&self, entries: Vec<Entry>) -> Group {
        let place = group::Place {
            medium: self.medium,
            sequence: self.sequence,
            ordinal: self.tail.ordinal,
            before: self.tail.before,
        };
        let (head, checksum) = group::encode(place, self.durable, &entries);
        let segment = self.shape.segment_of(self.sequence);
        let mut at = self.tail.bytes + head.len() as u64;
        let places = entries.iter().map(|entry| {
            let place = Place { segment, page: (at / PAGE) as u32, pages: entry.pages, tag: entry.tag };
            at += u64::from(entry.pages) * PAGE;
            place
        });
        let places = places.collect();
        let offset = self.shape.segment_at(segment.into()) + self.tail.bytes;
        let bytes = at - self.tail.bytes;
        Group { offset, head, places, bytes, entries, checksum }
    }

    /// Notes that a group was written. One that was not is planned again at the same place.
    pub(super) fn written(&mut self, group: &Group) {
        let rows = group.entries.iter().zip(&group.places);
        self.rows.extend(rows.map(|(entry, place)| footer::Row {
            key: entry.key,
            page: place.page,
            pages: entry.pages,
            tag: entry.tag,
        }));
        self.tail = Tail {
            bytes: self.tail.bytes + group.bytes,
            ordinal: self.tail.ordinal + 1,
            before: group.checksum,
        };
    }

    /// Notes that groups of this sequence below `ordinal` are synced.
    pub(super) fn synced(&mut self, sequence: u64, ordinal: u32) {
        if sequence == self.sequence {
            self.durable = self.durable.max(ordinal);
        }
    }

    /// Notes that something in this segment could not be synced.
    pub(super) const fn doubt(&mut self) {
        self.sound = false;
    }

    /// Returns the footer that ends the open segment, and its offset; `None` if it would claim too much.
    pub(super) fn footer(&self) -> Option<(u64, AlignedBuf)> {
        let pages = footer::encode(self.medium, self.sequence, &self.rows);
        let end =
            self.shape.segment_at(self.shape.segment_of(self.sequence).into()) + self.shape.segment_bytes;
        (self.sound && !self.rows.is_empty()).then(|| (end - pages.len() as u64, pages))
    }

    /// Moves on to the next segment, which is yet to begin.
    pub(super) fn roll(&mut self) {
        self.sequence += 1;
        self.begun = false;
        self.restart();
    }

    pub(super) const fn is_begun(&self) -> bool {
        self.begun
    }

    /// Notes that the segment's first groups are written and the next segment is clear.
    pub(super) const fn begin(&mut self) {
        self.begun = true;
    }

    /// Notes that the segment's first groups failed: they will be overwritten.
    pub(super) fn restart(&mut self) {
        self.tail = Tail::BEGIN;
        self.rows.clear();
        self.durable = 0;
        self.sound = true;
    }
}

#[cfg(test)]
mod tests {
    use kvdepot_core::{BlockHash, BlockKey, NamespaceId};

    use super::*;

    const SHAPE: Shape = Shape { segment_bytes: 64 * PAGE, segments: 3, table_bytes: PAGE };

    fn entry(n: u8, pages: u32) -> Entry {
        let key = BlockKey { namespace: NamespaceId([1; 16]), hash: BlockHash([n; 16]) };
        Entry { key, pages, tag: 0 }
    }

    #[test]
    fn groups_follow_each_other_and_stay_clear_of_the_footer() {
        let mut log = Log::new([3; 16], SHAPE, 4, Tail::BEGIN, Vec::new());
        let (mut end, mut groups) = (SHAPE.segment_at(1), 0);
        while log.fits(2, 5 * PAGE) {
            let group = log.plan(vec![entry(groups, 5), entry(groups, 0)]);
            assert_eq!((group.offset, group.bytes), (end, 6 * PAGE));
            assert_eq!(u64::from(group.places[0].page) * PAGE + SHAPE.segment_at(1), end + PAGE);
            // A group that failed is planned again at the same place.
            assert_eq!(log.plan(vec![entry(groups, 5)]).offset, group.offset);
            log.written(&group);
            (end, groups) = (end + group.bytes, groups + 1);
        }
        let (at, pages) = log.footer().unwrap();
        assert!(groups == 10 && at >= end && at + pages.len() as u64 == SHAPE.segment_at(2));
        log.roll();
        assert_eq!((log.sequence(), log.ordinal(), log.next_segment()), (5, 0, 0));
        assert!(log.footer().is_none(), "nothing to list");
        assert_eq!(log.plan(vec![entry(0, 1)]).offset, SHAPE.segment_at(2));
    }

    #[test]
    fn the_largest_record_fits_an_empty_segment() {
        let mut log = Log::new([3; 16], SHAPE, 0, Tail::BEGIN, Vec::new());
        log.written(&log.plan(Vec::new()));
        assert!(log.fits(1, SHAPE.record_bytes_max()));
        assert!(!log.fits(1, SHAPE.record_bytes_max() + PAGE));
    }

    #[test]
    fn a_segment_in_doubt_gets_no_footer() {
        let mut log = Log::new([3; 16], SHAPE, 0, Tail::BEGIN, Vec::new());
        log.written(&log.plan(vec![entry(0, 1)]));
        assert!(log.footer().is_some());
        log.doubt();
        assert!(log.footer().is_none());
    }
}
