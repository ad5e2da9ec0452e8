//! Invariants of the machine, for tests.

use super::Machine;
use super::names::SpaceId;

impl Machine {
    /// Checks the invariants after a step, by examining every slot. Returns the first violation.
    pub fn check(&self) -> std::result::Result<(), String> {
        let (held, used) = self.pool.recount();
        if held != self.pool.held() {
            return Err(format!("counted {:?}, but the slots hold {held:?}", self.pool.held()));
        }
        if used + self.pool.free_bytes() != self.pool.bytes() {
            return Err(format!(
                "{used} bytes used and {} free of {}",
                self.pool.free_bytes(),
                self.pool.bytes()
            ));
        }
        for (region, (gauge, used)) in
            self.pool.region_gauges().iter().zip(self.pool.recount_regions()).enumerate()
        {
            if used + gauge.free_bytes != gauge.bytes {
                return Err(format!("region {region}: the slots hold {used} bytes, but it is {gauge:?}"));
            }
        }
        let (counted, found) = (self.pool.leased_in_place(), self.pool.recount_in_place());
        if counted != found {
            return Err(format!("counted {counted:?} in place, but the slots hold {found:?}"));
        }
        // A tier that gets what others evict may get one that others have, too.
        if let Some(slot) = self.pool.low_in_tiers(!self.flow.placements.demotion) {
            return Err(format!("slot {slot} is of low priority, and a tier has it or is to get it"));
        }
        self.check_spaces()
    }

    /// Checks that the counts of spaces are correct and that every named space is known.
    fn check_spaces(&self) -> std::result::Result<(), String> {
        let slots = self.pool.recount_spaces();
        for (space, count, pinned) in self.pool.uses.all() {
            let found = slots.get(&space).copied().unwrap_or_default();
            if found != (count, pinned) {
                return Err(format!("{space:?} counts {count} slots, {pinned} pinned; there are {found:?}"));
            }
            if !self.catalog.knows(space) && space != SpaceId(0) {
                return Err(format!("{space:?} is forgotten, and {count} slots name it"));
            }
        }
        if let Some((space, _)) = slots.iter().find(|(space, _)| !self.pool.uses.has_slots(**space)) {
            return Err(format!("slots of {space:?} are not counted"));
        }
        if let Some((space, ..)) = self.flow.uses.all().find(|(space, ..)| !self.catalog.knows(*space)) {
            return Err(format!("{space:?} is forgotten, and a tier has not ended a command of it"));
        }
        let (namespaces, uses) = self.users.len();
        if namespaces != self.catalog.len() {
            return Err(format!(
                "{namespaces} namespaces may have users ({uses}), of {}",
                self.catalog.len()
            ));
        }
        Ok(())
    }
}
