//! The index of blocks that the pool can serve, for lookups: many small tables, each with its own lock, held for one
//! block at a time. So a lookup never waits for the machine, however long a step takes.
//!
//! Tables hold fingerprints of 54 bits, 14 of which are the number of the table. A collision is a false positive of a
//! lookup; loading the block is then a miss.

use std::hash::BuildHasher;

use foldhash::fast::RandomState;
use hashbrown::HashTable;
use kvdepot_core::BlockKey;
use parking_lot::{RwLock, RwLockReadGuard};
use smallvec::SmallVec;

/// Number of tables; a power of two. With eight million blocks each holds five hundred, so a table that grows moves no
/// more than that under the depot's lock.
const TABLES: usize = 1 << 14;

/// Number of blocks searched at a time.
const AT_A_TIME: usize = 32;

/// A table's entry for a key.
type Fingerprint = [u8; 5];

/// The table of a key, and its entry there.
type Place<'a> = (&'a RwLock<HashTable<Fingerprint>>, Fingerprint);

/// Cache-line aligned: a lookup in one table does not slow down a change of another.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Table(RwLock<HashTable<Fingerprint>>);

#[derive(Debug)]
pub(crate) struct Presence {
    tables: Vec<Table>,
    hasher: RandomState,
}

impl Presence {
    pub(crate) fn new() -> Self {
        Self { tables: (0..TABLES).map(|_| Table::default()).collect(), hasher: RandomState::default() }
    }

    fn place(&self, key: &BlockKey) -> Place<'_> {
        let hash = self.hasher.hash_one(key);
        let [a, b, c, d, e, ..] = hash.to_le_bytes();
        (&self.tables[(hash >> 48) as usize % TABLES].0, [a, b, c, d, e])
    }

    /// Applies changes of blocks' visibility. Blocks with equal fingerprints are counted. One caller at a time.
    pub(crate) fn set(&self, changes: &[(BlockKey, bool)]) {
        for changes in changes.chunks(AT_A_TIME) {
            let places: SmallVec<[Place<'_>; AT_A_TIME]> =
                changes.iter().map(|(key, _)| self.place(key)).collect();
            if changes.len() > 1 {
                // Prefetches the memory for all changes into the processor's cache at once.
                std::hint::black_box(look(&places));
            }
            for ((table, fingerprint), (_, visible)) in places.iter().zip(changes) {
                set_one(table, *fingerprint, *visible);
            }
        }
    }

    pub(crate) fn contains(&self, key: &BlockKey) -> bool {
        let (table, fingerprint) = self.place(key);
        holds(&table.read(), &fingerprint)
    }

    /// Returns which of these blocks can be served.
    pub(crate) fn contain<'a>(&self, keys: &'a [BlockKey]) -> impl Iterator<Item = bool> + use<'_, 'a> {
        keys.chunks(AT_A_TIME).flat_map(|keys| {
            let places: SmallVec<[Place<'_>; AT_A_TIME]> = keys.iter().map(|key| self.place(key)).collect();
            look(&places)
        })
    }

    /// Returns how many leading blocks can be served.
    pub(crate) fn prefix(&self, keys: &[BlockKey]) -> usize {
        self.contain(keys).take_while(|there| *there).count()
    }
}

fn set_one(table: &RwLock<HashTable<Fingerprint>>, fingerprint: Fingerprint, visible: bool) {
    let mut table = table.write();
    let hash = spread(&fingerprint);
    if visible {
        table.insert_unique(hash, fingerprint, spread);
    } else if let Ok(entry) = table.find_entry(hash, |other| *other == fingerprint) {
        entry.remove();
    }
}

/// Searches up to `AT_A_TIME` blocks. The searches are independent and, after the locks are taken, need no further lock,
/// so the processor waits for the memory of all of them together. If not all locks are free it takes them one at a time:
/// a reader never waits while it holds a lock, and never overtakes a waiting writer.
fn look(places: &[Place<'_>]) -> SmallVec<[bool; AT_A_TIME]> {
    std::hint::black_box(places.iter().fold(false, |any, (table, _)| any | table.is_locked()));
    let tables: Option<SmallVec<[RwLockReadGuard<'_, _>; AT_A_TIME]>> =
        places.iter().map(|(table, _)| table.try_read()).collect();
    match tables {
        Some(tables) => {
            let looks = tables.iter().zip(places);
            looks.map(|(table, (_, fingerprint))| holds(table, fingerprint)).collect()
        }
        None => places.iter().map(|(table, fingerprint)| holds(&table.read(), fingerprint)).collect(),
    }
}

fn holds(table: &HashTable<Fingerprint>, fingerprint: &Fingerprint) -> bool {
    table.find(spread(fingerprint), |other| other == fingerprint).is_some()
}

/// Tables use the lowest and the highest bits of a hash, so all of these depend on the complete fingerprint.
fn spread(&[a, b, c, d, e]: &Fingerprint) -> u64 {
    let product = u64::from_le_bytes([a, b, c, d, e, 0, 0, 0]).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    product ^ (product >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvdepot_core::{BlockHash, NamespaceId};

    #[test]
    fn a_block_is_there_as_often_as_it_came() {
        let presence = Presence::new();
        let key = |n: u8| BlockKey { namespace: NamespaceId([1; 16]), hash: BlockHash([n; 16]) };
        let all: Vec<_> = (0..200).map(|n| (key(n), true)).collect();
        presence.set(&all);
        presence.set(&[(key(7), true), (key(7), false)]);
        assert!(presence.contains(&key(7)) && presence.contains(&key(199)) && !presence.contains(&key(200)));
        let keys: Vec<_> = (0..=200).map(key).collect();
        let there: Vec<_> = presence.contain(&keys).collect();
        assert!(there[..200].iter().all(|there| *there) && !there[200]);
        presence.set(&[(key(7), false)]);
        assert!(!presence.contains(&key(7)) && presence.prefix(&keys) == 7);
    }

    /// Otherwise endlessly overlapping readers would starve the holder of the depot's lock.
    #[test]
    fn a_reader_does_not_pass_a_writer_that_waits() {
        let presence = Presence::new();
        let keys: Vec<_> =
            (0..4).map(|n| BlockKey { namespace: NamespaceId([1; 16]), hash: BlockHash([n; 16]) }).collect();
        presence.set(&[(keys[0], true)]);
        let held = presence.place(&keys[0]).0.read();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| presence.set(&[(keys[0], false)]));
            // From here on the writer waits for `held`.
            while presence.place(&keys[0]).0.try_read().is_some() {
                std::thread::yield_now();
            }
            let reader = scope.spawn(|| presence.contain(&keys).collect::<Vec<_>>());
            // Time for a reader to overtake.
            (0..1000).for_each(|_| std::thread::yield_now());
            drop(held);
            writer.join().unwrap();
            assert_eq!(reader.join().unwrap(), [false; 4], "it looked behind the writer");
        });
    }
}
