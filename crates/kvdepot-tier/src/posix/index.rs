//! What the tier knows about its files: by key, and in order of last use.
//!
//! Built for tens of millions of files under one lock. A file takes a slot of 56 bytes; slots are allocated in chunks
//! and found through many small hash tables, so that no insertion copies more than a small part of the index.
//! Namespaces are numbered: a retired namespace becomes unreachable in one step, and its slots are cleared piece by
//! piece. One index covers all namespaces and directories because they share the cap (P5).

use std::hash::BuildHasher;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hashbrown::{DefaultHashBuilder, HashMap, HashTable};
use kvdepot_core::limits::BLOCK_ALIGN_BYTES;
use kvdepot_core::{BlockHash, BlockKey, NamespaceId};

use super::order::{LinkStore, Links, NONE, Order};
use super::space::Space;

/// Hash tables; each grows on its own. 10 million files make 2,400 entries per table.
const TABLES: usize = 4096;
/// Slots allocated at a time.
const CHUNK: usize = 4096;

/// One file, or a free slot (`number` is `FREE`).
#[derive(Clone, Debug)]
struct Slot {
    hash: BlockHash,
    /// Grows with every insertion: distinguishes a file from its successor of the same key.
    generation: u64,
    /// The namespace's number.
    number: u32,
    /// Pages charged for the file.
    pages: u32,
    /// When it was last used, in seconds since 1970.
    used_s: u32,
    /// When its recency was last written to the disk.
    persisted_s: u32,
    links: Links,
    /// The scan that saw it last; 0 = none.
    seen: u32,
    /// Index of the tier's directory that holds it.
    directory: u8,
    /// Whether it is being read here: then it is in no order.
    is_read: bool,
}

const FREE: u32 = u32::MAX;

impl Slot {
    const EMPTY: Self = Self {
        hash: BlockHash([0; 16]),
        generation: 0,
        number: FREE,
        pages: 0,
        used_s: 0,
        persisted_s: 0,
        links: Links::NONE,
        seen: 0,
        directory: 0,
        is_read: false,
    };
}

/// The data of one file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    /// Bytes charged for the file.
    pub(super) bytes: u64,
    pub(super) directory: usize,
    pub(super) generation: u64,
    pub(super) used_s: u32,
}

/// A file that was taken out of the index.
#[derive(Clone, Debug)]
pub(super) struct Taken {
    pub(super) key: BlockKey,
    pub(super) space: Arc<Space>,
    pub(super) entry: Entry,
}

/// A file as a checkpoint lists it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Listed {
    pub(super) number: u32,
    pub(super) hash: BlockHash,
    pub(super) used_s: u32,
    pub(super) bytes: u64,
    pub(super) directory: usize,
}

fn pages(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(BLOCK_ALIGN_BYTES)).unwrap_or(u32::MAX)
}

#[derive(Debug, Default)]
struct Slots {
    chunks: Vec<Box<[Slot]>>,
    /// First free slot; the others follow by `links.next`.
    free: Option<u32>,
}

impl Slots {
    fn get(&self, slot: u32) -> &Slot {
        &self.chunks[slot as usize / CHUNK][slot as usize % CHUNK]
    }

    fn get_mut(&mut self, slot: u32) -> &mut Slot {
        &mut self.chunks[slot as usize / CHUNK][slot as usize % CHUNK]
    }

    fn len(&self) -> u32 {
        (self.chunks.len() * CHUNK) as u32
    }

    fn take_free(&mut self) -> u32 {
        if self.free.is_none() {
            let first = self.len();
            let mut chunk = vec![Slot::EMPTY; CHUNK].into_boxed_slice();
            for (at, slot) in (first..).zip(chunk.iter_mut()) {
                slot.links.next = at + 1;
            }
            chunk[CHUNK - 1].links.next = NONE;
            self.chunks.push(chunk);
            self.free = Some(first);
        }
        let slot = self.free.expect("a chunk was added");
        self.free = Some(self.get(slot).links.next).filter(|next| *next != NONE);
        slot
    }

    fn give_back(&mut self, slot: u32) {
        let next = self.free.unwrap_or(NONE);
        *self.get_mut(slot) = Slot { links: Links { previous: NONE, next }, ..Slot::EMPTY };
        self.free = Some(slot);
    }
}

impl LinkStore for Slots {
    fn links(&mut self, slot: u32) -> &mut Links {
        &mut self.get_mut(slot).links
    }

