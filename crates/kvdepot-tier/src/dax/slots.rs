//! Which block lies where, which ones are being read, and which ones are evicted to make space. Pure: returns what must
//! be written to the medium, and is notified when that is done.
//!
//! A slot's units are free only when nobody reads them and no header on the medium names them any more (P1, P4):
//! `headers` are those that must be cleared first. Until they are, `naming` tells where a block lies that can no longer
//! be found.

use std::collections::BTreeMap;

use hashbrown::{HashMap, HashSet};
use hashlink::LruCache;
use kvdepot_core::{BlockHash, BlockKey, NamespaceId};

use super::layout::Header;
use super::space::Space;

/// Blocks examined to find one that can make space.
const CANDIDATES_MAX: usize = 128;
/// Neighbours examined for all of these, in addition to two per needed unit: the lock is held meanwhile.
const STEPS_MAX: usize = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Its payload is being written; it cannot be found.
    Writing,
    /// Found by reads.
    Live,
    /// No longer found.
    Leaving,
}

#[derive(Debug)]
struct Slot {
    key: BlockKey,
    units: u32,
    phase: Phase,
    readers: u32,
    /// Those of them that hold a lease. Meanwhile the slot is not in `order`.
    leases: u32,
    /// Units whose headers on the medium may name these units, and the blocks they belong to.
    headers: Vec<Victim>,
    header: Header,
    /// Whether a read has compared its checksum.
    is_checked: bool,
}

impl Slot {
    fn new(header: Header, units: u32, headers: Vec<Victim>) -> Self {
        Self {
            key: header.key,
            units,
            phase: Phase::Writing,
            readers: 0,
            leases: 0,
            headers,
            header,
            is_checked: false,
        }
    }
}

/// A block that was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) unit: u32,
    pub(super) header: Header,
    /// Whether an earlier read has compared its checksum.
    pub(super) is_checked: bool,
}

impl Found {
    /// Returns whether both are the same block at the same place.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        (self.unit, self.header) == (other.unit, other.header)
    }
}

/// An evicted block, and the unit of its header.
pub(super) type Victim = (u32, BlockKey);

/// A place for a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reserved {
    pub(super) unit: u32,
    /// Evicted blocks; their headers must be cleared before the place is used.
    pub(super) victims: Vec<Victim>,
}

/// All slots of a medium.
#[derive(Debug)]
pub(super) struct Slots {
    space: Space,
    units: u32,
    by_unit: BTreeMap<u32, Slot>,
    index: HashMap<BlockKey, u32>,
    spaces: HashMap<NamespaceId, HashSet<BlockHash>>,
    /// Live slots without a lease, the coldest first.
    order: LruCache<u32, ()>,
    generation: u64,
    /// Leaving slots whose headers could not be cleared.
    uncleared: Vec<u32>,
    /// For each block that is no longer found: the slots whose headers may name it.
    named: HashMap<BlockKey, Vec<u32>>,
    /// Number of neighbours that the last reservation examined.
    steps: usize,
}

impl Slots {
    /// `units` free units.
    pub(super) fn new(units: u32) -> Self {
        Self {
            space: Space::new(units),
            units,
            by_unit: BTreeMap::new(),
            index: HashMap::new(),
            spaces: HashMap::new(),
            order: LruCache::new_unbounded(),
            generation: 0,
            uncleared: Vec::new(),
            named: HashMap::new(),
            steps: 0,
        }
    }

    /// Takes in a block that lies on the medium; `false` if its place is taken or beyond the end.
    pub(super) fn adopt(&mut self, unit: u32, units: u32, header: Header) -> bool {
        if self.index.contains_key(&header.key) || !self.space.take_at(unit, units) {
            return false;
        }
        self.generation = self.generation.max(header.generation);
        let headers = vec![(unit, header.key)];
        let slot = Slot::new(header, units, headers);
        self.by_unit.insert(unit, slot);
        self.publish(unit);
        true
    }

