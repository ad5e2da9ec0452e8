//! An engine's watchdog thread: fails requests past their deadline (P2) and replaces threads stuck in the operating
//! system.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use kvdepot_core::{Error, Result};

use crate::engine::Request;

/// The findings of one check.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// Requests that had not begun by their deadline.
    pub(crate) expired: Vec<Request>,
    /// Written-off threads to be replaced.
    pub(crate) replace: Vec<Stuck>,
    pub(crate) closed: bool,
}

/// A thread that was written off: the class that it served, if threads serve one class.
pub(crate) type Stuck = Option<crate::engine::Class>;

/// An engine with a watchdog.
pub(crate) trait Watched: Send + Sync + 'static {
    /// Returns the prefix of thread names.
    fn name(&self) -> &str;

    /// Blocks until the next deadline, then collects the requests and threads past it.
    fn watch(&self) -> Found;

    /// Notes that the expired requests of the last `watch` have been failed.
    fn expired_ended(&self);

    /// Starts a replacement of a stuck thread.
    fn replace(self: &Arc<Self>, stuck: Stuck) -> Result<()>;
}

/// Starts the watchdog.
pub(crate) fn start<W: Watched>(shared: &Arc<W>) -> Result<()> {
    let mine = Arc::clone(shared);
    std::thread::Builder::new()
        .name(format!("{}-watch", shared.name()))
        .spawn(move || run(&mine))
        .map(drop)
        .map_err(|e| Error::io("cannot start an I/O watchdog thread", e))
}

fn run<W: Watched>(shared: &Arc<W>) {
    loop {
        let found = shared.watch();
        for request in found.expired {
            if catch_unwind(AssertUnwindSafe(|| request.fail(Request::expired()))).is_err() {
                tracing::error!("an I/O callback panicked; the watchdog continues");
            }
        }
        shared.expired_ended();
        if found.closed {
            return;
        }
        if !found.replace.is_empty() {
            let threads = found.replace.len();
            tracing::warn!(
                threads,
                "I/O threads are stuck past their deadline, or ended with their queue, and are replaced"
            );
        }
        for stuck in found.replace {
            if let Err(error) = shared.replace(stuck) {
                tracing::error!(%error, "cannot start a replacement for an I/O thread");
            }
        }
    }
}
