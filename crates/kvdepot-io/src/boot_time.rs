//! A clock that goes on while the machine sleeps, unlike `Instant`: for leases that others count by their own clocks.

use std::time::Duration;

use rustix::time::ClockId;

use crate::clock;

/// Returns the time since the machine was started, in which it may have been suspended.
pub fn boot_time() -> Duration {
    clock::read(ClockId::Boottime)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_time_since_the_start() {
        let uptime = std::fs::read_to_string("/proc/uptime").expect("the kernel tells its uptime");
        let seconds: f64 = uptime.split(' ').next().and_then(|text| text.parse().ok()).expect("a number");
        // Both count suspended time; the file was read first, and rounds.
        assert!(boot_time().as_secs_f64() > seconds - 1.0);
        assert!(boot_time() <= boot_time());
    }
}
