//! A block as a value of an InfiniStore server, which knows neither namespaces nor checksums: our header goes in front.
//!
//! ```text
//!   0  magic "KVDVALUE"      16  block key, 32 bytes      56  CRC-64/NVME of the block
//!   8  version = 1, u32      48  bytes of the block, u64  64  CRC-64/NVME of bytes 0..64
//!  12  header bytes, u32                                  72  the block
//! ```
//!
//! That server shows a key before its value has arrived, and crashes if a client requests it then. So a block counts as
//! present when a second, small value exists. It is stored after the first, and is sent in one piece (P1).

use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceSpec, Result};
use kvdepot_io::checksum::crc64;

/// Bytes before the block.
pub(super) const HEADER_BYTES: usize = 72;
const MAGIC: [u8; 8] = *b"KVDVALUE";
const VERSION: u32 = 1;
/// Content of the small value.
pub(super) const MARK: &[u8] = b"kvdepot\n";

/// Returns the string under which a block is stored (P8).
pub(super) fn block_name(key: &BlockKey) -> String {
    format!("kvdepot1/{}/{}", key.namespace, key.hash)
}

/// Returns the string of the mark that shows that the block is complete.
pub(super) fn mark_name(key: &BlockKey) -> String {
    format!("{}/whole", block_name(key))
}

/// Returns the string of the entry that shows that a namespace has reached an epoch.
pub(super) fn epoch_name(spec: &NamespaceSpec, epoch: u32) -> String {
    format!("kvdepot1/{}/epoch/{epoch}", spec.root())
}

pub(super) fn encode(key: &BlockKey, block_bytes: usize, block_crc64: u64) -> [u8; HEADER_BYTES] {
    let mut out = [0; HEADER_BYTES];
    out[..8].copy_from_slice(&MAGIC);
    out[8..12].copy_from_slice(&VERSION.to_le_bytes());
    out[12..16].copy_from_slice(&(HEADER_BYTES as u32).to_le_bytes());
    out[16..48].copy_from_slice(&key.to_bytes());
    out[48..56].copy_from_slice(&(block_bytes as u64).to_le_bytes());
    out[56..64].copy_from_slice(&block_crc64.to_le_bytes());
    let whole = crc64(&out[..64]);
    out[64..].copy_from_slice(&whole.to_le_bytes());
    out
}

/// Checks a header against the requested block. Returns the block's checksum.
pub(super) fn check(header: &[u8; HEADER_BYTES], key: &BlockKey, block_bytes: usize) -> Result<u64> {
    let mut sum = [0; 8];
    sum.copy_from_slice(&header[56..64]);
    let block_crc64 = u64::from_le_bytes(sum);
    if *header == encode(key, block_bytes, block_crc64) {
        return Ok(block_crc64);
    }
    Err(Error::new(ErrorKind::Corrupt, "a remote value is not the requested block").with("key", key))
}

#[cfg(test)]
mod tests {
    use kvdepot_core::{BlockHash, NamespaceId};

    use super::*;

    #[test]
    fn any_other_bit_is_corrupt() {
        let key = BlockKey { namespace: NamespaceId([3; 16]), hash: BlockHash([4; 16]) };
        let good = encode(&key, 5000, 0x1234_5678_9abc_def0);
        assert_eq!(check(&good, &key, 5000).unwrap(), 0x1234_5678_9abc_def0);
        for bit in 0..HEADER_BYTES * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(check(&bad, &key, 5000).unwrap_err().kind(), ErrorKind::Corrupt, "bit {bit}");
        }
        assert!(check(&good, &key, 5001).is_err());
        assert_ne!(block_name(&key), mark_name(&key));
    }
}