    fn next(&self, slot: u32) -> Option<u32> {
        Some(self.get(slot).links.next).filter(|&next| next != NONE)
    }
}

/// Reads of a block that have not ended.
#[derive(Debug, Default)]
struct Reads {
    count: usize,
    /// Whether one that has ended was a use.
    is_used: bool,
}

/// All known files.
#[derive(Debug)]
pub(super) struct Index {
    tables: Vec<HashTable<u32>>,
    hasher: DefaultHashBuilder,
    slots: Slots,
    /// One order per directory: a full disk is relieved only by evicting its own files.
    orders: Vec<Order>,
    /// Reads in flight by block, whether or not its file is known: such a file is neither evicted nor overwritten.
    reading: HashMap<BlockKey, Reads>,
    /// Known files that are being read, per directory.
    read: Vec<usize>,
    /// Namespaces by number; a number is reused once none of its files is left.
    spaces: Vec<Option<Arc<Space>>>,
    numbers: HashMap<NamespaceId, u32>,
    len: usize,
    generations: u64,
    scans: u32,
    newest_s: u32,
}

impl Index {
    pub(super) fn new(directories: usize) -> Self {
        Self {
            tables: (0..TABLES).map(|_| HashTable::new()).collect(),
            hasher: DefaultHashBuilder::default(),
            slots: Slots::default(),
            orders: (0..directories).map(|_| Order::default()).collect(),
            reading: HashMap::new(),
            read: vec![0; directories],
            spaces: Vec::new(),
            numbers: HashMap::new(),
            len: 0,
            generations: 0,
            scans: 0,
            newest_s: 0,
        }
    }

    fn hash(hasher: &DefaultHashBuilder, number: u32, hash: &BlockHash) -> u64 {
        hasher.hash_one((number, hash.0))
    }

    /// The tables themselves use the lowest bits and the highest seven.
    const fn table_of(hash: u64) -> usize {
        (hash >> 32) as usize % TABLES
    }

    fn find(&self, key: &BlockKey) -> Option<u32> {
        let number = *self.numbers.get(&key.namespace)?;
        let hash = Self::hash(&self.hasher, number, &key.hash);
        let same = |slot: &u32| {
            let slot = self.slots.get(*slot);
            slot.number == number && slot.hash == key.hash
        };
        self.tables[Self::table_of(hash)].find(hash, same).copied()
    }

    fn entry(&self, slot: u32) -> Entry {
        let slot = self.slots.get(slot);
        Entry {
            bytes: u64::from(slot.pages) * BLOCK_ALIGN_BYTES,
            directory: slot.directory.into(),
            generation: slot.generation,
            used_s: slot.used_s,
        }
    }

    pub(super) fn get(&self, key: &BlockKey) -> Option<Entry> {
        self.find(key).map(|slot| self.entry(slot))
    }

    pub(super) const fn len(&self) -> usize {
        self.len
    }

    /// The newest generation: files added later have a higher one.
    pub(super) const fn generation(&self) -> u64 {
        self.generations
    }

    /// A new scan's number: higher than that of every earlier scan.
    pub(super) const fn next_scan(&mut self) -> u32 {
        self.scans += 1;
        self.scans
    }

    /// Adds an unknown file; `used` of `None` means now.
    pub(super) fn insert(
        &mut self,
        key: BlockKey,
        space: Arc<Space>,
        directory: usize,
        bytes: u64,
        used: Option<SystemTime>,
    ) {
        assert!(self.find(&key).is_none(), "a file was indexed twice: its bytes would be charged twice (P5)");
        let now_s = self.now_s();
        let used_s = used.map_or(now_s, |time| seconds(time).min(now_s));
        let number = self.number(space);
        self.generations += 1;
        let slot = self.slots.take_free();
        *self.slots.get_mut(slot) = Slot {
            hash: key.hash,
            generation: self.generations,
            number,
            pages: pages(bytes),
            used_s,
            persisted_s: used_s,
            links: Links::NONE,
            seen: 0,
            directory: u8::try_from(directory).expect("TIER_DIRECTORIES_MAX fits a byte"),
            is_read: self.reading.contains_key(&key),
        };
        self.put_in_order(slot);
        let (hasher, slots) = (&self.hasher, &self.slots);
        let hash = Self::hash(hasher, number, &key.hash);
        self.tables[Self::table_of(hash)].insert_unique(hash, slot, |other| {
            let other = slots.get(*other);
            Self::hash(hasher, other.number, &other.hash)
        });
        self.len += 1;
    }

