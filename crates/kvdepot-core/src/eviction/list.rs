//! Doubly linked lists of slots, stored in vectors that are indexed by slot. Every operation is O(1).

use super::chunked::Chunked;
use super::policy::SlotId;

const NIL: SlotId = SlotId::MAX;
const NO_LIST: u8 = u8::MAX;

#[derive(Clone, Copy, Debug)]
struct Node {
    newer: SlotId,
    older: SlotId,
}

const OUTSIDE: Node = Node { newer: NIL, older: NIL };

#[derive(Clone, Copy, Debug)]
struct Ends {
    newest: SlotId,
    oldest: SlotId,
    len: usize,
}

/// `N` lists; a slot is in one of them or in none.
#[derive(Debug)]
pub(super) struct SlotLists<const N: usize> {
    nodes: Chunked<Node>,
    /// Number of each slot's list. Stored separately, because padding would make it four bytes in a node.
    list: Chunked<u8>,
    ends: [Ends; N],
}

impl<const N: usize> SlotLists<N> {
    pub(super) const fn new() -> Self {
        let ends = [Ends { newest: NIL, oldest: NIL, len: 0 }; N];
        Self { nodes: Chunked::new(OUTSIDE), list: Chunked::new(NO_LIST), ends }
    }

    pub(super) fn len(&self, list: usize) -> usize {
        self.ends[list].len
    }

    pub(super) fn list_of(&self, slot: SlotId) -> Option<usize> {
        let list = self.list.get(slot)?;
        (list != NO_LIST).then_some(usize::from(list))
    }

    pub(super) fn oldest(&self, list: usize) -> Option<SlotId> {
        Some(self.ends[list].oldest).filter(|&slot| slot != NIL)
    }

    /// Returns the next newer slot in the list of `slot`.
    pub(super) fn newer(&self, slot: SlotId) -> Option<SlotId> {
        Some(self.nodes[slot].newer).filter(|&slot| slot != NIL)
    }

    /// Adds a slot that is in no list at the newest end.
    pub(super) fn push(&mut self, list: usize, slot: SlotId) {
        assert!(slot != NIL, "the last slot number marks the end of a list");
        self.nodes.reach(slot);
        self.list.reach(slot);
        debug_assert_eq!(self.list[slot], NO_LIST, "slot {slot} is in a list already");
        let newest = self.ends[list].newest;
        self.nodes[slot] = Node { newer: NIL, older: newest };
        self.list[slot] = list as u8;
        match newest {
            NIL => self.ends[list].oldest = slot,
            _ => self.nodes[newest].newer = slot,
        }
        self.ends[list].newest = slot;
        self.ends[list].len += 1;
    }

    /// Adds a slot that is in no list to the list of `newer`, as its next older neighbour.
    pub(super) fn push_before(&mut self, newer: SlotId, slot: SlotId) {
        let list = self.list[newer];
        self.nodes.reach(slot);
        self.list.reach(slot);
        debug_assert_eq!(self.list[slot], NO_LIST, "slot {slot} is in a list already");
        let older = self.nodes[newer].older;
        self.nodes[slot] = Node { newer, older };
        self.nodes[newer].older = slot;
        self.list[slot] = list;
        let ends = &mut self.ends[usize::from(list)];
        match older {
            NIL => ends.oldest = slot,
            _ => self.nodes[older].newer = slot,
        }
        ends.len += 1;
    }

    /// Removes a slot from its list, and returns the list's number.
    pub(super) fn unlink(&mut self, slot: SlotId) -> Option<usize> {
        let list = self.list_of(slot)?;
        let Node { newer, older } = std::mem::replace(&mut self.nodes[slot], OUTSIDE);
        self.list[slot] = NO_LIST;
        match newer {
            NIL => self.ends[list].newest = older,
            _ => self.nodes[newer].older = older,
        }
        match older {
            NIL => self.ends[list].oldest = newer,
            _ => self.nodes[older].newer = newer,
        }
        self.ends[list].len -= 1;
        Some(list)
    }

    /// Moves a slot to the newest end of `list`.
    pub(super) fn move_to(&mut self, list: usize, slot: SlotId) {
        self.unlink(slot);
        self.push(list, slot);
    }
}
