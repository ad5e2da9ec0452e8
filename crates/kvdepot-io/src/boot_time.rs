//! A clock that goes on while the machine sleeps, unlike `Instant`: for leases that others count by their own clocks.

use std::time::Duration;

/// Returns the time since the machine was started, in which it may have been suspended; zero where the system cannot
/// tell.
pub fn boot_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one `timespec`, which `time` is, and keeps no pointer to it.
    if unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut time) } != 0 {
        return Duration::ZERO;
    }
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
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
