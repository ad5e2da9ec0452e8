//! Detects stalls: moments in which the machine did not run the depot. Its timer is late then, and so is every answer.

use std::time::{Duration, Instant};

/// Minimum delay of a timer that counts as a stall.
const STALL_MIN: Duration = Duration::from_secs(1);
/// At most one stall is logged in this time.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// A stall found by a late timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stall {
    /// How late the timer was.
    pub(crate) late: Duration,
    /// Number of stalls since the last logged one, without this one; `None` if this one should not be logged.
    pub(crate) logged_after: Option<u64>,
}

/// Detects stalls by comparing when a timer was due with when it fired.
#[derive(Debug, Default)]
pub(crate) struct StallWatch {
    logged: Option<Instant>,
    left_out: u64,
}

impl StallWatch {
    /// Checks a timer that was due after `tick` and fired at `now`, `took` after it was set.
    pub(crate) fn timer_came(&mut self, tick: Duration, took: Duration, now: Instant) -> Option<Stall> {
        let late = took.saturating_sub(tick);
        if late < STALL_MIN {
            return None;
        }
        if self.logged.is_some_and(|logged| now.saturating_duration_since(logged) < LOG_INTERVAL) {
            self.left_out += 1;
            return Some(Stall { late, logged_after: None });
        }
        self.logged = Some(now);
        Some(Stall { late, logged_after: Some(std::mem::take(&mut self.left_out)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_timer_is_a_stall_and_stalls_are_logged_once_a_minute() {
        let (mut watch, tick, began) = (StallWatch::default(), Duration::from_millis(100), Instant::now());
        let at = |seconds| began + Duration::from_secs(seconds);
        let late = Duration::from_secs(20);
        assert_eq!(watch.timer_came(tick, Duration::from_millis(900), at(1)), None);
        assert_eq!(watch.timer_came(tick, tick + late, at(21)), Some(Stall { late, logged_after: Some(0) }));
        for seconds in [30, 40] {
            let stall = watch.timer_came(tick, tick + late, at(seconds));
            assert_eq!(stall, Some(Stall { late, logged_after: None }));
        }
        assert_eq!(watch.timer_came(tick, tick + late, at(81)), Some(Stall { late, logged_after: Some(2) }));
        assert_eq!(watch.timer_came(tick, tick, at(82)), None);
    }
}
