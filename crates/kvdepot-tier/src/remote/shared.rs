//! What the tier, its servers and their connections share.

use std::fmt;
use std::sync::Weak;
use std::sync::atomic::{AtomicBool, Ordering};

use kvdepot_core::rendezvous::Places;
use kvdepot_core::{BlockKey, NamespaceId, Result};
use parking_lot::{Condvar, Mutex};

use super::config::RemoteConfig;
use super::spaces::{Space, Spaces};
use super::turns::Turns;
use crate::TierEvents;
use crate::beliefs::Beliefs;

/// State shared by the tier, its servers and their connections.
pub(super) struct Shared {
    pub(super) config: RemoteConfig,
    pub(super) places: Places,
    pub(super) spaces: Mutex<Spaces>,
    /// Signalled when a server has answered a request to move.
    pub(super) answers: Condvar,
    pub(super) turns: Turns,
    pub(super) beliefs: Beliefs,
    pub(super) listener: Mutex<Option<Weak<dyn TierEvents>>>,
    /// Number of operations whose `done` was not called yet.
    pub(super) under_way: Mutex<usize>,
    pub(super) at_rest: Condvar,
    pub(super) stopping: AtomicBool,
}

impl Shared {
    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    pub(super) fn spaces(&self) -> Vec<Space> {
        self.spaces.lock().all()
    }

    /// Records a server's answer to the request to move to an epoch.
    pub(super) fn answered(&self, root: NamespaceId, epoch: u32, server: usize, answer: &Result<()>) {
        self.spaces.lock().answered(root, epoch, server, answer);
        self.answers.notify_all();
    }

    /// Drops all knowledge about this server's blocks. Returns those that it had, as far as known.
    pub(super) fn forget_server(&self, index: usize) -> Vec<BlockKey> {
        self.beliefs.forget_if(|key| self.places.of(key) == index)
    }

    /// Reports blocks that a server had and another one in its place does not.
    pub(super) fn tell_lost(&self, keys: &[BlockKey]) {
        let listener = self.listener.lock().as_ref().and_then(Weak::upgrade);
        if let Some(listener) = listener.filter(|_| !keys.is_empty()) {
            listener.lost(keys);
        }
    }

    pub(super) fn begun(&self) {
        *self.under_way.lock() += 1;
    }

    pub(super) fn ended(&self) {
        let mut under_way = self.under_way.lock();
        *under_way -= 1;
        if *under_way == 0 {
            self.at_rest.notify_all();
        }
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared")
            .field("config", &self.config)
            .field("spaces", &self.spaces)
            .finish_non_exhaustive()
    }
}
