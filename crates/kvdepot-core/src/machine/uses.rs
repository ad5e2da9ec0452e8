//! What still names a space: slots, turns of keys, claims and loads. A space of which nothing is left can be forgotten.

use hashbrown::HashMap;

use super::names::SpaceId;

/// What names one space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Use {
    slots: u32,
    /// Of these, slots that are being filled, read, written, or not in every tier yet.
    pinned: u32,
    /// Requests and turns that carry the space's number.
    held: u32,
}

/// What names each space.
#[derive(Clone, Debug, Default)]
pub(crate) struct Uses {
    map: HashMap<SpaceId, Use>,
    /// Spaces that nothing names any more since the last look.
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

    /// A slot was taken for a block of this space.
    pub(super) fn slot_came(&mut self, space: SpaceId, pinned: bool) {
        self.change(space, |uses| {
            uses.slots += 1;
            uses.pinned += u32::from(pinned);
        });
    }

    /// A slot was freed.
    pub(super) fn slot_went(&mut self, space: SpaceId, pinned: bool) {
        self.change(space, |uses| {
            uses.slots -= 1;
            uses.pinned -= u32::from(pinned);
        });
    }

    /// A slot cannot be evicted any more, or can be again.
    pub(super) fn set_pinned(&mut self, space: SpaceId, pinned: bool) {
        self.change(space, |uses| if pinned { uses.pinned += 1 } else { uses.pinned -= 1 });
    }

    /// Something carries the space's number from now on.
    pub(super) fn hold(&mut self, space: SpaceId) {
        self.change(space, |uses| uses.held += 1);
    }

    /// It does no more.
    pub(super) fn let_go(&mut self, space: SpaceId) {
        self.change(space, |uses| uses.held -= 1);
    }

    /// Whether nothing is under way in a space: what is in it may go.
    pub(super) fn is_idle(&self, space: SpaceId) -> bool {
        self.map.get(&space).is_none_or(|uses| uses.pinned == 0 && uses.held == 0)
    }

    /// Whether nothing names a space.
    pub(super) fn is_unused(&self, space: SpaceId) -> bool {
        !self.map.contains_key(&space)
    }

    /// Whether slots hold blocks of a space.
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

    /// Every space that is named, with its slots and those of them that are pinned.
    #[cfg(any(test, feature = "model"))]
    pub(super) fn all(&self) -> impl Iterator<Item = (SpaceId, u32, u32)> + '_ {
        self.map.iter().map(|(&space, uses)| (space, uses.slots, uses.pinned))
    }
}
