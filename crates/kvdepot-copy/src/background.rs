//! Background work on a pool in its own thread, with its progress and outcome.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvdepot_core::{Error, Result};
use parking_lot::{Condvar, Mutex};

/// A thread with its progress. Dropping it stops the thread and waits for it.
pub(crate) struct Background {
    progress: Arc<Progress>,
    thread: Option<JoinHandle<()>>,
}

/// State shared between the thread and its owner.
#[derive(Default)]
pub(crate) struct Progress {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    bytes: u64,
    stop: bool,
    /// Whether everything that could be done so far is done.
    caught_up: bool,
    ended: Option<Result<()>>,
}

impl Progress {
    /// Returns whether the thread should continue.
    pub(crate) fn goes_on(&self) -> bool {
        !self.state.lock().stop
    }

    /// Pauses for this time. Returns whether to continue afterwards.
    pub(crate) fn pause(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        let mut state = self.state.lock();
        while !state.stop && !self.changed.wait_until(&mut state, until).timed_out() {}
        !state.stop
    }

    /// Notes that everything that can be done now is done; more may follow.
    pub(crate) fn caught_up(&self) {
        self.state.lock().caught_up = true;
        self.changed.notify_all();
    }

    /// Adds to the number of bytes done.
    pub(crate) fn add(&self, bytes: usize) {
        self.state.lock().bytes += bytes as u64;
        self.changed.notify_all();
    }

    /// Returns the number of bytes done.
    pub(crate) fn bytes(&self) -> u64 {
        self.state.lock().bytes
    }
}

impl Background {
    /// Starts a thread of this name. The result of `work` is its outcome.
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

    /// Returns the number of bytes done.
    pub(crate) fn bytes(&self) -> u64 {
        self.progress.bytes()
    }

    /// Waits until the thread has ended or has caught up, at most `timeout`. Returns whether it has.
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

    /// Returns why it ended early, if it did.
    pub(crate) fn failure(&self) -> Option<Error> {
        self.progress.state.lock().ended.as_ref().and_then(|ended| ended.as_ref().err().cloned())
    }

    /// Stops the thread and waits for it.
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
