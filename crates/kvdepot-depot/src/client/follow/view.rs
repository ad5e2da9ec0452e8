//! What a follower has reported to its caller: which blocks can be read where. Pure and bounded (P7).
//!
//! A block counts for a group if all namespaces of the group have it, as for a hit.

use std::collections::VecDeque;

use hashbrown::HashMap;
use hashbrown::hash_map::IntoIter;
use kvdepot_core::BlockHash;

/// A change for the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delta {
    /// Number of the group.
    pub group: u32,
    /// 0 is the pool, `n` the `n`-th tier below it.
    pub place: u8,
    /// Whether the block has become readable there, or stopped being so.
    pub is_stored: bool,
    /// The block.
    pub hash: BlockHash,
}

/// Where one block of a namespace is.
#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    /// A bit for each place.
    places: u16,
    /// Places that were confirmed in `round`.
    seen: u16,
    round: u16,
}

impl Entry {
    const fn unseen(&self, round: u16) -> u16 {
        if self.round == round { self.places & !self.seen } else { self.places }
    }
}

#[derive(Debug, Default)]
struct Space {
    group: u32,
    blocks: HashMap<BlockHash, Entry>,
    round: u16,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct View {
    spaces: Vec<Space>,
    /// The namespaces of each group.
    groups: Vec<Vec<usize>>,
    blocks: usize,
    blocks_max: usize,
    /// Number of blocks that were not tracked because there were too many.
    pub(crate) left_out: u64,
    /// Namespaces whose blocks are all gone. Those of the first are being reported.
    clearing: VecDeque<usize>,
    leaving: Option<IntoIter<BlockHash, Entry>>,
    /// Blocks that a walk did not find again.
    stale: Vec<(usize, BlockHash)>,
    /// Changes for the caller.
    pub(crate) out: Vec<Delta>,
    #[cfg(test)]
    pub(crate) keeps_stale: bool,
}

impl View {
    pub(crate) fn new(blocks_max: usize) -> Self {
        Self {
            spaces: Vec::new(),
            groups: Vec::new(),
            blocks: 0,
            blocks_max,
            left_out: 0,
            clearing: VecDeque::new(),
            leaving: None,
            stale: Vec::new(),
            out: Vec::new(),
            #[cfg(test)]
            keeps_stale: false,
        }
    }

    /// Returns the number of tracked blocks, each counted once per namespace that has it.
    pub(crate) const fn blocks(&self) -> usize {
        self.blocks
    }

    pub(crate) const fn spaces(&self) -> usize {
        self.spaces.len()
    }

    /// Adds a group of this many namespaces with consecutive numbers. Returns the first number.
    pub(crate) fn add_group(&mut self, namespaces: usize) -> usize {
        let (first, group) = (self.spaces.len(), self.groups.len() as u32);
        self.spaces.extend((0..namespaces).map(|_| Space { group, ..Space::default() }));
        self.groups.push((first..first + namespaces).collect());
        first
    }

    /// Forgets the groups. All their blocks must have been reported as removed before, by `clear` and `settle`.
    pub(crate) fn forget_groups(&mut self) {
        debug_assert_eq!(self.blocks, 0, "blocks were not reported as removed");
        self.spaces.clear();
        self.groups.clear();
    }

    /// Records that a block of a namespace can be read in a place, or cannot any more. Idempotent.
    pub(crate) fn set(&mut self, space: usize, place: u8, is_stored: bool, hash: BlockHash) {
        let Some(bit) = 1_u16.checked_shl(place.into()) else { return };
        let full = self.blocks >= self.blocks_max;
        let of = &mut self.spaces[space];
        let (round, group) = (of.round, of.group);
        let changed = match of.blocks.get_mut(&hash) {
            None if !is_stored => false,
            None if full => {
                self.left_out += 1;
                false
            }
            None => {
                of.blocks.insert(hash, Entry { places: bit, seen: bit, round });
                self.blocks += 1;
                true
            }
            Some(entry) => {
                if entry.round != round {
                    (entry.round, entry.seen) = (round, 0);
                }
                let had = entry.places & bit != 0;
                let set = |bits: u16| if is_stored { bits | bit } else { bits & !bit };
                (entry.places, entry.seen) = (set(entry.places), set(entry.seen));
                if entry.places == 0 {
                    of.blocks.remove(&hash);
                    self.blocks -= 1;
                }
                had != is_stored
            }
        };
        if changed && self.others_have(space, group, &hash) & bit != 0 {
            self.out.push(Delta { group, place, is_stored, hash });
        }
    }

    /// Returns the places where all other namespaces of the group have the block, one bit each.
    fn others_have(&self, space: usize, group: u32, hash: &BlockHash) -> u16 {
        let others = self.groups[group as usize].iter().filter(|&&other| other != space);
        let places = others.map(|&other| self.spaces[other].blocks.get(hash).map_or(0, |entry| entry.places));
        places.fold(u16::MAX, |all, places| all & places)
    }

    /// Begins a walk over all blocks of a namespace.
    pub(crate) fn begin_walk(&mut self, space: usize) {
        self.spaces[space].round = self.spaces[space].round.wrapping_add(1);
    }

