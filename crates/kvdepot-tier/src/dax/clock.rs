//! Ends those parts of a restore that are in no queue: a wave waits for the previous one, and that one for a medium
//! that may hang. At the deadline, and when the tier closes, waiting waves end (P2).

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use kvdepot_core::Error;
use kvdepot_io::Request;
use parking_lot::{Condvar, Mutex, MutexGuard};

/// What may have to end before its parts have.
pub(super) trait Waits: Send + Sync {
    fn deadline(&self) -> Instant;

    /// Returns whether at least `count` waves are not in a queue yet.
    fn has_waves(&self, count: usize) -> bool;

    /// Fails what is not in a queue yet.
    fn give_up(&self, error: &Error);
}

#[derive(Default)]
struct Watched {
    restores: Vec<(Instant, Weak<dyn Waits>)>,
    has_thread: bool,
}

/// Knows every restore of more than one wave. Its thread runs as long as there are any.
#[derive(Default)]
pub(super) struct Clock {
    watched: Mutex<Watched>,
    changed: Condvar,
    is_stopping: AtomicBool,
}

impl Clock {
    /// Makes sure that a restore ends in time, if it has waiting waves.
    pub(super) fn watch(self: &Arc<Self>, restore: &Arc<impl Waits + 'static>) {
        // Its first wave will be in a queue in a moment.
        if !restore.has_waves(2) {
            return;
        }
        let mut watched = self.watched.lock();
        watched.restores.retain(|(_, other)| other.strong_count() > 0);
        let waiting: Weak<dyn Waits> = Arc::downgrade(restore) as _;
        watched.restores.push((restore.deadline(), waiting));
        if watched.has_thread {
            self.changed.notify_all();
            return;
        }
        let mine = Arc::clone(self);
        let thread = std::thread::Builder::new().name("kvd-dax-clock".to_owned()).spawn(move || mine.run());
        watched.has_thread = thread.is_ok();
        drop(watched);
        if let Err(error) = thread {
            restore.give_up(&Error::io("cannot start a thread that watches a restore's deadline", error));
        }
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Acquire)
    }

    /// Ends everything that waits.
    pub(super) fn stop(&self) {
        let watched = self.watched.lock();
        self.is_stopping.store(true, Ordering::Release);
        self.changed.notify_all();
        drop(watched);
    }

    fn run(&self) {
        let mut watched = self.watched.lock();
        loop {
            let (now, is_stopping) = (Instant::now(), self.is_stopping());
            let mut over = Vec::new();
            watched.restores.retain(|(deadline, restore)| {
                let is_over = is_stopping || *deadline <= now;
                if is_over {
                    over.extend(restore.upgrade());
                }
                !is_over && restore.strong_count() > 0
            });
            if !over.is_empty() {
                let error = if is_stopping { Request::closed() } else { Request::expired() };
                MutexGuard::unlocked(&mut watched, || {
                    over.into_iter().for_each(|restore| end(&*restore, &error))
                });
                continue;
            }
            let Some(next) = watched.restores.iter().map(|(deadline, _)| *deadline).min() else {
                watched.has_thread = false;
                return;
            };
            self.changed.wait_until(&mut watched, next);
        }
    }
}

fn end(restore: &dyn Waits, error: &Error) {
    if catch_unwind(AssertUnwindSafe(|| restore.give_up(error))).is_err() {
        tracing::error!("a callback of a read panicked; the others go on");
    }
}
