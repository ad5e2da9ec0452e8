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

/// A time in nanoseconds, and its event.
type Took = (u64, &'static str);

/// Length of half a window in seconds. A value is shown for one to two halves, so a scrape each minute misses none.
const HALF_S: u64 = 60;

/// The longest time of the half of a window that is not over, and that of the half before it. Halves have numbers.
#[derive(Clone, Copy, Debug)]
struct Halves {
    half: u64,
    newest: Took,
    before: Took,
}

impl Halves {
    const fn new() -> Self {
        Self { half: 0, newest: (0, ""), before: (0, "") }
    }

    /// Begins the half `half`, unless it has begun.
    fn turn(&mut self, half: u64) {
        if half > self.half {
            self.before = if half == self.half + 1 { self.newest } else { (0, "") };
            self.newest = (0, "");
            self.half = half;
        }
    }

    /// Records a time in the half `half`, or in the newest one if that is over.
    fn took(&mut self, half: u64, took: Took) {
        self.turn(half);
        if took.0 > self.newest.0 {
            self.newest = took;
        }
    }

    /// Returns the longest time of the half `half` and of the one before it. Changes nothing, so all readers see the same.
    fn longest(mut self, half: u64) -> Took {
        self.turn(half);
        if self.before.0 > self.newest.0 { self.before } else { self.newest }
    }
}

/// The longest of many times in the last one to two minutes, and its event.
#[derive(Debug)]
struct Longest {
    /// Those of `halves`, so that a time that changes nothing takes no lock.
    half: AtomicU64,
    ns: AtomicU64,
    halves: Mutex<Halves>,
}

impl Longest {
    const fn new() -> Self {
        Self { half: AtomicU64::new(0), ns: AtomicU64::new(0), halves: Mutex::new(Halves::new()) }
    }

    fn took(&self, half: u64, time: Duration, what: &'static str) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        if half > self.half.load(Ordering::Acquire) || ns > self.ns.load(Ordering::Relaxed) {
            let mut halves = self.halves.lock();
            halves.took(half, (ns, what));
            self.keep(&halves);
        }
    }

    /// Call it under the lock. Whoever sees a new half sees its time, too.
    fn keep(&self, halves: &Halves) {
        self.ns.store(halves.newest.0, Ordering::Relaxed);
        self.half.store(halves.half, Ordering::Release);
    }

    fn longest(&self, half: u64) -> Took {
        self.halves.lock().longest(half)
    }

    fn forget(&self) {
        let mut halves = self.halves.lock();
        *halves = Halves { half: halves.half, ..Halves::new() };
        self.keep(&halves);
    }
}

/// The longest holds, in nanoseconds, with the event of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LongestHolds {
    pub(crate) real: Took,
    pub(crate) processor: Took,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Holds {
    began: Instant,
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
    pub(crate) const fn new(began: Instant) -> Self {
        Self { began, real: Longest::new(), processor: Longest::new() }
    }

    fn half(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.began).as_secs() / HALF_S
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
        let half = self.half(now);
        self.real.took(half, real, event);
        self.processor.took(half, processor, event);
    }

    /// Returns the longest holds of the last one to two minutes before `now`.
    pub(crate) fn longest(&self, now: Instant) -> LongestHolds {
        let half = self.half(now);
        LongestHolds { real: self.real.longest(half), processor: self.processor.longest(half) }
    }

    /// Forgets all holds.
    pub(crate) fn forget(&self) {
        self.real.forget();
        self.processor.forget();
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
    fn a_time_is_shown_for_the_rest_of_its_half_and_all_of_the_next_one() {
        let mut halves = Halves::new();
        halves.took(0, (9, "sweep"));
        halves.took(0, (7, "commit"));
        assert_eq!([halves.longest(0), halves.longest(0), halves.longest(1)], [(9, "sweep"); 3]);
        halves.took(1, (5, "reserve"));
        assert_eq!(halves.longest(1), (9, "sweep"), "of both halves");
        assert_eq!(halves.longest(2), (5, "reserve"));
        assert_eq!(halves.longest(3), (0, ""));
        halves.took(3, (2, "look"));
        assert_eq!(halves.longest(3), (2, "look"), "nothing of a half that is two before it");
        halves.took(2, (4, "late"));
        assert_eq!(halves.longest(3), (4, "late"), "a thread that was preempted after it read the time");
        assert_eq!(halves.longest(u64::MAX), (0, ""));
    }

    #[test]
    fn reading_the_longest_hold_changes_nothing() {
        let began = Instant::now();
        let holds = Holds::new(began);
        let at = |s: u64| holds.longest(began + Duration::from_secs(s)).real;
        let took = |s: u64, ns: u64, what| {
            holds.real.took(holds.half(began + Duration::from_secs(s)), Duration::from_nanos(ns), what);
        };
        took(1, 5, "reserve");
        took(2, 9, "sweep");
        took(3, 7, "commit");
        assert_eq!([at(3), at(3), at(59), at(119)], [(9, "sweep"); 4], "whoever reads, and however often");
        assert_eq!(at(120), (0, ""));
        took(60, 3, "look");
        assert_eq!(
            (at(60), at(120)),
            ((9, "sweep"), (3, "look")),
            "a shorter one in the next half counts there"
        );
        holds.forget();
        assert_eq!(at(60), (0, ""));
        took(61, 1, "wait");
        assert_eq!(at(61), (1, "wait"));
    }

    #[test]
    fn time_without_the_processor_is_no_processor_time() {
        let holds = Holds::new(Instant::now());
        let hold = Holds::begin();
        // Like a thread that was preempted for a minute.
        let locked = Instant::now().checked_sub(Duration::from_secs(60)).unwrap();
        holds.end(&hold, locked, "wait");
        let LongestHolds { real, processor } = holds.longest(Instant::now());
        assert!(real.0 >= 60_000_000_000, "{real:?}");
        assert!(processor.0 < real.0 / 2, "{processor:?} of {real:?}");
    }

    #[test]
    fn work_is_processor_time() {
        let holds = Holds::new(Instant::now());
        let hold = Holds::begin();
        let (locked, begun) = (Instant::now(), thread_time());
        let mut sum = 0_u64;
        while thread_time() < begun + Duration::from_millis(2) {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        holds.end(&hold, locked, "work");
        let (processor, what) = holds.longest(Instant::now()).processor;
        assert!(processor >= 2_000_000 && what == "work", "{processor} ns of {what}");
    }
}
