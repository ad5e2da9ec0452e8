//! State that the requests of an Object tier share.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hashbrown::HashMap;
use hashlink::LinkedHashSet;
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId, Result};
use object_store::path::Path;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{Notify, OnceCell, Semaphore, oneshot};

use super::config::ObjectConfig;
use super::link::Link;
use super::names::Names;
use super::packs::PackState;
use crate::beliefs::Beliefs;
use crate::compression::Transform;
use crate::owed::Owed;
use crate::spaces::{Space, Spaces};

/// Number of blocks that are encoded or decoded at a time.
const CODECS_MAX: usize = 2;

/// Callers that wait for the store's answer about a block.
pub(super) type Asked = HashMap<BlockKey, Vec<oneshot::Sender<Result<bool>>>>;

pub(super) struct Shared {
    pub(super) config: ObjectConfig,
    pub(super) link: Link,
    pub(super) transform: Transform,
    /// Blocks that are encoded or decoded at a time: fewer than the runtime has threads, which must answer the others.
    pub(super) codecs: Semaphore,
    pub(super) names: Names,
    pub(super) host: String,
    pub(super) runtime: Handle,
    pub(super) spaces: Mutex<Spaces>,
    pub(super) beliefs: Arc<Beliefs>,
    pub(super) packs: PackState,
    pub(super) owed: Arc<Owed>,
    /// Signalled when a write has completed.
    pub(super) written: Notify,
    pub(super) asked: Mutex<Asked>,
    /// Set when the store has shown that it honours conditions.
    pub(super) keeps_conditions: OnceCell<()>,
    /// A lock per namespace, held while its epoch is stored; only for namespaces with an epoch to store.
    pub(super) settling: Mutex<HashMap<NamespaceId, Arc<tokio::sync::Mutex<()>>>>,
    /// Whether a task is retrying to store epochs.
    pub(super) is_retrying: Mutex<bool>,
    /// Namespaces whose past epochs should be deleted; the front one is next.
    pub(super) to_sweep: Mutex<LinkedHashSet<NamespaceId>>,
    pub(super) sweep: Notify,
}

impl Shared {
    pub(super) fn new(config: ObjectConfig, link: Link, host: String, runtime: Handle) -> Self {
        Self {
            names: Names::new(&config.prefix),
            transform: Transform::new(config.compression),
            codecs: Semaphore::new(CODECS_MAX),
            beliefs: Arc::new(Beliefs::new(config.present_ttl, config.absent_ttl)),
            packs: PackState::new(&config),
            owed: Arc::default(),
            config,
            link,
            host,
            runtime,
            spaces: Mutex::default(),
            written: Notify::new(),
            asked: Mutex::default(),
            keeps_conditions: OnceCell::new(),
            settling: Mutex::default(),
            is_retrying: Mutex::new(false),
            to_sweep: Mutex::default(),
            sweep: Notify::new(),
        }
    }

    /// Returns the served namespace of a block, and the block's object.
    pub(super) fn place(&self, key: &BlockKey) -> Result<(Space, Path)> {
        let space = self.spaces.lock().of(key)?.clone();
        let path = self.names.block(space.spec.root(), space.epoch, key.hash);
        Ok((space, path))
    }

    /// Forgets an epoch of a namespace whose blocks nobody may name any more.
    pub(super) fn forget_namespace(&self, id: NamespaceId) {
        self.packs.forget(id);
        self.beliefs.forget_namespace(id);
    }

    /// Records that the block is present, unless it was removed in the meantime.
    pub(super) fn note_present(&self, key: BlockKey, bytes: u64, removals: u64) {
        let is_open = self.spaces.lock().of(&key).is_ok();
        if is_open {
            self.beliefs.note_present(key, bytes, removals);
        }
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

pub(super) fn late() -> Error {
    Error::new(ErrorKind::Timeout, "an object store did not bring an operation to its end by its deadline")
}

pub(super) fn in_time(deadline: Instant) -> Result<()> {
    if deadline > Instant::now() {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Timeout, "the deadline had passed when the call came"))
}
