//! Which pack holds which block, as far as this tier knows. A state machine without a clock and without requests.
//!
//! The tier learns of packs by writing them and from lists of the bucket. It is bounded (P7): the oldest packs of the
//! largest namespace make room. A pack that is to be deleted is *doomed*: no block is found in it any more, and no list
//! brings it back.

use std::collections::BTreeMap;
use std::hash::BuildHasher;
use std::time::{Duration, Instant};

use hashbrown::{DefaultHashBuilder, HashMap};
use hashlink::LinkedHashSet;
use kvdepot_core::limits::{
    OBJECT_PACK_HEAD_TRIES, OBJECT_PACKED_BLOCKS_MAX, OBJECT_PACKS_DOOMED_MAX, SNAPSHOT_HASHES_MAX,
};
use kvdepot_core::{BlockHash, BlockKey, NamespaceId};

use super::codec::{Entry, PackName};
use crate::Presence;

/// Parts of a namespace's table: each grows on its own, so that no insert moves more than a few thousand places.
const PARTS: usize = 1024;

#[derive(Debug)]
struct Pack {
    entries: Box<[Entry]>,
    /// Until when the pack is assumed to be in the bucket.
    until: Instant,
}

impl Pack {
    /// What it counts in the index: a pack without usable blocks takes memory, too.
    fn weight(&self) -> u64 {
        self.entries.len().max(1) as u64
    }

    fn bytes(&self) -> u64 {
        self.entries.iter().map(|entry| entry.bytes).sum()
    }
}

#[derive(Clone, Copy, Debug)]
struct Place {
    pack: PackName,
    entry: u32,
}

/// The packs of one epoch of a namespace.
#[derive(Debug)]
pub(super) struct Packs {
    packs: BTreeMap<PackName, Pack>,
    places: Vec<HashMap<BlockHash, Place>>,
    /// Further places of blocks.
    twins: HashMap<BlockHash, Vec<Place>>,
    /// Sum of the packs' weights, and of their bytes.
    weight: u64,
    bytes: u64,
    /// Packs that are being deleted, with their blocks.
    doomed: HashMap<PackName, Box<[Entry]>>,
    /// Packs that were deleted, the oldest first: a list that began before may still name them.
    deleted: LinkedHashSet<PackName>,
    /// How often the heads of packs could not be read.
    failed_heads: HashMap<PackName, u8>,
    /// Start of the last list that has ended.
    listed_at: Option<Instant>,
    is_being_listed: bool,
    /// Start, in milliseconds since 1970, of the last list after which all packs were known.
    whole_at_ms: Option<u64>,
}

/// Where a block lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::object) struct Found {
    pub(super) pack: PackName,
    pub(super) entry: Entry,
    /// Whether the pack may be assumed to be there without asking.
    pub(super) is_sure: bool,
}

impl Found {
    pub(in crate::object) const fn presence(&self) -> Presence {
        if self.is_sure { Presence::Present } else { Presence::Unknown }
    }
}

/// What became of a pack that was told to the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Learnt {
    /// It is known now, or was known before.
    Known,
    /// It is being deleted, or was.
    Deleted,
    /// There is no room for a pack that is as old.
    NoRoom,
}

/// All packs that a tier knows.
#[derive(Debug)]
pub(in crate::object) struct PackIndex {
    spaces: HashMap<NamespaceId, Packs>,
    hasher: DefaultHashBuilder,
    ttl: Duration,
    weight_max: u64,
    weight: u64,
    bytes: u64,
}

impl Packs {
    fn new() -> Self {
        Self {
            packs: BTreeMap::new(),
            places: (0..PARTS).map(|_| HashMap::new()).collect(),
            twins: HashMap::new(),
            weight: 0,
            bytes: 0,
            doomed: HashMap::new(),
            deleted: LinkedHashSet::new(),
            failed_heads: HashMap::new(),
            listed_at: None,
            is_being_listed: false,
            whole_at_ms: None,
        }
    }

