//! A thread that runs requests until it is stopped or written off.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use kvdepot_core::{Error, Result};

use super::queue::{Next, Shared};
use crate::transfer;

/// Starts one worker thread.
pub(super) fn start(shared: &Arc<Shared>) -> Result<()> {
    let mine = Arc::clone(shared);
    std::thread::Builder::new()
        .name(shared.config.name.clone())
        .spawn(move || work(&mine))
        .map(drop)
        .map_err(|e| Error::io("cannot start an I/O thread", e))
}

fn work(shared: &Shared) {
    while let Next::Run(number, request) = shared.next() {
        tracing::trace!(?request, "begin");
        // A panic in a callback must not cost a thread: the engine would run out of them one by one.
        if catch_unwind(AssertUnwindSafe(|| transfer::run(request))).is_err() {
            tracing::error!("an I/O callback panicked; its thread continues");
        }
        if !shared.ended(number) {
            return;
        }
    }
}
