//! A lock for which no thread waits twice: its holder may hang in a write, or may be a thread that a fork left behind.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

/// How long a thread waits for another one's line.
const WAIT: Duration = Duration::from_millis(10);

/// A value for one thread at a time.
pub(super) struct Gate<T> {
    value: Mutex<T>,
    wait: Duration,
    /// A wait timed out, and the value was not free since.
    is_stuck: AtomicBool,
}

impl<T> Gate<T> {
    pub(super) const fn new(value: T) -> Self {
        Self { value: Mutex::new(value), wait: WAIT, is_stuck: AtomicBool::new(false) }
    }

    /// Locks the value. Returns `None` if another thread holds it for too long. After that no thread waits until it is
    /// free.
    pub(super) fn enter(&self) -> Option<MutexGuard<'_, T>> {
        let is_stuck = self.is_stuck.load(Ordering::Relaxed);
        let entered = if is_stuck { self.value.try_lock() } else { self.value.try_lock_for(self.wait) };
        if entered.is_none() != is_stuck {
            self.is_stuck.store(entered.is_none(), Ordering::Relaxed);
        }
        entered
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Far longer than any test: a wait would hang.
    const NEVER: Duration = Duration::from_secs(100_000);

    #[test]
    fn nobody_waits_long_for_a_thread_that_hangs() {
        assert!(WAIT <= Duration::from_millis(10));
        let gate = Gate::new(0);
        let held = gate.enter();
        assert!(held.is_some());
        assert!(gate.enter().is_none());
        assert!(gate.is_stuck.load(Ordering::Relaxed), "the next one does not wait at all");
    }

    #[test]
    fn after_a_wait_in_vain_nobody_waits_until_the_value_was_free() {
        let gate = Gate { wait: NEVER, is_stuck: AtomicBool::new(true), ..Gate::new(0) };
        let _hanging = gate.value.lock();
        for _ in 0..100 {
            assert!(gate.enter().is_none());
        }
    }

    #[test]
    fn once_a_line_got_through_threads_wait_for_each_other_again() {
        let gate = Gate::new(0);
        let held = gate.enter();
        assert!(gate.enter().is_none());
        drop(held);
        *gate.enter().expect("free") += 1;
        assert!(!gate.is_stuck.load(Ordering::Relaxed));
    }
}
