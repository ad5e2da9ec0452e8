//! Which holders have a slot leased, collected piece by piece from a frozen machine.

use hashbrown::HashMap;

use crate::eviction::SlotId;
use crate::lease::LeaseId;

/// A lease of a holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hold {
    /// The leased slot.
    pub slot: SlotId,
    /// The holder's index in the list that the machine got.
    pub holder: u32,
}

/// A place in the holders' leases; the default is the beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldFrom {
    pub(super) holder: usize,
    pub(super) lease: LeaseId,
}

impl Default for HeldFrom {
    fn default() -> Self {
        Self { holder: 0, lease: LeaseId(0) }
    }
}

/// The holders of each leased slot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeldBy(HashMap<SlotId, Vec<u32>>);

impl HeldBy {
    /// Adds leases.
    pub fn add(&mut self, held: &[Hold]) {
        for hold in held {
            self.0.entry(hold.slot).or_default().push(hold.holder);
        }
    }

    /// Returns the holders of a slot, in their order, each as often as it has leased the slot.
    pub(super) fn of(&self, slot: SlotId) -> Vec<u32> {
        self.0.get(&slot).cloned().unwrap_or_default()
    }
}
