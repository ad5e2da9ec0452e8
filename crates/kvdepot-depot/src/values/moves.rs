//! Detects whether values may have moved during a lookup.
//!
//! A value that is stored again may move from one size class to another. A lookup that searches class by class could
//! search the new class before the move and the old one after it, and find it in neither.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts the replacements of values.
#[derive(Debug, Default)]
pub(super) struct Moves {
    begun: AtomicU64,
    ended: AtomicU64,
}

/// A move that has not ended.
#[derive(Debug)]
pub(super) struct Move<'a>(&'a Moves);

/// When a lookup began.
#[derive(Clone, Copy, Debug)]
pub(super) struct Since(u64);

impl Moves {
    /// Begins a move. Hold the returned value while a value replaces another.
    pub(super) fn begin(&self) -> Move<'_> {
        self.begun.fetch_add(1, Ordering::SeqCst);
        Move(self)
    }

    /// Returns the start of a lookup. Call it before the first class is searched.
    pub(super) fn now(&self) -> Since {
        Since(self.ended.load(Ordering::SeqCst))
    }

    /// Returns whether no value has moved since then: all moves begun by now had ended by then.
    pub(super) fn none_since(&self, Since(ended): Since) -> bool {
        self.begun.load(Ordering::SeqCst) == ended
    }
}

impl Drop for Move<'_> {
    fn drop(&mut self) {
        self.0.ended.fetch_add(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_move_is_seen_by_every_look_that_it_overlaps() {
        let moves = Moves::default();
        let before = moves.now();
        assert!(moves.none_since(before));
        let first = moves.begin();
        let during = moves.now();
        assert!(!moves.none_since(before) && !moves.none_since(during));
        drop(first);
        assert!(!moves.none_since(before) && !moves.none_since(during));
        let after = moves.now();
        assert!(moves.none_since(after));
        drop(moves.begin());
        assert!(!moves.none_since(after));
    }
}
