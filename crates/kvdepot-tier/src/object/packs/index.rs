//! Which pack holds which block, as far as this tier knows. A state machine without a clock and without requests.
//!
//! The tier learns of packs by writing them and from lists of the bucket. It is bounded (P7): the oldest packs of the
//! namespace that learns of one make space for it.

use std::collections::BTreeMap;
use std::hash::BuildHasher;
use std::time::{Duration, Instant};

use hashbrown::{DefaultHashBuilder, HashMap};
use kvdepot_core::limits::{KNOWN_KEYS_MAX, SNAPSHOT_HASHES_MAX};
use kvdepot_core::{BlockHash, BlockKey, NamespaceId};

use super::codec::{Entry, PackName};

/// Parts of a namespace's table: each grows on its own, so that no insert moves more than a few thousand places.
const PARTS: usize = 256;

#[derive(Debug)]
struct Pack {
    entries: Box<[Entry]>,
    /// Until when the pack is assumed to be in the bucket.
    until: Instant,
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
    /// Start of the last list that has ended.
    listed_at: Option<Instant>,
    is_being_listed: bool,
    /// Whether one list from the beginning has come to its end, heads included: later ones need not go back that far.
    is_whole: bool,
}

/// Where a block lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::object) struct Found {
    pub(super) pack: PackName,
    pub(super) entry: Entry,
    /// Whether the pack may be assumed to be there without asking.
    pub(super) is_sure: bool,
}

/// All packs that a tier knows.
#[derive(Debug)]
pub(super) struct PackIndex {
    spaces: HashMap<NamespaceId, Packs>,
    hasher: DefaultHashBuilder,
    ttl: Duration,
    blocks_max: u64,
    blocks: u64,
    bytes: u64,
}

impl Packs {
    fn new() -> Self {
        Self {
            packs: BTreeMap::new(),
            places: (0..PARTS).map(|_| HashMap::new()).collect(),
            twins: HashMap::new(),
            listed_at: None,
            is_being_listed: false,
            is_whole: false,
        }
    }
}

impl PackIndex {
    /// `ttl`: how long a pack is assumed to be in the bucket after it was written, listed or read.
    pub(super) fn new(ttl: Duration) -> Self {
        Self::with_capacity(ttl, KNOWN_KEYS_MAX as u64)
    }

    fn with_capacity(ttl: Duration, blocks_max: u64) -> Self {
        Self {
            spaces: HashMap::new(),
            hasher: DefaultHashBuilder::default(),
            ttl,
            blocks_max,
            blocks: 0,
            bytes: 0,
        }
    }

    /// Returns the number of blocks in packs, and of their bytes.
    pub(super) const fn usage(&self) -> (u64, u64) {
        (self.blocks, self.bytes)
    }

    fn part(&self, hash: &BlockHash) -> usize {
        self.hasher.hash_one(hash) as usize % PARTS
    }

    /// Records that a pack is in the bucket.
    pub(super) fn learn(&mut self, id: NamespaceId, name: PackName, entries: Vec<Entry>, now: Instant) {
        let until = now + self.ttl;
        let space = self.spaces.entry(id).or_insert_with(Packs::new);
        if let Some(known) = space.packs.get_mut(&name) {
            known.until = until;
            return;
        }
        for (number, entry) in entries.iter().enumerate() {
            let part = self.hasher.hash_one(entry.hash) as usize % PARTS;
            let place = Place { pack: name, entry: u32::try_from(number).unwrap_or(u32::MAX) };
            let earlier = space.places[part].insert(entry.hash, place);
            if let Some(earlier) = earlier.filter(|earlier| earlier.pack != name) {
                space.twins.entry(entry.hash).or_default().push(earlier);
            }
        }
        self.blocks += entries.len() as u64;
        self.bytes += entries.iter().map(|entry| entry.bytes).sum::<u64>();
        space.packs.insert(name, Pack { entries: entries.into(), until });
        while self.blocks > self.blocks_max {
            let oldest = self.spaces.get(&id).and_then(|space| space.packs.keys().next().copied());
            let Some(oldest) = oldest.filter(|oldest| *oldest != name) else { break };
            self.drop_pack(id, oldest);
        }
    }

    /// Returns where a block lies.
    pub(super) fn find(&self, key: &BlockKey, now: Instant) -> Option<Found> {
        let space = self.spaces.get(&key.namespace)?;
        let place = space.places[self.part(&key.hash)].get(&key.hash)?;
        let pack = space.packs.get(&place.pack)?;
        let entry = *pack.entries.get(place.entry as usize)?;
        Some(Found { pack: place.pack, entry, is_sure: pack.until > now })
    }

    /// Returns all known packs with a block.
    pub(super) fn with_block(&self, key: &BlockKey) -> Vec<PackName> {
        let Some(space) = self.spaces.get(&key.namespace) else { return Vec::new() };
        let place = space.places[self.part(&key.hash)].get(&key.hash).map(|place| place.pack);
        let twins = space.twins.get(&key.hash).into_iter().flatten().map(|place| place.pack);
        place.into_iter().chain(twins).collect()
    }

