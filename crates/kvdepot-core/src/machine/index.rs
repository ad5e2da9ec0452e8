//! From a key to its slot: many small tables, so that the growth of one is a short hold of the depot's lock.

use std::hash::BuildHasher;

use foldhash::fast::FixedState;
use hashbrown::HashTable;

use super::names::PoolKey;
use super::slots::Slots;
use crate::eviction::SlotId;

/// Tables. At eight million blocks each holds eight thousand.
const TABLES: usize = 1024;

/// The slot of each key. Keys themselves stand in the slots only.
#[derive(Clone, Debug)]
pub(crate) struct Index {
    tables: Vec<HashTable<SlotId>>,
    hasher: FixedState,
    len: usize,
}

impl Index {
    /// `seed` makes the order of a table unknown to those who choose keys.
    pub(crate) fn new(seed: u64) -> Self {
        Self { tables: vec![HashTable::new(); TABLES], hasher: FixedState::with_seed(seed), len: 0 }
    }

    pub(crate) fn hash(&self, key: &PoolKey) -> u64 {
        hash_with(&self.hasher, key)
    }

    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn get(&self, slots: &Slots, key: &PoolKey) -> Option<SlotId> {
        let hash = self.hash(key);
        self.tables[table_of(hash)].find(hash, |&id| slots.at(id).key == *key).copied()
    }

    /// Names `id` for its slot's key; which slot was named before.
    pub(crate) fn insert(&mut self, slots: &Slots, id: SlotId) -> Option<SlotId> {
        let key = slots.at(id).key;
        let hash = self.hash(&key);
        let table = &mut self.tables[table_of(hash)];
        if let Some(named) = table.find_mut(hash, |&other| slots.at(other).key == key) {
            return Some(std::mem::replace(named, id));
        }
        let hasher = &self.hasher;
        table.insert_unique(hash, id, |&other| hash_with(hasher, &slots.at(other).key));
        self.len += 1;
        None
    }

    /// Forgets a key if `id` is what it names.
    pub(crate) fn remove(&mut self, slots: &Slots, id: SlotId) -> bool {
        let hash = self.hash(&slots.at(id).key);
        match self.tables[table_of(hash)].find_entry(hash, |&other| other == id) {
            Ok(entry) => {
                entry.remove();
                self.len -= 1;
                true
            }
            Err(_) => false,
        }
    }
}

fn hash_with(hasher: &FixedState, key: &PoolKey) -> u64 {
    hasher.hash_one(key)
}

/// From the middle bits: tables use the highest and the lowest.
const fn table_of(hash: u64) -> usize {
    (hash >> 32) as usize % TABLES
}
