//! Removals that tiers have failed to carry out. The tier may still have the block. Until a retry succeeds, or no
//! client can request the block any more, the tier is not asked for it and does not get what is stored under its key
//! (P1).
//!
//! Owed removals are kept for each *part* of a tier, such as a server, and for each space. A part may owe a limited
//! number of removals. Beyond that it is *closed* for the space that has the most of them: it is neither read nor
//! written there and gets no removals, until the namespace has left the space. So a part that is unreachable for long
//! costs a bounded amount of memory, and other clients can store and remove.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Bound;
use std::sync::Arc;

use hashbrown::HashMap;

use super::event::{RemovalId, TierIndex};
use super::names::{PoolKey, SpaceId};
use super::tiers::{TierMask, bit};
use crate::key::{BlockHash, BlockKey};

/// Returns the part of a tier, such as a server, that a block belongs to: always the same one. Called under the depot's
/// lock.
pub type PartOf = Arc<dyn Fn(TierIndex, &BlockKey) -> usize + Send + Sync>;

/// Parts of tiers. Without a function each tier is one part.
#[derive(Clone, Default)]
pub(super) struct Parts(pub(super) Option<PartOf>);

impl Parts {
    pub(super) fn of(&self, tier: TierIndex, key: &BlockKey) -> usize {
        self.0.as_ref().map_or(0, |part_of| part_of(tier, key))
    }
}

impl fmt::Debug for Parts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Parts(of each tier)" } else { "Parts(one a tier)" })
    }
}

/// A part of a tier, for one space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) space: SpaceId,
    pub(super) tier: TierIndex,
    pub(super) part: usize,
}

/// Blocks to remove, with the try of each that is in flight.
pub(super) type Debts = BTreeMap<BlockHash, Option<RemovalId>>;

/// Removals that one place owes.
#[derive(Clone, Debug, Default)]
struct Group {
    debts: Debts,
    /// The block that was retried last.
    tried: Option<BlockHash>,
    is_closed: bool,
}

/// All owed removals.
#[derive(Clone, Debug, Default)]
pub(super) struct Owed {
    groups: BTreeMap<Place, Group>,
    /// Number of removals that each part owes, over all spaces.
    sums: HashMap<(TierIndex, usize), usize>,
    closed: usize,
    /// The place that was retried last.
    tried: Option<Place>,
    /// Ticks since the last retries.
    pub(super) ticks: u32,
}

/// Change of a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// It owes something from now on.
    Began,
    /// It owes nothing any more.
    Ended,
    Neither,
}

impl Owed {
    /// Returns the number of owed removals.
    pub(super) fn len(&self) -> usize {
        self.sums.values().sum()
    }

    /// Returns the number of closed places.
    pub(super) const fn closed_len(&self) -> usize {
        self.closed
    }

    pub(super) fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Returns the number of places that owe something.
    pub(super) fn places(&self) -> usize {
        self.groups.len()
    }

    fn in_space(&self, space: SpaceId) -> impl Iterator<Item = (&Place, &Group)> {
        let end = |n| Place { space, tier: n, part: n };
        self.groups.range(end(usize::MIN)..=end(usize::MAX))
    }

    /// Returns the tiers that may still have what was removed under a key, without closed ones.
    pub(super) fn tiers(&self, key: &PoolKey) -> TierMask {
        if self.is_empty() {
            return 0;
        }
        let owing = self.in_space(key.space).filter(|(_, group)| group.debts.contains_key(&key.hash));
        owing.fold(0, |tiers, (place, _)| tiers | bit(place.tier))
    }

    /// Returns the tiers whose part that a block belongs to is closed for it.
    pub(super) fn closed(&self, parts: &Parts, space: SpaceId, key: impl FnOnce() -> BlockKey) -> TierMask {
        if self.closed == 0 {
            return 0;
        }
        let mut closed = self.in_space(space).filter(|(_, group)| group.is_closed).peekable();
        if closed.peek().is_none() {
            return 0;
        }
        let key = key();
        let is_there = |place: &Place| parts.of(place.tier, &key) == place.part;
        closed.fold(0, |tiers, (place, _)| {
            let is_known = tiers & bit(place.tier) != 0;
            if !is_known && is_there(place) { tiers | bit(place.tier) } else { tiers }
        })
    }

    /// Records an owed removal, unless it is known or the place is closed. Returns `None` if the part owes `max`
    /// already.
    pub(super) fn owe(&mut self, place: Place, hash: BlockHash, max: usize) -> Option<Change> {
        if let Some(group) = self.groups.get(&place)
            && (group.is_closed || group.debts.contains_key(&hash))
        {
            return Some(Change::Neither);
        }
        let sum = self.sums.entry((place.tier, place.part)).or_default();
        if *sum >= max {
            return None;
        }
        *sum += 1;
        let change = if self.groups.contains_key(&place) { Change::Neither } else { Change::Began };
        self.groups.entry(place).or_default().debts.insert(hash, None);
        Some(change)
    }

