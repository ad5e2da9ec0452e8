//! The attachment to a depot, as its callers use it. A lost depot costs them nothing (P6): each call is a miss until
//! `attaching` has found a depot again in the background.

use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use kvdepot_core::{Error, ErrorKind, NamespaceSpec, Result};
use parking_lot::{Condvar, Mutex, RwLock};

use crate::client::attached_pool::AttachedPool;
use crate::client::devices::Devices;
use crate::client::generation::Generation;
use crate::client::lane::Welcome;
use crate::client::next_depot::NextDepot;
use crate::client::spawn::Spawner;
use crate::client::tier_memory;
use crate::depot::Depot;
use crate::message::NamespaceHandle;
use crate::stats::Stats;
use crate::user::User;

/// Why a depot counts as lost that hands its pool over.
const HANDS_OVER: &str = "it hands its pool over to another depot";

/// The depot to attach to.
pub(crate) enum Target {
    Embedded(Depot, User),
    Socket { path: PathBuf, spawner: Option<Spawner> },
}

/// Limits of an engine's tasks.
#[derive(Clone, Copy, Debug)]
pub struct QueueDepths {
    /// Number of tasks that may be queued in a store.
    pub waiting: u64,
    /// Number of shards of blocks that may be in flight in a task.
    pub running: u64,
}

/// A namespace that this process uses.
#[derive(Clone, Debug)]
pub(super) struct Known {
    pub(super) spec: Arc<NamespaceSpec>,
    /// Whether a store of it reads blocks in a tier's memory, if the depot passes that.
    pub(super) in_place: bool,
    /// Whether the depot could not open it when it was asked last.
    pub(super) has_failed: bool,
}

/// This process's attachment.
pub struct Attachment {
    pub(super) target: Target,
    pub(super) current: RwLock<Option<Arc<Generation>>>,
    /// Namespaces to open whenever a depot is found.
    pub(super) namespaces: Mutex<Vec<Known>>,
    /// Whether a thread opens and closes namespaces of an embedded depot.
    pub(super) tended: AtomicBool,
    /// Held by that thread while it has the attachment.
    pub(super) tending: Arc<Mutex<()>>,
    /// The mapped pool: that of the attached depot, or of the last one, which may come back.
    pub(super) pool: Mutex<Option<Arc<AttachedPool>>>,
    pub(crate) devices: Devices,
    pub(super) signal: Mutex<()>,
    /// Notified after each attempt to attach.
    pub(super) wake: Condvar,
    /// The depot that takes over, if callers wait for one.
    pub(super) next_depot: NextDepot,
    pub(super) refused: Mutex<Option<Error>>,
    /// Why no depot is attached, if known; empty while one is.
    pub(super) trouble: Mutex<String>,
    /// Limits of this client's queues, if they differ from the depot's.
    queue_depths: OnceLock<QueueDepths>,
    /// Whether the depot's pool only passes blocks on to its tiers.
    passes_through: AtomicBool,
    pub(super) stopping: AtomicBool,
    /// Time limit of a call that an engine's thread waits for.
    pub(crate) call_timeout: Duration,
    /// Counters of this client; failures by kind.
    pub(crate) stats: Stats,
}

impl Attachment {
    /// Attaches to a depot inside this process.
    pub fn embedded(depot: Depot) -> Result<Arc<Self>> {
        let (id, pool, config) = (depot.id(), depot.pool(), depot.config().clone());
        let (user, memory) = (depot.user(), tier_memory::of(&depot));
        let this = Self::new(Target::Embedded(depot, user), Duration::from_millis(config.timeout_ms));
        let welcome = Welcome {
            depot: id,
            is_divided: pool.regions().len() > 1,
            has_memory: memory.is_some(),
            timeout_ms: config.timeout_ms,
            waiting_queue_depth: config.waiting_queue_depth as u64,
            running_queue_depth: config.running_queue_depth as u64,
        };
        let pool = Arc::new(AttachedPool::new(id, pool));
        *this.pool.lock() = Some(Arc::clone(&pool));
        *this.current.write() = Some(Arc::new(Generation::new(welcome, pool, memory)));
        this.set_passes_through(config.passes_through());
        Ok(Arc::new(this))
    }

    pub(super) fn new(target: Target, call_timeout: Duration) -> Self {
        Self {
            target,
            current: RwLock::new(None),
            tended: AtomicBool::new(false),
            tending: Arc::default(),
            namespaces: Mutex::new(Vec::new()),
            pool: Mutex::new(None),
            devices: Devices::default(),
            signal: Mutex::new(()),
            wake: Condvar::new(),
            next_depot: NextDepot::default(),
            refused: Mutex::new(None),
            trouble: Mutex::default(),
            queue_depths: OnceLock::new(),
            passes_through: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            call_timeout,
            stats: Stats::default(),
        }
    }

    /// Returns whether calls reach a depot now, or one that takes its pool over is about to answer.
    pub fn attached(&self) -> bool {
        let attached = || self.current.read().is_some();
        // The next depot is in place before its wait ends, so the first look may come too early for both.
        !matches!(&self.target, Target::Embedded(depot, _) if depot.is_dead())
            && (attached() || self.next_depot.until().is_some() || attached())
    }

