//! A group: what one write appends to a segment. Its head lists the contents; the records follow, each with the bytes
//! of a block file (`docs/format.md`).
//!
//! A head carries the checksum of the head before it. So a walk from a segment's beginning finds, in order, what was
//! written in this life of the segment, and stops where that ends.

use kvdepot_core::BlockKey;
use kvdepot_io::AlignedBuf;
use kvdepot_io::checksum::crc64;

use super::codec::{MediumId, PAGE, id_at, u32_at, u64_at};

const MAGIC: [u8; 8] = *b"KVDGROUP";
const VERSION: u32 = 1;
const AT_ENTRIES: usize = 12;
const AT_ID: usize = 16;
const AT_SEQUENCE: usize = 32;
const AT_ORDINAL: usize = 40;
const AT_DURABLE: usize = 44;
const AT_BEFORE: usize = 48;
const AT_BYTES: usize = 56;
const AT_CHECKSUM: usize = 64;
const HEAD: usize = 72;
const ENTRY: usize = 40;

/// The most entries of a group: no head is longer than a few pages.
pub(super) const ENTRIES_MAX: usize = 2048;

/// One thing that happened to a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) key: BlockKey,
    /// Pages of its record; 0 = the block was removed.
    pub(super) pages: u32,
    /// Low half of its record's header checksum: tells the record from a complete one of another time at the same
    /// place.
    pub(super) tag: u32,
}

/// The position of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) medium: MediumId,
    /// Counts the lives of segments.
    pub(super) sequence: u64,
    /// Counts the groups of a segment's life.
    pub(super) ordinal: u32,
    /// Checksum of the previous head; 0 for the first.
    pub(super) before: u64,
}

/// A head that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) sequence: u64,
    /// Groups below this one had been synced when the head was written.
    pub(super) durable: u32,
    /// Its own checksum.
    pub(super) checksum: u64,
    /// Bytes of head and records.
    pub(super) bytes: u64,
    pub(super) entries: Vec<Entry>,
}

/// Bytes of a head with this many entries.
pub(super) const fn head_bytes(entries: usize) -> u64 {
    ((HEAD + entries * ENTRY) as u64).next_multiple_of(PAGE)
}

/// Makes a head: returns its pages and its checksum.
pub(super) fn encode(place: Place, durable: u32, entries: &[Entry]) -> (AlignedBuf, u64) {
    let head = head_bytes(entries.len());
    let bytes = head + entries.iter().map(|entry| u64::from(entry.pages) * PAGE).sum::<u64>();
    let mut out = AlignedBuf::zeroed(head as usize);
    let count = u32::try_from(entries.len()).expect("at most ENTRIES_MAX");
    let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &MAGIC);
    put(8, &VERSION.to_le_bytes());
    put(AT_ENTRIES, &count.to_le_bytes());
    put(AT_ID, &place.medium);
    put(AT_SEQUENCE, &place.sequence.to_le_bytes());
    put(AT_ORDINAL, &place.ordinal.to_le_bytes());
    put(AT_DURABLE, &durable.to_le_bytes());
    put(AT_BEFORE, &place.before.to_le_bytes());
    put(AT_BYTES, &bytes.to_le_bytes());
    for (entry, at) in entries.iter().zip((HEAD..).step_by(ENTRY)) {
        put(at, &entry.key.to_bytes());
        put(at + 32, &entry.pages.to_le_bytes());
        put(at + 36, &entry.tag.to_le_bytes());
    }
    let checksum = crc64(&out);
    out[AT_CHECKSUM..HEAD].copy_from_slice(&checksum.to_le_bytes());
    (out, checksum)
}

/// Returns the length of the head that begins with this page; `None` if none does.
pub(super) fn peek(page: &[u8]) -> Option<u64> {
    let entries = u32_at(page, AT_ENTRIES)? as usize;
    (page.get(..8)? == MAGIC && u32_at(page, 8)? == VERSION && entries <= ENTRIES_MAX)
        .then(|| head_bytes(entries))
}

/// Reads a head of this medium, whatever its place; `None` if it is not intact.
pub(super) fn parse_any(medium: MediumId, pages: &[u8]) -> Option<Head> {
    let length = peek(pages)? as usize;
    let mut whole = pages.get(..length)?.to_vec();
    let checksum = u64_at(pages, AT_CHECKSUM)?;
    whole[AT_CHECKSUM..HEAD].fill(0);
    if checksum != crc64(&whole) || id_at(pages, AT_ID)? != medium {
        return None;
    }
    let entry = |at: usize| {
        let key = BlockKey::from_bytes(pages.get(at..at + 32)?.try_into().ok()?);
        Some(Entry { key, pages: u32_at(pages, at + 32)?, tag: u32_at(pages, at + 36)? })
    };
    let count = u32_at(pages, AT_ENTRIES)? as usize;
    let entries: Vec<Entry> = (HEAD..).step_by(ENTRY).take(count).map(entry).collect::<Option<_>>()?;
    let records: u64 = entries.iter().map(|entry| u64::from(entry.pages) * PAGE).sum();
    let bytes = u64_at(pages, AT_BYTES)?;
    let (sequence, durable) = (u64_at(pages, AT_SEQUENCE)?, u32_at(pages, AT_DURABLE)?);
    (bytes == length as u64 + records).then_some(Head { sequence, durable, checksum, bytes, entries })
}

/// Reads the head that belongs at a place; `None` if another head or none is there.
pub(super) fn parse(place: Place, pages: &[u8]) -> Option<Head> {
    let head = parse_any(place.medium, pages)?;
    let here = head.sequence == place.sequence
        && u32_at(pages, AT_ORDINAL)? == place.ordinal
        && u64_at(pages, AT_BEFORE)? == place.before;
    here.then_some(head)
}

#[cfg(test)]
mod tests {
    use kvdepot_core::{BlockHash, NamespaceId};

    use super::*;

    #[test]
    fn a_head_counts_at_its_own_place_only() {
        let key = |n: u8| BlockKey { namespace: NamespaceId([n; 16]), hash: BlockHash([n + 1; 16]) };
        let entry = |n: u8| Entry { key: key(n), pages: n.into(), tag: u32::from(n) * 7 };
        let entries: Vec<Entry> = (0..130).map(entry).collect();
        let place = Place { medium: [1; 16], sequence: 9, ordinal: 4, before: 77 };
        let (pages, checksum) = encode(place, 3, &entries);
        let head = parse(place, &pages).unwrap();
        assert_eq!((head.checksum, head.durable, &head.entries), (checksum, 3, &entries));
        assert_eq!(head.bytes, pages.len() as u64 + 4096 * (0..130).sum::<u64>());
        for other in [
            Place { medium: [2; 16], ..place },
            Place { sequence: 8, ..place },
            Place { ordinal: 5, ..place },
            Place { before: 76, ..place },
        ] {
            assert_eq!(parse(other, &pages), None, "{other:?}");
        }
        for byte in [0, 12, 50, 70, 80, 4100, 5270] {
            let mut bad = pages.to_vec();
            bad[byte] ^= 1;
            assert_eq!(parse(place, &bad), None, "byte {byte}");
        }
        assert_eq!(parse(place, &pages[..4096]), None);
        assert_eq!(parse(place, &[0; 4096]), None);
    }
}
