//! Turns a panic in a depot process into an abort. A depot that has lost a thread answers some requests and never
//! others, which costs clients their deadlines; a dead depot is an immediate miss.

use std::sync::Once;
use std::thread::ThreadId;

use parking_lot::Mutex;

/// Prefix of the names of the depot's threads.
const THREADS: &str = "kvd";

static SERVING: Mutex<Vec<ThreadId>> = Mutex::new(Vec::new());

/// Marks a thread that serves a depot. A panic in it aborts the process until this value is dropped.
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

/// Makes a panic in any thread of the depot, or in the calling one, abort the process after it was logged. Panics of
/// other threads go to the previous hook.
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
