//! A walk over a list in search of a slot that may be evicted, a few slots at a time.

use crate::limits::EVICTION_PASSED_OVER_MAX;

/// Position of a walk. A walk that was cut resumes at the oldest end: the slots that it has passed over are at the
/// newest end, except the first few, which it meets again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Walk {
    /// Number of slots left to examine.
    left: usize,
    /// Number of slots passed over.
    passed_over: usize,
    /// Whether the walk was cut before.
    is_cut: bool,
    /// Number of slots to examine before none is kept for its uses any more. While a search is cut, slots gain uses
    /// again: without a limit it might never complete.
    patience: usize,
}

impl Walk {
    /// Makes a walk over a list of `len` slots, each of which may be kept up to `uses_max` times.
    pub(super) const fn over(len: usize, uses_max: u8) -> Self {
        Self {
            left: len,
            passed_over: 0,
            is_cut: false,
            patience: len * uses_max as usize + EVICTION_PASSED_OVER_MAX,
        }
    }

    /// Notes a slot that may be evicted. Returns whether it may be kept for a while; then all `len` slots must be
    /// examined again.
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

    /// Notes a slot that may not be evicted. Returns whether to move it to the newest end.
    pub(super) const fn pass_over(&mut self) -> bool {
        self.passed_over += 1;
        self.is_cut || self.passed_over > EVICTION_PASSED_OVER_MAX
    }

    /// Cuts the walk here. From now on it moves all slots that it passes over, or it would make no progress.
    pub(super) fn cut(&mut self) {
        if !self.is_cut {
            self.left += self.passed_over.min(EVICTION_PASSED_OVER_MAX);
        }
        self.is_cut = true;
    }
}
