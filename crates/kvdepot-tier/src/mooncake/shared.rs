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
use crate::known::Known;
use crate::spaces::{Space, Spaces};
use crate::writing::Writing;
use crate::{Done, TierEvents};

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
    pub(super) known: Mutex<Known>,
    pub(super) writing: Mutex<Writing>,
    /// Signalled with `writing` when a write has ended.
    pub(super) written: Condvar,
    /// Number of removals that have begun: an answer from before one is not recorded.
    pub(super) removals: AtomicU64,
    /// Corrupt blocks that are to be removed, and the tries that are left.
    pub(super) corrupt: Mutex<HashMap<BlockKey, u32>>,
    /// Held while an epoch is stored, by the first byte of its namespace.
    pub(super) settling: [Mutex<()>; 16],
    pub(super) figures: Figures,
    pub(super) listener: Mutex<Option<Weak<dyn TierEvents>>>,
    under_way: Mutex<usize>,
    at_rest: Condvar,
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
            known: Mutex::new(Known::new(config.present_ttl, config.absent_ttl)),
            writing: Mutex::default(),
            written: Condvar::new(),
            removals: AtomicU64::new(0),
            corrupt: Mutex::default(),
            settling: [const { Mutex::new(()) }; 16],
            figures: Figures::default(),
            listener: Mutex::new(None),
            under_way: Mutex::new(0),
            at_rest: Condvar::new(),
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
        let writing = self.writing.lock();
        if is_open && !writing.is_leaving(&key) && self.removals.load(Ordering::Acquire) == removals {
            self.known.lock().note(key, true, bytes as u64);
        }
    }

    /// Records that the block was absent, unless it is being written.
    pub(super) fn note_absent(&self, key: BlockKey) {
        let writing = self.writing.lock();
        if !writing.holds(&key) {
            self.known.lock().note(key, false, 0);
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

    /// Registers an owed answer.
    pub(super) fn owe<T>(self: &Arc<Self>, done: Done<T>) -> Answer<T> {
        *self.under_way.lock() += 1;
        Answer { done: Some(done), shared: Arc::clone(self) }
    }

    /// See [`crate::Tier::drain`].
    pub(super) fn drain(&self, deadline: Instant) -> bool {
        let mut under_way = self.under_way.lock();
        while *under_way > 0 {
            if self.at_rest.wait_until(&mut under_way, deadline).timed_out() {
                return *under_way == 0;
            }
        }
        true
    }
}

/// Result of an operation, which is sent in any case: if it is dropped, the tier is closing.
pub(super) struct Answer<T> {
    done: Option<Done<T>>,
    shared: Arc<Shared>,
}

impl<T> Answer<T> {
    pub(super) fn end(mut self, outcome: Result<T>) {
        if let Some(done) = self.done.take() {
            done(outcome);
        }
    }
}

impl<T> Drop for Answer<T> {
    fn drop(&mut self) {
        if let Some(done) = self.done.take() {
            done(Err(Error::new(ErrorKind::Closed, "the tier is closing")));
        }
        let mut under_way = self.shared.under_way.lock();
        *under_way -= 1;
        if *under_way == 0 {
            self.shared.at_rest.notify_all();
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