    /// Takes a place from a block: another pack's takes over. Returns whether no known pack has the block now.
    fn leave(&mut self, part: usize, hash: BlockHash, name: PackName) -> bool {
        let mut twins = self.twins.remove(&hash).unwrap_or_default();
        twins.retain(|place| place.pack != name);
        let places = &mut self.places[part];
        let mut is_gone = false;
        if places.get(&hash).is_some_and(|place| place.pack == name) {
            // The newest of the others.
            match twins.pop() {
                Some(place) => drop(places.insert(hash, place)),
                None => {
                    places.remove(&hash);
                    is_gone = true;
                }
            }
        }
        if !twins.is_empty() {
            self.twins.insert(hash, twins);
        }
        is_gone
    }
}

impl PackIndex {
    /// `ttl`: how long a pack is assumed to be in the bucket after it was written, listed or read.
    pub(super) fn new(ttl: Duration) -> Self {
        Self::with_capacity(ttl, OBJECT_PACKED_BLOCKS_MAX)
    }

    fn with_capacity(ttl: Duration, weight_max: u64) -> Self {
        let hasher = DefaultHashBuilder::default();
        Self { spaces: HashMap::new(), hasher, ttl, weight_max, weight: 0, bytes: 0 }
    }

    /// Returns the number of blocks in packs, and of their bytes.
    pub(super) const fn usage(&self) -> (u64, u64) {
        (self.weight, self.bytes)
    }

    fn part(&self, hash: &BlockHash) -> usize {
        self.hasher.hash_one(hash) as usize % PARTS
    }

    /// Records that a pack is in the bucket.
    pub(super) fn learn(
        &mut self,
        id: NamespaceId,
        name: PackName,
        entries: Vec<Entry>,
        now: Instant,
    ) -> Learnt {
        let until = now + self.ttl;
        let space = self.spaces.entry(id).or_insert_with(Packs::new);
        if space.doomed.contains_key(&name) || space.deleted.contains(&name) {
            return Learnt::Deleted;
        }
        if let Some(known) = space.packs.get_mut(&name) {
            known.until = until;
            return Learnt::Known;
        }
        let pack = Pack { entries: entries.into(), until };
        if !self.make_room(id, name, pack.weight()) {
            return Learnt::NoRoom;
        }
        let Some(space) = self.spaces.get_mut(&id) else { return Learnt::NoRoom };
        for (number, entry) in pack.entries.iter().enumerate() {
            let part = self.hasher.hash_one(entry.hash) as usize % PARTS;
            let place = Place { pack: name, entry: u32::try_from(number).unwrap_or(u32::MAX) };
            let earlier = space.places[part].insert(entry.hash, place);
            if let Some(earlier) = earlier.filter(|earlier| earlier.pack != name) {
                space.twins.entry(entry.hash).or_default().push(earlier);
            }
        }
        let (weight, bytes) = (pack.weight(), pack.bytes());
        (space.weight, space.bytes) = (space.weight + weight, space.bytes + bytes);
        (self.weight, self.bytes) = (self.weight + weight, self.bytes + bytes);
        space.failed_heads.remove(&name);
        space.packs.insert(name, pack);
        Learnt::Known
    }

    /// Forgets old packs of the largest namespaces until there is room. Returns false if the new pack is older than those
    /// that would have to go.
    fn make_room(&mut self, id: NamespaceId, name: PackName, weight: u64) -> bool {
        while self.weight > 0 && self.weight + weight > self.weight_max {
            let largest = self.spaces.iter().max_by_key(|(_, space)| space.weight);
            let Some((largest, oldest)) =
                largest.and_then(|(id, space)| Some((*id, *space.packs.keys().next()?)))
            else {
                return false;
            };
            if largest == id && oldest > name {
                return false;
            }
            self.drop_pack(largest, oldest);
        }
        true
    }

    /// Returns where a block lies.
    pub(in crate::object) fn find(&self, key: &BlockKey, now: Instant) -> Option<Found> {
        let space = self.spaces.get(&key.namespace)?;
        let place = space.places[self.part(&key.hash)].get(&key.hash)?;
        let pack = space.packs.get(&place.pack)?;
        let entry = *pack.entries.get(place.entry as usize)?;
        Some(Found { pack: place.pack, entry, is_sure: pack.until > now })
    }

