//! State of a Mooncake tier that its calls share.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use hashbrown::HashMap;
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId, Result};
use parking_lot::{Condvar, Mutex};

use super::config::MooncakeConfig;
use super::link::Link;
use super::staging::Staging;
use crate::TierEvents;
use crate::beliefs::Beliefs;
use crate::owed::Owed;
use crate::spaces::{Space, Spaces};

/// Mooncake's results that mean something to the tier.
pub(super) mod code {
    pub(in crate::mooncake) const NO_SPACE: i64 = -200;
    pub(in crate::mooncake) const NOT_READY: i64 = -703;
    pub(in crate::mooncake) const NOT_FOUND: i64 = -704;
    pub(in crate::mooncake) const IS_THERE: i64 = -705;
    pub(in crate::mooncake) const HAS_LEASE: i64 = -706;
    pub(in crate::mooncake) const LEASE_ENDED: i64 = -707;
}

/// Namespaces, and the tokens of their epochs' records by root.
#[derive(Debug, Default)]
pub(super) struct Named {
    pub(super) spaces: Spaces,
    pub(super) tokens: HashMap<NamespaceId, u64>,
}

/// Where a block is: its namespace, and the token of its epoch's record.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) space: Space,
    pub(super) token: u64,
}

impl Place {
    pub(super) fn block_bytes(&self) -> usize {
        usize::try_from(self.space.spec.layout().block_bytes()).expect("BLOCK_BYTES_MAX fits an address")
    }
}

impl Named {
    /// Forgets a namespace, unless an epoch must be stored. Returns the id that its keys carried.
    pub(super) fn close(&mut self, root: NamespaceId) -> Option<NamespaceId> {
        let id = self.spaces.close(root);
        if self.spaces.wanted(root).is_none() {
            self.tokens.remove(&root);
        }
        id
    }

    pub(super) fn place(&self, key: &BlockKey) -> Result<Place> {
        let space = self.spaces.of(key)?;
        let token = self.tokens.get(&space.spec.root()).copied().ok_or_else(|| {
            Error::new(ErrorKind::NotFound, "a namespace's epoch has no record").with("key", key)
        })?;
        Ok(Place { space: space.clone(), token })
    }
}

#[derive(Debug, Default)]
pub(super) struct Figures {
    pub(super) corrupt: AtomicU64,
    pub(super) lost: AtomicU64,
    pub(super) refused_by_lease: AtomicU64,
}

pub(super) fn one_more(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

pub(super) struct Shared {
    pub(super) config: MooncakeConfig,
    pub(super) link: Link,
    pub(super) staging: Arc<Staging>,
    pub(super) named: Mutex<Named>,
    pub(super) beliefs: Arc<Beliefs>,
    pub(super) owed: Arc<Owed>,
    /// Signalled with `beliefs.writing` when a write has ended.
    pub(super) written: Condvar,
    /// Corrupt blocks that are to be removed, and the tries that are left.
    pub(super) corrupt: Mutex<HashMap<BlockKey, u32>>,
    /// Held while an epoch is stored, by the first byte of its namespace.
    pub(super) settling: [Mutex<()>; 16],
    pub(super) figures: Figures,
    pub(super) listener: Mutex<Option<Weak<dyn TierEvents>>>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Shared {
    pub(super) fn new(config: MooncakeConfig) -> Result<Self> {
        Ok(Self {
            link: Link::default(),
            staging: Staging::new(config.staging_bytes)?,
            named: Mutex::default(),
            beliefs: Arc::new(Beliefs::new(config.present_ttl, config.absent_ttl)),
            owed: Arc::default(),
            written: Condvar::new(),
            corrupt: Mutex::default(),
            settling: [const { Mutex::new(()) }; 16],
            figures: Figures::default(),
            listener: Mutex::new(None),
            config,
        })
    }

    /// Returns the deadline of a call for a caller who waits until `deadline`.
    pub(super) fn patience(&self, deadline: Instant) -> Instant {
        deadline.min(Instant::now() + self.config.timeout)
    }

    /// Records that the block is present, unless it was removed in the meantime.
    pub(super) fn note_present(&self, key: BlockKey, bytes: usize, removals: u64) {
        let is_open = self.named.lock().spaces.of(&key).is_ok();
        if is_open {
            self.beliefs.note_present(key, bytes as u64, removals);
        }
    }

    pub(super) fn tell_lost(&self, key: BlockKey) {
        one_more(&self.figures.lost);
        // The clone releases the lock before the call.
        let listener = self.listener.lock().as_ref().and_then(Weak::upgrade);
        if let Some(listener) = listener {
            listener.lost(&[key]);
        }
    }
}

pub(super) fn in_time(deadline: Instant) -> Result<()> {
    if deadline > Instant::now() {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Timeout, "the deadline had passed when the call came"))
}

/// Returns the error that one of Mooncake's codes means.
pub(super) fn refused(code: i64, key: &str) -> Error {
    let (kind, what) = match code {
        code::NO_SPACE => (ErrorKind::NoSpace, "Mooncake has no space left for a value"),
        code::NOT_FOUND | code::NOT_READY => (ErrorKind::NotFound, "Mooncake does not have a value"),
        code::HAS_LEASE => (ErrorKind::Busy, "a reader's lease keeps a value in Mooncake"),
        code::LEASE_ENDED => (ErrorKind::Busy, "Mooncake's lease ended before a value's bytes had arrived"),
        _ => (ErrorKind::Unavailable, "Mooncake failed a call"),
    };
    Error::new(kind, what).with("code", code).with("name", key)
}