    /// Puts a file after all others of its last second of use, unless it is being read.
    fn put_in_order(&mut self, slot: u32) {
        let &Slot { used_s, is_read, directory, .. } = self.slots.get(slot);
        let directory = usize::from(directory);
        if is_read {
            self.read[directory] += 1;
        } else {
            self.orders[directory].push(&mut self.slots, slot, used_s);
        }
    }

    /// Puts a file that was read, but not used, back into the order: other files of its second are not evicted before it.
    fn put_back_in_order(&mut self, slot: u32) {
        let &Slot { used_s, directory, .. } = self.slots.get(slot);
        self.orders[usize::from(directory)].push_first(&mut self.slots, slot, used_s);
    }

    /// Undoes `put_in_order`, before anything changes on which it depends.
    fn take_from_order(&mut self, slot: u32) {
        let &Slot { used_s, is_read, directory, .. } = self.slots.get(slot);
        let directory = usize::from(directory);
        if is_read {
            self.read[directory] -= 1;
        } else {
            self.orders[directory].remove(&mut self.slots, slot, used_s);
        }
    }

    /// Notes the start of a read: its file, if it is known or becomes known, is not among the coldest until the end.
    pub(super) fn begin_read(&mut self, key: BlockKey) {
        self.reading.entry(key).or_default().count += 1;
        if let Some(slot) = self.find(&key).filter(|slot| !self.slots.get(*slot).is_read) {
            self.take_from_order(slot);
            self.slots.get_mut(slot).is_read = true;
            self.put_in_order(slot);
        }
    }

    /// Notes the end of a read, and whether it was a use; returns whether it was the block's last one. Its file is ordered by
    /// its last use again.
    pub(super) fn end_read(&mut self, key: &BlockKey, is_use: bool) -> bool {
        let Some(reads) = self.reading.get_mut(key) else { return false };
        reads.count -= 1;
        reads.is_used |= is_use;
        if reads.count > 0 {
            return false;
        }
        let is_used = reads.is_used;
        self.reading.remove(key);
        if let Some(slot) = self.find(key).filter(|slot| self.slots.get(*slot).is_read) {
            self.take_from_order(slot);
            self.slots.get_mut(slot).is_read = false;
            if is_used {
                self.put_in_order(slot);
            } else {
                self.put_back_in_order(slot);
            }
        }
        true
    }

    /// Returns whether a block is being read.
    pub(super) fn is_read(&self, key: &BlockKey) -> bool {
        self.reading.contains_key(key)
    }

    /// Blocks that are being read.
    pub(super) fn blocks_read(&self) -> Vec<BlockKey> {
        self.reading.keys().copied().collect()
    }

    /// Returns whether a file of a directory is being read.
    pub(super) fn has_read(&self, directory: usize) -> bool {
        self.read[directory] > 0
    }

    fn number(&mut self, space: Arc<Space>) -> u32 {
        let Self { numbers, spaces, .. } = self;
        *numbers.entry(space.id).or_insert_with(|| {
            let free = spaces.iter().position(Option::is_none).unwrap_or_else(|| {
                spaces.push(None);
                spaces.len() - 1
            });
            spaces[free] = Some(space);
            free as u32
        })
    }

    /// Takes a file out; its bytes stay charged until the caller releases them.
    pub(super) fn remove(&mut self, key: &BlockKey) -> Option<Taken> {
        self.find(key).map(|slot| self.take(slot))
    }

    fn take(&mut self, slot: u32) -> Taken {
        let entry = self.entry(slot);
        let (number, hash) = (self.slots.get(slot).number, self.slots.get(slot).hash);
        self.take_from_order(slot);
        let table_hash = Self::hash(&self.hasher, number, &hash);
        if let Ok(found) = self.tables[Self::table_of(table_hash)].find_entry(table_hash, |at| *at == slot) {
            found.remove();
        }
        self.slots.give_back(slot);
        self.len -= 1;
        let space = self.spaces[number as usize].clone().expect("a file's namespace keeps its number");
        Taken { key: space.key(hash), space, entry }
    }

