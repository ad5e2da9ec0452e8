//! The latest changes of which blocks can be read where, with sequence numbers. A pure, bounded data structure (P7).

use std::collections::VecDeque;

use kvdepot_core::{BlockHash, BlockKey, NamespaceId};

/// A place that holds blocks: 0 is the pool, `n` the `n`-th tier below it.
pub(crate) type Place = u8;

/// A block became readable in a place, or stopped being so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Change {
    pub(crate) key: BlockKey,
    pub(crate) place: Place,
    pub(crate) is_stored: bool,
}

/// A change in one of the requested namespaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Event {
    /// Index of the namespace in the request.
    pub(crate) space: u16,
    /// 0 is the pool, `n` the `n`-th tier below it.
    pub(crate) place: u8,
    /// Whether the block has become readable there, or stopped being so.
    pub(crate) is_stored: bool,
    /// The block.
    pub(crate) hash: BlockHash,
}

/// The answer to a reader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reading {
    /// Sequence number of the last change that the reader has now.
    pub(crate) upto: u64,
    /// Whether changes between the reader's last one and these are missing.
    pub(crate) is_gap: bool,
    /// Whether there are more changes.
    pub(crate) has_more: bool,
    pub(crate) events: Vec<Event>,
}

/// See the module. A change's sequence number is the number of changes up to and including it.
#[derive(Debug)]
pub(crate) struct Ring {
    changes: VecDeque<Change>,
    /// Sequence number of the latest change.
    head: u64,
    capacity: usize,
    #[cfg(test)]
    pub(super) hides_gaps: bool,
}

impl Ring {
    /// Makes a ring that keeps this many changes. Allocates nothing before the first one.
    pub(crate) const fn new(capacity: usize) -> Self {
        Self {
            changes: VecDeque::new(),
            head: 0,
            capacity,
            #[cfg(test)]
            hides_gaps: false,
        }
    }

    pub(crate) const fn head(&self) -> u64 {
        self.head
    }

    pub(crate) fn push(&mut self, change: Change) {
        if self.changes.len() == self.capacity {
            self.changes.pop_front();
        }
        self.changes.push_back(change);
        self.head += 1;
    }

    /// Forgets all changes. Every reader finds a gap.
    pub(crate) fn cut(&mut self) {
        self.changes = VecDeque::new();
        self.head += 1;
    }

    /// Reads the changes after a sequence number, examining at most `looks`. `space` returns the index of a requested
    /// namespace.
    pub(crate) fn read(
        &self,
        after: u64,
        looks: usize,
        space: impl Fn(&NamespaceId) -> Option<u16>,
    ) -> Reading {
        let first = self.head - self.changes.len() as u64;
        if after < first || after > self.head {
            #[cfg(test)]
            if self.hides_gaps {
                return Reading { upto: self.head, is_gap: false, has_more: false, events: Vec::new() };
            }
            return Reading { upto: self.head, is_gap: true, has_more: false, events: Vec::new() };
        }
        let from = usize::try_from(after - first).unwrap_or(usize::MAX);
        let upto = from.saturating_add(looks).min(self.changes.len());
        let events = self.changes.range(from..upto).filter_map(|change| {
            let Change { key, place, is_stored } = *change;
            Some(Event { space: space(&key.namespace)?, place, is_stored, hash: key.hash })
        });
        let has_more = upto < self.changes.len();
        Reading { upto: first + upto as u64, is_gap: false, has_more, events: events.collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(n: u8) -> Change {
        let key = BlockKey { namespace: NamespaceId([n % 2; 16]), hash: BlockHash([n; 16]) };
        Change { key, place: 1, is_stored: true }
    }

    fn even(id: &NamespaceId) -> Option<u16> {
        (id.0[0] == 0).then_some(7)
    }

    #[test]
    fn a_reader_gets_what_it_asked_for_in_order_and_in_pieces() {
        let mut ring = Ring::new(8);
        (0..6).for_each(|n| ring.push(change(n)));
        let first = ring.read(0, 4, even);
        assert_eq!((first.upto, first.is_gap, first.has_more), (4, false, true));
        let hashes =
            |reading: &Reading| reading.events.iter().map(|event| event.hash.0[0]).collect::<Vec<_>>();
        assert_eq!(hashes(&first), [0, 2]);
        assert!(first.events.iter().all(|event| event.space == 7 && event.place == 1 && event.is_stored));
        let second = ring.read(first.upto, 4, even);
        assert_eq!((second.upto, second.has_more, hashes(&second)), (6, false, vec![4]));
        assert_eq!(
            ring.read(6, 4, even),
            Reading { upto: 6, is_gap: false, has_more: false, events: Vec::new() }
        );
    }

    #[test]
    fn what_was_overwritten_or_cut_is_a_gap() {
        let mut ring = Ring::new(4);
        (0..6).for_each(|n| ring.push(change(n)));
        let gap = Reading { upto: 6, is_gap: true, has_more: false, events: Vec::new() };
        assert_eq!(ring.read(1, 9, even), gap);
        assert_eq!(ring.read(2, 9, even).events.len(), 2);
        assert_eq!(ring.read(7, 9, even), gap, "a number of another depot");
        ring.cut();
        assert!(ring.read(6, 9, even).is_gap);
        assert!(!ring.read(7, 9, even).is_gap);
    }
}
