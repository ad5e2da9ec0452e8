//! The layout of a ledger, in words of 64 bits.
//!
//! ```text
//!   head         magic, version, bytes of the pool, salt, largest number of records, checksum of these; records and
//!                namespaces used so far; whether it is valid; clients that may copy, with a check; the pool's regions:
//!                their number, checksum, and of each its bytes and its node
//!   namespaces   each: epoch with a check, checksum and length of the text, the text that was fingerprinted
//!   records      one for each slot number: checksum (0: none), key, checksum of the block, its bytes, its place
//! ```
//!
//! A checksum includes the salt and the number of its entry, so nothing can be mistaken for something else. It is
//! written last, and cleared first.

use kvdepot_core::limits::{BLOCK_ALIGN_BYTES, NAMESPACE_SPEC_BYTES_MAX, NAMESPACES_MAX, POOL_REGIONS_MAX};
use kvdepot_core::machine::Whole;
use kvdepot_core::runs::{Run, Runs};
use kvdepot_core::{BlockHash, BlockKey, NamespaceId};
use kvdepot_io::checksum::crc64;

use crate::pool::PoolRegion;

pub(super) const MAGIC: u64 = 0x5244_474c_4456_4b00;
/// Version of the layout. Other versions are not read.
pub(super) const VERSION: u64 = 2;

pub(super) const HEAD_MAGIC: usize = 0;
pub(super) const HEAD_VERSION: usize = 1;
pub(super) const HEAD_POOL_BYTES: usize = 2;
pub(super) const HEAD_SALT: usize = 3;
pub(super) const HEAD_RECORDS_MAX: usize = 4;
pub(super) const HEAD_CHECKSUM: usize = 5;
pub(super) const HEAD_RECORDS: usize = 6;
pub(super) const HEAD_NAMESPACES: usize = 7;
pub(super) const HEAD_HOLDS: usize = 8;
pub(super) const HEAD_CLIENTS: usize = 9;
pub(super) const HEAD_REGIONS: usize = 10;
pub(super) const HEAD_REGIONS_CHECKSUM: usize = 11;
const HEAD_REGION: usize = 12;
const HEAD_WORDS: usize = 512;
const _: () = assert!(HEAD_REGION + 2 * POOL_REGIONS_MAX <= HEAD_WORDS);

pub(super) const NAMESPACE_EPOCH: usize = 0;
pub(super) const NAMESPACE_CHECKSUM: usize = 1;
pub(super) const NAMESPACE_BYTES: usize = 2;
pub(super) const NAMESPACE_TEXT: usize = 3;
const NAMESPACE_WORDS: usize = NAMESPACE_TEXT + NAMESPACE_SPEC_BYTES_MAX.div_ceil(8);

/// Number of runs in a record. A block in more pieces has no record.
const RUNS_MAX: usize = 8;
pub(super) const RECORD_WORDS: usize = 16;
const _: () = assert!(8 + RUNS_MAX == RECORD_WORDS);

/// The number in the checksum of the list of regions; that of the head is 0.
pub(super) const REGIONS_NUMBER: usize = 1;

/// Returns the position of a region's entry.
pub(super) const fn region_at(number: usize) -> usize {
    HEAD_REGION + 2 * number
}

/// Encodes a region. The node is stored plus one, and 0 means that there is none.
pub(super) fn region_words(region: &PoolRegion) -> [u64; 2] {
    [region.bytes, region.node.map_or(0, |node| u64::from(node) + 1)]
}

/// Decodes a region.
pub(super) fn region_of([bytes, node]: [u64; 2]) -> Option<PoolRegion> {
    let node = node.checked_sub(1).map(u32::try_from).transpose().ok()?;
    Some(PoolRegion::memory(bytes, node))
}

/// Returns the position of the namespace with this number.
pub(super) const fn namespace_at(number: usize) -> usize {
    HEAD_WORDS + number * NAMESPACE_WORDS
}

/// Returns the position of this slot's record.
pub(super) const fn record_at(slot: usize) -> usize {
    namespace_at(NAMESPACES_MAX) + slot * RECORD_WORDS
}

/// Returns the largest number of slots in a pool of this size.
pub(super) const fn records_max(pool_bytes: u64) -> usize {
    (pool_bytes / BLOCK_ALIGN_BYTES) as usize
}

