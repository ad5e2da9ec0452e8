//! Operations of a tier that have not ended long after they should have. They count as failed, but the tier may still
//! use their slots, which stay pinned until it ends them (P4).

use hashbrown::HashMap;

use crate::eviction::SlotId;

/// A tier is given nothing more of a kind while hung operations of that kind pin more than this part of the pool.
const POOL_DIVISOR: u64 = 8;

/// A tier's hung operations of one kind, by slot.
#[derive(Clone, Debug)]
pub(super) struct Hung<T> {
    operations: HashMap<SlotId, (T, u64)>,
    /// Bytes of their slots.
    bytes: u64,
}

impl<T> Default for Hung<T> {
    fn default() -> Self {
        Self { operations: HashMap::new(), bytes: 0 }
    }
}

impl<T> Hung<T> {
    pub(super) fn add(&mut self, slot: SlotId, operation: T, bytes: u64) {
        let before = self.operations.insert(slot, (operation, bytes));
        debug_assert!(before.is_none(), "an operation hangs once");
        self.bytes += bytes;
    }

    /// Takes an operation that has ended, if it had hung.
    pub(super) fn take(&mut self, slot: SlotId) -> Option<T> {
        let (operation, bytes) = self.operations.remove(&slot)?;
        self.bytes -= bytes;
        Some(operation)
    }

    pub(super) fn len(&self) -> usize {
        self.operations.len()
    }

    /// Returns whether so many have hung that the tier is given no more: each could pin another slot.
    pub(super) fn is_clogged(&self, most: usize, pool_bytes: u64) -> bool {
        self.operations.len() >= most || self.bytes > pool_bytes / POOL_DIVISOR
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tier_is_clogged_by_many_operations_or_by_large_ones() {
        let mut hung: Hung<&str> = Hung::default();
        assert!(!hung.is_clogged(2, 800) && hung.take(1).is_none());
        hung.add(1, "one", 100);
        assert!(!hung.is_clogged(2, 800), "an eighth of the pool");
        assert!(hung.is_clogged(2, 799) && hung.is_clogged(1, 800));
        hung.add(2, "two", 100);
        assert!(hung.is_clogged(9, 800) && hung.is_clogged(2, 8000));
        assert_eq!((hung.take(1), hung.take(1), hung.len()), (Some("one"), None, 1));
        assert!(!hung.is_clogged(2, 800));
    }
}
