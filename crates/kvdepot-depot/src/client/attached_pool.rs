//! A depot's pool as mapped by this process. It stays mapped, and registered with devices, when the depot is lost and
//! attached again. When the depot is dead it is released immediately, and unmapped after the last copy that uses it.

use std::sync::{Arc, Weak};

use kvdepot_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use crate::pool::PoolMapping;

/// See the module.
#[derive(Debug)]
pub(crate) struct AttachedPool {
    depot: u64,
    mapping: Mutex<Option<Arc<PoolMapping>>>,
}

/// All pools that this process has mapped, by the depot's id.
static MAPPED: Mutex<Vec<(u64, Weak<PoolMapping>)>> = Mutex::new(Vec::new());

/// Returns whether this process had pools of other depots mapped and has none of them any more: a copy holds the
/// mapping.
pub(crate) fn has_earlier_ended(depot: u64) -> bool {
    let mapped = MAPPED.lock();
    let mut earlier = mapped.iter().filter(|(id, _)| *id != depot).peekable();
    earlier.peek().is_some() && earlier.all(|(_, mapping)| mapping.strong_count() == 0)
}

impl AttachedPool {
    pub(crate) fn new(depot: u64, mapping: Arc<PoolMapping>) -> Self {
        MAPPED.lock().push((depot, Arc::downgrade(&mapping)));
        Self { depot, mapping: Mutex::new(Some(mapping)) }
    }

    /// Returns the id of the depot that owns it.
    pub(crate) const fn depot(&self) -> u64 {
        self.depot
    }

    /// Returns the mapping; `Unavailable` after the pool was released.
    pub(crate) fn mapping(&self) -> Result<Arc<PoolMapping>> {
        let gone =
            || Error::new(ErrorKind::Unavailable, "the pool of this depot was released: the depot is lost");
        self.mapping.lock().clone().ok_or_else(gone)
    }

    /// Takes the mapping, which nothing can get from here on.
    pub(super) fn release(&self) -> Option<Arc<PoolMapping>> {
        self.mapping.lock().take()
    }
}