    /// Notes a use, now or at `used`; never makes a file older. Returns when it was last used after that.
    pub(super) fn touch(&mut self, key: &BlockKey, used: Option<SystemTime>) -> Option<u32> {
        let now_s = self.now_s();
        let slot = self.find(key)?;
        let entry = self.entry(slot);
        let used_s = used.map_or(now_s, |time| seconds(time).min(now_s)).max(entry.used_s);
        self.take_from_order(slot);
        self.slots.get_mut(slot).used_s = used_s;
        self.put_in_order(slot);
        Some(used_s)
    }

    /// Sets the bytes charged for a file, unless it is younger than `generation`. Returns what they were.
    pub(super) fn resize(&mut self, key: &BlockKey, generation: u64, bytes: u64) -> Option<u64> {
        let slot = self.find(key)?;
        let before = self.entry(slot);
        let slot = self.slots.get_mut(slot);
        if before.generation > generation {
            return None;
        }
        slot.pages = pages(bytes);
        Some(before.bytes)
    }

    /// Returns whether a file's recency on the disk is `interval_s` or more behind; if so, it counts as written now.
    pub(super) fn take_due(&mut self, key: &BlockKey, interval_s: u32) -> bool {
        let Some(slot) = self.find(key) else { return false };
        let slot = self.slots.get_mut(slot);
        let due = slot.used_s.saturating_sub(slot.persisted_s) >= interval_s;
        if due {
            slot.persisted_s = slot.used_s;
        }
        due
    }

    /// Notes that a scan saw a file; `false` if the file is not known in this directory.
    pub(super) fn see(&mut self, key: &BlockKey, directory: usize, scan: u32) -> bool {
        let Some(slot) = self.find(key) else { return false };
        let slot = self.slots.get_mut(slot);
        if usize::from(slot.directory) != directory {
            return false;
        }
        // A later scan of the same namespace may have seen it already.
        slot.seen = slot.seen.max(scan);
        true
    }

    /// The least recently used file that is not being read, in one directory or in all: its last use and its slot.
    pub(super) fn coldest(&self, directory: Option<usize>) -> Option<(u32, u32)> {
        match directory {
            Some(directory) => self.orders[directory].first(),
            None => self.orders.iter().filter_map(Order::first).min_by_key(|(second, _)| *second),
        }
    }

    /// Returns the least recently used files of every directory that are not being read: in all about `count`.
    pub(super) fn coldest_files(&self, count: usize) -> Vec<BlockKey> {
        let each = (count / self.orders.len().max(1)).max(16);
        let slots = self.orders.iter().flat_map(|order| order.iter(&self.slots).take(each));
        slots.map(|slot| self.at(slot).0).collect()
    }

    /// Returns key and data of the file in an occupied slot.
    pub(super) fn at(&self, slot: u32) -> (BlockKey, Entry) {
        let Slot { number, hash, .. } = *self.slots.get(slot);
        let space = self.spaces[number as usize].as_ref().expect("a file's namespace keeps its number");
        (space.key(hash), self.entry(slot))
    }

    /// Takes out the least recently used file that is not being read, in one directory or in all.
    pub(super) fn take_coldest(&mut self, directory: Option<usize>) -> Option<Taken> {
        self.coldest(directory).map(|(_, slot)| self.take(slot))
    }

    /// Makes a namespace's files unreachable in one step. Returns its number, for `take_retired`; `None` if it had no
    /// files.
    pub(super) fn retire(&mut self, id: NamespaceId) -> Option<u32> {
        self.numbers.remove(&id)
    }

    /// Takes out files of a retired namespace, examining `slots_max` slots from `cursor` on; also returns where to
    /// continue, if there is more.
    pub(super) fn take_retired(
        &mut self,
        number: u32,
        cursor: u32,
        slots_max: u32,
    ) -> (Vec<Taken>, Option<u32>) {
        let (found, next) = self.slots_where(cursor, slots_max, |slot| slot.number == number);
        let taken = found.into_iter().map(|slot| self.take(slot)).collect();
        if next.is_none() {
            self.spaces[number as usize] = None;
        }
        (taken, next)
    }

    /// Keys of a namespace's files that are older than `generation` and were seen neither by `scan` nor by a later one,
    /// piece by piece.
    pub(super) fn unseen(
        &self,
        id: NamespaceId,
        generation: u64,
        scan: u32,
        cursor: u32,
        slots_max: u32,
    ) -> (Vec<BlockKey>, Option<u32>) {
        let old = |slot: &Slot| slot.generation <= generation && slot.seen < scan;
        self.keys_where(id, cursor, slots_max, old)
    }

