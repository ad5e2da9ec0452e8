//! Which blocks the pool can serve, for lookups: many small tables, each behind a lock of its own that is held for one
//! block at a time. So a lookup never waits for the machine, however long a step takes.
//!
//! Tables hold 64-bit fingerprints. A collision makes a lookup hopeful; who loads the block finds a miss.

use std::hash::BuildHasher;

use foldhash::fast::RandomState;
use hashbrown::HashTable;
use kvdepot_core::BlockKey;
use parking_lot::RwLock;

/// Tables; a power of two. At eight million blocks each holds eight thousand.
const TABLES: usize = 1024;

#[derive(Debug)]
pub(crate) struct Presence {
    tables: Vec<RwLock<HashTable<u64>>>,
    hasher: RandomState,
}

impl Presence {
    pub(crate) fn new() -> Self {
        Self {
            tables: (0..TABLES).map(|_| RwLock::new(HashTable::new())).collect(),
            hasher: RandomState::default(),
        }
    }

    fn table(&self, fingerprint: u64) -> &RwLock<HashTable<u64>> {
        // Tables use the lowest bits and the highest.
        &self.tables[(fingerprint >> 32) as usize % TABLES]
    }

    /// The block became visible, or is no longer. Blocks with one fingerprint are counted.
    pub(crate) fn set(&self, key: &BlockKey, visible: bool) {
        let fingerprint = self.hasher.hash_one(key);
        let mut table = self.table(fingerprint).write();
        if visible {
            table.insert_unique(fingerprint, fingerprint, |other| *other);
        } else if let Ok(entry) = table.find_entry(fingerprint, |other| *other == fingerprint) {
            entry.remove();
        }
    }

    pub(crate) fn contains(&self, key: &BlockKey) -> bool {
        let fingerprint = self.hasher.hash_one(key);
        self.table(fingerprint).read().find(fingerprint, |other| *other == fingerprint).is_some()
    }
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
