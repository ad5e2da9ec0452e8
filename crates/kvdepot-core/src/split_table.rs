//! A hash table of numbers that grows in many short steps. It consists of small tables, one of which is split in two
//! for every few numbers added (linear hashing). So no insert moves more than a few hundred numbers, however many there
//! are.

use std::hint::black_box;

use hashbrown::HashTable;
use smallvec::SmallVec;

/// Maximum average of numbers in a table. Tables that were not split yet in this round have up to twice as many.
const PER_TABLE: usize = 128;
/// Tables in one chunk: adding a table moves no other.
const CHUNK: usize = 1024;

/// Number of hashes that `prefetch` takes without an allocation.
const PREFETCHED: usize = 64;

/// A hash table of numbers. The caller defines what a number means and how it hashes.
#[derive(Clone, Debug)]
pub(crate) struct SplitTable {
    chunks: Vec<Vec<HashTable<u32>>>,
    /// Number of tables when this round of splits began: a power of two, `1 << level`.
    level: u32,
    /// The next table to split.
    split: usize,
    len: usize,
}

impl SplitTable {
    pub(crate) fn new() -> Self {
        Self { chunks: vec![vec![HashTable::new()]], level: 0, split: 0, len: 0 }
    }

    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    const fn tables(&self) -> usize {
        (1 << self.level) + self.split
    }

    /// Uses the middle bits, because tables use the highest and the lowest.
    const fn table_of(&self, hash: u64) -> usize {
        let bits = (hash >> 16) as usize & u32::MAX as usize;
        let low = bits & ((1 << self.level) - 1);
        if low < self.split { bits & ((2 << self.level) - 1) } else { low }
    }

    fn table(&self, hash: u64) -> &HashTable<u32> {
        let at = self.table_of(hash);
        &self.chunks[at / CHUNK][at % CHUNK]
    }

    fn at_mut(&mut self, at: usize) -> &mut HashTable<u32> {
        &mut self.chunks[at / CHUNK][at % CHUNK]
    }

    pub(crate) fn find(&self, hash: u64, is: impl FnMut(&u32) -> bool) -> Option<u32> {
        self.table(hash).find(hash, is).copied()
    }

    /// Reads the tables of these hashes, so that following calls find them in the processor's caches. The reads are
    /// independent of each other, so the processor waits for the memory of all of them together.
    pub(crate) fn prefetch(&self, hashes: impl Iterator<Item = u64>) {
        let tables: SmallVec<[(&HashTable<u32>, u64); PREFETCHED]> =
            hashes.map(|hash| (self.table(hash), hash)).collect();
        // First the headers, which say where the entries are.
        black_box(tables.iter().fold(0, |sum, (table, _)| sum ^ table.capacity()));
        black_box(
            tables.iter().fold(false, |any, (table, hash)| any | table.find(*hash, |_| true).is_some()),
        );
    }

    pub(crate) fn find_mut(&mut self, hash: u64, is: impl FnMut(&u32) -> bool) -> Option<&mut u32> {
        let at = self.table_of(hash);
        self.at_mut(at).find_mut(hash, is)
    }

    /// Adds a number that is not present. `hash_of` returns the hash of any number that is.
    pub(crate) fn insert(&mut self, hash: u64, number: u32, hash_of: impl Fn(&u32) -> u64) {
        let at = self.table_of(hash);
        self.at_mut(at).insert_unique(hash, number, &hash_of);
        self.len += 1;
        if self.len > self.tables() * PER_TABLE {
            self.split(hash_of);
        }
    }

    /// Removes a number. Returns whether it was present.
    pub(crate) fn remove(&mut self, hash: u64, is: impl FnMut(&u32) -> bool) -> bool {
        let at = self.table_of(hash);
        let Ok(entry) = self.at_mut(at).find_entry(hash, is) else { return false };
        entry.remove();
        self.len -= 1;
        true
    }

    /// Splits the next table in two.
    fn split(&mut self, hash_of: impl Fn(&u32) -> u64) {
        let (old, new) = (self.split, self.tables());
        self.split += 1;
        if self.split == 1 << self.level {
            (self.level, self.split) = (self.level + 1, 0);
        }
        let both = std::mem::take(self.at_mut(old));
        // Capacity for the numbers of its half, and for some more.
        let capacity = both.len() * 5 / 8;
        let (mut stay, mut go) = (HashTable::with_capacity(capacity), HashTable::with_capacity(capacity));
        for number in both {
            let hash = hash_of(&number);
            let half = if self.table_of(hash) == old { &mut stay } else { &mut go };
            half.insert_unique(hash, number, &hash_of);
        }
        *self.at_mut(old) = stay;
        if new.is_multiple_of(CHUNK) {
            self.chunks.push(Vec::with_capacity(CHUNK));
        }
        self.chunks[new / CHUNK].push(go);
    }

    /// Returns the number of numbers in the largest table: one step of growth moves at most that many.
    #[cfg(test)]
    pub(crate) fn largest(&self) -> usize {
        self.chunks.iter().flatten().map(HashTable::len).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::hash::BuildHasher;

    use foldhash::fast::FixedState;

    use super::*;

    #[test]
    fn it_holds_what_came_and_did_not_go() {
        let (mut table, mut model) = (SplitTable::new(), HashSet::new());
        let hasher = FixedState::with_seed(7);
        let hash = |number: &u32| hasher.hash_one(number);
        let mut random = 1_u64;
        for _ in 0..300_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let number = (random >> 40) as u32 % 50_000;
            let there = table.find(hash(&number), |other| *other == number);
            assert_eq!(there, model.contains(&number).then_some(number));
            if random >> 62 == 0 {
                assert_eq!(table.remove(hash(&number), |other| *other == number), model.remove(&number));
            } else if model.insert(number) {
                table.insert(hash(&number), number, hash);
            }
            assert_eq!(table.len(), model.len());
        }
    }

    #[test]
    fn no_step_of_its_growth_moves_many_numbers() {
        let hasher = FixedState::with_seed(3);
        let mut table = SplitTable::new();
        for number in 0..1_000_000 {
            table.insert(hasher.hash_one(number), number, |other| hasher.hash_one(other));
            if number % 4099 == 0 {
                assert!(table.largest() <= 4 * PER_TABLE, "{} of {number}", table.largest());
            }
        }
        let found = |number| table.find(hasher.hash_one(number), |other| *other == number);
        assert!((0..1_000_000).step_by(997).all(|number| found(number) == Some(number)));
    }

    #[test]
    fn an_insert_asks_for_the_hashes_of_a_few_numbers_only() {
        let hasher = FixedState::with_seed(5);
        let mut table = SplitTable::new();
        let asked = std::cell::Cell::new(0);
        for number in 0..300_000 {
            asked.set(0);
            table.insert(hasher.hash_one(number), number, |other| {
                asked.set(asked.get() + 1);
                hasher.hash_one(other)
            });
            assert!(asked.get() <= 8 * PER_TABLE, "{} at {number}", asked.get());
        }
    }
}