/// Returns the checksum of words. Never 0, which means none.
pub(super) fn checksum(salt: u64, number: usize, words: &[u64]) -> u64 {
    let mut bytes = Vec::with_capacity(16 + words.len() * 8);
    for word in [salt, number as u64].iter().chain(words) {
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    crc64(&bytes).max(1)
}

/// Returns the checksum of a text of this many bytes, whose last word may be padded.
pub(super) fn text_checksum(salt: u64, number: usize, bytes: usize, words: &[u64]) -> u64 {
    let whole: Vec<u64> = std::iter::once(bytes as u64).chain(words.iter().copied()).collect();
    checksum(salt, number, &whole)
}

/// Encodes an epoch and its check in one word.
pub(super) fn epoch_word(salt: u64, number: usize, epoch: u32) -> u64 {
    let check = checksum(salt, number, &[u64::from(epoch)]) >> 32;
    check << 32 | u64::from(epoch)
}

/// The number in the check of the count of clients, which no namespace has.
const CLIENTS_NUMBER: usize = usize::MAX;

/// Encodes a count of clients and its check in one word.
pub(super) fn clients_word(salt: u64, clients: u32) -> u64 {
    epoch_word(salt, CLIENTS_NUMBER, clients)
}

/// Decodes the count of clients. A damaged count is read as one client, whose exit cannot be watched.
pub(super) fn clients_of(salt: u64, word: u64) -> u32 {
    if word == 0 { 0 } else { epoch_of(salt, CLIENTS_NUMBER, word).unwrap_or(1) }
}

/// Decodes an epoch if its check is correct.
pub(super) fn epoch_of(salt: u64, number: usize, word: u64) -> Option<u32> {
    let epoch = word as u32;
    (epoch_word(salt, number, epoch) == word).then_some(epoch)
}

fn halves(bytes: [u8; 16]) -> [u64; 2] {
    let number = u128::from_le_bytes(bytes);
    [number as u64, (number >> 64) as u64]
}

fn whole(halves: [u64; 2]) -> [u8; 16] {
    (u128::from(halves[0]) | u128::from(halves[1]) << 64).to_le_bytes()
}

/// Encodes a record without its checksum; `None` if the block has too many pieces.
pub(super) fn record_words(block: &Whole) -> Option<[u64; RECORD_WORDS - 1]> {
    let mut words = [0; RECORD_WORDS - 1];
    words[0..2].copy_from_slice(&halves(block.key.namespace.0));
    words[2..4].copy_from_slice(&halves(block.key.hash.0));
    (words[4], words[5], words[6]) = (block.crc64, block.block_bytes, block.runs.len() as u64);
    if block.runs.len() > RUNS_MAX {
        return None;
    }
    for (word, run) in words[7..].iter_mut().zip(&block.runs) {
        let page = |bytes: u64| u32::try_from(bytes / BLOCK_ALIGN_BYTES).ok().map(u64::from);
        *word = page(run.offset)? << 32 | page(run.len)?;
    }
    Some(words)
}

/// Decodes a record for a pool of this size; `None` if its words are invalid.
pub(super) fn block_of(slot: usize, words: &[u64; RECORD_WORDS - 1], pool_bytes: u64) -> Option<Whole> {
    let mut runs = Runs::new();
    for &word in words[7..].get(..usize::try_from(words[6]).ok()?)? {
        let run =
            Run { offset: (word >> 32) * BLOCK_ALIGN_BYTES, len: (word & 0xffff_ffff) * BLOCK_ALIGN_BYTES };
        if run.len == 0 || run.end() > pool_bytes {
            return None;
        }
        runs.push(run);
    }
    let key = BlockKey {
        namespace: NamespaceId(whole([words[0], words[1]])),
        hash: BlockHash(whole([words[2], words[3]])),
    };
    let (crc64, block_bytes) = (words[4], words[5]);
    let bytes: u64 = runs.iter().map(|run| run.len).sum();
    let slot = u32::try_from(slot).ok()?;
    (bytes >= block_bytes && bytes > 0).then_some(Whole { slot, key, runs, block_bytes, crc64 })
}
