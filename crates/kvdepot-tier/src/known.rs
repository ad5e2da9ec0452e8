//! Cached knowledge of a tier over a network about its blocks: its writes, and recent answers.

use std::hash::BuildHasher;
use std::time::{Duration, Instant};

use hashbrown::DefaultHashBuilder;
use hashlink::LruCache;
use kvdepot_core::limits::{KNOWN_KEYS_MAX, SNAPSHOT_HASHES_MAX};
use kvdepot_core::{BlockKey, NamespaceId};

use crate::{Presence, TierUsage};

#[derive(Clone, Copy, Debug)]
struct Belief {
    there: bool,
    until: Instant,
    bytes: u64,
}

/// Number of parts. A part holds at most as many keys as one piece of a list may have, so a piece is read under one short
/// hold of the lock.
pub(crate) const PARTS: usize = KNOWN_KEYS_MAX / SNAPSHOT_HASHES_MAX * 2;
/// Maximum number of keys of a part. The least recently used one of the part makes space for another.
const PART_KEYS_MAX: usize = KNOWN_KEYS_MAX / PARTS;

/// The cached knowledge, bounded (P7), in parts by the hash of the key.
#[derive(Debug)]
pub(crate) struct Known {
    parts: Vec<LruCache<BlockKey, Belief>>,
    hasher: DefaultHashBuilder,
    present_ttl: Duration,
    absent_ttl: Duration,
    blocks: u64,
    bytes: u64,
}

impl Known {
    pub(crate) fn new(present_ttl: Duration, absent_ttl: Duration) -> Self {
        let parts = (0..PARTS).map(|_| LruCache::new_unbounded()).collect();
        Self { parts, hasher: DefaultHashBuilder::default(), present_ttl, absent_ttl, blocks: 0, bytes: 0 }
    }

    fn part_of(&self, key: &BlockKey) -> usize {
        self.hasher.hash_one(key) as usize % PARTS
    }

    /// Records that the block is present or absent.
    pub(crate) fn note(&mut self, key: BlockKey, there: bool, bytes: u64) {
        self.forget(&key);
        let ttl = if there { self.present_ttl } else { self.absent_ttl };
        let part = self.part_of(&key);
        let part = &mut self.parts[part];
        part.insert(key, Belief { there, until: Instant::now() + ttl, bytes });
        let dropped = if part.len() > PART_KEYS_MAX { part.remove_lru() } else { None };
        if there {
            self.blocks += 1;
            self.bytes += bytes;
        }
        if let Some((_, belief)) = dropped {
            self.uncount(belief);
        }
    }

    pub(crate) fn forget(&mut self, key: &BlockKey) {
        let part = self.part_of(key);
        if let Some(belief) = self.parts[part].remove(key) {
            self.uncount(belief);
        }
    }

    /// Forgets those of the keys of a part that are meant. Returns the ones that were present, as far as known.
    pub(crate) fn forget_in(&mut self, part: usize, is_meant: impl Fn(&BlockKey) -> bool) -> Vec<BlockKey> {
        let meant = self.parts[part].iter().filter(|(key, _)| is_meant(key));
        let now = Instant::now();
        let is_there = |belief: &Belief| belief.there && belief.until > now;
        let meant: Vec<(BlockKey, bool)> = meant.map(|(key, belief)| (*key, is_there(belief))).collect();
        meant.iter().for_each(|(key, _)| self.forget(key));
        meant.into_iter().filter(|(_, there)| *there).map(|(key, _)| key).collect()
    }

    pub(crate) fn presence(&self, key: &BlockKey, now: Instant) -> Presence {
        match self.parts[self.part_of(key)].peek(key) {
            Some(belief) if belief.until <= now => Presence::Unknown,
            Some(belief) if belief.there => Presence::Present,
            Some(_) => Presence::Absent,
            None => Presence::Unknown,
        }
    }

    /// Returns a piece of the keys of a namespace that were present when last seen, from the part `from` on, and the part
    /// to continue at.
    pub(crate) fn present_from(&self, namespace: NamespaceId, from: u64) -> (Vec<BlockKey>, Option<u64>) {
        let mut part = usize::try_from(from).unwrap_or(PARTS).min(PARTS);
        let (mut keys, mut looked_at) = (Vec::new(), 0);
        while part < PARTS && looked_at + PART_KEYS_MAX <= SNAPSHOT_HASHES_MAX {
            let beliefs = self.parts[part].iter();
            let present = beliefs.filter(|(key, belief)| belief.there && key.namespace == namespace);
            keys.extend(present.map(|(key, _)| *key));
            looked_at += self.parts[part].len();
            part += 1;
        }
        (keys, (part < PARTS).then_some(part as u64))
    }

