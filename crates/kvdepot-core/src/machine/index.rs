//! Index from a key to its slot. Only the slots store the keys.

use std::hash::BuildHasher;

use foldhash::fast::FixedState;
use xxhash_rust::xxh3::xxh3_128;

use super::names::PoolKey;
use super::slots::Slots;
use crate::eviction::SlotId;
use crate::split_table::SplitTable;

/// The slot of each key.
#[derive(Clone, Debug)]
pub(crate) struct Index {
    slots: SplitTable,
    hasher: KeyHasher,
}

/// Hashes keys that clients may choose. The hash function multiplies the halves of a block hash, each combined with a number
/// of its own, and its seed hides the first number only. Whoever knew the second could choose keys that all collide, so the
/// block hash is combined with a secret before.
#[derive(Clone, Debug)]
struct KeyHasher {
    state: FixedState,
    secret: u128,
}

impl KeyHasher {
    fn new(seed: u64) -> Self {
        Self { state: FixedState::with_seed(seed), secret: xxh3_128(&seed.to_le_bytes()) }
    }

    fn hash(&self, key: &PoolKey) -> u64 {
        self.state.hash_one((key.space, u128::from_le_bytes(key.hash.0) ^ self.secret))
    }
}

impl Index {
    /// Makes an empty index. `seed` hides the order of a table from clients that choose keys.
    pub(crate) fn new(seed: u64) -> Self {
        Self { slots: SplitTable::new(), hasher: KeyHasher::new(seed) }
    }

    pub(crate) fn hash(&self, key: &PoolKey) -> u64 {
        self.hasher.hash(key)
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
        self.slots.insert(hash, id, |&other| hasher.hash(&slots.at(other).key));
    }

    /// Makes its slot's key point to `id`. Returns the slot that it pointed to before.
    pub(crate) fn insert(&mut self, slots: &Slots, id: SlotId) -> Option<SlotId> {
        let key = slots.at(id).key;
        let hash = self.hash(&key);
        if let Some(named) = self.slots.find_mut(hash, |&other| slots.at(other).key == key) {
            return Some(std::mem::replace(named, id));
        }
        let hasher = &self.hasher;
        self.slots.insert(hash, id, |&other| hasher.hash(&slots.at(other).key));
        None
    }

    /// Removes a key if it points to `id`.
    pub(crate) fn remove(&mut self, slots: &Slots, id: SlotId) -> bool {
        self.slots.remove(self.hash(&slots.at(id).key), |&other| other == id)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::super::names::SpaceId;
    use super::*;
    use crate::key::BlockHash;

    /// Second half of a block hash that cancels the public number of the hash function.
    const CANCELS: u64 = 0xc0ac_29b7_c97c_50dd;

    #[test]
    fn keys_that_are_chosen_do_not_collide() {
        let hasher = KeyHasher::new(7);
        let key = |low: u64| {
            let hash = u128::from(low) | u128::from(CANCELS) << 64;
            PoolKey { space: SpaceId(3), hash: BlockHash(hash.to_le_bytes()) }
        };
        let with_public_number: HashSet<u64> =
            (0..1000).map(|low| FixedState::with_seed(7).hash_one(key(low))).collect();
        let hashes: HashSet<u64> = (0..1000).map(|low| hasher.hash(&key(low))).collect();
        assert_eq!((with_public_number.len(), hashes.len()), (1, 1000));
    }
}