    /// Ends the walk. All events before its end must have been applied; a block that neither has confirmed is gone.
    pub(crate) fn end_walk(&mut self, space: usize) {
        #[cfg(test)]
        if self.keeps_stale {
            return;
        }
        let of = &self.spaces[space];
        let unseen = of.blocks.iter().filter(|(_, entry)| entry.unseen(of.round) != 0);
        self.stale.extend(unseen.map(|(hash, _)| (space, *hash)));
    }

    /// Records that all blocks of a namespace are gone.
    pub(crate) fn clear(&mut self, space: usize) {
        if !self.spaces[space].blocks.is_empty() && !self.clearing.contains(&space) {
            self.clearing.push_back(space);
        }
    }

    /// Reports pending removals, in about `room` deltas at most. Returns whether none is left; until then, call nothing else.
    pub(crate) fn settle(&mut self, room: usize) -> bool {
        while self.out.len() < room {
            if let Some((space, hash)) = self.stale.pop() {
                let of = &self.spaces[space];
                let unseen = of.blocks.get(&hash).map_or(0, |entry| entry.unseen(of.round));
                let places = (0..16).filter(|place| unseen & 1 << place != 0);
                places.for_each(|place| self.set(space, place, false, hash));
                continue;
            }
            let Some(&space) = self.clearing.front() else { return true };
            let leaving = self
                .leaving
                .get_or_insert_with(|| std::mem::take(&mut self.spaces[space].blocks).into_iter());
            let Some((hash, entry)) = leaving.next() else {
                self.leaving = None;
                self.clearing.pop_front();
                continue;
            };
            self.blocks -= 1;
            let group = self.spaces[space].group;
            let told = entry.places & self.others_have(space, group, &hash);
            let places = (0..16).filter(|place| told & 1 << place != 0);
            self.out.extend(places.map(|place| Delta { group, place, is_stored: false, hash }));
        }
        self.stale.is_empty() && self.clearing.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(n: u8) -> BlockHash {
        BlockHash([n; 16])
    }

    fn told(view: &mut View) -> Vec<(u32, u8, bool, u8)> {
        view.out.drain(..).map(|d| (d.group, d.place, d.is_stored, d.hash.0[0])).collect()
    }

    #[test]
    fn a_block_counts_when_all_ranks_have_it() {
        let mut view = View::new(100);
        let first = view.add_group(2);
        view.set(first, 0, true, hash(1));
        assert_eq!(told(&mut view), []);
        view.set(first + 1, 1, true, hash(1));
        assert_eq!(told(&mut view), [], "one has it in the pool, the other in a tier");
        view.set(first + 1, 0, true, hash(1));
        view.set(first + 1, 0, true, hash(1));
        assert_eq!(told(&mut view), [(0, 0, true, 1)]);
        view.set(first, 0, false, hash(1));
        view.set(first + 1, 0, false, hash(1));
        assert_eq!(told(&mut view), [(0, 0, false, 1)]);
        assert_eq!(view.blocks(), 1);
    }

    #[test]
    fn what_is_cleared_is_told_in_pieces_and_once() {
        let mut view = View::new(100);
        let first = view.add_group(2);
        for n in 0..10 {
            view.set(first, 0, true, hash(n));
            view.set(first + 1, 0, true, hash(n));
        }
        assert_eq!(told(&mut view).len(), 10);
        view.clear(first);
        view.clear(first + 1);
        assert!(!view.settle(4));
        assert_eq!(told(&mut view).len(), 4);
        assert!(view.settle(100));
        let rest = told(&mut view);
        assert!(rest.len() == 6 && rest.iter().all(|delta| !delta.2), "{rest:?}");
        assert_eq!(view.blocks(), 0);
    }

    #[test]
    fn what_a_walk_does_not_find_again_is_gone() {
        let mut view = View::new(100);
        let space = view.add_group(1);
        (0..4).for_each(|n| view.set(space, 0, true, hash(n)));
        view.set(space, 1, true, hash(0));
        told(&mut view);
        view.begin_walk(space);
        view.set(space, 0, true, hash(0));
        view.set(space, 0, true, hash(1));
        view.end_walk(space);
        // Came after the walk was over, and before it was told.
        view.set(space, 0, true, hash(2));
        assert!(view.settle(100));
        let mut gone = told(&mut view);
        gone.sort_unstable();
        assert_eq!(gone, [(0, 0, false, 3), (0, 1, false, 0)]);
    }

    #[test]
    fn blocks_beyond_the_limit_are_left_out_and_counted() {
        let mut view = View::new(2);
        let space = view.add_group(1);
        (0..4).for_each(|n| view.set(space, 0, true, hash(n)));
        assert_eq!((told(&mut view).len(), view.left_out, view.blocks()), (2, 2, 2));
        view.set(space, 0, false, hash(0));
        view.set(space, 0, true, hash(3));
        assert_eq!(told(&mut view), [(0, 0, false, 0), (0, 0, true, 3)]);
    }
}
