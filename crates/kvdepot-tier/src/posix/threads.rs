//! Starts and ends the tier's background threads.

use std::sync::Arc;
use std::time::Instant;

use kvdepot_core::{Error, Result};

use super::shared::Shared;

/// Starts a background thread for which closing the tier waits.
pub(super) fn start_thread(
    shared: &Arc<Shared>,
    name: &str,
    run: impl FnOnce(&Arc<Shared>) + Send + 'static,
) -> Result<()> {
    let mine = Arc::clone(shared);
    shared.lock().chores.threads += 1;
    let work = move || {
        run(&mine);
        mine.lock().chores.threads -= 1;
        mine.changed.notify_all();
    };
    std::thread::Builder::new().name(name.to_owned()).spawn(work).map(drop).map_err(|e| {
        shared.lock().chores.threads -= 1;
        shared.changed.notify_all();
        Error::io("cannot start a tier's background thread", e)
    })
}

impl Shared {
    /// Ends the threads of a tier that cannot be opened.
    pub(super) fn stop_threads(&self) {
        self.lock().chores.stop_at = Some(Instant::now());
        self.wake_all();
    }

    /// Tells the background threads to end, and waits for what they are doing.
    pub(super) fn stop(&self, deadline: Instant) {
        let mut state = self.lock();
        state.chores.stop_at = Some(deadline);
        self.wake_all();
        while state.chores.threads > 0 && !state.wait_until(&self.changed, deadline) {}
    }
}
