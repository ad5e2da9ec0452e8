//! The bytes and the name of a pack: several small blocks in one object, as drawn in `docs/format.md`.
//!
//! The head lists the blocks; their block files follow without gaps. The head is only a guide: each block file has its
//! own key and checksums, which every read compares (P1).

use kvdepot_core::limits::{BLOCK_ALIGN_BYTES, OBJECT_PACK_BLOCKS_MAX};
use kvdepot_core::{BlockHash, Error, ErrorKind, NamespaceId, Result};
use kvdepot_io::checksum::crc64;

/// First bytes of every pack.
const MAGIC: [u8; 8] = *b"KVDPACK\n";
/// Version of the format that this build writes and reads.
const VERSION: u32 = 1;

const AT_VERSION: usize = 8;
const AT_BLOCKS: usize = 12;
const AT_NAMESPACE: usize = 16;
const AT_CHECKSUM: usize = 32;
const FIXED_BYTES: usize = 40;
/// A block's hash and the number of its pages.
const ENTRY_BYTES: usize = 20;
/// A block file has a page of header and a page of payload at least.
const BLOCK_BYTES_MIN: u64 = 2 * BLOCK_ALIGN_BYTES;

/// The name of a pack within its namespace. Names are ordered by the time at which their depots wrote them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(in crate::object) struct PackName {
    /// Milliseconds since 1970 by the clock of the depot that wrote it.
    pub(super) time_ms: u64,
    /// Different for packs of the same time.
    pub(super) random: u64,
    /// Number of its blocks, from which a reader computes the length of the head.
    pub(super) blocks: u32,
}

impl PackName {
    /// Parses the last part of an object's name.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut fields = text.split('-');
        let mut next = || u64::from_str_radix(fields.next()?, 16).ok();
        let name = Self { time_ms: next()?, random: next()?, blocks: u32::try_from(next()?).ok()? };
        // Names are compared as numbers and listed as texts: they must have the usual number of digits.
        let is_possible =
            (1..=OBJECT_PACK_BLOCKS_MAX).contains(&(name.blocks as usize)) && name.time_ms >> 48 == 0;
        (is_possible && name.to_string() == text).then_some(name)
    }

    pub(super) const fn head_bytes(&self) -> usize {
        (FIXED_BYTES + ENTRY_BYTES * self.blocks as usize).next_multiple_of(BLOCK_ALIGN_BYTES as usize)
    }
}

impl std::fmt::Display for PackName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:012x}-{:016x}-{:x}", self.time_ms, self.random, self.blocks)
    }
}

/// A block of a pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) hash: BlockHash,
    /// Position of its block file in the object.
    pub(super) offset: u64,
    /// Bytes of its block file.
    pub(super) bytes: u64,
}

/// Returns the head of a pack with these blocks, and the blocks' places.
pub(super) fn encode(namespace: NamespaceId, blocks: &[(BlockHash, u64)]) -> Result<(Vec<u8>, Vec<Entry>)> {
    let too_many = || Error::new(ErrorKind::Config, "a pack holds fewer and smaller blocks");
    let count = u32::try_from(blocks.len()).map_err(|_| too_many())?;
    let head_bytes = PackName { time_ms: 0, random: 0, blocks: count }.head_bytes();
    let mut head = vec![0; head_bytes];
    let mut put = |at: usize, bytes: &[u8]| head[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &MAGIC);
    put(AT_VERSION, &VERSION.to_le_bytes());
    put(AT_BLOCKS, &count.to_le_bytes());
    put(AT_NAMESPACE, &namespace.0);
    let (mut offset, mut entries) = (head_bytes as u64, Vec::with_capacity(blocks.len()));
    for (number, (hash, bytes)) in blocks.iter().enumerate() {
        let pages = u32::try_from(bytes / BLOCK_ALIGN_BYTES).map_err(|_| too_many())?;
        let at = FIXED_BYTES + number * ENTRY_BYTES;
        put(at, &hash.0);
        put(at + 16, &pages.to_le_bytes());
        entries.push(Entry { hash: *hash, offset, bytes: *bytes });
        offset += bytes;
    }
    let checksum = crc64(&head);
    head[AT_CHECKSUM..FIXED_BYTES].copy_from_slice(&checksum.to_le_bytes());
    Ok((head, entries))
}

