//! State that the requests of an Object tier share, and the answers that they owe.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hashbrown::HashMap;
use hashlink::LinkedHashSet;
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId, Result};
use object_store::path::Path;
use parking_lot::{Condvar, Mutex};
use tokio::runtime::Handle;
use tokio::sync::{Notify, OnceCell, oneshot};

use super::ObjectConfig;
use super::link::Link;
use super::names::Names;
use crate::Done;
use crate::known::Known;
use crate::spaces::{Space, Spaces};
use crate::writing::Writing;

/// Callers that wait for the store's answer about a block.
pub(super) type Asked = HashMap<BlockKey, Vec<oneshot::Sender<Result<bool>>>>;

pub(super) struct Shared {
    pub(super) config: ObjectConfig,
    pub(super) link: Link,
    pub(super) names: Names,
    pub(super) host: String,
    pub(super) runtime: Handle,
    pub(super) spaces: Mutex<Spaces>,
    pub(super) known: Mutex<Known>,
    pub(super) writing: Mutex<Writing>,
    /// Signalled when a write has completed.
    pub(super) written: Notify,
    pub(super) asked: Mutex<Asked>,
    /// Number of removals begun: the store's answer about a block from before a removal is not trusted after it.
    pub(super) removals: AtomicU64,
    /// Set when the store has shown that it honours conditions.
    pub(super) keeps_conditions: OnceCell<()>,
    /// A lock per namespace, held while its epoch is stored; only for namespaces with an epoch to store.
    pub(super) settling: Mutex<HashMap<NamespaceId, Arc<tokio::sync::Mutex<()>>>>,
    /// Whether a task is retrying to store epochs.
    pub(super) is_retrying: Mutex<bool>,
    /// Namespaces whose past epochs should be deleted; the front one is next.
    pub(super) to_sweep: Mutex<LinkedHashSet<NamespaceId>>,
    pub(super) sweep: Notify,
    under_way: Mutex<usize>,
    at_rest: Condvar,
}

impl Shared {
    pub(super) fn new(config: ObjectConfig, link: Link, host: String, runtime: Handle) -> Self {
        Self {
            names: Names::new(&config.prefix),
            known: Mutex::new(Known::new(config.present_ttl, config.absent_ttl)),
            config,
            link,
            host,
            runtime,
            spaces: Mutex::default(),
            writing: Mutex::default(),
            written: Notify::new(),
            asked: Mutex::default(),
            removals: AtomicU64::new(0),
            keeps_conditions: OnceCell::new(),
            settling: Mutex::default(),
            is_retrying: Mutex::new(false),
            to_sweep: Mutex::default(),
            sweep: Notify::new(),
            under_way: Mutex::new(0),
            at_rest: Condvar::new(),
        }
    }

    /// Returns the served namespace of a block, and the block's object.
    pub(super) fn place(&self, key: &BlockKey) -> Result<(Space, Path)> {
        let space = self.spaces.lock().of(key)?.clone();
        let path = self.names.block(space.spec.root(), space.epoch, key.hash);
        Ok((space, path))
    }

    /// Records that the block is present, unless it was removed in the meantime.
    pub(super) fn note_present(&self, key: BlockKey, bytes: u64, removals: u64) {
        let is_open = self.spaces.lock().of(&key).is_ok();
        let writing = self.writing.lock();
        if is_open && !writing.is_leaving(&key) && self.removals.load(Ordering::Acquire) == removals {
            self.known.lock().note(key, true, bytes);
        }
    }

    /// Records that the block was absent, unless it is being written.
    pub(super) fn note_absent(&self, key: BlockKey) {
        let writing = self.writing.lock();
        if !writing.holds(&key) {
            self.known.lock().note(key, false, 0);
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

    /// Returns the deadline of a request without its own one.
    pub(super) fn patience(&self) -> Instant {
        Instant::now() + self.config.timeout.max(Duration::from_millis(100)) * 2
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("link", &self.link).finish_non_exhaustive()
    }
}

/// The result of an operation, which is sent in any case: a task that ends without it reports that the tier is closing.
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

pub(super) fn late() -> Error {
    Error::new(ErrorKind::Timeout, "an object store did not bring an operation to its end by its deadline")
}

pub(super) fn in_time(deadline: Instant) -> Result<()> {
    if deadline > Instant::now() {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Timeout, "the deadline had passed when the call came"))
}