    /// Keys of a namespace, piece by piece.
    pub(super) fn keys(&self, id: NamespaceId, cursor: u32, slots_max: u32) -> (Vec<BlockKey>, Option<u32>) {
        self.keys_where(id, cursor, slots_max, |_| true)
    }

    fn keys_where(
        &self,
        id: NamespaceId,
        cursor: u32,
        slots_max: u32,
        wanted: impl Fn(&Slot) -> bool,
    ) -> (Vec<BlockKey>, Option<u32>) {
        let Some(number) = self.numbers.get(&id).copied() else { return (Vec::new(), None) };
        let (found, next) = self.slots_where(cursor, slots_max, |slot| slot.number == number && wanted(slot));
        let keys = found.into_iter().map(|slot| BlockKey { namespace: id, hash: self.slots.get(slot).hash });
        (keys.collect(), next)
    }

    /// Files of all current namespaces, for a checkpoint, piece by piece.
    pub(super) fn list(&self, cursor: u32, slots_max: u32) -> (Vec<Listed>, Option<u32>) {
        let (found, next) = self.slots_where(cursor, slots_max, |slot| slot.number != FREE);
        let listed = found.into_iter().map(|at| {
            let (slot, entry) = (self.slots.get(at), self.entry(at));
            let Entry { bytes, directory, used_s, .. } = entry;
            Listed { number: slot.number, hash: slot.hash, used_s, bytes, directory }
        });
        (listed.collect(), next)
    }

    /// Reachable namespaces with their numbers.
    pub(super) fn numbered(&self) -> Vec<(u32, Arc<Space>)> {
        let spaces = self.numbers.values().filter_map(|number| {
            self.spaces[*number as usize].as_ref().map(|space| (*number, Arc::clone(space)))
        });
        spaces.collect()
    }

    fn slots_where(
        &self,
        cursor: u32,
        slots_max: u32,
        wanted: impl Fn(&Slot) -> bool,
    ) -> (Vec<u32>, Option<u32>) {
        let end = cursor.saturating_add(slots_max).min(self.slots.len());
        let found = (cursor..end).filter(|slot| wanted(self.slots.get(*slot))).collect();
        (found, (end < self.slots.len()).then_some(end))
    }

    /// The clock; it never goes back here, even if the system's does.
    pub(super) fn now_s(&mut self) -> u32 {
        self.newest_s = self.newest_s.max(seconds(SystemTime::now()));
        self.newest_s
    }
}

/// Whole seconds since 1970.
pub(super) fn seconds(time: SystemTime) -> u32 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| u32::try_from(since.as_secs()).unwrap_or(u32::MAX))
}

