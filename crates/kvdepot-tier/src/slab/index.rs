//! Which block lies where: about 64 bytes per block, and no insertion moves more than a small part of the index.
//!
//! The blocks of a segment are linked, so that a segment can be recycled without a search. Namespaces are numbered as
//! long as they have blocks.

use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashMap, HashTable};
use kvdepot_core::{BlockHash, BlockKey, NamespaceId};

use super::codec::PAGE;

/// Hash tables; each grows on its own.
const TABLES: usize = 4096;
/// Slots allocated at a time.
const CHUNK: usize = 4096;
const NONE: u32 = u32::MAX;
/// In `Slot::pages`: a crash may have torn the record.
const UNPROVEN: u32 = 1 << 31;

/// The position of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) segment: u32,
    pub(super) page: u32,
    pub(super) pages: u32,
    /// Low half of the record's header checksum.
    pub(super) tag: u32,
}

impl Place {
    /// Returns the length of the record.
    pub(super) fn bytes(self) -> u64 {
        u64::from(self.pages) * PAGE
    }
}

/// The data of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Known {
    pub(super) place: Place,
    /// Grows with every use; 0 = not used since it was written.
    pub(super) used: u32,
    /// Found by a walk after a crash, past what was synced: it may well be torn.
    pub(super) unproven: bool,
}

#[derive(Clone, Debug)]
struct Slot {
    hash: BlockHash,
    /// The namespace's number; `NONE` = a free slot.
    space: u32,
    segment: u32,
    page: u32,
    pages: u32,
    tag: u32,
    used: u32,
    /// Neighbours in the segment's list; in a free slot, `next` is the next free one.
    before: u32,
    next: u32,
}

const FREE: Slot = Slot {
    hash: BlockHash([0; 16]),
    space: NONE,
    segment: 0,
    page: 0,
    pages: 0,
    tag: 0,
    used: 0,
    before: NONE,
    next: NONE,
};

#[derive(Debug)]
struct Space {
    id: NamespaceId,
    blocks: u64,
}

/// All blocks of a medium.
#[derive(Debug)]
pub(super) struct Index {
    tables: Vec<HashTable<u32>>,
    hasher: DefaultHashBuilder,
    chunks: Vec<Box<[Slot]>>,
    free: u32,
    /// The newest block of each segment.
    heads: Vec<u32>,
    numbers: HashMap<NamespaceId, u32>,
    spaces: Vec<Space>,
    spaces_free: Vec<u32>,
    len: u64,
    pages: u64,
    uses: u32,
}

impl Index {
    pub(super) fn new(segments: u64) -> Self {
        let segments = usize::try_from(segments).expect("fewer segments than u32 counts");
        Self {
            tables: (0..TABLES).map(|_| HashTable::new()).collect(),
            hasher: DefaultHashBuilder::default(),
            chunks: Vec::new(),
            free: NONE,
            heads: vec![NONE; segments],
            numbers: HashMap::new(),
            spaces: Vec::new(),
            spaces_free: Vec::new(),
            len: 0,
            pages: 0,
            uses: 0,
        }
    }

    /// Number of blocks.
    pub(super) const fn len(&self) -> u64 {
        self.len
    }

    /// Bytes of their records.
    pub(super) const fn bytes(&self) -> u64 {
        self.pages * PAGE
    }

    /// Bytes that the index itself takes, counting only what grows with its blocks.
    #[cfg(test)]
    fn memory_bytes(&self) -> usize {
        let tables: usize = self.tables.iter().map(HashTable::allocation_size).sum();
        tables + self.chunks.len() * CHUNK * size_of::<Slot>()
    }

    fn slot(&self, number: u32) -> &Slot {
        &self.chunks[number as usize / CHUNK][number as usize % CHUNK]
    }

    fn slot_mut(&mut self, number: u32) -> &mut Slot {
        &mut self.chunks[number as usize / CHUNK][number as usize % CHUNK]
    }

    fn hash(&self, space: u32, hash: BlockHash) -> u64 {
        self.hasher.hash_one((space, hash.0))
    }

    const fn table_of(hash: u64) -> usize {
        // The middle bits: a table uses the lowest and the highest ones.
        (hash >> 24) as usize % TABLES
    }

    fn find(&self, key: &BlockKey) -> Option<u32> {
        let space = *self.numbers.get(&key.namespace)?;
        let hash = self.hash(space, key.hash);
        let is = |number: &u32| {
            let slot = self.slot(*number);
            slot.space == space && slot.hash == key.hash
        };
        self.tables[Self::table_of(hash)].find(hash, is).copied()
    }