/// Returns the places of a pack's blocks. `object_bytes` is the length of the whole object.
pub(super) fn decode(
    head: &[u8],
    name: PackName,
    namespace: NamespaceId,
    object_bytes: u64,
) -> Result<Vec<Entry>> {
    let corrupt = |what: &str| Error::new(ErrorKind::Corrupt, what.to_owned()).with("pack", name);
    if head.len() != name.head_bytes() || head[..8] != MAGIC {
        return Err(corrupt("an object with the name of a pack is none"));
    }
    let u32_at = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    if u32_at(AT_VERSION) != VERSION {
        let error = Error::new(ErrorKind::Unsupported, "a pack has a later version of the format");
        return Err(error.with("pack", name).with("version", u32_at(AT_VERSION)));
    }
    let mut plain = head.to_vec();
    plain[AT_CHECKSUM..FIXED_BYTES].fill(0);
    if crc64(&plain).to_le_bytes() != head[AT_CHECKSUM..FIXED_BYTES] {
        return Err(corrupt("a pack's head has another checksum"));
    }
    if u32_at(AT_BLOCKS) != name.blocks || head[AT_NAMESPACE..AT_CHECKSUM] != namespace.0 {
        return Err(corrupt("a pack is another's: it was copied or renamed"));
    }
    let mut offset = head.len() as u64;
    let mut entries = Vec::with_capacity(name.blocks as usize);
    for entry in head[FIXED_BYTES..].chunks_exact(ENTRY_BYTES).take(name.blocks as usize) {
        let (hash, pages) = entry.split_at(16);
        let mut key = [0; 16];
        key.copy_from_slice(hash);
        let bytes =
            u64::from(u32::from_le_bytes([pages[0], pages[1], pages[2], pages[3]])) * BLOCK_ALIGN_BYTES;
        if bytes < BLOCK_BYTES_MIN {
            return Err(corrupt("a pack has a block without bytes"));
        }
        entries.push(Entry { hash: BlockHash(key), offset, bytes });
        offset += bytes;
    }
    if offset != object_bytes {
        return Err(corrupt("a pack's object has another length").with("bytes", object_bytes));
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: PackName = PackName { time_ms: 0x19a_0000_0000, random: 7, blocks: 3 };

    fn made() -> (Vec<u8>, Vec<Entry>, u64) {
        let blocks: Vec<_> = (1..=3_u8).map(|n| (BlockHash([n; 16]), u64::from(n) * 8192)).collect();
        let (head, entries) = encode(NamespaceId([9; 16]), &blocks).unwrap();
        let total = head.len() as u64 + 6 * 8192;
        (head, entries, total)
    }

    #[test]
    fn a_pack_is_read_back() {
        let (head, entries, total) = made();
        assert_eq!(decode(&head, NAME, NamespaceId([9; 16]), total).unwrap(), entries);
        let places: Vec<_> = entries.iter().map(|entry| (entry.offset, entry.bytes)).collect();
        assert_eq!(places, [(4096, 8192), (12288, 16384), (28672, 24576)]);
    }

    #[test]
    fn every_damaged_byte_of_a_head_is_found() {
        let (head, _, total) = made();
        for at in 0..head.len() {
            let mut other = head.clone();
            other[at] ^= 0x10;
            assert!(decode(&other, NAME, NamespaceId([9; 16]), total).is_err(), "byte {at}");
        }
        for total in [total - 4096, total + 1] {
            assert!(decode(&head, NAME, NamespaceId([9; 16]), total).is_err());
        }
        assert!(decode(&head, NAME, NamespaceId([8; 16]), total).is_err());
        assert!(decode(&head, PackName { blocks: 2, ..NAME }, NamespaceId([9; 16]), total).is_err());
        assert!(decode(&head[..4000], NAME, NamespaceId([9; 16]), total).is_err());
        let (head, _) = encode(NamespaceId([9; 16]), &[(BlockHash([1; 16]), 4096)]).unwrap();
        let one = PackName { blocks: 1, ..NAME };
        assert!(decode(&head, one, NamespaceId([9; 16]), 8192).is_err(), "a header without payload");
    }

    #[test]
    fn names_are_read_back_and_ordered_by_time() {
        assert_eq!(PackName::parse(&NAME.to_string()), Some(NAME));
        let later = PackName { time_ms: NAME.time_ms + 1, random: 0, blocks: 1 };
        assert!(NAME < later && NAME.to_string() < later.to_string());
        for text in [
            "",
            "1-2",
            "1-2-3",
            "00000000000g-0000000000000007-3",
            "019a00000000-0000000000000007-0",
            "1000000000000-0000000000000007-3",
        ] {
            assert_eq!(PackName::parse(text), None, "{text}");
        }
        let most = PackName { blocks: OBJECT_PACK_BLOCKS_MAX as u32, ..NAME };
        assert_eq!(PackName::parse(&most.to_string()), Some(most));
        assert_eq!(PackName::parse(&PackName { blocks: most.blocks + 1, ..NAME }.to_string()), None);
    }
}
