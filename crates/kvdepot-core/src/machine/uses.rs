//! Uses of spaces: by slots, turns of keys, claims and loads. A space without uses can be forgotten.

use hashbrown::HashMap;

use super::names::SpaceId;

/// Uses of one space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Use {
    slots: u32,
    /// Of these, slots that are being filled, read or written, or that are not in every tier yet.
    pinned: u32,
    /// Requests and turns that have the space's number.
    held: u32,
}

/// Uses of each space.
#[derive(Clone, Debug, Default)]
pub(crate) struct Uses {
    map: HashMap<SpaceId, Use>,
    /// Spaces that have lost their last use since the last call.
    unused: Vec<SpaceId>,
}

impl Uses {
    fn change(&mut self, space: SpaceId, change: impl FnOnce(&mut Use)) {
        let uses = self.map.entry(space).or_default();
        change(uses);
        if *uses == Use::default() {
            self.map.remove(&space);
            self.unused.push(space);
        }
    }

    /// Records a slot taken for a block of this space.
    pub(super) fn slot_came(&mut self, space: SpaceId, pinned: bool) {
        self.change(space, |uses| {
            uses.slots += 1;
            uses.pinned += u32::from(pinned);
        });
    }

    /// Records a freed slot.
    pub(super) fn slot_went(&mut self, space: SpaceId, pinned: bool) {
        self.change(space, |uses| {
            uses.slots -= 1;
            uses.pinned -= u32::from(pinned);
        });
    }

    /// Records that a slot can no longer be evicted, or can be again.
    pub(super) fn set_pinned(&mut self, space: SpaceId, pinned: bool) {
        self.change(space, |uses| if pinned { uses.pinned += 1 } else { uses.pinned -= 1 });
    }

    /// Records that something has the space's number from now on.
    pub(super) fn hold(&mut self, space: SpaceId) {
        self.change(space, |uses| uses.held += 1);
    }

    /// Ends such a use.
    pub(super) fn let_go(&mut self, space: SpaceId) {
        self.change(space, |uses| uses.held -= 1);
    }

    /// Returns whether nothing is in flight in a space, so that its contents may be removed.
    pub(super) fn is_idle(&self, space: SpaceId) -> bool {
        self.map.get(&space).is_none_or(|uses| uses.pinned == 0 && uses.held == 0)
    }

    /// Returns whether a space has no uses.
    pub(super) fn is_unused(&self, space: SpaceId) -> bool {
        !self.map.contains_key(&space)
    }

    /// Returns whether slots hold blocks of a space.
    pub(super) fn has_slots(&self, space: SpaceId) -> bool {
        self.map.get(&space).is_some_and(|uses| uses.slots > 0)
    }

    /// Slots that hold blocks of a space.
    pub(super) fn slots(&self, space: SpaceId) -> u32 {
        self.map.get(&space).map_or(0, |uses| uses.slots)
    }

    /// Spaces that something has ceased to name since the last call.
    pub(super) fn take_unused(&mut self) -> Vec<SpaceId> {
        std::mem::take(&mut self.unused)
    }

    /// Iterates over the spaces with uses, their slots, and how many of them are pinned.
    #[cfg(any(test, feature = "model"))]
    pub(super) fn all(&self) -> impl Iterator<Item = (SpaceId, u32, u32)> + '_ {
        self.map.iter().map(|(&space, uses)| (space, uses.slots, uses.pinned))
    }
}
