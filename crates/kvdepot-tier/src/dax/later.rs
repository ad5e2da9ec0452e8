//! Work that is done among the writes, and the removals that wait for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::Error;
use kvdepot_io::{Call, Class, IoEngine, Op, Request};
use parking_lot::Mutex;

use crate::Done;

/// When a removal that has not started is abandoned: it has no deadline of its own, and what it did not clear is
/// cleared later.
const REMOVAL_WAIT_MAX: Duration = Duration::from_secs(30);

/// A removal; it is reported done when the last reference to it is dropped.
pub(super) struct Removal {
    done: Mutex<Option<Done<()>>>,
    error: Mutex<Option<Error>>,
}

impl Removal {
    pub(super) fn new(done: Done<()>) -> Arc<Self> {
        Arc::new(Self { done: Mutex::new(Some(done)), error: Mutex::new(None) })
    }

    pub(super) fn fail(&self, error: Error) {
        self.error.lock().get_or_insert(error);
    }
}

impl Drop for Removal {
    fn drop(&mut self) {
        let error = self.error.get_mut().take();
        if let Some(done) = self.done.get_mut().take() {
            done(error.map_or(Ok(()), Err));
        }
    }
}

/// Has `engine` run a function among the writes.
pub(super) fn later(engine: &dyn IoEngine, run: impl FnOnce(Result<(), Error>) + Send + 'static) {
    let call = Call { run: Box::new(run) };
    let deadline = Instant::now() + REMOVAL_WAIT_MAX;
    engine.submit(vec![Request { class: Class::Write, deadline, op: Op::Call(call) }]);
}
