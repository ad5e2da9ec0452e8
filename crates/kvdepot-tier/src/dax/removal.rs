//! Removals: blocks are unreachable at once, and a removal is done when no header on the medium names them any more.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId};
use kvdepot_io::{Call, Class, IoEngine, Op, Request};
use parking_lot::Mutex;

use super::state::Shared;
use crate::Done;

/// When a removal that has not started is abandoned: it has no deadline of its own, and what it did not clear is
/// cleared later.
const REMOVAL_WAIT_MAX: Duration = Duration::from_secs(30);
/// Blocks handled in one step.
const PIECE: usize = 256;

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

impl Shared {
    /// Makes blocks unreachable, and has their headers cleared.
    pub(super) fn remove(self: &Arc<Self>, engine: &dyn IoEngine, keys: &[BlockKey], done: Done<()>) {
        let removal = Removal::new(done);
        if self.owner.is_lost() {
            removal.fail(Error::new(
                ErrorKind::Io,
                "another depot has taken the medium: nothing of it is removed",
            ));
            return;
        }
        let (mut units, mut is_named) = (Vec::new(), false);
        for keys in keys.chunks(PIECE) {
            let mut state = self.lock();
            for key in keys {
                units.extend(state.slots.take_out(key));
                // This includes earlier blocks whose header is still there or is being cleared.
                is_named |= state.wait_cleared(key, &removal);
                if let Some(write) = state.writing.get_mut(key) {
                    write.cancelled = true;
                    write.removals.push(Arc::clone(&removal));
                }
            }
        }
        if !is_named {
            return;
        }
        let shared = Arc::clone(self);
        later(engine, move |begun| match begun {
            Ok(()) => {
                shared.clear_slots(&units);
                shared.clear_left_over();
            }
            Err(error) => {
                units.extend(shared.lock().slots.take_uncleared());
                shared.put_off(&units, &error);
            }
        });
    }

    /// Frees the space of a past epoch, piece by piece, until the tier is closed.
    pub(super) fn retire(self: &Arc<Self>, engine: &Arc<dyn IoEngine>, id: NamespaceId) {
        let (shared, next) = (Arc::clone(self), Arc::downgrade(engine));
        later(&**engine, move |begun| {
            // What stays is unreachable, makes space when it is the coldest, and is not taken in after a restart.
            if begun.is_err() {
                return;
            }
            let units: Vec<u32> = {
                let mut state = shared.lock();
                if state.is_stopping {
                    return;
                }
                let keys = state.slots.keys(id, PIECE);
                keys.iter().filter_map(|key| state.slots.take_out(key)).collect()
            };
            if units.is_empty() {
                return;
            }
            shared.clear_slots(&units);
            if let Some(engine) = next.upgrade() {
                shared.retire(&engine, id);
            }
        });
    }
}