    /// Returns all known packs with a block, also those that could not be deleted.
    pub(super) fn with_block(&self, key: &BlockKey) -> Vec<PackName> {
        let Some(space) = self.spaces.get(&key.namespace) else { return Vec::new() };
        let place = space.places[self.part(&key.hash)].get(&key.hash).map(|place| place.pack);
        let twins = space.twins.get(&key.hash).into_iter().flatten().map(|place| place.pack);
        let has = |entries: &[Entry]| entries.iter().any(|entry| entry.hash == key.hash);
        let doomed = space.doomed.iter().filter(|(_, entries)| has(entries)).map(|(name, _)| *name);
        place.into_iter().chain(twins).chain(doomed).collect()
    }

    /// Records that a pack was seen in the bucket. Returns whether it needs no look: it is known, or was deleted.
    pub(super) fn seen(&mut self, id: NamespaceId, name: PackName, now: Instant) -> bool {
        let until = now + self.ttl;
        let Some(space) = self.spaces.get_mut(&id) else { return false };
        if let Some(pack) = space.packs.get_mut(&name) {
            pack.until = until;
            return true;
        }
        space.doomed.contains_key(&name) || space.deleted.contains(&name)
    }

    /// Records that the head of a pack could not be read. Returns whether it is given up.
    pub(super) fn head_failed(&mut self, id: NamespaceId, name: PackName) -> bool {
        let Some(space) = self.spaces.get_mut(&id) else { return false };
        if space.failed_heads.len() >= OBJECT_PACKS_DOOMED_MAX {
            space.failed_heads.clear();
        }
        let tries = space.failed_heads.entry(name).or_default();
        *tries += 1;
        *tries >= OBJECT_PACK_HEAD_TRIES
    }

    fn take(&mut self, id: NamespaceId, name: PackName) -> Option<(Pack, Vec<BlockKey>)> {
        let hasher = self.hasher.clone();
        let space = self.spaces.get_mut(&id)?;
        let pack = space.packs.remove(&name)?;
        let (weight, bytes) = (pack.weight(), pack.bytes());
        (space.weight, space.bytes) = (space.weight - weight, space.bytes - bytes);
        (self.weight, self.bytes) = (self.weight - weight, self.bytes - bytes);
        let mut gone = Vec::new();
        for entry in &pack.entries {
            if space.leave(hasher.hash_one(entry.hash) as usize % PARTS, entry.hash, name) {
                gone.push(BlockKey { namespace: id, hash: entry.hash });
            }
        }
        Some((pack, gone))
    }

    /// Forgets a pack. Returns those of its blocks that lie in no other known pack.
    pub(super) fn drop_pack(&mut self, id: NamespaceId, name: PackName) -> Vec<BlockKey> {
        self.take(id, name).map(|(_, gone)| gone).unwrap_or_default()
    }

    /// Serves a pack no more, because it is to be deleted. Returns those of its blocks that lie in no other known pack;
    /// `None` if too many packs are being deleted.
    pub(super) fn doom(&mut self, id: NamespaceId, name: PackName) -> Option<Vec<BlockKey>> {
        let space = self.spaces.get(&id)?;
        if space.doomed.contains_key(&name) {
            return Some(Vec::new());
        }
        if space.doomed.len() >= OBJECT_PACKS_DOOMED_MAX {
            return None;
        }
        let Some((pack, gone)) = self.take(id, name) else { return Some(Vec::new()) };
        self.spaces.get_mut(&id)?.doomed.insert(name, pack.entries);
        Some(gone)
    }

    /// Records that a pack is not in the bucket any more. Returns those of its blocks that lie in no other known pack.
    pub(super) fn deleted(&mut self, id: NamespaceId, name: PackName) -> Vec<BlockKey> {
        let gone = self.drop_pack(id, name);
        if let Some(space) = self.spaces.get_mut(&id) {
            space.doomed.remove(&name);
            space.deleted.insert(name);
            if space.deleted.len() > OBJECT_PACKS_DOOMED_MAX {
                space.deleted.pop_front();
            }
        }
        gone
    }

    /// Finds a block in this pack no more.
    pub(super) fn skip(&mut self, key: &BlockKey, name: PackName) {
        let part = self.part(&key.hash);
        if let Some(space) = self.spaces.get_mut(&key.namespace) {
            space.leave(part, key.hash, name);
        }
    }

