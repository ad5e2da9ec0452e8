//! How blocks and epochs are named in the store, and the head in front of a block.
//!
//! ```text
//!   0  magic "KVDMOON1"      48  token of the record of the namespace's epoch, u64
//!   8  version = 1, u32      56  bytes of the block, u64
//!  12  head bytes, u32       64  CRC-64/NVME of the block
//!  16  block key, 32 bytes   72  CRC-64/NVME of bytes 0..72        80  the block
//! ```
//!
//! The token is drawn when an epoch's record is stored, and is part of the block's name. If the store loses a record,
//! its blocks have no name any more: a namespace cannot fall back to an earlier epoch (P1).

use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId, Result};
use kvdepot_io::checksum::crc64;

/// Bytes in front of a block.
pub(super) const HEAD_BYTES: usize = 80;
/// Space for a record of an epoch; longer values are none.
pub(super) const RECORD_BYTES_MAX: usize = 256;
const MAGIC: [u8; 8] = *b"KVDMOON1";
const VERSION: u32 = 1;

/// Returns the name of a block (P8).
pub(super) fn block(prefix: &str, key: &BlockKey, token: u64) -> String {
    format!("{prefix}/1/{}/{token:016x}/{}", key.namespace, key.hash)
}

/// Returns the name of the record of a namespace's epoch.
pub(super) fn record(prefix: &str, root: NamespaceId) -> String {
    format!("{prefix}/1/{root}/epoch")
}

pub(super) fn head(key: &BlockKey, token: u64, block_bytes: usize, block_crc64: u64) -> [u8; HEAD_BYTES] {
    let mut out = [0; HEAD_BYTES];
    out[..8].copy_from_slice(&MAGIC);
    out[8..12].copy_from_slice(&VERSION.to_le_bytes());
    out[12..16].copy_from_slice(&(HEAD_BYTES as u32).to_le_bytes());
    out[16..48].copy_from_slice(&key.to_bytes());
    out[48..56].copy_from_slice(&token.to_le_bytes());
    out[56..64].copy_from_slice(&(block_bytes as u64).to_le_bytes());
    out[64..72].copy_from_slice(&block_crc64.to_le_bytes());
    let whole = crc64(&out[..72]);
    out[72..].copy_from_slice(&whole.to_le_bytes());
    out
}

/// Checks a head against the requested block. Returns the block's checksum.
pub(super) fn check(
    head_bytes: &[u8; HEAD_BYTES],
    key: &BlockKey,
    token: u64,
    block_bytes: usize,
) -> Result<u64> {
    let mut sum = [0; 8];
    sum.copy_from_slice(&head_bytes[64..72]);
    let block_crc64 = u64::from_le_bytes(sum);
    if *head_bytes == head(key, token, block_bytes, block_crc64) {
        return Ok(block_crc64);
    }
    Err(Error::new(ErrorKind::Corrupt, "a value in Mooncake is not the requested block").with("key", key))
}

/// The stored epoch of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) epoch: u32,
    pub(super) token: u64,
}

impl Record {
    /// Returns the record's text: `kvdepot epoch 1 <namespace> <epoch> <token> <checksum of the text before>`.
    pub(super) fn text(self, root: NamespaceId) -> String {
        let text = format!("kvdepot epoch 1 {root} {} {:016x} ", self.epoch, self.token);
        format!("{text}{:016x}\n", crc64(text.as_bytes()))
    }

    /// Returns `None` for anything but the text of a record of this namespace.
    pub(super) fn parse(text: &[u8], root: NamespaceId) -> Option<Self> {
        let mut words = std::str::from_utf8(text).ok()?.split(' ').skip(4);
        let epoch = words.next()?.parse().ok()?;
        let token = u64::from_str_radix(words.next()?, 16).ok()?;
        let record = Self { epoch, token };
        (record.text(root).as_bytes() == text).then_some(record)
    }
}

#[cfg(test)]
mod tests {
    use kvdepot_core::BlockHash;

    use super::*;

    #[test]
    fn any_other_bit_of_a_head_is_corrupt() {
        let key = BlockKey { namespace: NamespaceId([3; 16]), hash: BlockHash([4; 16]) };
        let good = head(&key, 9, 5000, 0x1234_5678_9abc_def0);
        assert_eq!(check(&good, &key, 9, 5000).unwrap(), 0x1234_5678_9abc_def0);
        for bit in 0..HEAD_BYTES * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(check(&bad, &key, 9, 5000).unwrap_err().kind(), ErrorKind::Corrupt, "bit {bit}");
        }
        assert!(check(&good, &key, 9, 5001).is_err());
        assert!(check(&good, &key, 8, 5000).is_err(), "a block from before the record was lost");
    }

    #[test]
    fn a_damaged_record_is_none() {
        let root = NamespaceId([9; 16]);
        let record = Record { epoch: 41, token: 0xfeed };
        let good = record.text(root);
        assert!(
            good.len() <= RECORD_BYTES_MAX
                && Record { epoch: u32::MAX, token: u64::MAX }.text(root).len() <= RECORD_BYTES_MAX
        );
        assert_eq!(Record::parse(good.as_bytes(), root), Some(record));
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone().into_bytes();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Record::parse(&bad, root), None, "bit {bit}");
        }
        assert_eq!(Record::parse(b"", root), None);
        assert_eq!(Record::parse(good.as_bytes(), NamespaceId([8; 16])), None);
    }
}
