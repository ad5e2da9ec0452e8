//! The thread that ends what is past its deadline (P2) and replaces threads stuck in the operating system.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use kvdepot_core::{Error, Result};

use super::queue::Shared;
use super::worker;
use crate::engine::Request;

/// Starts the watchdog.
pub(super) fn start(shared: &Arc<Shared>) -> Result<()> {
    let mine = Arc::clone(shared);
    std::thread::Builder::new()
        .name(format!("{}-watch", shared.config.name))
        .spawn(move || watch(&mine))
        .map(drop)
        .map_err(|e| Error::io("cannot start an I/O watchdog thread", e))
}

fn watch(shared: &Arc<Shared>) {
    loop {
        let found = shared.watch();
        for request in found.expired {
            if catch_unwind(AssertUnwindSafe(|| request.fail(Request::expired()))).is_err() {
                tracing::error!("an I/O callback panicked; the watchdog goes on");
            }
        }
        shared.expired_ended();
        if found.closed {
            return;
        }
        if found.replace > 0 {
            tracing::warn!(
                threads = found.replace,
                "I/O threads are stuck past their deadline and were replaced"
            );
        }
        for _ in 0..found.replace {
            if let Err(error) = worker::start(shared) {
                tracing::error!(%error, "one I/O thread fewer until the stuck one comes back");
            }
        }
    }
}
