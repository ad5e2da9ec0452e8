//! Cached knowledge of a tier over a network about its blocks: its writes, and recent answers.

use std::time::{Duration, Instant};

use hashlink::LruCache;
use kvdepot_core::limits::KNOWN_KEYS_MAX;
use kvdepot_core::{BlockKey, NamespaceId};

use crate::{Presence, TierUsage};

#[derive(Clone, Copy, Debug)]
struct Belief {
    there: bool,
    until: Instant,
    bytes: u64,
}

/// The cached knowledge, bounded (P7).
#[derive(Debug)]
pub(crate) struct Known {
    beliefs: LruCache<BlockKey, Belief>,
    present_ttl: Duration,
    absent_ttl: Duration,
    blocks: u64,
    bytes: u64,
}

impl Known {
    pub(crate) fn new(present_ttl: Duration, absent_ttl: Duration) -> Self {
        let beliefs = LruCache::new_unbounded();
        Self { beliefs, present_ttl, absent_ttl, blocks: 0, bytes: 0 }
    }

    /// Records that the block is present or absent.
    pub(crate) fn note(&mut self, key: BlockKey, there: bool, bytes: u64) {
        self.forget(&key);
        let ttl = if there { self.present_ttl } else { self.absent_ttl };
        self.beliefs.insert(key, Belief { there, until: Instant::now() + ttl, bytes });
        if there {
            self.blocks += 1;
            self.bytes += bytes;
        }
        while self.beliefs.len() > KNOWN_KEYS_MAX {
            let Some((_, belief)) = self.beliefs.remove_lru() else { break };
            self.uncount(belief);
        }
    }

    pub(crate) fn forget(&mut self, key: &BlockKey) {
        if let Some(belief) = self.beliefs.remove(key) {
            self.uncount(belief);
        }
    }

    pub(crate) fn forget_namespace(&mut self, namespace: NamespaceId) {
        for key in self.keys(|key, _| key.namespace == namespace) {
            self.forget(&key);
        }
    }

    /// Forgets blocks of a server that came back as another one: nothing about them is certain.
    pub(crate) fn forget_if(&mut self, is_meant: impl Fn(&BlockKey) -> bool) {
        for key in self.keys(|key, _| is_meant(key)) {
            self.forget(&key);
        }
    }

    pub(crate) fn presence(&self, key: &BlockKey, now: Instant) -> Presence {
        match self.beliefs.peek(key) {
            Some(belief) if belief.until <= now => Presence::Unknown,
            Some(belief) if belief.there => Presence::Present,
            Some(_) => Presence::Absent,
            None => Presence::Unknown,
        }
    }

    /// Returns the keys of a namespace that are known to be present.
    pub(crate) fn present(&self, namespace: NamespaceId) -> Vec<BlockKey> {
        self.keys(|key, belief| key.namespace == namespace && belief.there)
    }

    pub(crate) fn usage(&self) -> TierUsage {
        TierUsage { blocks: self.blocks, bytes: self.bytes, bytes_max: 0 }
    }

    fn keys(&self, is_meant: impl Fn(&BlockKey, &Belief) -> bool) -> Vec<BlockKey> {
        self.beliefs.iter().filter(|(key, belief)| is_meant(key, belief)).map(|(key, _)| *key).collect()
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
        let mut known = Known::new(Duration::from_secs(60), Duration::from_secs(1));
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
            (known.presence(&key(2), now), known.presence(&key(2), at(2))),
            (Presence::Absent, Presence::Unknown)
        );
        assert_eq!(known.presence(&key(3), now), Presence::Unknown);
        known.forget_namespace(NamespaceId([1; 16]));
        assert_eq!((known.usage().bytes, known.presence(&key(1), now)), (0, Presence::Unknown));
    }
}
