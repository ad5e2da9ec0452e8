//! The end of a full segment: all its entries in order, so that a start reads a few pages instead of walking the
//! segment.

use kvdepot_core::BlockKey;
use kvdepot_io::AlignedBuf;
use kvdepot_io::checksum::crc64;

use super::codec::{MediumId, PAGE, id_at, u32_at, u64_at};

const MAGIC: [u8; 8] = *b"KVDSEGMT";
const VERSION: u32 = 1;
const AT_ROWS: usize = 12;
const AT_ID: usize = 16;
const AT_SEQUENCE: usize = 32;
const AT_TABLE_CHECKSUM: usize = 40;
const AT_CHECKSUM: usize = 48;
const HEAD: usize = 56;
const ROW: usize = 48;

/// Something that happened to a key, and where its record lies in the segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) key: BlockKey,
    /// Page of the segment where the record begins.
    pub(super) page: u32,
    /// Pages of the record; 0 = the block was removed.
    pub(super) pages: u32,
    /// Low half of the record's header checksum.
    pub(super) tag: u32,
}

/// The last page of a segment, which describes the rows before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Trailer {
    pub(super) sequence: u64,
    pub(super) rows: usize,
    checksum: u64,
}

const fn table_bytes(rows: usize) -> u64 {
    ((rows * ROW) as u64).next_multiple_of(PAGE)
}

/// Bytes of a footer with this many rows; it stands at the segment's end.
pub(super) const fn bytes(rows: usize) -> u64 {
    table_bytes(rows) + PAGE
}

impl Trailer {
    /// Bytes of the rows before it.
    pub(super) const fn table_bytes(&self) -> u64 {
        table_bytes(self.rows)
    }
}

pub(super) fn encode(medium: MediumId, sequence: u64, rows: &[Row]) -> AlignedBuf {
    let mut out = AlignedBuf::zeroed(bytes(rows.len()) as usize);
    for (row, at) in rows.iter().zip((0..).step_by(ROW)) {
        out[at..at + 32].copy_from_slice(&row.key.to_bytes());
        out[at + 32..at + 36].copy_from_slice(&row.page.to_le_bytes());
        out[at + 36..at + 40].copy_from_slice(&row.pages.to_le_bytes());
        out[at + 40..at + 44].copy_from_slice(&row.tag.to_le_bytes());
    }
    let (table, trailer) = out.split_at_mut(table_bytes(rows.len()) as usize);
    let count = u32::try_from(rows.len()).expect("a segment has fewer pages than u32 counts");
    trailer[..8].copy_from_slice(&MAGIC);
    trailer[8..12].copy_from_slice(&VERSION.to_le_bytes());
    trailer[AT_ROWS..AT_ID].copy_from_slice(&count.to_le_bytes());
    trailer[AT_ID..AT_SEQUENCE].copy_from_slice(&medium);
    trailer[AT_SEQUENCE..AT_TABLE_CHECKSUM].copy_from_slice(&sequence.to_le_bytes());
    trailer[AT_TABLE_CHECKSUM..AT_CHECKSUM].copy_from_slice(&crc64(table).to_le_bytes());
    let checksum = crc64(&trailer[..AT_CHECKSUM]);
    trailer[AT_CHECKSUM..HEAD].copy_from_slice(&checksum.to_le_bytes());
    out
}

/// Reads a segment's last page.
pub(super) fn parse_trailer(medium: MediumId, page: &[u8]) -> Option<Trailer> {
    let whole = u64_at(page, AT_CHECKSUM)? == crc64(page.get(..AT_CHECKSUM)?);
    let ours = page.get(..8)? == MAGIC && u32_at(page, 8)? == VERSION && id_at(page, AT_ID)? == medium;
    (whole && ours).then_some(Trailer {
        sequence: u64_at(page, AT_SEQUENCE)?,
        rows: u32_at(page, AT_ROWS)? as usize,
        checksum: u64_at(page, AT_TABLE_CHECKSUM)?,
    })
}

/// Reads the rows that a trailer describes.
pub(super) fn parse_rows(trailer: Trailer, table: &[u8]) -> Option<Vec<Row>> {
    if table.len() as u64 != trailer.table_bytes() || crc64(table) != trailer.checksum {
        return None;
    }
    let row = |at: usize| {
        let key = BlockKey::from_bytes(table.get(at..at + 32)?.try_into().ok()?);
        let (page, pages) = (u32_at(table, at + 32)?, u32_at(table, at + 36)?);
        Some(Row { key, page, pages, tag: u32_at(table, at + 40)? })
    };
    (0..).step_by(ROW).take(trailer.rows).map(row).collect()
}

#[cfg(test)]
mod tests {
    use kvdepot_core::{BlockHash, NamespaceId};

    use super::*;

    #[test]
    fn a_footer_is_whole_or_nothing() {
        let key = |n: u8| BlockKey { namespace: NamespaceId([n; 16]), hash: BlockHash([n + 1; 16]) };
        let row = |n: u8| Row { key: key(n), page: n.into(), pages: 2, tag: u32::from(n) * 7 };
        let rows: Vec<Row> = (0..200).map(row).collect();
        let pages = encode([1; 16], 5, &rows);
        let (table, page) = pages.split_at(pages.len() - 4096);
        let trailer = parse_trailer([1; 16], page).unwrap();
        assert_eq!((trailer.sequence, trailer.table_bytes()), (5, table.len() as u64));
        assert_eq!(parse_rows(trailer, table), Some(rows));
        assert_eq!(parse_trailer([2; 16], page), None);
        for byte in 0..HEAD {
            let mut bad = page.to_vec();
            bad[byte] ^= 1;
            assert_eq!(parse_trailer([1; 16], &bad), None, "byte {byte}");
        }
        let mut bad = table.to_vec();
        bad[5000] ^= 1;
        assert_eq!(parse_rows(trailer, &bad), None);
        assert_eq!(parse_rows(trailer, &table[4096..]), None);
    }
}
