//! What a panic does to a depot process. A depot that has lost a thread answers some requests and never others, which
//! costs clients their deadlines; a dead one is a miss at once.

use std::sync::Once;
use std::thread::ThreadId;

use parking_lot::Mutex;

/// Names of the depot's threads begin with this.
const THREADS: &str = "kvd";

static SERVING: Mutex<Vec<ThreadId>> = Mutex::new(Vec::new());

/// A thread that serves a depot; a panic in it aborts the process until this is dropped.
#[derive(Debug)]
pub(crate) struct Serving(ThreadId);

impl Drop for Serving {
    fn drop(&mut self) {
        let mut serving = SERVING.lock();
        if let Some(index) = serving.iter().position(|thread| *thread == self.0) {
            serving.swap_remove(index);
        }
    }
}

/// Has a panic in any thread of the depot, or in the calling one, abort the process after it was logged. Panics of other
/// threads are left to the hook that was there before.
#[must_use]
pub(crate) fn abort_on_panic() -> Serving {
    static INSTALL: Once = Once::new();
    let this = std::thread::current().id();
    SERVING.lock().push(this);
    INSTALL.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            before(info);
            let thread = std::thread::current();
            let name = thread.name().unwrap_or("unnamed");
            if name.starts_with(THREADS) || SERVING.lock().contains(&thread.id()) {
                tracing::error!("the depot ends: its thread {name} panicked: {info}");
                std::process::abort();
            }
        }));
    });
    Serving(this)
}
