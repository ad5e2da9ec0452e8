//! Namespaces that are being opened or moved, or must be; `opening` carries that out.

use std::time::Instant;

use hashbrown::{HashMap, HashSet};
use kvdepot_core::limits::NAMESPACES_OPENING_MAX;
use kvdepot_core::{NamespaceId, NamespaceSpec};
use parking_lot::{Condvar, Mutex};

/// An epoch that must be stored before the namespace is opened again.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    pub(super) spec: NamespaceSpec,
    pub(super) at_least: u32,
    /// Whether the epoch must be a new one.
    pub(super) advance: bool,
    /// Changes with every request: an answer to an earlier request is not enough.
    pub(super) request: u64,
}

/// Namespaces that are being opened or moved, or must be.
#[derive(Debug, Default)]
pub(super) struct Namespaces {
    pub(super) inner: Mutex<Inner>,
    pub(super) changed: Condvar,
}

/// What is known of them under the lock.
#[derive(Debug, Default)]
pub(super) struct Inner {
    /// Namespaces whose turn is taken.
    moving: HashSet<NamespaceId>,
    pub(super) wanted: HashMap<NamespaceId, Wanted>,
    requests: u64,
    /// Whether the retry thread runs.
    pub(super) is_retrying: bool,
    pub(super) is_stopping: bool,
}

impl Namespaces {
    /// Takes the turn of a namespace; waits for it until `deadline`.
    pub(super) fn take_turn(&self, root: NamespaceId, deadline: Instant) -> bool {
        let mut inner = self.inner.lock();
        loop {
            if inner.moving.len() < NAMESPACES_OPENING_MAX && inner.moving.insert(root) {
                return true;
            }
            if self.changed.wait_until(&mut inner, deadline).timed_out() {
                return false;
            }
        }
    }

    pub(super) fn end_turn(&self, root: NamespaceId) {
        self.inner.lock().moving.remove(&root);
        self.changed.notify_all();
    }

    pub(super) fn is_wanted(&self, root: NamespaceId) -> bool {
        self.inner.lock().wanted.contains_key(&root)
    }

    /// Ends the retry thread.
    pub(super) fn stop(&self) {
        self.inner.lock().is_stopping = true;
        self.changed.notify_all();
    }
}

impl Inner {
    /// Wants an epoch stored, in addition to what is wanted of the namespace already.
    pub(super) fn want(&mut self, spec: &NamespaceSpec, at_least: u32, advance: bool) {
        self.requests += 1;
        let request = self.requests;
        let wanted = self.wanted.entry(spec.root()).or_insert_with(|| Wanted {
            spec: spec.clone(),
            at_least,
            advance,
            request,
        });
        if advance && !wanted.advance {
            // The epoch that was to be stored may be in use elsewhere.
            wanted.at_least = wanted.at_least.saturating_add(1);
        }
        wanted.at_least = wanted.at_least.max(at_least);
        wanted.advance |= advance;
        wanted.request = request;
    }
}
