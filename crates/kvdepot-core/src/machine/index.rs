//! Index from a key to its slot. Only the slots store the keys.

use std::hash::BuildHasher;

use foldhash::fast::FixedState;

use super::names::PoolKey;
use super::slots::Slots;
use crate::eviction::SlotId;
use crate::split_table::SplitTable;

/// The slot of each key.
#[derive(Clone, Debug)]
pub(crate) struct Index {
    slots: SplitTable,
    hasher: FixedState,
}

impl Index {
    /// Makes an empty index. `seed` hides the order of a table from clients that choose keys.
    pub(crate) fn new(seed: u64) -> Self {
        Self { slots: SplitTable::new(), hasher: FixedState::with_seed(seed) }
    }

    pub(crate) fn hash(&self, key: &PoolKey) -> u64 {
        self.hasher.hash_one(key)
    }

    pub(crate) const fn len(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn get(&self, slots: &Slots, key: &PoolKey) -> Option<SlotId> {
        self.get_hashed(slots, key, self.hash(key))
    }

    /// Like `get`, for a caller that has the key's hash.
    pub(crate) fn get_hashed(&self, slots: &Slots, key: &PoolKey, hash: u64) -> Option<SlotId> {
        self.slots.find(hash, |&id| slots.at(id).key == *key)
    }

    /// Brings the entries of keys with these hashes into the processor's caches.
    pub(crate) fn prefetch(&self, hashes: impl Iterator<Item = u64>) {
        self.slots.prefetch(hashes);
    }

    /// Adds a key that is not present. `hash` is its hash.
    pub(crate) fn insert_new(&mut self, slots: &Slots, id: SlotId, hash: u64) {
        debug_assert!(self.get(slots, &slots.at(id).key).is_none(), "the key is present");
        let hasher = &self.hasher;
        self.slots.insert(hash, id, |&other| hasher.hash_one(slots.at(other).key));
    }

    /// Makes its slot's key point to `id`. Returns the slot that it pointed to before.
    pub(crate) fn insert(&mut self, slots: &Slots, id: SlotId) -> Option<SlotId> {
        let key = slots.at(id).key;
        let hash = self.hash(&key);
        if let Some(named) = self.slots.find_mut(hash, |&other| slots.at(other).key == key) {
            return Some(std::mem::replace(named, id));
        }
        let hasher = &self.hasher;
        self.slots.insert(hash, id, |&other| hasher.hash_one(slots.at(other).key));
        None
    }

    /// Removes a key if it points to `id`.
    pub(crate) fn remove(&mut self, slots: &Slots, id: SlotId) -> bool {
        self.slots.remove(self.hash(&slots.at(id).key), |&other| other == id)
    }
}