    /// Number of neighbours that the last reservation examined.
    #[cfg(test)]
    pub(super) const fn steps(&self) -> usize {
        self.steps
    }

    /// Number of blocks that can be found.
    pub(super) fn len(&self) -> usize {
        self.index.len()
    }

    /// Iterates over the blocks that can be found, with the units where they begin.
    pub(super) fn live(&self) -> impl Iterator<Item = (u32, Header)> + '_ {
        let is_live = |(_, slot): &(&u32, &Slot)| slot.phase == Phase::Live;
        self.by_unit.iter().filter(is_live).map(|(unit, slot)| (*unit, slot.header))
    }

    /// Number of units that are not free.
    pub(super) const fn units_used(&self) -> u32 {
        self.units - self.space.units()
    }

    pub(super) fn contains(&self, key: &BlockKey) -> bool {
        self.index.contains_key(key)
    }

    /// Notes a use of a block.
    pub(super) fn touch(&mut self, key: &BlockKey) {
        if let Some(unit) = self.index.get(key) {
            self.order.get(unit);
        }
    }

    /// Returns blocks of a namespace, at most `most`.
    pub(super) fn keys(&self, namespace: NamespaceId, most: usize) -> Vec<BlockKey> {
        let hashes = self.spaces.get(&namespace).into_iter().flatten().take(most);
        hashes.map(|hash| BlockKey { namespace, hash: *hash }).collect()
    }

    /// Returns whether a namespace has blocks that can be found.
    pub(super) fn has_any(&self, namespace: NamespaceId) -> bool {
        self.spaces.get(&namespace).is_some_and(|blocks| !blocks.is_empty())
    }

    /// Returns the blocks of a namespace among `count` slots from the unit `from` on, and the unit to continue at.
    pub(super) fn keys_from(
        &self,
        namespace: NamespaceId,
        from: u32,
        count: usize,
    ) -> (Vec<BlockKey>, Option<u32>) {
        let mut slots = self.by_unit.range(from..);
        let is_ours = |(unit, slot): &(&u32, &Slot)| {
            slot.key.namespace == namespace && self.index.get(&slot.key) == Some(unit)
        };
        let keys = slots.by_ref().take(count).filter(is_ours).map(|(_, slot)| slot.key).collect();
        (keys, slots.next().map(|(unit, _)| *unit))
    }

    /// Finds a block and keeps its place from being reused until `unpin`. `is_use`: it counts as used.
    pub(super) fn pin(&mut self, key: &BlockKey, is_use: bool) -> Option<Found> {
        let unit = *self.index.get(key)?;
        let slot = self.by_unit.get_mut(&unit)?;
        slot.readers += 1;
        if is_use {
            self.order.get(&unit);
        }
        Some(Found { unit, header: slot.header, is_checked: slot.is_checked })
    }

    /// A read that has not ended has compared the block's checksum.
    pub(super) fn checked(&mut self, unit: u32) {
        if let Some(slot) = self.by_unit.get_mut(&unit) {
            slot.is_checked = true;
        }
    }

    /// Ends a read.
    pub(super) fn unpin(&mut self, unit: u32) {
        if let Some(slot) = self.by_unit.get_mut(&unit) {
            slot.readers = slot.readers.saturating_sub(1);
            self.free_if_over(unit);
        }
    }

    /// Makes a lease of a read that has not ended.
    pub(super) fn lease(&mut self, unit: u32) {
        if let Some(slot) = self.by_unit.get_mut(&unit) {
            slot.leases += 1;
            // However many leased blocks are cold, a reservation finds one that can go.
            self.order.remove(&unit);
        }
    }

    /// Ends a lease.
    pub(super) fn end_lease(&mut self, unit: u32) {
        let Some(slot) = self.by_unit.get_mut(&unit).filter(|slot| slot.leases > 0) else { return };
        slot.leases -= 1;
        if slot.leases == 0 && slot.phase == Phase::Live {
            self.order.insert(unit, ());
        }
        self.unpin(unit);
    }

    /// Iterates over the blocks that can be evicted, the coldest first.
    pub(super) fn coldest(&self) -> impl Iterator<Item = BlockKey> + '_ {
        self.order.iter().filter_map(|(unit, ())| self.by_unit.get(unit)).map(|slot| slot.key)
    }

    /// Reserves a place of `units` for a block; the headers of its victims must be cleared before it is used. `None` if
    /// nothing can make space that is not being read.
    pub(super) fn reserve(&mut self, key: BlockKey, epoch: u32, units: u32, bytes: u32) -> Option<Reserved> {
        self.steps = 0;
        if units == 0 || units > self.units {
            return None;
        }
        let (unit, whole, victims) = match self.space.take(units) {
            Some(unit) => (unit, units, Vec::new()),
            None => self.evict(units)?,
        };
        self.generation += 1;
        let header = Header { key, generation: self.generation, checksum: 0, bytes, epoch };
        let headers = victims.clone();
        let slot = Slot::new(header, whole, headers);
        self.by_unit.insert(unit, slot);
        self.name(unit);
        Some(Reserved { unit, victims })
    }

    /// Evicts the coldest block that can make space, and as many of its neighbours as are needed. All of the space that
    /// they leave is taken: `settle` gives back the excess.
    fn evict(&mut self, units: u32) -> Option<(u32, u32, Vec<Victim>)> {
        let coldest = self.order.iter().take(CANDIDATES_MAX).map(|(unit, ())| *unit);
        // The first candidate alone may need as many neighbours as units.
        let all = STEPS_MAX + 2 * units as usize;
        let mut left = all;
        let window = coldest.filter_map(|unit| self.window(unit, units, &mut left)).next();
        self.steps = all - left;
        let (from, to, gone) = window?;
        let mut victims = Vec::with_capacity(gone.len());
        for unit in gone {
            self.hide(unit);
            if let Some(slot) = self.by_unit.remove(&unit) {
                self.space.give(unit, slot.units);
                victims.push((unit, slot.key));
            }
        }
        let taken = self.space.take_at(from, to - from);
        debug_assert!(taken, "a window is made of free units and of blocks that went");
        Some((from, to - from, victims))
    }

    /// Finds units around a block that are free or can be freed. Takes its steps from `left`.
    fn window(&self, unit: u32, units: u32, left: &mut usize) -> Option<(u32, u32, Vec<u32>)> {
        let may_go = |unit: u32| {
            let slot = self.by_unit.get(&unit)?;
            (slot.phase == Phase::Live && slot.readers == 0).then_some(slot.units)
        };
        let (mut from, mut to, mut gone) = (unit, unit + may_go(unit)?, vec![unit]);
        while to - from < units {
            *left = left.checked_sub(1)?;
            if let Some((start, _)) = self.space.ending_at(from) {
                from = start;
            } else if let Some(length) = self.space.starting_at(to) {
                to += length;
            } else if let Some(length) = may_go(to) {
                gone.push(to);
                to += length;
            } else {
                let (before, _) = self.by_unit.range(..from).next_back()?;
                may_go(*before)?;
                gone.push(*before);
                from = *before;
            }
        }
        Some((from, to, gone))
    }

    /// The headers of a place's victims have been cleared: frees its excess units.
    pub(super) fn settle(&mut self, unit: u32, units: u32) {
        self.unname(unit);
        if let Some(slot) = self.by_unit.get_mut(&unit) {
            let too_much = slot.units.saturating_sub(units);
            slot.units -= too_much;
            self.space.give_if_any(unit + units, too_much);
        }
    }

    /// A block's header is about to be written: returns it, with the checksum.
    pub(super) fn begin_publish(&mut self, unit: u32, checksum: u64) -> Option<Header> {
        let slot = self.by_unit.get_mut(&unit)?;
        slot.headers = vec![(unit, slot.key)];
        slot.header.checksum = checksum;
        Some(slot.header)
    }

    /// A block's header has been written: the block can be found from here on.
    pub(super) fn publish(&mut self, unit: u32) {
        if let Some(slot) = self.by_unit.get_mut(&unit) {
            slot.phase = Phase::Live;
            let key = slot.key;
            self.index.insert(key, unit);
            self.spaces.entry(key.namespace).or_default().insert(key.hash);
            self.order.insert(unit, ());
        }
    }

    /// Makes a block unreachable; returns the slot whose headers must be cleared.
    pub(super) fn take_out(&mut self, key: &BlockKey) -> Option<u32> {
        let unit = *self.index.get(key)?;
        self.leave(unit);
        Some(unit)
    }

    /// A slot leaves. If nothing on the medium names it and nobody reads it, it is free at once.
    pub(super) fn leave(&mut self, unit: u32) {
        self.hide(unit);
        if let Some(slot) = self.by_unit.get_mut(&unit) {
            slot.phase = Phase::Leaving;
            self.name(unit);
            self.free_if_over(unit);
        }
    }

    /// Slots whose headers may name a block that cannot be found.
    pub(super) fn naming(&self, key: &BlockKey) -> Vec<u32> {
        self.named.get(key).cloned().unwrap_or_default()
    }

    /// Notes which blocks that cannot be found are named by a slot's headers.
    fn name(&mut self, unit: u32) {
        let headers = self.by_unit.get(&unit).map_or(&[][..], |slot| &slot.headers);
        for (_, key) in headers {
            let slots = self.named.entry(*key).or_default();
            if !slots.contains(&unit) {
                slots.push(unit);
            }
        }
    }

    /// A slot's headers have been cleared.
    fn unname(&mut self, unit: u32) {
        let Some(slot) = self.by_unit.get_mut(&unit) else { return };
        for (_, key) in std::mem::take(&mut slot.headers) {
            if let Some(slots) = self.named.get_mut(&key) {
                slots.retain(|other| *other != unit);
                if slots.is_empty() {
                    self.named.remove(&key);
                }
            }
        }
    }

    /// Headers that must be cleared before this slot is free.
    pub(super) fn headers(&self, unit: u32) -> Vec<u32> {
        let headers = self.by_unit.get(&unit).map_or(&[][..], |slot| &slot.headers);
        headers.iter().map(|(unit, _)| *unit).collect()
    }

    /// The headers of a leaving slot have been cleared.
    pub(super) fn cleared(&mut self, unit: u32) {
        self.unname(unit);
        self.free_if_over(unit);
    }

    /// The headers of a leaving slot could not be cleared: it is kept until they can be.
    pub(super) fn not_cleared(&mut self, unit: u32) {
        if self.by_unit.get(&unit).is_some_and(|slot| !slot.headers.is_empty()) {
            self.uncleared.push(unit);
        }
    }

    /// Takes the slots whose headers must be cleared in another attempt.
    pub(super) fn take_uncleared(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.uncleared)
    }

    fn hide(&mut self, unit: u32) {
        let Some(slot) = self.by_unit.get(&unit) else { return };
        if slot.phase != Phase::Live {
            return;
        }
        let key = slot.key;
        self.index.remove(&key);
        self.order.remove(&unit);
        if let Some(hashes) = self.spaces.get_mut(&key.namespace) {
            hashes.remove(&key.hash);
            if hashes.is_empty() {
                self.spaces.remove(&key.namespace);
            }
        }
    }

    fn free_if_over(&mut self, unit: u32) {
        let is_over =
            |slot: &Slot| slot.phase == Phase::Leaving && slot.readers == 0 && slot.headers.is_empty();
        if self.by_unit.get(&unit).is_some_and(is_over)
            && let Some(slot) = self.by_unit.remove(&unit)
        {
            self.space.give(unit, slot.units);
        }
    }
}

impl Space {
    fn give_if_any(&mut self, start: u32, length: u32) {
        if length > 0 {
            self.give(start, length);
        }
    }
}
