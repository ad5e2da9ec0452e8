//! Turns to advance an epoch.

use std::time::Instant;

use hashbrown::HashSet;
use kvdepot_core::{Error, ErrorKind, NamespaceId, Result};
use parking_lot::{Condvar, Mutex};

/// One thread at a time synchronises servers: otherwise it would mistake another thread's
/// move for another client's.
#[derive(Debug, Default)]
pub(super) struct Turns {
    taken: Mutex<HashSet<NamespaceId>>,
    changed: Condvar,
}

impl Turns {
    /// Waits for the turn of a namespace until `deadline`.
    pub(super) fn take(&self, root: NamespaceId, deadline: Instant) -> Result<Turn<'_>> {
        let mut taken = self.taken.lock();
        while !taken.insert(root) {
            if self.changed.wait_until(&mut taken, deadline).timed_out() {
                let what = "a namespace is being opened or reset at remote servers that do not answer";
                return Err(Error::new(ErrorKind::Timeout, what).with("namespace", root));
            }
        }
        Ok(Turn { turns: self, root })
    }
}

/// The turn of a namespace; given back when dropped.
pub(super) struct Turn<'a> {
    turns: &'a Turns,
    root: NamespaceId,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.turns.taken.lock().remove(&self.root);
        self.turns.changed.notify_all();
    }
}
