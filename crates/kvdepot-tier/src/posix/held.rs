//! A guard of the tier's lock that records how long it was held.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, MutexGuard};

/// Whether hold times are measured in processor time, which costs two system calls each.
static BY_PROCESSOR: AtomicBool = AtomicBool::new(false);

/// Sets whether hold times are measured in processor time: on a busy machine the real time includes what other
/// processes take of the processor.
pub(super) fn measure_by_processor(on: bool) {
    // Relaxed: a hold measured by both clocks only spoils one figure, on which nothing depends.
    BY_PROCESSOR.store(on, Ordering::Relaxed);
}

#[derive(Clone, Copy)]
enum Since {
    Wall(Instant),
    Processor(Duration),
}

impl Since {
    fn now() -> Self {
        if BY_PROCESSOR.load(Ordering::Relaxed) {
            Self::Processor(kvdepot_io::thread_time::thread_time())
        } else {
            Self::Wall(Instant::now())
        }
    }

    fn elapsed(self) -> Duration {
        match self {
            Self::Wall(since) => since.elapsed(),
            Self::Processor(since) => kvdepot_io::thread_time::thread_time().saturating_sub(since),
        }
    }
}

/// The state under the lock.
pub(super) struct Held<'a, T> {
    state: MutexGuard<'a, T>,
    since: Since,
    longest_ns: &'a AtomicU64,
}

impl<'a, T> Held<'a, T> {
    pub(super) fn new(state: MutexGuard<'a, T>, longest_ns: &'a AtomicU64) -> Self {
        Self { state, since: Since::now(), longest_ns }
    }

    /// Releases the lock until somebody wakes `condvar`; `true` if the deadline passed first.
    pub(super) fn wait_until(&mut self, condvar: &Condvar, deadline: Instant) -> bool {
        self.note();
        let late = condvar.wait_until(&mut self.state, deadline).timed_out();
        self.since = Since::now();
        late
    }

    fn note(&self) {
        let held = u64::try_from(self.since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        // Relaxed: a figure that orders nothing, and is written only by the holder of the lock.
        if held > self.longest_ns.load(Ordering::Relaxed) {
            self.longest_ns.fetch_max(held, Ordering::Relaxed);
        }
    }
}

impl<T> Drop for Held<'_, T> {
    fn drop(&mut self) {
        self.note();
    }
}

impl<T> Deref for Held<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.state
    }
}

impl<T> DerefMut for Held<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.state
    }
}
