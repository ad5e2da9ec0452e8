//! Leases. Each belongs to a connection, and ends with it at the latest (P4).

use std::collections::BTreeMap;

use hashbrown::HashMap;
use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};
use crate::eviction::SlotId;
use crate::limits::LEASES_PER_OWNER_MAX;

/// Leases with consecutive numbers in one row. A request's leases are consecutive, so most rows are full, and a row is
/// searched once for several leases.
const ROW: u64 = 16;
/// No slot: slots have smaller numbers.
const NONE: SlotId = SlotId::MAX;

/// Name of a lease. It is never reused in a depot's life, so a late release cannot end a newer lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LeaseId(pub u64);

/// Leases of slots by owner. Owners are connection ids.
#[derive(Debug, Default)]
pub struct LeaseTable {
    owners: HashMap<u64, Leases>,
    granted_ever: u64,
}

/// Leases of one owner, in the order of their numbers, so that they end in the same order in every run.
#[derive(Debug, Default)]
struct Leases {
    /// The slots of leases `ROW * n` and following, by `n`. No row is empty.
    rows: BTreeMap<u64, [SlotId; ROW as usize]>,
    count: usize,
}

const fn place(lease: LeaseId) -> (u64, usize) {
    (lease.0 / ROW, (lease.0 % ROW) as usize)
}

impl Leases {
    fn insert(&mut self, lease: LeaseId, slot: SlotId) {
        debug_assert!(slot != NONE, "no slot has this number");
        let (row, at) = place(lease);
        match self.rows.last_entry().filter(|last| *last.key() == row) {
            Some(mut last) => last.get_mut()[at] = slot,
            None => {
                let mut slots = [NONE; ROW as usize];
                slots[at] = slot;
                self.rows.insert(row, slots);
            }
        }
        self.count += 1;
    }

    fn get(&self, lease: LeaseId) -> Option<SlotId> {
        let (row, at) = place(lease);
        self.rows.get(&row).map(|slots| slots[at]).filter(|&slot| slot != NONE)
    }

    fn remove(&mut self, lease: LeaseId) -> Option<SlotId> {
        let (row, at) = place(lease);
        let slots = self.rows.get_mut(&row)?;
        let slot = std::mem::replace(&mut slots[at], NONE);
        if slot == NONE {
            return None;
        }
        self.count -= 1;
        if *slots == [NONE; ROW as usize] {
            self.rows.remove(&row);
        }
        Some(slot)
    }

    fn from(&self, from: LeaseId) -> impl Iterator<Item = (LeaseId, SlotId)> + '_ {
        let rows = self.rows.range(from.0 / ROW..);
        let all = rows.flat_map(|(&row, slots)| {
            (row * ROW..).map(LeaseId).zip(slots.iter().copied()).filter(|&(_, slot)| slot != NONE)
        });
        all.skip_while(move |&(lease, _)| lease < from)
    }
}

impl LeaseTable {
    /// Makes an empty table.
    pub fn new() -> Self {
        Self::default()
    }

    /// Gives `owner` a lease on a slot. An owner with `LEASES_PER_OWNER_MAX` leases gets `Busy` (P7).
    pub fn grant(&mut self, owner: u64, slot: SlotId) -> Result<LeaseId> {
        let leases = self.owners.entry(owner).or_default();
        if leases.count >= LEASES_PER_OWNER_MAX {
            return Err(Error::new(ErrorKind::Busy, "the connection holds too many leases")
                .with("leases_max", LEASES_PER_OWNER_MAX));
        }
        self.granted_ever += 1;
        let lease = LeaseId(self.granted_ever);
        leases.insert(lease, slot);
        Ok(lease)
    }

    /// Returns the slot of a lease of `owner`.
    pub fn slot_of(&self, owner: u64, lease: LeaseId) -> Result<SlotId> {
        let slot = self.owners.get(&owner).and_then(|leases| leases.get(lease));
        slot.ok_or_else(|| no_such_lease(lease))
    }

    /// Ends a lease and returns its slot. Only its owner can end it.
    pub fn release(&mut self, owner: u64, lease: LeaseId) -> Result<SlotId> {
        let leases = self.owners.get_mut(&owner).ok_or_else(|| no_such_lease(lease))?;
        let slot = leases.remove(lease).ok_or_else(|| no_such_lease(lease))?;
        if leases.count == 0 {
            self.owners.remove(&owner);
        }
        Ok(slot)
    }

    /// Ends all leases of a connection that has ended (P4). Returns one entry for each lease, so a slot may appear
    /// twice.
    pub fn end_owner(&mut self, owner: u64) -> Vec<SlotId> {
        self.end_some(owner, usize::MAX)
    }

