//! How a claim notes when it got how far, for who traces its request.

use std::sync::Arc;

use super::super::event::{CameFrom, ClaimTimes, Nanos, Settled, TierIndex};
use super::claim::Claim;

impl Claim {
    /// Returns the report about a claim whose hit becomes final now.
    pub(super) fn settled(&self, now: Nanos) -> Settled {
        let opened = self.times.opened;
        Settled {
            namespaces: Arc::clone(&self.handles),
            asked: self.limit - self.skip,
            hit: self.hit - self.skip,
            admitted_after: self.times.admitted.map(|admitted| admitted.saturating_sub(opened)),
            took: now.saturating_sub(opened),
        }
    }
}

impl ClaimTimes {
    pub(super) fn opened_at(now: Nanos) -> Self {
        Self { opened: now, ..Self::default() }
    }

    pub(super) fn admitted_at(&mut self, now: Nanos) {
        self.admitted.get_or_insert(now);
    }

    /// A hit is settled anew if something was lost before its client knew of it.
    pub(super) const fn settled_at(&mut self, now: Nanos) {
        self.settled = Some(now);
    }

    /// Notes that a block came from a tier.
    pub(super) fn came(&mut self, tier: TierIndex, now: Nanos) {
        match self.tiers.iter_mut().find(|came| came.tier == tier) {
            Some(came) => (came.blocks, came.last) = (came.blocks + 1, now),
            None => self.tiers.push(CameFrom { tier, blocks: 1, first: now, last: now }),
        }
    }
}