    /// Returns why no depot is attached, if known; empty while one is.
    pub fn trouble(&self) -> String {
        if self.attached() { String::new() } else { self.trouble.lock().clone() }
    }

    /// Sets the limits of queues for stores made from now on, in place of those that the depot was started with. Only
    /// the first call has an effect.
    pub fn set_queue_depths(&self, depths: QueueDepths) {
        let _ = self.queue_depths.set(depths);
    }

    /// Sets whether the depot's pool only passes blocks on to its tiers, which log lines of tasks reflect.
    pub fn set_passes_through(&self, passes_through: bool) {
        self.passes_through.store(passes_through, Ordering::Relaxed);
    }

    pub(crate) fn passes_through(&self) -> bool {
        self.passes_through.load(Ordering::Relaxed)
    }

    /// Returns the limits of this client's queues at the depot of a generation.
    pub(crate) fn queue_depths(&self, generation: &Generation) -> QueueDepths {
        let welcome = &generation.welcome;
        let depots =
            || QueueDepths { waiting: welcome.waiting_queue_depth, running: welcome.running_queue_depth };
        self.queue_depths.get().copied().unwrap_or_else(depots)
    }

    /// Returns how many tasks may be queued in a store; `None` if only a depot could tell and none is attached.
    pub(crate) fn waiting_queue_depth(&self) -> Option<u64> {
        let own = self.queue_depths.get().map(|depths| depths.waiting);
        own.or_else(|| self.generation().ok().map(|generation| generation.welcome.waiting_queue_depth))
    }

    pub(crate) fn generation(&self) -> Result<Arc<Generation>> {
        let unattached = || Error::new(ErrorKind::Unavailable, "no depot is attached");
        self.current.read().clone().ok_or_else(unattached)
    }

    /// Like `generation`, but waits for the next depot during a take-over, at most until `deadline`.
    pub(crate) fn generation_by(&self, deadline: Instant) -> Result<Arc<Generation>> {
        loop {
            let attached = self.generation();
            if attached.is_ok() {
                return attached;
            }
            // The next depot is in place before its wait ends.
            let Some(until) = self.next_depot.until() else { return self.generation() };
            let mut signal = self.signal.lock();
            // The next depot is in place before the signal is given.
            if self.generation().is_err()
                && self.wake.wait_until(&mut signal, until.min(deadline)).timed_out()
            {
                return self.generation();
            }
        }
    }

    /// Returns the namespace's number at the depot of this generation. Never waits: if it is not open yet, it is being
    /// opened.
    pub(crate) fn handle(&self, generation: &Generation, spec: &NamespaceSpec) -> Result<NamespaceHandle> {
        let handle = generation.handles.read().get(spec.canonical()).copied();
        handle.ok_or_else(|| Error::new(ErrorKind::Unavailable, "the depot does not know this namespace yet"))
    }

    /// Notes that the depot of this generation has announced that another one takes its pool over.
    pub(crate) fn hands_over(&self, generation: &Arc<Generation>) {
        self.note_take_over(generation);
        self.lost(generation, HANDS_OVER);
    }

    /// Notes that another depot takes the pool of this generation over.
    pub(super) fn note_take_over(&self, generation: &Generation) {
        if !generation.handed_over.swap(true, Ordering::AcqRel) {
            self.next_depot.announced(self.call_timeout);
        }
    }

    /// Notes that the depot of this generation does not answer any more: every call is a miss until it, or another one,
    /// does.
    pub(crate) fn lost(&self, generation: &Arc<Generation>, why: &str) {
        if matches!(self.target, Target::Embedded(..)) {
            return;
        }
        // The announcement may be on a lane that is not in use.
        if !generation.is_handed_over() && generation.is_told() {
            self.note_take_over(generation);
        }
        if generation.lost.swap(true, Ordering::AcqRel) {
            return;
        }
        let mut current = self.current.write();
        if current.as_ref().is_some_and(|now| Arc::ptr_eq(now, generation)) {
            *self.trouble.lock() = why.to_owned();
            *current = None;
            if generation.is_handed_over() {
                tracing::info!("another depot takes over the pool: it is attached when it answers");
            } else {
                tracing::warn!(
                    "the depot was lost ({why}): the engine continues without it, and attaches again automatically"
                );
            }
        }
        drop(current);
        generation.lanes.lock().clear();
        let _signal = self.signal.lock();
        self.wake.notify_all();
    }

    /// Closes the attachment: the background thread stops, lanes close, leases end.
    pub fn close(&self) {
        self.stopping.store(true, Ordering::Release);
        self.next_depot.no_more();
        if matches!(self.target, Target::Socket { .. })
            && let Some(generation) = self.current.write().take()
        {
            generation.lanes.lock().clear();
            self.give_up_pool();
        }
        let signal = self.signal.lock();
        self.wake.notify_all();
        drop(signal);
        // The depot of an embedded attachment ends with its last owner, which is to be the caller.
        drop(self.tending.lock());
    }

    /// Releases the mapped pool with its registrations: immediately, or after the last copy that uses it.
    pub(super) fn give_up_pool(&self) {
        let pool = self.pool.lock().take();
        if let Some(pool) = pool {
            self.devices.give_up(&pool);
        }
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        self.give_up_pool();
    }
}

impl fmt::Debug for Attachment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Attachment(attached: {})", self.attached())
    }
}
