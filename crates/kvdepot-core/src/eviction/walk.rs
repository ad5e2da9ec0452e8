//! A walk over a list that searches for a slot that may be evicted, a few slots at a time.

use crate::limits::EVICTION_PASSED_OVER_MAX;

/// Position of a walk. An interrupted walk resumes at the oldest end. The slots that it has passed over are at the newest
/// end by then, except the first few, which it meets again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Walk {
    /// Number of slots left to examine.
    left: usize,
    /// Number of slots passed over.
    passed_over: usize,
    /// Whether the walk was interrupted before.
    is_cut: bool,
    /// Number of slots to examine before uses no longer protect a slot. Slots gain uses while a search is interrupted, so
    /// without this limit it might never end.
    patience: usize,
}

impl Walk {
    /// Makes a walk over a list of `len` slots, each of which may be spared up to `uses_max` times.
    pub(super) const fn over(len: usize, uses_max: u8) -> Self {
        Self {
            left: len,
            passed_over: 0,
            is_cut: false,
            patience: len * uses_max as usize + EVICTION_PASSED_OVER_MAX,
        }
    }

    /// Records a slot that could be evicted but has uses. Returns whether to spare it; if so, all `len` slots are examined
    /// again.
    pub(super) const fn reprieve(&mut self, len: usize) -> bool {
        if self.patience > 0 {
            self.left = len;
        }
        self.patience > 0
    }

    /// Returns whether there is another slot to examine.
    pub(super) const fn next(&mut self) -> bool {
        if self.left == 0 {
            return false;
        }
        self.left -= 1;
        self.patience = self.patience.saturating_sub(1);
        true
    }

    /// Records a slot that may not be evicted. Returns whether to move it to the newest end.
    pub(super) const fn pass_over(&mut self) -> bool {
        self.passed_over += 1;
        self.is_cut || self.passed_over > EVICTION_PASSED_OVER_MAX
    }

    /// Interrupts the walk here. From now on it moves every slot that it passes over. Otherwise it would make no progress.
    pub(super) fn cut(&mut self) {
        if !self.is_cut {
            self.left += self.passed_over.min(EVICTION_PASSED_OVER_MAX);
        }
        self.is_cut = true;
    }
}