    /// Ends up to `max` leases of an owner that has ended. Returns one entry for each lease, so a slot may appear
    /// twice.
    pub fn end_some(&mut self, owner: u64, max: usize) -> Vec<SlotId> {
        let Some(leases) = self.owners.get_mut(&owner) else { return Vec::new() };
        let some: Vec<LeaseId> = leases.from(LeaseId(0)).take(max).map(|(lease, _)| lease).collect();
        let slots = some.iter().filter_map(|&lease| leases.remove(lease)).collect();
        if leases.count == 0 {
            self.owners.remove(&owner);
        }
        slots
    }

    /// Returns the number of leases granted so far, which is the number of the newest.
    pub const fn granted_ever(&self) -> u64 {
        self.granted_ever
    }

    /// Iterates over the leases of an owner from `from` on, in the order of their numbers.
    pub fn of(&self, owner: u64, from: LeaseId) -> impl Iterator<Item = (LeaseId, SlotId)> + '_ {
        self.owners.get(&owner).into_iter().flat_map(move |leases| leases.from(from))
    }

    /// Returns the number of leases.
    pub fn len(&self) -> usize {
        self.owners.values().map(|leases| leases.count).sum()
    }

    /// Returns whether there is no lease.
    pub fn is_empty(&self) -> bool {
        self.owners.is_empty()
    }

    /// Returns the lease that was granted first of those that have not ended.
    pub fn oldest(&self) -> Option<LeaseId> {
        let firsts = self.owners.values().filter_map(|leases| leases.from(LeaseId(0)).next());
        firsts.map(|(lease, _)| lease).min()
    }

    /// Returns the number of owners that hold leases.
    pub fn owners(&self) -> usize {
        self.owners.len()
    }

    /// Returns the number of leases that `owner` holds.
    pub fn count(&self, owner: u64) -> usize {
        self.owners.get(&owner).map_or(0, |leases| leases.count)
    }
}

fn no_such_lease(lease: LeaseId) -> Error {
    Error::new(ErrorKind::Protocol, "the connection holds no such lease").with("lease", lease.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leases_end_once_and_only_by_their_owner() {
        let mut table = LeaseTable::new();
        let lease = table.grant(1, 7).unwrap();
        assert_eq!(table.release(2, lease).unwrap_err().kind(), ErrorKind::Protocol);
        assert_eq!(table.release(1, lease).unwrap(), 7);
        assert_eq!(table.release(1, lease).unwrap_err().kind(), ErrorKind::Protocol);
    }

    #[test]
    fn leases_are_listed_and_ended_in_the_order_of_their_numbers() {
        let (mut table, mut model) = (LeaseTable::new(), BTreeMap::new());
        let mut random = 7_u64;
        for slot in 0..5_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let owner = random >> 62;
            let lease = table.grant(owner, slot).unwrap();
            if owner == 1 {
                model.insert(lease, slot);
            }
            let some = LeaseId(1 + (random >> 20) % lease.0);
            assert_eq!(table.slot_of(1, some).ok(), model.get(&some).copied());
            if random >> 40 & 1 == 0 {
                assert_eq!(table.release(1, some).ok(), model.remove(&some));
            }
        }
        assert_eq!(table.count(1), model.len());
        for from in (0..5_001).step_by(7).map(LeaseId) {
            let listed = table.of(1, from).map(|(lease, slot)| (lease.0, slot));
            assert!(listed.eq(model.range(from..).map(|(lease, &slot)| (lease.0, slot))), "{from:?}");
        }
        let mut ended = Vec::new();
        while table.count(1) > 0 {
            ended.extend(table.end_some(1, 100));
        }
        assert_eq!(ended, model.into_values().collect::<Vec<_>>());
        assert_eq!(table.owners(), 3);
    }

    #[test]
    fn an_owner_s_end_ends_all_its_leases() {
        let mut table = LeaseTable::new();
        for slot in [3, 3, 4] {
            table.grant(1, slot).unwrap();
        }
        table.grant(2, 5).unwrap();
        assert_eq!((table.len(), table.oldest()), (4, Some(LeaseId(1))));
        let mut slots = table.end_owner(1);
        slots.sort_unstable();
        assert_eq!(slots, [3, 3, 4]);
        assert_eq!((table.count(1), table.count(2), table.len()), (0, 1, 1));
        assert!(table.end_owner(1).is_empty());
        assert_eq!(table.oldest(), Some(LeaseId(4)));
        table.end_owner(2);
        assert_eq!((table.is_empty(), table.oldest()), (true, None));
    }
}
