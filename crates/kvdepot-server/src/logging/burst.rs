//! Limits how many lines of one kind are written within a time window.

use std::time::{Duration, Instant};

/// The time window.
const WINDOW: Duration = Duration::from_secs(10);

/// One kind of line.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Burst {
    begun: Option<Instant>,
    written: u32,
    left_out: u64,
}

impl Burst {
    /// Decides whether a line may be written now, with at most `most` in a window. Returns the number of lines left out
    /// before it, or `None` to leave it out.
    pub(super) fn admit(&mut self, now: Instant, most: u32) -> Option<u64> {
        if self.begun.is_none_or(|begun| now.saturating_duration_since(begun) >= WINDOW) {
            (self.begun, self.written) = (Some(now), 0);
        }
        if self.written >= most {
            self.left_out += 1;
            return None;
        }
        self.written += 1;
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_is_counted_and_told_once_by_the_next_line() {
        let (mut burst, begun) = (Burst::default(), Instant::now());
        for _ in 0..3 {
            assert_eq!(burst.admit(begun, 3), Some(0));
        }
        for _ in 0..40 {
            assert_eq!(burst.admit(begun + WINDOW / 2, 3), None);
        }
        assert_eq!(burst.admit(begun + WINDOW, 3), Some(40));
        assert_eq!(burst.admit(begun + WINDOW, 3), Some(0), "told once");
    }
}
