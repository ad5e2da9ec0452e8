//! Leases. Each belongs to a connection, and ends with it at the latest (P4).

use std::collections::BTreeMap;

use hashbrown::HashMap;
use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};
use crate::eviction::SlotId;
use crate::limits::LEASES_PER_OWNER_MAX;

/// Name of a lease. It is never reused in a depot's life, so a late release cannot end a newer lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LeaseId(pub u64);

/// Leases of slots by owner. Owners are connection ids.
#[derive(Debug, Default)]
pub struct LeaseTable {
    /// Leases by number, so that they end in the same order in every run.
    owners: HashMap<u64, BTreeMap<LeaseId, SlotId>>,
    granted_ever: u64,
}

impl LeaseTable {
    /// Makes an empty table.
    pub fn new() -> Self {
        Self::default()
    }

    /// Gives `owner` a lease on a slot. An owner with `LEASES_PER_OWNER_MAX` leases gets `Busy` (P7).
    pub fn grant(&mut self, owner: u64, slot: SlotId) -> Result<LeaseId> {
        if self.count(owner) >= LEASES_PER_OWNER_MAX {
            return Err(Error::new(ErrorKind::Busy, "the connection holds too many leases")
                .with("leases_max", LEASES_PER_OWNER_MAX));
        }
        self.granted_ever += 1;
        let lease = LeaseId(self.granted_ever);
        self.owners.entry(owner).or_default().insert(lease, slot);
        Ok(lease)
    }

    /// Returns the slot of a lease of `owner`.
    pub fn slot_of(&self, owner: u64, lease: LeaseId) -> Result<SlotId> {
        let slot = self.owners.get(&owner).and_then(|leases| leases.get(&lease)).copied();
        slot.ok_or_else(|| no_such_lease(lease))
    }

    /// Ends a lease and returns its slot. Only its owner can end it.
    pub fn release(&mut self, owner: u64, lease: LeaseId) -> Result<SlotId> {
        let bad = || no_such_lease(lease);
        let leases = self.owners.get_mut(&owner).ok_or_else(bad)?;
        let slot = leases.remove(&lease).ok_or_else(bad)?;
        if leases.is_empty() {
            self.owners.remove(&owner);
        }
        Ok(slot)
    }

    /// Ends all leases of a connection that has ended (P4). Returns one entry for each lease, so a slot may appear
    /// twice.
    pub fn end_owner(&mut self, owner: u64) -> Vec<SlotId> {
        self.owners.remove(&owner).map(|leases| leases.into_values().collect()).unwrap_or_default()
    }

    /// Ends up to `max` leases of an owner that has ended. Returns one entry for each lease, so a slot may appear
    /// twice.
    pub fn end_some(&mut self, owner: u64, max: usize) -> Vec<SlotId> {
        let Some(leases) = self.owners.get_mut(&owner) else { return Vec::new() };
        if leases.len() <= max {
            return self.end_owner(owner);
        }
        let some: Vec<LeaseId> = leases.keys().take(max).copied().collect();
        some.iter().filter_map(|lease| leases.remove(lease)).collect()
    }

    /// Returns the number of leases granted so far, which is the number of the newest.
    pub const fn granted_ever(&self) -> u64 {
        self.granted_ever
    }

    /// Iterates over the leases of an owner from `from` on, in the order of their numbers.
    pub fn of(&self, owner: u64, from: LeaseId) -> impl Iterator<Item = (LeaseId, SlotId)> + '_ {
        let leases = self.owners.get(&owner).map(|leases| leases.range(from..));
        leases.into_iter().flatten().map(|(&lease, &slot)| (lease, slot))
    }

    /// Returns the number of owners that hold leases.
    pub fn owners(&self) -> usize {
        self.owners.len()
    }

    /// Returns the number of leases that `owner` holds.
    pub fn count(&self, owner: u64) -> usize {
        self.owners.get(&owner).map_or(0, BTreeMap::len)
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
    fn an_owner_s_end_ends_all_its_leases() {
        let mut table = LeaseTable::new();
        for slot in [3, 3, 4] {
            table.grant(1, slot).unwrap();
        }
        table.grant(2, 5).unwrap();
        let mut slots = table.end_owner(1);
        slots.sort_unstable();
        assert_eq!(slots, [3, 3, 4]);
        assert_eq!((table.count(1), table.count(2)), (0, 1));
        assert!(table.end_owner(1).is_empty());
    }
}