    pub(crate) fn usage(&self) -> TierUsage {
        TierUsage { blocks: self.blocks, bytes: self.bytes, bytes_max: 0 }
    }

    const fn uncount(&mut self, belief: Belief) {
        if belief.there {
            self.blocks -= 1;
            self.bytes -= belief.bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use kvdepot_core::BlockHash;

    use super::*;

    #[test]
    fn beliefs_end() {
        let mut known = Known::new(Duration::from_secs(60), Duration::from_secs(30));
        let key = |n| BlockKey { namespace: NamespaceId([1; 16]), hash: BlockHash([n; 16]) };
        known.note(key(1), true, 100);
        known.note(key(1), true, 100);
        known.note(key(2), false, 100);
        let now = Instant::now();
        let at = |seconds| now + Duration::from_secs(seconds);
        assert_eq!(known.usage(), TierUsage { blocks: 1, bytes: 100, bytes_max: 0 });
        assert_eq!(
            (known.presence(&key(1), now), known.presence(&key(1), at(61))),
            (Presence::Present, Presence::Unknown)
        );
        assert_eq!(
            (known.presence(&key(2), now), known.presence(&key(2), at(31))),
            (Presence::Absent, Presence::Unknown)
        );
        assert_eq!(known.presence(&key(3), now), Presence::Unknown);
        let forgotten: Vec<BlockKey> = (0..PARTS)
            .flat_map(|part| known.forget_in(part, |key| key.namespace == NamespaceId([1; 16])))
            .collect();
        assert_eq!(forgotten, [key(1)], "those that were present");
        assert_eq!((known.usage().bytes, known.presence(&key(1), now)), (0, Presence::Unknown));
    }

    /// Every present block is in one piece, no piece is too long, and each piece is read afresh. Otherwise a follower of
    /// events would report blocks that were removed while it read the list.
    #[test]
    fn pieces_have_every_present_block_and_none_that_was_removed_before() {
        let mut known = Known::new(Duration::from_secs(60), Duration::from_secs(60));
        let hash = |n: u64| {
            let mut hash = [0; 16];
            hash[..8].copy_from_slice(&n.to_le_bytes());
            BlockHash(hash)
        };
        let key = |space, n| BlockKey { namespace: NamespaceId([space; 16]), hash: hash(n) };
        for n in 0..50_000 {
            known.note(key((n % 3) as u8, n), !n.is_multiple_of(5), 1);
        }
        let is_there = |n: u64| n % 3 == 1 && !n.is_multiple_of(5);
        let (first, mut next) = known.present_from(NamespaceId([1; 16]), 0);
        let gone = (0..50_000).filter(|&n| is_there(n)).map(|n| key(1, n)).find(|key| !first.contains(key));
        known.forget(&gone.unwrap());
        let mut keys = first;
        while let Some(from) = next {
            let (piece, then) = known.present_from(NamespaceId([1; 16]), from);
            assert!(piece.len() <= SNAPSHOT_HASHES_MAX);
            assert!(then.is_none_or(|then| then > from));
            keys.extend(piece);
            next = then;
        }
        let mut expected: Vec<_> = (0..50_000).filter(|&n| is_there(n)).map(|n| key(1, n)).collect();
        expected.retain(|key| Some(*key) != gone);
        keys.sort_unstable_by_key(|key| key.hash.0);
        expected.sort_unstable_by_key(|key| key.hash.0);
        assert!(keys == expected, "{} of {} keys", keys.len(), expected.len());
    }

    #[test]
    fn it_keeps_a_bounded_number_of_the_most_recently_noted_keys() {
        let mut known = Known::new(Duration::from_secs(60), Duration::from_secs(60));
        let mut hash = [0; 16];
        for n in 0..KNOWN_KEYS_MAX as u64 + 100_000 {
            hash[..8].copy_from_slice(&n.to_le_bytes());
            known.note(BlockKey { namespace: NamespaceId([1; 16]), hash: BlockHash(hash) }, true, 2);
        }
        let held: usize = known.parts.iter().map(LruCache::len).sum();
        assert!(held <= KNOWN_KEYS_MAX && held > KNOWN_KEYS_MAX * 9 / 10, "{held}");
        assert_eq!((known.usage().blocks, known.usage().bytes), (held as u64, 2 * held as u64));
        let last = BlockKey { namespace: NamespaceId([1; 16]), hash: BlockHash(hash) };
        assert_eq!(known.presence(&last, Instant::now()), Presence::Present);
    }
}
