//! Measures how long the machine's lock is held: in real time, and in processor time of the holding thread.
//!
//! Real time includes what others do to the holder: a thread that is preempted under the lock holds it for a time
//! slice. Processor time shows the actual work. Reading it is a system call of several hundred nanoseconds, on a path
//! that takes one or two microseconds, so a thread reads it at most once in `SAMPLE_AGE` and after long holds. The
//! result is therefore an upper bound: a hold is charged with its thread's work since the last reading, but with no
//! more than its real time.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvdepot_io::thread_time::thread_time;
use parking_lot::Mutex;

/// Maximum age of a thread's last reading of its processor time, which is also the maximum overcharge of a hold.
const SAMPLE_AGE: Duration = Duration::from_micros(50);
/// For a hold shorter than this in real time, that also counts as its processor time.
const LONG: Duration = Duration::from_micros(100);

thread_local! {
    /// When this thread last read its processor time, and the value.
    static LAST: Cell<Option<(Instant, Duration)>> = const { Cell::new(None) };
}

/// The longest of many times, and its event.
#[derive(Debug)]
struct Longest {
    ns: AtomicU64,
    what: Mutex<(u64, &'static str)>,
}

impl Longest {
    const fn new() -> Self {
        Self { ns: AtomicU64::new(0), what: Mutex::new((0, "")) }
    }

    fn took(&self, time: Duration, what: &'static str) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        if ns > self.ns.fetch_max(ns, Ordering::Relaxed) {
            let mut longest = self.what.lock();
            if ns > longest.0 {
                *longest = (ns, what);
            }
        }
    }

    fn peek(&self) -> (u64, &'static str) {
        *self.what.lock()
    }

    fn take(&self) -> (u64, &'static str) {
        let longest = std::mem::take(&mut *self.what.lock());
        self.ns.store(0, Ordering::Relaxed);
        longest
    }
}

/// The longest holds, in nanoseconds, with the event of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LongestHolds {
    pub(crate) real: (u64, &'static str),
    pub(crate) processor: (u64, &'static str),
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Holds {
    real: Longest,
    processor: Longest,
}

/// One hold, from before the lock was requested.
#[derive(Debug)]
pub(crate) struct Hold {
    /// Processor time of the thread, as of a moment before.
    processor: Duration,
}

impl Holds {
    pub(crate) const fn new() -> Self {
        Self { real: Longest::new(), processor: Longest::new() }
    }

    /// Starts a measurement. Call it before the lock is taken.
    pub(crate) fn begin() -> Hold {
        let now = Instant::now();
        let processor = LAST.with(|last| match last.get() {
            Some((read, processor)) if now.saturating_duration_since(read) < SAMPLE_AGE => processor,
            _ => read(last, now),
        });
        Hold { processor }
    }

    /// Records that the lock was held since `locked`, for an event of this name.
    pub(crate) fn end(&self, hold: &Hold, locked: Instant, event: &'static str) {
        let now = Instant::now();
        let real = now.saturating_duration_since(locked);
        let processor = if real < LONG {
            real
        } else {
            LAST.with(|last| read(last, now)).saturating_sub(hold.processor).min(real)
        };
        self.real.took(real, event);
        self.processor.took(processor, event);
    }

    /// Returns the longest holds since the last call of [`Self::take`].
    pub(crate) fn peek(&self) -> LongestHolds {
        LongestHolds { real: self.real.peek(), processor: self.processor.peek() }
    }

    /// Returns the longest holds since the last call.
    pub(crate) fn take(&self) -> LongestHolds {
        LongestHolds { real: self.real.take(), processor: self.processor.take() }
    }
}

fn read(last: &Cell<Option<(Instant, Duration)>>, now: Instant) -> Duration {
    let processor = thread_time();
    last.set(Some((now, processor)));
    processor
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_hold_is_named_once() {
        let holds = Holds::new();
        holds.real.took(Duration::from_nanos(5), "reserve");
        holds.real.took(Duration::from_nanos(9), "sweep");
        holds.real.took(Duration::from_nanos(7), "commit");
        assert_eq!(holds.peek().real, (9, "sweep"), "a look changes nothing");
        assert_eq!(holds.take().real, (9, "sweep"));
        assert_eq!(holds.take().real, (0, ""), "since the last call");
    }

    #[test]
    fn time_without_the_processor_is_no_processor_time() {
        let holds = Holds::new();
        let hold = Holds::begin();
        // Like a thread that was preempted for a minute.
        let locked = Instant::now().checked_sub(Duration::from_secs(60)).unwrap();
        holds.end(&hold, locked, "wait");
        let LongestHolds { real, processor } = holds.take();
        assert!(real.0 >= 60_000_000_000, "{real:?}");
        assert!(processor.0 < real.0 / 2, "{processor:?} of {real:?}");
    }

    #[test]
    fn work_is_processor_time() {
        let holds = Holds::new();
        let hold = Holds::begin();
        let (locked, begun) = (Instant::now(), thread_time());
        let mut sum = 0_u64;
        while thread_time() < begun + Duration::from_millis(2) {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        holds.end(&hold, locked, "work");
        let (processor, what) = holds.take().processor;
        assert!(processor >= 2_000_000 && what == "work", "{processor} ns of {what}");
    }
}
