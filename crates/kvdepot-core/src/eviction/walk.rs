//! A walk over a list in search of a slot that may go, a few slots at a time.

use crate::limits::EVICTION_PASSED_OVER_MAX;

/// Where a walk stands. One that was cut goes on at the oldest end: what it has passed over is at the newest, but for the
/// first few, which it meets again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Walk {
    /// Slots still to be looked at.
    left: usize,
    /// Slots passed over.
    passed_over: usize,
    /// Whether it was cut before.
    is_cut: bool,
    /// Slots that may be looked at before none is kept for its uses any more. While a search is cut, uses come back: without
    /// a bound it might never end.
    patience: usize,
}

impl Walk {
    /// A walk over a list of so many slots, each of which may be kept so many times.
    pub(super) const fn over(len: usize, uses_max: u8) -> Self {
        Self {
            left: len,
            passed_over: 0,
            is_cut: false,
            patience: len * uses_max as usize + EVICTION_PASSED_OVER_MAX,
        }
    }

    /// A slot may go. Whether it may be kept for a while: then all of so many slots are to be looked at once more.
    pub(super) const fn reprieve(&mut self, len: usize) -> bool {
        if self.patience > 0 {
            self.left = len;
        }
        self.patience > 0
    }

    /// Whether there is another slot to look at.
    pub(super) const fn next(&mut self) -> bool {
        if self.left == 0 {
            return false;
        }
        self.left -= 1;
        self.patience = self.patience.saturating_sub(1);
        true
    }

    /// A slot may not go: whether it is to be moved to the newest end.
    pub(super) const fn pass_over(&mut self) -> bool {
        self.passed_over += 1;
        self.is_cut || self.passed_over > EVICTION_PASSED_OVER_MAX
    }

    /// The walk is cut here. From now on it moves all that it passes over, or it would not get on.
    pub(super) fn cut(&mut self) {
        if !self.is_cut {
            self.left += self.passed_over.min(EVICTION_PASSED_OVER_MAX);
        }
        self.is_cut = true;
    }
}
