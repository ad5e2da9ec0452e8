//! Reports of the blocks that a tier will evict next, each at most once for as long as it is remembered.

use std::collections::{HashSet, VecDeque};
use std::sync::Weak;

use kvdepot_core::BlockKey;

use crate::TierEvents;

/// Blocks reported ahead of their eviction.
pub(crate) const AHEAD: usize = 256;
/// Reported blocks that are remembered.
const REMEMBERED: usize = 16 * AHEAD;

/// What a tier has reported. A tier whose depot does not ask for it keeps none.
#[derive(Debug, Default)]
pub(crate) struct Cooling {
    reported: HashSet<BlockKey>,
    oldest: VecDeque<BlockKey>,
    /// Reported blocks that are probably still there.
    left: usize,
}

impl Cooling {
    /// Returns a new one if the listener asks for such reports.
    pub(crate) fn for_listener(listener: &Weak<dyn TierEvents>) -> Option<Self> {
        listener.upgrade().filter(|listener| listener.asks_for_cooling()).map(|_| Self::default())
    }

    /// Records evictions.
    pub(crate) const fn evicted(&mut self, blocks: usize) {
        self.left = self.left.saturating_sub(blocks);
    }

    /// Returns whether so few reported blocks are left that the coldest must be looked at again.
    pub(crate) const fn is_due(&self) -> bool {
        self.left < AHEAD / 2
    }

    /// Takes the tier's blocks, the coldest first. Returns those that have not been reported.
    pub(crate) fn report(&mut self, coldest: impl Iterator<Item = BlockKey>) -> Vec<BlockKey> {
        self.left = 0;
        let looked_at = coldest.take(AHEAD).inspect(|_| self.left += 1);
        let fresh: Vec<BlockKey> = looked_at.filter(|key| self.reported.insert(*key)).collect();
        self.oldest.extend(&fresh);
        while self.oldest.len() > REMEMBERED {
            self.oldest.pop_front().into_iter().for_each(|key| {
                self.reported.remove(&key);
            });
        }
        fresh
    }
}

#[cfg(test)]
mod tests {
    use kvdepot_core::{BlockHash, NamespaceId};

    use super::*;

    fn key(n: usize) -> BlockKey {
        let mut hash = [0; 16];
        hash[..8].copy_from_slice(&n.to_le_bytes());
        BlockKey { namespace: NamespaceId([1; 16]), hash: BlockHash(hash) }
    }

    /// As of a tier with so many blocks that evicts them in the order of their numbers and gets as many new ones.
    fn evict(blocks: usize) -> (Cooling, usize) {
        let mut cooling = Cooling::default();
        let (mut reported, mut looks) = (0, 0);
        for evicted in 0..20 * AHEAD {
            if cooling.is_due() {
                looks += 1;
                let fresh = cooling.report((evicted..evicted + blocks).map(key));
                assert_eq!(fresh, (reported..evicted + blocks.min(AHEAD)).map(key).collect::<Vec<_>>());
                reported = evicted + blocks.min(AHEAD);
            }
            assert!(evicted < reported, "{blocks} blocks: {evicted} was not reported");
            cooling.evicted(1);
        }
        (cooling, looks)
    }

    #[test]
    fn every_block_is_reported_once_and_before_it_is_evicted() {
        let (cooling, looks) = evict(10 * AHEAD);
        assert!(looks <= 41, "the order is looked at once for many evictions, not {looks} times");
        assert!(cooling.reported.len() <= REMEMBERED && cooling.oldest.len() == cooling.reported.len());
    }

    #[test]
    fn a_tier_with_few_blocks_reports_all_of_them() {
        for blocks in [1, 2, AHEAD / 2, AHEAD - 1, AHEAD] {
            evict(blocks);
        }
    }
}