    /// Forgets an epoch of a namespace. The caller drops the result after it has released its lock.
    pub(super) fn forget(&mut self, id: NamespaceId) -> Option<Packs> {
        let space = self.spaces.remove(&id)?;
        (self.weight, self.bytes) = (self.weight - space.weight, self.bytes - space.bytes);
        Some(space)
    }

    /// Returns whether the bucket should be listed for an epoch of a namespace now; the caller then does, and calls
    /// [`Self::listed`]. There is one list at a time, and the next one begins `every` after the last one began. With
    /// `only_first` it should if all packs were never known.
    pub(super) fn begin_list(
        &mut self,
        id: NamespaceId,
        now: Instant,
        every: Duration,
        only_first: bool,
    ) -> bool {
        let space = self.spaces.entry(id).or_insert_with(Packs::new);
        let is_due = space.listed_at.is_none_or(|at| now >= at + every);
        let begins = is_due && !space.is_being_listed && !(only_first && space.whole_at_ms.is_some());
        space.is_being_listed |= begins;
        begins
    }

    /// Records that a list that began at `began` has ended, in whichever way.
    pub(super) fn listed(&mut self, id: NamespaceId, began: Instant) {
        if let Some(space) = self.spaces.get_mut(&id) {
            space.is_being_listed = false;
            space.listed_at = Some(began);
        }
    }

    /// Records that all packs of an epoch of a namespace that were in the bucket at a time are known, as far as there is
    /// room.
    pub(super) fn list_was_whole(&mut self, id: NamespaceId, began_ms: u64) {
        if let Some(space) = self.spaces.get_mut(&id) {
            space.whole_at_ms = space.whole_at_ms.max(Some(began_ms));
        }
    }

    /// Returns the start of the last list after which all packs were known, in milliseconds since 1970.
    pub(super) fn whole_at_ms(&self, id: NamespaceId) -> Option<u64> {
        self.spaces.get(&id)?.whole_at_ms
    }

    /// Returns a piece of the known packs of an epoch of a namespace, from a name on.
    pub(super) fn names_from(&self, id: NamespaceId, from: PackName, count: usize) -> Vec<PackName> {
        let Some(space) = self.spaces.get(&id) else { return Vec::new() };
        space.packs.range(from..).take(count).map(|(name, _)| *name).collect()
    }

    /// Returns whether any pack of an epoch of a namespace is known.
    pub(super) fn has(&self, id: NamespaceId) -> bool {
        self.spaces.get(&id).is_some_and(|space| !space.packs.is_empty())
    }

