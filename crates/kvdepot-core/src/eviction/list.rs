//! Doubly linked lists threaded through one vector indexed by slot: every operation is O(1).

use super::SlotId;

const NIL: SlotId = SlotId::MAX;
const NO_LIST: u8 = u8::MAX;

#[derive(Clone, Copy, Debug)]
struct Node {
    newer: SlotId,
    older: SlotId,
    list: u8,
}

const OUTSIDE: Node = Node { newer: NIL, older: NIL, list: NO_LIST };

#[derive(Clone, Copy, Debug)]
struct Ends {
    newest: SlotId,
    oldest: SlotId,
    len: usize,
}

/// `N` lists; a slot is in one of them or in none.
#[derive(Debug)]
pub(super) struct SlotLists<const N: usize> {
    nodes: Vec<Node>,
    ends: [Ends; N],
}

impl<const N: usize> SlotLists<N> {
    pub(super) fn new(slots_hint: usize) -> Self {
        Self { nodes: Vec::with_capacity(slots_hint), ends: [Ends { newest: NIL, oldest: NIL, len: 0 }; N] }
    }

    pub(super) fn len(&self, list: usize) -> usize {
        self.ends[list].len
    }

    pub(super) fn list_of(&self, slot: SlotId) -> Option<usize> {
        let list = self.nodes.get(slot as usize)?.list;
        (list != NO_LIST).then_some(usize::from(list))
    }

    pub(super) fn oldest(&self, list: usize) -> Option<SlotId> {
        Some(self.ends[list].oldest).filter(|&slot| slot != NIL)
    }

    /// The neighbour that came after `slot` in its list.
    pub(super) fn newer(&self, slot: SlotId) -> Option<SlotId> {
        Some(self.nodes[slot as usize].newer).filter(|&slot| slot != NIL)
    }

    /// Puts a slot that is in no list at the newest end.
    pub(super) fn push(&mut self, list: usize, slot: SlotId) {
        assert!(slot != NIL, "the last slot number marks the end of a list");
        if self.nodes.len() <= slot as usize {
            self.nodes.resize(slot as usize + 1, OUTSIDE);
        }
        debug_assert_eq!(self.nodes[slot as usize].list, NO_LIST, "slot {slot} is in a list already");
        let newest = self.ends[list].newest;
        self.nodes[slot as usize] = Node { newer: NIL, older: newest, list: list as u8 };
        match newest {
            NIL => self.ends[list].oldest = slot,
            _ => self.nodes[newest as usize].newer = slot,
        }
        self.ends[list].newest = slot;
        self.ends[list].len += 1;
    }

    /// Takes a slot out of its list and says which that was.
    pub(super) fn unlink(&mut self, slot: SlotId) -> Option<usize> {
        let list = self.list_of(slot)?;
        let Node { newer, older, .. } = std::mem::replace(&mut self.nodes[slot as usize], OUTSIDE);
        match newer {
            NIL => self.ends[list].newest = older,
            _ => self.nodes[newer as usize].older = older,
        }
        match older {
            NIL => self.ends[list].oldest = newer,
            _ => self.nodes[older as usize].newer = newer,
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
