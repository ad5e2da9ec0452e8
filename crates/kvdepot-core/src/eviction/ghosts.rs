//! Keys that recently left the small queue of S3-FIFO, as 32-bit fingerprints. A collision only leads to a worse choice
//! of a victim.

use std::collections::VecDeque;
use std::hash::BuildHasher;

use crate::split_table::SplitTable;
use foldhash::fast::FixedState;

/// Number of fingerprints per chunk of the row.
const CHUNK: usize = 4096;
/// Maximum number of keys to forget for each key that is added.
const POPS_MAX: usize = 4;

/// Remembered keys, oldest first. Takes about 14 bytes per key.
#[derive(Debug)]
pub(super) struct Ghosts {
    /// Number of the newest entry of each remembered key; a key's earlier entries are stale.
    newest: SplitTable,
    hasher: FixedState,
    row: Row,
}

/// A queue in chunks whose entries are found by number. Numbers wrap around; there are never 2^32 entries.
#[derive(Debug, Default)]
struct Row {
    chunks: VecDeque<Vec<u32>>,
    /// Number of entries that have left the first chunk.
    gone: usize,
    len: usize,
    /// Number of the oldest entry.
    first: u32,
}

impl Row {
    fn push(&mut self, fingerprint: u32) -> u32 {
        if self.chunks.back().is_none_or(|chunk| chunk.len() == CHUNK) {
            self.chunks.push_back(Vec::with_capacity(CHUNK));
        }
        self.chunks.back_mut().expect("a chunk was just added").push(fingerprint);
        self.len += 1;
        self.first.wrapping_add((self.len - 1) as u32)
    }

    fn pop(&mut self) -> Option<(u32, u32)> {
        let fingerprint = *self.chunks.front()?.get(self.gone)?;
        let number = self.first;
        (self.first, self.len, self.gone) = (number.wrapping_add(1), self.len - 1, self.gone + 1);
        if self.gone == CHUNK {
            self.chunks.pop_front();
            self.gone = 0;
        }
        Some((number, fingerprint))
    }

    fn at(&self, number: u32) -> Option<u32> {
        let at = self.gone + number.wrapping_sub(self.first) as usize;
        self.chunks.get(at / CHUNK)?.get(at % CHUNK).copied()
    }
}

impl Ghosts {
    pub(super) fn new() -> Self {
        Self { newest: SplitTable::new(), hasher: FixedState::default(), row: Row::default() }
    }

    /// Adds a key. If there are more than `keys_max` (P7), forgets the oldest ones, a few per call.
    pub(super) fn remember(&mut self, fingerprint: u32, keys_max: usize) {
        let number = self.row.push(fingerprint);
        let (row, hasher) = (&self.row, &self.hasher);
        let hash = hasher.hash_one(fingerprint);
        match self.newest.find_mut(hash, |&known| row.at(known) == Some(fingerprint)) {
            Some(known) => *known = number,
            None => {
                let rehash = |known: &u32| hasher.hash_one(row.at(*known).unwrap_or_default());
                self.newest.insert(hash, number, rehash);
            }
        }
        // The work per call is bounded: after a reset there are far fewer slots than keys.
        for _ in 0..POPS_MAX {
            if self.row.len <= keys_max.max(1) {
                return;
            }
            let Some((number, fingerprint)) = self.row.pop() else { return };
            let hash = self.hasher.hash_one(fingerprint);
            self.newest.remove(hash, |&known| known == number);
        }
    }

    /// Forgets the key. Returns whether it was remembered.
    pub(super) fn forget(&mut self, fingerprint: u32) -> bool {
        let (row, hash) = (&self.row, self.hasher.hash_one(fingerprint));
        self.newest.remove(hash, |&known| row.at(known) == Some(fingerprint))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_are_forgotten_and_their_memory_comes_back() {
        let mut ghosts = Ghosts::new();
        for key in 0..100_000 {
            ghosts.remember(key, 10_000);
        }
        assert_eq!(ghosts.newest.len(), 10_000);
        assert!(ghosts.row.chunks.len() <= 10_000 / CHUNK + 2);
        assert!(!ghosts.forget(89_999) && ghosts.forget(90_000) && !ghosts.forget(90_000));
    }

    #[test]
    fn a_key_that_comes_again_counts_from_its_newest_entry() {
        let mut ghosts = Ghosts::new();
        ghosts.row.first = u32::MAX - 1;
        for key in [1, 2, 1, 3] {
            ghosts.remember(key, 3);
        }
        ghosts.remember(4, 3);
        assert!(!ghosts.forget(2) && ghosts.forget(1) && ghosts.forget(3) && ghosts.forget(4));
    }
}
