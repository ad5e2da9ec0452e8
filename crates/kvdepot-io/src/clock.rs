//! Reads the system's clocks.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Returns the time of a clock that never shows less than zero.
pub(crate) fn read(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}
