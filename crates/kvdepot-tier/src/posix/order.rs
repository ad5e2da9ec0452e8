//! Files of one directory in order of last use: one list per second, in order of arrival within it.
//!
//! Links are slot numbers of the index. Files found by a scan bring their recency from the disk and fall between those
//! used since; a single list would need a search for that.

use std::collections::BTreeMap;

/// The end of a list, and the link of a slot that is in none.
pub(super) const NONE: u32 = u32::MAX;

/// A file's neighbours in the list of its second.
#[derive(Clone, Copy, Debug)]
pub(super) struct Links {
    pub(super) previous: u32,
    pub(super) next: u32,
}

impl Links {
    pub(super) const NONE: Self = Self { previous: NONE, next: NONE };
}

/// The place where an order keeps its links: the slots of the index.
pub(super) trait LinkStore {
    fn links(&mut self, slot: u32) -> &mut Links;

    /// The slot after this one in its list.
    fn next(&self, slot: u32) -> Option<u32>;
}

#[derive(Debug, Default)]
pub(super) struct Order {
    /// By second: first and last slot.
    seconds: BTreeMap<u32, (u32, u32)>,
}

impl Order {
    /// Adds a slot after all others of its second.
    pub(super) fn push(&mut self, store: &mut impl LinkStore, slot: u32, second: u32) {
        let (_, last) = self.seconds.entry(second).or_insert((slot, NONE));
        let previous = std::mem::replace(last, slot);
        *store.links(slot) = Links { previous, next: NONE };
        if previous != NONE {
            store.links(previous).next = slot;
        }
    }

    /// Adds a slot before all others of its second.
    pub(super) fn push_first(&mut self, store: &mut impl LinkStore, slot: u32, second: u32) {
        let (first, last) = self.seconds.entry(second).or_insert((NONE, slot));
        let next = std::mem::replace(first, slot);
        if next == NONE {
            *last = slot;
        }
        *store.links(slot) = Links { previous: NONE, next };
        if next != NONE {
            store.links(next).previous = slot;
        }
    }

    /// Removes a slot that was pushed with this second.
    pub(super) fn remove(&mut self, store: &mut impl LinkStore, slot: u32, second: u32) {
        let Links { previous, next } = std::mem::replace(store.links(slot), Links::NONE);
        if previous != NONE {
            store.links(previous).next = next;
        }
        if next != NONE {
            store.links(next).previous = previous;
        }
        let Some((first, last)) = self.seconds.get_mut(&second) else { return };
        if *first == slot {
            *first = next;
        }
        if *last == slot {
            *last = previous;
        }
        if *first == NONE {
            self.seconds.remove(&second);
        }
    }

    /// Iterates over the slots, the least recently used first.
    pub(super) fn iter<'a>(&'a self, store: &'a impl LinkStore) -> impl Iterator<Item = u32> + 'a {
        self.seconds
            .values()
            .flat_map(|(first, _)| std::iter::successors(Some(*first), |slot| store.next(*slot)))
    }

    /// The least recently used slot and its second.
    pub(super) fn first(&self) -> Option<(u32, u32)> {
        self.seconds.first_key_value().map(|(second, (first, _))| (*second, *first))
    }
}