    /// Returns blocks in packs from a time on, and the time to continue at. All packs of one time are in one piece.
    pub(super) fn keys_from(&self, id: NamespaceId, from_ms: u64) -> (Vec<BlockKey>, Option<u64>) {
        let Some(space) = self.spaces.get(&id) else { return (Vec::new(), None) };
        let first = PackName { time_ms: from_ms, random: 0, blocks: 0 };
        let (mut keys, mut last_ms, mut looked_at) = (Vec::new(), from_ms, 0);
        for (name, pack) in space.packs.range(first..) {
            looked_at += pack.entries.len().max(1);
            if name.time_ms != last_ms && looked_at > SNAPSHOT_HASHES_MAX {
                return (keys, Some(name.time_ms));
            }
            last_ms = name.time_ms;
            let is_here = |entry: &&Entry| {
                space.places[self.part(&entry.hash)].get(&entry.hash).is_some_and(|place| place.pack == *name)
            };
            let here = pack.entries.iter().filter(is_here);
            keys.extend(here.map(|entry| BlockKey { namespace: id, hash: entry.hash }));
        }
        (keys, None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: NamespaceId = NamespaceId([1; 16]);
    const TTL: Duration = Duration::from_secs(60);

    fn hash(n: u32) -> BlockHash {
        let mut hash = [0; 16];
        hash[..4].copy_from_slice(&n.to_le_bytes());
        BlockHash(hash)
    }

    fn key(n: u32) -> BlockKey {
        BlockKey { namespace: ID, hash: hash(n) }
    }

    fn name(time_ms: u64, blocks: u32) -> PackName {
        PackName { time_ms, random: 5, blocks }
    }

    fn entries(blocks: impl Iterator<Item = u32>) -> Vec<Entry> {
        let entry = |(at, n)| Entry { hash: hash(n), offset: 4096 * (at as u64 + 1), bytes: 4096 };
        blocks.enumerate().map(entry).collect()
    }

    #[test]
    fn a_block_is_found_as_long_as_any_pack_has_it() {
        let (mut index, now) = (PackIndex::new(TTL), Instant::now());
        index.learn(ID, name(1, 4), entries(0..4), now);
        index.learn(ID, name(2, 4), entries(2..6), now);
        index.learn(ID, name(3, 2), entries(2..4), now);
        assert_eq!(index.find(&key(2), now).unwrap().pack, name(3, 2), "the one learnt last");
        assert_eq!(index.with_block(&key(3)).len(), 3);
        assert_eq!(index.usage(), (10, 10 * 4096));
        assert!(index.drop_pack(ID, name(3, 2)).is_empty(), "others have them");
        assert_eq!(index.find(&key(2), now).unwrap().pack, name(2, 4));
        assert_eq!(index.drop_pack(ID, name(1, 4)), [key(0), key(1)]);
        assert_eq!(index.drop_pack(ID, name(2, 4)).len(), 4);
        assert!((0..6).all(|n| index.find(&key(n), now).is_none() && index.with_block(&key(n)).is_empty()));
        assert_eq!(index.usage(), (0, 0));
        assert!(index.spaces[&ID].twins.is_empty());
    }

    #[test]
    fn a_pack_that_has_a_block_twice_loses_it_once() {
        let (mut index, now) = (PackIndex::new(TTL), Instant::now());
        index.learn(ID, name(1, 2), entries([7, 7].into_iter()), now);
        assert!(index.find(&key(7), now).is_some());
        assert_eq!(index.drop_pack(ID, name(1, 2)), [key(7)]);
        assert!(index.find(&key(7), now).is_none() && index.spaces[&ID].twins.is_empty());
    }

    #[test]
    fn a_pack_is_believed_for_its_time() {
        let (mut index, now) = (PackIndex::new(TTL), Instant::now());
        index.learn(ID, name(1, 1), entries(0..1), now);
        assert!(index.find(&key(0), now + TTL / 2).unwrap().is_sure);
        assert!(!index.find(&key(0), now + TTL).unwrap().is_sure);
        assert!(index.seen(ID, name(1, 1), now + TTL) && !index.seen(ID, name(9, 1), now));
        assert!(index.find(&key(0), now + TTL).unwrap().is_sure);
    }

    #[test]
    fn the_oldest_packs_make_room() {
        let (mut index, now) = (PackIndex::with_capacity(TTL, 10), Instant::now());
        for time in 0..20 {
            let first = time as u32 * 4;
            index.learn(ID, name(time, 4), entries(first..first + 4), now);
            assert!(index.usage().0 <= 10);
        }
        assert!(index.find(&key(79), now).is_some() && index.find(&key(0), now).is_none());
        assert_eq!(index.learn(ID, name(1, 4), entries(0..4), now), Learnt::NoRoom, "older than the others");
        assert_eq!(index.usage().0, 8);
        let two = NamespaceId([2; 16]);
        for time in 0..3 {
            let first = 1000 + time as u32 * 2;
            assert_eq!(index.learn(two, name(time, 2), entries(first..first + 2), now), Learnt::Known);
        }
        let of = |index: &PackIndex, id| index.spaces[&id].weight;
        assert_eq!((of(&index, ID), of(&index, two)), (4, 6), "the largest namespace makes room");
        assert_eq!(index.learn(ID, name(99, 1), Vec::new(), now), Learnt::Known);
        assert_eq!((of(&index, ID), of(&index, two)), (5, 4), "a pack without blocks counts");
        index.learn(ID, name(100, 30), entries(2000..2030), now);
        assert_eq!(index.usage().0, 30, "a single pack has room in any case");
        drop(index.forget(ID));
        assert_eq!(index.usage(), (0, 0));
    }

    #[test]
    fn lists_take_turns_and_are_due_after_a_pause() {
        let (mut index, now) = (PackIndex::new(TTL), Instant::now());
        let pause = Duration::from_secs(10);
        let begin = |index: &mut PackIndex, after| index.begin_list(ID, now + after, pause, false);
        assert!(begin(&mut index, Duration::ZERO));
        assert!(!begin(&mut index, Duration::ZERO) && !begin(&mut index, pause * 2));
        index.listed(ID, now);
        assert!(!begin(&mut index, pause / 2));
        assert!(begin(&mut index, pause));
        index.listed(ID, now + pause);
        index.learn(ID, name(500, 1), entries(0..1), now);
        assert_eq!(index.whole_at_ms(ID), None, "older ones may be unknown");
        assert!(index.begin_list(ID, now + pause * 2, pause, true));
        index.listed(ID, now + pause * 2);
        index.list_was_whole(ID, 700);
        index.list_was_whole(ID, 600);
        assert_eq!(index.whole_at_ms(ID), Some(700));
        assert!(!index.begin_list(ID, now + pause * 9, pause, true), "the first one is done");
        assert!(begin(&mut index, pause * 9));
    }

    #[test]
    fn all_keys_are_listed_in_bounded_pieces() {
        let (mut index, now) = (PackIndex::new(TTL), Instant::now());
        for time in 0..30_u64 {
            let first = time as u32 * 1000;
            // Two packs at a time, and one block that all have.
            index.learn(ID, name(time, 1000), entries(first + 1..first + 1000), now);
            let other = PackName { random: 6, ..name(time, 2) };
            index.learn(ID, other, entries([0, 100_000 + time as u32].into_iter()), now);
        }
        let (mut keys, mut from) = (Vec::new(), Some(0));
        while let Some(at) = from {
            let (piece, next) = index.keys_from(ID, at);
            assert!(piece.len() <= SNAPSHOT_HASHES_MAX && next.is_none_or(|next| next > at));
            keys.extend(piece);
            from = next;
        }
        keys.sort_by_key(|key| key.hash.0);
        let all = keys.len();
        keys.dedup();
        assert_eq!((all, keys.len()), (30 * 1000 + 1, 30 * 1000 + 1));
    }

    #[test]
    fn a_doomed_pack_is_not_found_and_no_list_brings_it_back() {
        let (mut index, now) = (PackIndex::new(TTL), Instant::now());
        index.learn(ID, name(1, 4), entries(0..4), now);
        index.learn(ID, name(2, 1), entries(3..4), now);
        assert_eq!(index.doom(ID, name(1, 4)).unwrap().len(), 3, "another pack has the fourth");
        assert!(index.find(&key(0), now).is_none() && index.find(&key(3), now).is_some());
        assert_eq!(index.with_block(&key(0)), [name(1, 4)], "a later removal deletes it");
        let learn = |index: &mut PackIndex| index.learn(ID, name(1, 4), entries(0..4), now);
        assert_eq!(learn(&mut index), Learnt::Deleted);
        assert!(index.seen(ID, name(1, 4), now) && index.doom(ID, name(1, 4)).unwrap().is_empty());
        assert!(index.deleted(ID, name(1, 4)).is_empty());
        assert!(index.with_block(&key(0)).is_empty());
        assert_eq!(learn(&mut index), Learnt::Deleted, "a list that began before");
        assert_eq!(index.usage(), (1, 4096));
    }

    #[test]
    fn a_head_that_cannot_be_read_is_given_up() {
        let mut index = PackIndex::new(TTL);
        index.begin_list(ID, Instant::now(), TTL, false);
        let tries: Vec<bool> = (0..3).map(|_| index.head_failed(ID, name(1, 1))).collect();
        assert_eq!(tries, [false, false, true]);
    }

    #[test]
    fn a_skipped_block_is_found_in_another_pack() {
        let (mut index, now) = (PackIndex::new(TTL), Instant::now());
        index.learn(ID, name(1, 2), entries(0..2), now);
        index.learn(ID, name(2, 2), entries(0..2), now);
        index.skip(&key(0), name(2, 2));
        assert_eq!(index.find(&key(0), now).unwrap().pack, name(1, 2));
        index.skip(&key(0), name(1, 2));
        assert!(index.find(&key(0), now).is_none() && index.find(&key(1), now).is_some());
        assert_eq!(index.drop_pack(ID, name(2, 2)), [], "the other pack has the rest");
    }
}
