//! One life of a depot as a client sees it: its welcome, its pool, the lanes to it, and whether it is lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hashbrown::{HashMap, HashSet};
use kvdepot_core::{ErrorKind, Result};
use parking_lot::{Mutex, RwLock};

use crate::client::attached_pool::AttachedPool;
use crate::client::lane::{Lane, Welcome};
use crate::client::tier_memory::Lent;
use crate::message::{NamespaceHandle, Response};

/// One lifetime of a depot, as this process sees it.
pub(crate) struct Generation {
    pub(crate) welcome: Welcome,
    pub(crate) pool: Arc<AttachedPool>,
    /// The memory of a tier in which the depot leases blocks, as far as it is mapped.
    pub(crate) memory: Lent,
    pub(super) lanes: Mutex<Vec<Lane>>,
    pub(super) handles: RwLock<HashMap<String, NamespaceHandle>>,
    /// Namespaces that are closed here and not yet reported to the depot.
    pub(super) closed: Mutex<HashMap<String, NamespaceHandle>>,
    /// Locked for reading while the depot opens a namespace, and for writing while it is told that some are closed.
    pub(super) naming: RwLock<()>,
    /// Namespaces of which the depot knows that they are read in the tier's memory.
    pub(super) told_in_place: Mutex<HashSet<NamespaceHandle>>,
    /// The lane on which claims are leased. There is only one, so that the scheduler's calls find it connected.
    pub(super) claims: Mutex<Option<Lane>>,
    pub(super) lost: AtomicBool,
    /// Whether the depot has announced that it hands its pool over.
    pub(super) handed_over: AtomicBool,
    /// Whether the depot was told that no copy of this process concerns an earlier depot.
    pub(super) told_ended: AtomicBool,
}

impl Generation {
    pub(super) fn new(welcome: Welcome, pool: Arc<AttachedPool>, memory: Lent) -> Self {
        Self {
            welcome,
            pool,
            memory,
            lanes: Mutex::new(Vec::new()),
            handles: RwLock::new(HashMap::new()),
            closed: Mutex::new(HashMap::new()),
            naming: RwLock::new(()),
            told_in_place: Mutex::new(HashSet::new()),
            claims: Mutex::new(None),
            lost: AtomicBool::new(false),
            handed_over: AtomicBool::new(false),
            told_ended: AtomicBool::new(false),
        }
    }

    /// Returns whether the depot of this generation counts as lost.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// Returns whether blocks can be read in the tier's memory now.
    pub(crate) fn reads_in_place(&self) -> bool {
        self.memory.as_ref().is_some_and(|memory| memory.check().is_ok())
    }

    /// Returns whether the depot has hung up. A lane in use is left alone: its user notices it.
    pub(super) fn hung_up(&self) -> bool {
        let claims = self.claims.try_lock().is_some_and(|lane| lane.as_ref().is_some_and(Lane::hung_up));
        claims || self.lanes.lock().first().is_some_and(Lane::hung_up)
    }

    /// Returns whether the depot has announced that it hands its pool over, as far as was noticed.
    pub(crate) fn is_handed_over(&self) -> bool {
        self.handed_over.load(Ordering::Acquire)
    }

    /// Returns whether the depot has announced on an unused lane that it hands its pool over.
    pub(super) fn is_told(&self) -> bool {
        let told = |lane: &mut Lane| lane.look_for_announcement();
        self.claims.try_lock().is_some_and(|mut lane| lane.as_mut().is_some_and(told))
            || self.lanes.lock().iter_mut().any(told)
    }

    /// Returns an answer to a request that names these namespaces. If the depot does not know one of them any more, all
    /// are opened again in the background; until then each is a miss.
    pub(crate) fn checked(&self, named: &[NamespaceHandle], response: Response) -> Result<Response> {
        response.into_result().inspect_err(|error| {
            if error.kind() == ErrorKind::NotFound && !named.is_empty() {
                self.handles.write().retain(|_, handle| !named.contains(handle));
            }
        })
    }
}
