//! Advances of epochs that this depot makes itself, so that it doesn't take them for another depot's.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts the advances that have begun and ended.
#[derive(Debug, Default)]
pub(crate) struct Advances {
    begun: AtomicU64,
    ended: AtomicU64,
}

/// An advance that this depot makes; it ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Advance<'a>(&'a Advances);

/// A moment, to compare with a later one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mark(u64);

impl Advances {
    /// Notes that an advance begins.
    pub(crate) fn begin(&self) -> Advance<'_> {
        self.begun.fetch_add(1, Ordering::SeqCst);
        Advance(self)
    }

    /// Marks this moment. What the caller reads afterwards is compared with it.
    pub(crate) fn mark(&self) -> Mark {
        // Advances that have not ended count as later ones.
        Mark(self.ended.load(Ordering::SeqCst))
    }

    /// Returns whether an advance of this depot was under way at the mark, or has begun since.
    pub(crate) fn any_since(&self, mark: Mark) -> bool {
        self.begun.load(Ordering::SeqCst) != mark.0
    }
}

impl Drop for Advance<'_> {
    fn drop(&mut self) {
        self.0.ended.fetch_add(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advances_under_way_or_later_are_noticed_and_earlier_ones_are_not() {
        let advances = Advances::default();
        let quiet = advances.mark();
        assert!(!advances.any_since(quiet));
        let first = advances.begin();
        let during = advances.mark();
        assert!(advances.any_since(quiet) && advances.any_since(during));
        drop(first);
        assert!(advances.any_since(quiet) && advances.any_since(during));
        let after = advances.mark();
        assert!(!advances.any_since(after));
        drop(advances.begin());
        assert!(advances.any_since(after));
    }
}
