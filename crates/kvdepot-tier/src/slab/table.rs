//! The table of namespaces: which epoch each is in. There are two copies; both are rewritten and synced before an epoch
//! counts, so that damage to one of them never takes a namespace back to an earlier epoch.

use kvdepot_core::NamespaceId;
use kvdepot_io::AlignedBuf;
use kvdepot_io::checksum::crc64;

use super::codec::{MediumId, PAGE, id_at, u32_at, u64_at};

/// First bytes of a table.
pub(super) const MAGIC: [u8; 8] = *b"KVDSPACE";
const VERSION: u32 = 1;
const AT_COUNT: usize = 12;
const AT_ID: usize = 16;
const AT_NUMBER: usize = 32;
const AT_CHECKSUM: usize = 40;
const HEAD: usize = 48;
const ROW: usize = 40;

/// A namespace as the medium knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) root: NamespaceId,
    /// The id of its epoch, which the keys of its blocks carry.
    pub(super) id: NamespaceId,
    pub(super) epoch: u32,
}

/// Bytes of a table with this many rows, in complete pages.
pub(super) const fn bytes_for(rows: usize) -> u64 {
    ((HEAD + rows * ROW) as u64).next_multiple_of(PAGE)
}

/// Number of rows that fit.
pub(super) const fn rows_max(bytes: u64) -> usize {
    (bytes as usize - HEAD) / ROW
}

/// The table's pages. `number` grows with every table.
pub(super) fn encode(medium: MediumId, number: u64, rows: &[Row]) -> AlignedBuf {
    let mut out = AlignedBuf::zeroed(bytes_for(rows.len()) as usize);
    let count = u32::try_from(rows.len()).expect("a bounded number of namespaces");
    out[..8].copy_from_slice(&MAGIC);
    out[8..12].copy_from_slice(&VERSION.to_le_bytes());
    out[AT_COUNT..AT_ID].copy_from_slice(&count.to_le_bytes());
    out[AT_ID..AT_NUMBER].copy_from_slice(&medium);
    out[AT_NUMBER..AT_CHECKSUM].copy_from_slice(&number.to_le_bytes());
    for (row, at) in rows.iter().zip((HEAD..).step_by(ROW)) {
        out[at..at + 16].copy_from_slice(&row.root.0);
        out[at + 16..at + 32].copy_from_slice(&row.id.0);
        out[at + 32..at + 36].copy_from_slice(&row.epoch.to_le_bytes());
    }
    let checksum = crc64(&out);
    out[AT_CHECKSUM..HEAD].copy_from_slice(&checksum.to_le_bytes());
    out
}

/// Returns a copy's number and rows; `None` if it is not intact. `bytes` may be longer than the table.
pub(super) fn parse(medium: MediumId, bytes: &[u8]) -> Option<(u64, Vec<Row>)> {
    let fits = bytes.get(..8)? == MAGIC && u32_at(bytes, 8)? == VERSION && id_at(bytes, AT_ID)? == medium;
    let count = u32_at(bytes, AT_COUNT)? as usize;
    if !fits || count > rows_max(bytes.len() as u64) {
        return None;
    }
    let mut whole = bytes.get(..bytes_for(count) as usize)?.to_vec();
    whole[AT_CHECKSUM..HEAD].fill(0);
    if u64_at(bytes, AT_CHECKSUM)? != crc64(&whole) {
        return None;
    }
    let row = |at| {
        let (root, id) = (NamespaceId(id_at(bytes, at)?), NamespaceId(id_at(bytes, at + 16)?));
        Some(Row { root, id, epoch: u32_at(bytes, at + 32)? })
    };
    let rows: Option<Vec<Row>> = (HEAD..).step_by(ROW).take(count).map(row).collect();
    Some((u64_at(bytes, AT_NUMBER)?, rows?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_whole_or_nothing() {
        let row = |n: u8| Row { root: NamespaceId([n; 16]), id: NamespaceId([n + 1; 16]), epoch: n.into() };
        let rows: Vec<Row> = (0..120).map(row).collect();
        let mut pages = encode([9; 16], 5, &rows).to_vec();
        pages.extend([7; 4096]);
        assert_eq!(parse([9; 16], &pages), Some((5, rows.clone())));
        assert_eq!(parse([8; 16], &pages), None, "another medium's");
        for byte in [0, 9, 13, 20, 35, 44, 60, 4700, 6000] {
            let mut bad = pages.clone();
            bad[byte] ^= 1;
            assert_eq!(parse([9; 16], &bad), None, "byte {byte}");
        }
        assert_eq!(parse([9; 16], &pages[..4096]), None);
        assert_eq!(parse([9; 16], &encode([9; 16], 1, &[])), Some((1, Vec::new())));
    }
}