    fn known(&self, number: u32) -> Known {
        let slot = self.slot(number);
        let pages = slot.pages & !UNPROVEN;
        let place = Place { segment: slot.segment, page: slot.page, pages, tag: slot.tag };
        Known { place, used: slot.used, unproven: slot.pages & UNPROVEN != 0 }
    }

    pub(super) fn get(&self, key: &BlockKey) -> Option<Known> {
        self.find(key).map(|number| self.known(number))
    }

    /// Notes that a block was used.
    pub(super) fn touch(&mut self, key: &BlockKey) {
        if let Some(number) = self.find(key) {
            // After 4 billion uses the order starts over: blocks used after that go before those used earlier.
            self.uses = self.uses.checked_add(1).unwrap_or(1);
            self.slot_mut(number).used = self.uses;
        }
    }

    /// Puts a block at its new place, replacing its old one.
    pub(super) fn insert(&mut self, key: BlockKey, place: Place, unproven: bool) {
        self.remove(&key);
        let space = self.number(key.namespace);
        let number = self.take_free();
        let head = std::mem::replace(&mut self.heads[place.segment as usize], number);
        if head != NONE {
            self.slot_mut(head).before = number;
        }
        let flag = if unproven { UNPROVEN } else { 0 };
        *self.slot_mut(number) = Slot {
            hash: key.hash,
            space,
            segment: place.segment,
            page: place.page,
            pages: place.pages | flag,
            tag: place.tag,
            used: 0,
            before: NONE,
            next: head,
        };
        let hash = self.hash(space, key.hash);
        let (chunks, hasher) = (&self.chunks, &self.hasher);
        let rehash = |number: &u32| {
            let slot = &chunks[*number as usize / CHUNK][*number as usize % CHUNK];
            hasher.hash_one((slot.space, slot.hash.0))
        };
        self.tables[Self::table_of(hash)].insert_unique(hash, number, rehash);
        self.spaces[space as usize].blocks += 1;
        self.len += 1;
        self.pages += u64::from(place.pages);
    }

    /// Forgets a block; returns where it lay.
    pub(super) fn remove(&mut self, key: &BlockKey) -> Option<Place> {
        let number = self.find(key)?;
        Some(self.drop_slot(number))
    }

    fn drop_slot(&mut self, number: u32) -> Place {
        let slot = self.slot(number).clone();
        let hash = self.hash(slot.space, slot.hash);
        if let Ok(entry) = self.tables[Self::table_of(hash)].find_entry(hash, |other| *other == number) {
            entry.remove();
        }
        match slot.before {
            NONE => self.heads[slot.segment as usize] = slot.next,
            before => self.slot_mut(before).next = slot.next,
        }
        if slot.next != NONE {
            self.slot_mut(slot.next).before = slot.before;
        }
        let place = self.known(number).place;
        *self.slot_mut(number) = Slot { next: self.free, ..FREE };
        self.free = number;
        self.len -= 1;
        self.pages -= u64::from(place.pages);
        let space = &mut self.spaces[slot.space as usize];
        space.blocks -= 1;
        if space.blocks == 0 {
            self.numbers.remove(&space.id);
            self.spaces_free.push(slot.space);
        }
        place
    }

    fn number(&mut self, id: NamespaceId) -> u32 {
        if let Some(number) = self.numbers.get(&id) {
            return *number;
        }
        let space = Space { id, blocks: 0 };
        let number = match self.spaces_free.pop() {
            Some(number) => {
                self.spaces[number as usize] = space;
                number
            }
            None => {
                self.spaces.push(space);
                u32::try_from(self.spaces.len() - 1).expect("fewer namespaces than blocks")
            }
        };
        self.numbers.insert(id, number);
        number
    }

    fn take_free(&mut self) -> u32 {
        if self.free == NONE {
            let first = u32::try_from(self.chunks.len() * CHUNK).expect("a medium has fewer blocks");
            let mut chunk = vec![FREE; CHUNK].into_boxed_slice();
            for (slot, next) in chunk.iter_mut().zip(first + 1..).take(CHUNK - 1) {
                slot.next = next;
            }
            self.chunks.push(chunk);
            self.free = first;
        }
        let number = self.free;
        self.free = self.slot(number).next;
        number
    }

    fn key(&self, number: u32) -> BlockKey {
        let slot = self.slot(number);
        BlockKey { namespace: self.spaces[slot.space as usize].id, hash: slot.hash }
    }