    /// Records that a pack was seen in the bucket. Returns whether it was known before.
    pub(super) fn seen(&mut self, id: NamespaceId, name: PackName, now: Instant) -> bool {
        let until = now + self.ttl;
        let pack = self.spaces.get_mut(&id).and_then(|space| space.packs.get_mut(&name));
        pack.map(|pack| pack.until = until).is_some()
    }

    /// Returns the number of blocks for which there is space.
    pub(super) const fn room(&self) -> u64 {
        self.blocks_max.saturating_sub(self.blocks)
    }

    /// Forgets a pack that is not in the bucket any more. Returns those of its blocks that lie in no other known pack.
    pub(super) fn drop_pack(&mut self, id: NamespaceId, name: PackName) -> Vec<BlockKey> {
        let hasher = self.hasher.clone();
        let Some(space) = self.spaces.get_mut(&id) else { return Vec::new() };
        let Some(pack) = space.packs.remove(&name) else { return Vec::new() };
        self.blocks -= pack.entries.len() as u64;
        self.bytes -= pack.entries.iter().map(|entry| entry.bytes).sum::<u64>();
        let mut gone = Vec::new();
        for entry in &pack.entries {
            let hash = entry.hash;
            let part = &mut space.places[hasher.hash_one(hash) as usize % PARTS];
            let mut twins = space.twins.remove(&hash).unwrap_or_default();
            twins.retain(|place| place.pack != name);
            if part.get(&hash).is_some_and(|place| place.pack == name) {
                // The newest of the others.
                match twins.pop() {
                    Some(place) => drop(part.insert(hash, place)),
                    None => {
                        part.remove(&hash);
                        gone.push(BlockKey { namespace: id, hash });
                    }
                }
            }
            if !twins.is_empty() {
                space.twins.insert(hash, twins);
            }
        }
        gone
    }

    /// Forgets an epoch of a namespace. The caller drops the result after it has released its lock.
    pub(super) fn forget(&mut self, id: NamespaceId) -> Option<Packs> {
        let space = self.spaces.remove(&id)?;
        for pack in space.packs.values() {
            self.blocks -= pack.entries.len() as u64;
            self.bytes -= pack.entries.iter().map(|entry| entry.bytes).sum::<u64>();
        }
        Some(space)
    }

    /// Returns whether the bucket should be listed for an epoch of a namespace now; the caller then does, and calls
    /// [`Self::listed`]. There is one list at a time, and the next one begins `every` after the last one began.
    pub(super) fn begin_list(&mut self, id: NamespaceId, now: Instant, every: Duration) -> bool {
        let space = self.spaces.entry(id).or_insert_with(Packs::new);
        let is_due = space.listed_at.is_none_or(|at| now >= at + every);
        let begins = is_due && !space.is_being_listed;
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

    /// Returns the known packs of an epoch of a namespace from a name on.
    pub(super) fn names_from(&self, id: NamespaceId, from: PackName) -> Vec<PackName> {
        let Some(space) = self.spaces.get(&id) else { return Vec::new() };
        space.packs.range(from..).map(|(name, _)| *name).collect()
    }

    /// Records that all packs of an epoch of a namespace that were in the bucket are known, as far as there is room.
    pub(super) fn list_is_whole(&mut self, id: NamespaceId) {
        if let Some(space) = self.spaces.get_mut(&id) {
            space.is_whole = true;
        }
    }

    /// Returns the time of the newest known pack of an epoch of a namespace, if all older ones are known.
    pub(super) fn listed_to_ms(&self, id: NamespaceId) -> Option<u64> {
        let space = self.spaces.get(&id).filter(|space| space.is_whole)?;
        space.packs.keys().next_back().map(|name| name.time_ms)
    }

    /// Returns blocks in packs from a time on, and the time to continue at. All packs of one time are in one piece.
    pub(super) fn keys_from(&self, id: NamespaceId, from_ms: u64) -> (Vec<BlockKey>, Option<u64>) {
        let Some(space) = self.spaces.get(&id) else { return (Vec::new(), None) };
        let first = PackName { time_ms: from_ms, random: 0, blocks: 0 };
        let (mut keys, mut last_ms) = (Vec::new(), from_ms);
        for (name, pack) in space.packs.range(first..) {
            if name.time_ms != last_ms && keys.len() + pack.entries.len() > SNAPSHOT_HASHES_MAX {
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
        assert_eq!(index.room(), 2);
        index.learn(ID, name(99, 30), entries(1000..1030), now);
        assert_eq!(index.usage().0, 30, "a single pack has room in any case");
        drop(index.forget(ID));
        assert_eq!((index.usage(), index.room()), ((0, 0), 10));
    }

    #[test]
    fn lists_take_turns_and_are_due_after_a_pause() {
        let (mut index, now) = (PackIndex::new(TTL), Instant::now());
        let pause = Duration::from_secs(10);
        assert!(index.begin_list(ID, now, pause));
        assert!(!index.begin_list(ID, now, pause) && !index.begin_list(ID, now + pause * 2, pause));
        index.listed(ID, now);
        assert!(!index.begin_list(ID, now + pause / 2, pause));
        assert!(index.begin_list(ID, now + pause, pause));
        index.learn(ID, name(500, 1), entries(0..1), now);
        assert_eq!(index.listed_to_ms(ID), None, "older ones may be unknown");
        index.list_is_whole(ID);
        assert_eq!(index.listed_to_ms(ID), Some(500));
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
}
