//! Work on a pool that goes on in a thread of its own: how far it is, and its end.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvdepot_core::{Error, Result};
use parking_lot::{Condvar, Mutex};

/// A thread, and what it has done; dropping it asks the thread to stop and waits for it.
pub(crate) struct Background {
    progress: Arc<Progress>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread says of itself, and is told.
#[derive(Default)]
pub(crate) struct Progress {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    bytes: u64,
    stop: bool,
    /// All that could be done so far is.
    caught_up: bool,
    ended: Option<Result<()>>,
}

impl Progress {
    /// Whether to go on.
    pub(crate) fn goes_on(&self) -> bool {
        !self.state.lock().stop
    }

    /// Lets this time pass; whether to go on after it.
    pub(crate) fn pause(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        let mut state = self.state.lock();
        while !state.stop && !self.changed.wait_until(&mut state, until).timed_out() {}
        !state.stop
    }

    /// All that can be done now is done; more may come.
    pub(crate) fn caught_up(&self) {
        self.state.lock().caught_up = true;
        self.changed.notify_all();
    }

    /// So much more is done.
    pub(crate) fn add(&self, bytes: usize) {
        self.state.lock().bytes += bytes as u64;
        self.changed.notify_all();
    }

    /// Bytes that are done.
    pub(crate) fn bytes(&self) -> u64 {
        self.state.lock().bytes
    }
}

impl Background {
    /// Starts a thread of this name. What it returns is its end.
    pub(crate) fn start(
        name: &str,
        work: impl FnOnce(&Progress) -> Result<()> + Send + 'static,
    ) -> Result<Self> {
        let progress = Arc::<Progress>::default();
        let theirs = Arc::clone(&progress);
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                let outcome = work(&theirs);
                theirs.state.lock().ended = Some(outcome);
                theirs.changed.notify_all();
            })
            .map_err(|e| Error::io("cannot start a thread that registers memory", e))?;
        Ok(Self { progress, thread: Some(thread) })
    }

    /// Bytes that are done.
    pub(crate) fn bytes(&self) -> u64 {
        self.progress.bytes()
    }

    /// Waits until the thread has ended, or has done all that it could so far, at most `timeout`; whether it has.
    pub(crate) fn wait(&self, timeout: Duration) -> bool {
        self.wait_until(timeout, |state| state.caught_up || state.ended.is_some())
    }

    fn wait_until(&self, timeout: Duration, holds: impl Fn(&State) -> bool) -> bool {
        let deadline = Instant::now() + timeout;
        let mut state = self.progress.state.lock();
        while !holds(&state) {
            if self.progress.changed.wait_until(&mut state, deadline).timed_out() {
                return holds(&state);
            }
        }
        true
    }

    /// Why it ended early, if it did.
    pub(crate) fn failure(&self) -> Option<Error> {
        self.progress.state.lock().ended.as_ref().and_then(|ended| ended.as_ref().err().cloned())
    }

    /// Asks it to stop, and waits for it.
    pub(crate) fn stop(&mut self) {
        self.progress.state.lock().stop = true;
        self.progress.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.stop();
    }
}