/// The start of a second since 1970.
pub(super) fn time_of(second: u32) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(second.into())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use kvdepot_core::{BlockLayout, NamespaceSpec};

    use super::*;

    fn space(model: &str) -> Arc<Space> {
        let layout = BlockLayout::new(vec![vec![4096]]).expect("a layout");
        let spec = NamespaceSpec::new(&format!(r#"{{"model":"{model}"}}"#), layout).expect("a description");
        Arc::new(Space::new(spec, 0, true))
    }

    fn key(space: &Space, n: u64) -> BlockKey {
        let mut hash = [0; 16];
        hash[..8].copy_from_slice(&n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes());
        space.key(BlockHash(hash))
    }

    #[test]
    fn a_file_takes_few_bytes() {
        assert!(size_of::<Slot>() <= 56, "{}", size_of::<Slot>());
    }

    /// Compared with a list of files in order of last use; all times lie in the past, so that the test does not depend
    /// on now. What is being read is not evicted, and has its place again afterwards.
    #[test]
    fn the_order_is_that_of_a_plain_list() {
        let (mut index, spaces) = (Index::new(3), [space("a"), space("b")]);
        let mut model: Vec<(u32, usize, BlockKey)> = Vec::new();
        let mut reads: Vec<BlockKey> = Vec::new();
        // Those among them that an ended read has used.
        let mut used_by: HashSet<BlockKey> = HashSet::new();
        let mut random = 7_u64;
        for step in 0..40_000_u64 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let draw = |bits: u32, bound: u64| (random >> bits) % bound;
            let space = &spaces[draw(20, 2) as usize];
            let (key, second) = (key(space, draw(24, 500)), 1000 + draw(34, 50) as u32);
            let at = model.iter().position(|(_, _, known)| *known == key);
            match (draw(41, 10), at) {
                (0..=3, None) => {
                    let directory = draw(45, 3) as usize;
                    index.insert(key, Arc::clone(space), directory, 8192, Some(time_of(second)));
                    model.push((second, directory, key));
                }
                (0..=3, Some(at)) => {
                    let (before, directory, _) = model.remove(at);
                    let used = index.touch(&key, Some(time_of(second))).expect("known");
                    assert_eq!(used, before.max(second), "step {step}");
                    model.push((used, directory, key));
                }
                (4, Some(at)) => {
                    model.remove(at);
                    assert_eq!(index.remove(&key).expect("known").key, key);
                }
                (5, _) => {
                    let directory = draw(45, 3) as usize;
                    let here = model.iter().filter(|(_, at, _)| *at == directory);
                    let free = here.filter(|(.., key)| !reads.contains(key));
                    let coldest = free.min_by_key(|(second, ..)| *second).map(|(.., key)| *key);
                    let taken = index.take_coldest(Some(directory)).map(|taken| taken.key);
                    assert_eq!(taken, coldest, "step {step}");
                    model.retain(|(.., key)| Some(*key) != taken);
                }
                (6, _) => {
                    index.begin_read(key);
                    reads.push(key);
                }
                (7, _) if !reads.is_empty() => {
                    // Of two reads of a block, the first one to end is not the last.
                    let ended = reads.swap_remove(draw(45, reads.len() as u64) as usize);
                    let (is_use, is_last) = (draw(50, 2) == 0, !reads.contains(&ended));
                    assert_eq!(index.end_read(&ended, is_use), is_last, "step {step}");
                    if is_use {
                        used_by.insert(ended);
                    }
                    if is_last {
                        let was_used = used_by.remove(&ended);
                        let back = model.iter().position(|(.., key)| *key == ended);
                        if let Some(file) = back.map(|at| model.remove(at)) {
                            // The first or the last one of its second.
                            model.insert(if was_used { model.len() } else { 0 }, file);
                        }
                    }
                }
                (_, at) => assert_eq!(index.get(&key).is_some(), at.is_some(), "step {step}"),
            }
            assert_eq!(index.len(), model.len());
            let is_read =
                |directory| model.iter().any(|(_, at, key)| *at == directory && reads.contains(key));
            assert!((0..3).all(|directory| index.has_read(directory) == is_read(directory)), "step {step}");
        }
    }

    /// Its block's key no longer leads to the file, but the file still counts as being read.
    #[test]
    fn a_retired_file_that_is_read_goes_like_the_others() {
        let (mut index, old) = (Index::new(1), space("old"));
        index.insert(key(&old, 0), Arc::clone(&old), 0, 8192, None);
        index.begin_read(key(&old, 0));
        let number = index.retire(old.id).expect("it had files");
        assert!(index.end_read(&key(&old, 0), true) && index.has_read(0));
        let (taken, _) = index.take_retired(number, 0, 1);
        assert_eq!((taken.len(), index.len(), index.has_read(0)), (1, 0, false));
        index.insert(key(&old, 0), Arc::clone(&old), 0, 8192, None);
        assert_eq!(index.take_coldest(None).expect("nobody reads it").key, key(&old, 0));
    }

    #[test]
    fn a_retired_namespace_is_unreachable_at_once_and_its_number_is_used_again() {
        let mut index = Index::new(1);
        let (old, other) = (space("old"), space("other"));
        for n in 0..10_000 {
            index.insert(key(&old, n), Arc::clone(&old), 0, 8192, None);
        }
        index.insert(key(&other, 0), Arc::clone(&other), 0, 8192, None);
        let number = index.retire(old.id).expect("it had files");
        assert!(index.get(&key(&old, 5)).is_none() && index.get(&key(&other, 0)).is_some());
        let (mut cursor, mut cleared) = (Some(0), 0);
        while let Some(from) = cursor {
            let (taken, next) = index.take_retired(number, from, 1000);
            assert!(taken.len() <= 1000);
            (cleared, cursor) = (cleared + taken.len(), next);
        }
        assert_eq!((cleared, index.len()), (10_000, 1));
        let new = space("new");
        index.insert(key(&new, 0), Arc::clone(&new), 0, 8192, None);
        assert_eq!(index.numbers[&new.id], number);
    }
}