    /// Up to `count` blocks of a segment, newest first.
    pub(super) fn of_segment(&self, segment: u32, count: usize) -> Vec<(BlockKey, Known)> {
        let mut number = self.heads[segment as usize];
        let mut out = Vec::new();
        while number != NONE && out.len() < count {
            out.push((self.key(number), self.known(number)));
            number = self.slot(number).next;
        }
        out
    }

    /// Returns whether a namespace has blocks.
    pub(super) fn has(&self, namespace: NamespaceId) -> bool {
        self.numbers.contains_key(&namespace)
    }

    /// Keys of a namespace among `count` slots from `from` on, and where to continue.
    pub(super) fn keys(&self, namespace: NamespaceId, from: u32, count: u32) -> (Vec<BlockKey>, Option<u32>) {
        let Some(space) = self.numbers.get(&namespace) else { return (Vec::new(), None) };
        let end = (self.chunks.len() * CHUNK) as u32;
        let to = from.saturating_add(count).min(end);
        let ours = (from..to).filter(|number| self.slot(*number).space == *space);
        let keys = ours.map(|number| self.key(number)).collect();
        (keys, (to < end).then_some(to))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(space: u8, n: u32) -> BlockKey {
        let mut hash = [0; 16];
        hash[..4].copy_from_slice(&n.to_le_bytes());
        BlockKey { namespace: NamespaceId([space; 16]), hash: BlockHash(hash) }
    }

    #[test]
    fn a_block_costs_less_than_100_bytes() {
        let mut index = Index::new(4);
        for n in 0..1_000_000 {
            index.insert(key(1, n), Place { segment: n % 4, page: n, pages: 2, tag: n }, false);
        }
        let each = index.memory_bytes() as f64 / index.len() as f64;
        assert!(each < 100.0, "{each} bytes a block");
        println!("{each:.1} bytes a block");
    }

    #[derive(Clone, Debug)]
    enum Step {
        Insert(u8, u32, u32),
        Remove(u8, u32),
        Touch(u8, u32),
        Clear(u32),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0u8..3, 0u32..40, 0u32..5).prop_map(|(space, n, segment)| Step::Insert(space, n, segment)),
            2 => (0u8..3, 0u32..40).prop_map(|(space, n)| Step::Remove(space, n)),
            1 => (0u8..3, 0u32..40).prop_map(|(space, n)| Step::Touch(space, n)),
            1 => (0u32..5).prop_map(Step::Clear),
        ]
    }

    proptest! {
        #[test]
        fn it_is_a_map_with_lists(steps in proptest::collection::vec(step(), 0..200)) {
            let mut index = Index::new(5);
            let mut model: HashMap<BlockKey, (Place, bool)> = HashMap::new();
            for (at, step) in (0..).zip(steps) {
                match step {
                    Step::Insert(space, n, segment) => {
                        let place = Place { segment, page: at, pages: n + 1, tag: n * 3 };
                        index.insert(key(space, n), place, n % 2 == 0);
                        model.insert(key(space, n), (place, false));
                    }
                    Step::Remove(space, n) => {
                        let gone = model.remove(&key(space, n)).map(|(place, _)| place);
                        prop_assert_eq!(index.remove(&key(space, n)), gone);
                    }
                    Step::Touch(space, n) => {
                        index.touch(&key(space, n));
                        if let Some(entry) = model.get_mut(&key(space, n)) {
                            entry.1 = true;
                        }
                    }
                    Step::Clear(segment) => {
                        for (key, _) in index.of_segment(segment, usize::MAX) {
                            index.remove(&key);
                        }
                        model.retain(|_, (place, _)| place.segment != segment);
                    }
                }
                prop_assert_eq!(index.len(), model.len() as u64);
                let bytes: u64 = model.values().map(|(place, _)| place.bytes()).sum();
                prop_assert_eq!(index.bytes(), bytes);
            }
            for (key, (place, used)) in &model {
                let known = index.get(key).unwrap();
                prop_assert_eq!((known.place, known.used > 0), (*place, *used));
            }
            for space in 0..3 {
                let id = NamespaceId([space; 16]);
                let count = model.keys().filter(|key| key.namespace == id).count();
                prop_assert_eq!(index.keys(id, 0, u32::MAX).0.len(), count);
                prop_assert_eq!(index.has(id), count > 0);
            }
            let listed: usize = (0..5).map(|segment| index.of_segment(segment, usize::MAX).len()).sum();
            prop_assert_eq!(listed, model.len());
        }
    }
}
