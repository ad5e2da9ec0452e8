//! Collects small blocks until they make a pack. A state machine: it neither sleeps nor writes.

use hashbrown::HashMap;
use kvdepot_core::NamespaceId;
use kvdepot_core::limits::OBJECT_PACK_BLOCKS_MAX;

/// What the caller must do after it has added a block.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next<T> {
    /// Nothing: the blocks wait for more, and another caller's timer ends that.
    Wait,
    /// Set a timer, and then call [`Gather::take`] with this number.
    Timer(u64),
    /// Write these blocks now.
    Write(Vec<T>),
}

#[derive(Debug)]
struct Group<T> {
    number: u64,
    bytes: u64,
    items: Vec<T>,
}

/// The blocks that wait, of each epoch of a namespace.
#[derive(Debug)]
pub(super) struct Gather<T> {
    bytes_max: u64,
    groups: HashMap<NamespaceId, Group<T>>,
    numbers: u64,
}

impl<T> Gather<T> {
    /// `bytes_max`: size at which a group of blocks is complete.
    pub(super) fn new(bytes_max: u64) -> Self {
        Self { bytes_max, groups: HashMap::new(), numbers: 0 }
    }

    /// Adds a block.
    pub(super) fn add(&mut self, namespace: NamespaceId, item: T, bytes: u64) -> Next<T> {
        let is_first = !self.groups.contains_key(&namespace);
        self.numbers += u64::from(is_first);
        let number = self.numbers;
        let group =
            self.groups.entry(namespace).or_insert_with(|| Group { number, bytes: 0, items: Vec::new() });
        group.items.push(item);
        group.bytes += bytes;
        if group.bytes >= self.bytes_max || group.items.len() >= OBJECT_PACK_BLOCKS_MAX {
            let group = self.groups.remove(&namespace);
            return Next::Write(group.map(|group| group.items).unwrap_or_default());
        }
        if is_first { Next::Timer(number) } else { Next::Wait }
    }

    /// Takes all blocks.
    pub(super) fn take_all(&mut self) -> Vec<T> {
        self.groups.drain().flat_map(|(_, group)| group.items).collect()
    }

    /// Takes the blocks whose timer has ended; nothing if they were written before.
    pub(super) fn take(&mut self, namespace: NamespaceId, number: u64) -> Vec<T> {
        if self.groups.get(&namespace).is_none_or(|group| group.number != number) {
            return Vec::new();
        }
        self.groups.remove(&namespace).map(|group| group.items).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: NamespaceId = NamespaceId([1; 16]);
    const TWO: NamespaceId = NamespaceId([2; 16]);

    #[test]
    fn blocks_wait_until_their_pack_is_full() {
        let mut gather = Gather::new(100);
        let Next::Timer(first) = gather.add(ONE, 'a', 40) else { panic!("the first one sets a timer") };
        assert_eq!(gather.add(ONE, 'b', 40), Next::Wait);
        assert!(matches!(gather.add(TWO, 'x', 40), Next::Timer(_)), "no pack has two namespaces");
        assert_eq!(gather.add(ONE, 'c', 40), Next::Write(vec!['a', 'b', 'c']));
        assert!(gather.take(ONE, first).is_empty(), "the timer comes late");
        let Next::Timer(second) = gather.add(ONE, 'd', 40) else { panic!("a new group") };
        assert!(gather.take(ONE, first).is_empty(), "and takes no later group");
        assert_eq!(gather.take(ONE, second), ['d']);
    }

    #[test]
    fn all_blocks_can_be_taken() {
        let mut gather = Gather::new(100);
        let Next::Timer(first) = gather.add(ONE, 'a', 40) else { panic!("the first one sets a timer") };
        gather.add(TWO, 'b', 40);
        let mut all = gather.take_all();
        all.sort_unstable();
        assert_eq!((all, gather.take(ONE, first)), (vec!['a', 'b'], Vec::new()));
    }

    #[test]
    fn a_pack_has_a_bounded_number_of_blocks() {
        let mut gather = Gather::new(u64::MAX);
        for n in 1..OBJECT_PACK_BLOCKS_MAX {
            assert!(!matches!(gather.add(ONE, n, 1), Next::Write(_)));
        }
        let Next::Write(all) = gather.add(ONE, 0, 1) else { panic!("it is full") };
        assert_eq!(all.len(), OBJECT_PACK_BLOCKS_MAX);
    }
}