    /// Returns the place of the same part that owes the most; `place` itself if none owes anything. It takes as many
    /// steps as there are places.
    pub(super) fn largest(&self, place: Place) -> Place {
        let same =
            self.groups.iter().filter(|(other, _)| (other.tier, other.part) == (place.tier, place.part));
        let largest =
            same.filter(|(_, group)| !group.debts.is_empty()).max_by_key(|(_, group)| group.debts.len());
        largest.map_or(place, |(largest, _)| *largest)
    }

    /// Closes a place: its owed removals are no longer recorded one by one.
    pub(super) fn close(&mut self, place: Place) -> (Change, Debts) {
        let change = if self.groups.contains_key(&place) { Change::Neither } else { Change::Began };
        let group = self.groups.entry(place).or_default();
        self.closed += usize::from(!std::mem::replace(&mut group.is_closed, true));
        let debts = std::mem::take(&mut group.debts);
        self.uncount(place, debts.len());
        (change, debts)
    }

    fn uncount(&mut self, place: Place, debts: usize) {
        let part = (place.tier, place.part);
        if let Some(sum) = self.sums.get_mut(&part) {
            *sum -= debts;
            if *sum == 0 {
                self.sums.remove(&part);
            }
        }
    }

    /// Records that a tier has removed a block.
    pub(super) fn pay(&mut self, place: Place, hash: &BlockHash) -> Change {
        let Some(group) = self.groups.get_mut(&place) else { return Change::Neither };
        if group.debts.remove(hash).is_none() {
            return Change::Neither;
        }
        let is_over = group.debts.is_empty() && !group.is_closed;
        self.uncount(place, 1);
        if !is_over {
            return Change::Neither;
        }
        self.groups.remove(&place);
        Change::Ended
    }

    /// Records the end of a try. It is ignored if the removal was completed in the meantime or is owed anew.
    pub(super) fn tried(&mut self, place: Place, hash: &BlockHash, id: RemovalId, is_made: bool) -> Change {
        let debt = self.groups.get_mut(&place).and_then(|group| group.debts.get_mut(hash));
        match debt {
            Some(asked) if *asked == Some(id) => *asked = None,
            _ => return Change::Neither,
        }
        if is_made { self.pay(place, hash) } else { Change::Neither }
    }

    /// Forgets all removals that are owed in a place whose blocks can no longer be requested.
    pub(super) fn forgive(&mut self, place: Place) -> Option<Debts> {
        let group = self.groups.remove(&place)?;
        self.closed -= usize::from(group.is_closed);
        self.uncount(place, group.debts.len());
        Some(group.debts)
    }

    /// Returns the next place to retry, in turn.
    pub(super) fn next_place(&mut self) -> Option<Place> {
        self.tried = after(&self.groups, self.tried.as_ref()).next();
        self.tried
    }

    /// Returns the next blocks of a place to retry, in turn, at most `looks`.
    pub(super) fn next_blocks(&mut self, place: Place, looks: usize) -> Vec<BlockHash> {
        let Some(group) = self.groups.get_mut(&place) else { return Vec::new() };
        let blocks: Vec<BlockHash> = after(&group.debts, group.tried.as_ref()).take(looks).collect();
        group.tried = blocks.last().copied();
        blocks
    }

    /// Begins a try of an owed removal. Returns false if it is not owed or a try is in flight.
    pub(super) fn try_again(&mut self, place: Place, hash: &BlockHash, id: RemovalId) -> bool {
        let debt = self.groups.get_mut(&place).and_then(|group| group.debts.get_mut(hash));
        match debt {
            Some(asked @ None) => {
                *asked = Some(id);
                true
            }
            _ => false,
        }
    }
}

/// Returns all keys of a map, starting after one and wrapping around.
fn after<'a, K: Ord + Copy, V>(map: &'a BTreeMap<K, V>, key: Option<&K>) -> impl Iterator<Item = K> + 'a {
    let (behind, upto) = match key {
        Some(&key) => (Bound::Excluded(key), Some(Bound::Included(key))),
        None => (Bound::Unbounded, None),
    };
    let again = upto.map(|upto| map.range((Bound::Unbounded, upto)));
    let again = again.into_iter().flatten();
    map.range((behind, Bound::Unbounded)).chain(again).map(|(&key, _)| key)
}
