//! Limits how often a log line repeats: a peer must not be able to fill the disk with it.

use std::fmt;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Minimum time between two lines of one kind.
const INTERVAL: Duration = Duration::from_secs(10);

/// One kind of log line.
#[derive(Debug, Default)]
pub(crate) struct LogLimit {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    written: Option<Instant>,
    left_out: u64,
}

/// Number of lines left out before this one. Formats as nothing if there were none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LeftOut(u64);

impl LogLimit {
    /// Calls `write` unless it was called less than `INTERVAL` ago. Counts the calls that it leaves out.
    pub(crate) fn line(&self, write: impl FnOnce(LeftOut)) {
        if let Some(left_out) = self.admit(Instant::now()) {
            write(left_out);
        }
    }

    fn admit(&self, now: Instant) -> Option<LeftOut> {
        let mut state = self.state.lock();
        if state.written.is_some_and(|at| now.saturating_duration_since(at) < INTERVAL) {
            state.left_out += 1;
            return None;
        }
        state.written = Some(now);
        Some(LeftOut(std::mem::take(&mut state.left_out)))
    }
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            count => write!(f, " ({count} lines like this were left out before)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_left_out_and_counted() {
        let (limit, begun) = (LogLimit::default(), Instant::now());
        assert_eq!(limit.admit(begun), Some(LeftOut(0)));
        for _ in 0..1000 {
            assert_eq!(limit.admit(begun + INTERVAL / 2), None);
        }
        assert_eq!(limit.admit(begun + INTERVAL), Some(LeftOut(1000)));
        assert_eq!(limit.admit(begun + INTERVAL * 2), Some(LeftOut(0)), "counted once");
        assert_eq!(LeftOut(0).to_string(), "");
        assert!(LeftOut(7).to_string().contains('7'));
    }
}
