//! Which blocks the pool can serve, for lookups: many small tables, each behind a lock of its own that is held for one
//! block at a time. So a lookup never waits for the machine, however long a step takes.
//!
//! Tables hold fingerprints of 50 bits, 10 of which are the number of the table. A collision makes a lookup hopeful; who
//! loads the block finds a miss.

use std::hash::BuildHasher;

use foldhash::fast::RandomState;
use hashbrown::HashTable;
use kvdepot_core::BlockKey;
use parking_lot::RwLock;

/// Tables; a power of two. At eight million blocks each holds eight thousand.
const TABLES: usize = 1024;

/// What a table holds of a key.
type Fingerprint = [u8; 5];

#[derive(Debug)]
pub(crate) struct Presence {
    tables: Vec<RwLock<HashTable<Fingerprint>>>,
    hasher: RandomState,
}

impl Presence {
    pub(crate) fn new() -> Self {
        Self {
            tables: (0..TABLES).map(|_| RwLock::new(HashTable::new())).collect(),
            hasher: RandomState::default(),
        }
    }

    fn place(&self, key: &BlockKey) -> (&RwLock<HashTable<Fingerprint>>, Fingerprint) {
        let hash = self.hasher.hash_one(key);
        let [a, b, c, d, e, ..] = hash.to_le_bytes();
        (&self.tables[(hash >> 48) as usize % TABLES], [a, b, c, d, e])
    }

    /// The block became visible, or is no longer. Blocks with one fingerprint are counted.
    pub(crate) fn set(&self, key: &BlockKey, visible: bool) {
        let (table, fingerprint) = self.place(key);
        let mut table = table.write();
        let hash = spread(&fingerprint);
        if visible {
            table.insert_unique(hash, fingerprint, spread);
        } else if let Ok(entry) = table.find_entry(hash, |other| *other == fingerprint) {
            entry.remove();
        }
    }

    pub(crate) fn contains(&self, key: &BlockKey) -> bool {
        let (table, fingerprint) = self.place(key);
        table.read().find(spread(&fingerprint), |other| *other == fingerprint).is_some()
    }
}

/// Tables use the lowest bits and the highest of a hash, so all of them depend on the whole fingerprint.
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
        (0..200).for_each(|n| presence.set(&key(n), true));
        presence.set(&key(7), true);
        presence.set(&key(7), false);
        assert!(presence.contains(&key(7)) && presence.contains(&key(199)) && !presence.contains(&key(200)));
        presence.set(&key(7), false);
        assert!(!presence.contains(&key(7)));
    }
}
