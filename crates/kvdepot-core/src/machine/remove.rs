//! Removal of blocks: immediately in the pool, and in turn in the tiers.

use super::batch::REMOVE_BLOCKS;
use super::event::{Effects, Location, Token};
use super::removal::Removal;
use super::{Machine, names};
use crate::key::BlockKey;
use crate::misses::Fate;

impl Machine {
    /// Removes a key from the pool. Returns whether tiers must be asked to remove it.
    pub(super) fn forget(&mut self, key: names::PoolKey, location: Location) -> bool {
        let mut saved = false;
        if let Some(slot) = self.pool.find(&key) {
            let found = self.pool.slot(slot);
            // A tier that has yet to get a value may have another one, whose removal is in flight.
            saved = found.saved != 0 || (found.is_value() && found.to_write | found.writing != 0);
            self.pool.unname(slot);
            self.flow.displace(&mut self.pool, slot);
        }
        // A tier that is closed for the block may have it, whatever it reports.
        let may_be_there = || self.flow.is_leaving(&key) || self.flow.is_closed(&self.catalog, &key);
        self.flow.has_tiers() && (saved || location != Location::Absent || may_be_there())
    }

    pub(super) fn remove(
        &mut self,
        token: Token,
        keys: &[BlockKey],
        locations: &[Location],
        out: &mut Effects,
    ) {
        debug_assert!(keys.len() <= REMOVE_BLOCKS, "{} blocks in one removal", keys.len());
        let mut removal = Removal { was_there: Vec::with_capacity(keys.len()), left: 0, failed: 0 };
        let located = locations.iter().copied().chain(std::iter::repeat(Location::Absent));
        for (key, location) in keys.iter().zip(located) {
            let Some(key) = self.catalog.pool_key(key) else {
                removal.was_there.push(false);
                continue;
            };
            let in_pool = self.pool.readable(&key).is_some();
            let was_there = in_pool || matches!(location, Location::Tier(_));
            removal.was_there.push(was_there);
            if was_there {
                self.pool.went(key, Fate::Removed, None);
            }
            if self.catalog.is_provisional(key.space) {
                // What tiers have of the namespace has another key, and may be served when all have answered.
                self.forget(key, Location::Absent);
                removal.failed += 1;
            } else if self.forget(key, location) {
                removal.left += usize::from(self.flow.remove(&self.catalog, key, Some(token), out));
            }
        }
        if removal.left == 0 {
            out.replies.push((token, Ok(removal.reply())));
        } else {
            self.removals.insert(token, removal);
        }
    }

    pub(super) fn removal_ended(&mut self, token: Token, failed: bool, out: &mut Effects) {
        if let Some(removal) = self.removals.get_mut(&token) {
            removal.left -= 1;
            removal.failed += usize::from(failed);
            if removal.left == 0
                && let Some(removal) = self.removals.remove(&token)
            {
                out.replies.push((token, Ok(removal.reply())));
            }
        }
    }
}
