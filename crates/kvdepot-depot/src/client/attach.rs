//! The attachment to a depot: found or started, and after a loss found again in the background, at no cost to callers
//! (P6).

use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use hashbrown::HashMap;
use kvdepot_core::limits::BATCH_HASHES_MAX;
use kvdepot_core::{BlockHash, Error, ErrorKind, NamespaceSpec, Result};
use parking_lot::{Condvar, Mutex, RwLock};

use crate::client::attached_pool::{AttachedPool, Devices, has_earlier_ended};
use crate::client::lane::{Lane, PassedPool, Welcome, unexpected};
use crate::client::next_depot::NextDepot;
use crate::client::spawn::Spawner;
use crate::depot::Depot;
use crate::message::{Hashes, NamespaceHandle, Request, Response, hash_bytes};
use crate::stats::Stats;
use crate::user::User;

/// Pauses between attempts to attach.
const RETRY_MIN: Duration = Duration::from_millis(20);
const RETRY_MAX: Duration = Duration::from_secs(1);
/// Longest pause while another depot takes the pool over.
const RETRY_TAKE_OVER_MAX: Duration = Duration::from_millis(40);
/// How often an attached process checks whether its depot is still there.
const WATCH: Duration = Duration::from_millis(200);
/// The longest time for a handshake, or for opening a namespace, in the background.
const HANDSHAKE_WAIT: Duration = Duration::from_secs(5);
/// Why a depot counts as lost that hands its pool over.
const HANDS_OVER: &str = "it hands its pool over to another depot";
/// Number of lanes kept for reuse.
const IDLE_LANES_MAX: usize = 16;

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

/// One lifetime of a depot, as this process sees it.
pub(crate) struct Generation {
    pub(crate) welcome: Welcome,
    pub(crate) pool: Arc<AttachedPool>,
    lanes: Mutex<Vec<Lane>>,
    handles: RwLock<HashMap<String, NamespaceHandle>>,
    /// The lane on which claims are leased. There is only one, so that the scheduler's calls find it connected.
    claims: Mutex<Option<Lane>>,
    lost: AtomicBool,
    /// Whether the depot has announced that it hands its pool over.
    handed_over: AtomicBool,
    /// Whether the depot was told that no copy of this process concerns an earlier depot.
    told_ended: AtomicBool,
}

/// This process's attachment.
pub struct Attachment {
    target: Target,
    current: RwLock<Option<Arc<Generation>>>,
    /// Namespaces to open whenever a depot is found.
    namespaces: Mutex<Vec<Arc<NamespaceSpec>>>,
    /// The mapped pool: that of the attached depot, or of the last one, which may come back.
    pool: Mutex<Option<Arc<AttachedPool>>>,
    pub(crate) devices: Devices,
    signal: Mutex<()>,
    /// Notified after each attempt to attach.
    wake: Condvar,
    /// The depot that takes over, if callers wait for one.
    next_depot: NextDepot,
    refused: Mutex<Option<Error>>,
    /// Why no depot is attached, if known; empty while one is.
    trouble: Mutex<String>,
    /// Limits of this client's queues, if they differ from the depot's.
    queue_depths: OnceLock<QueueDepths>,
    /// Whether the depot's pool only passes blocks on to its tiers.
    passes_through: AtomicBool,
    stopping: AtomicBool,
    /// Time limit of a call that an engine's thread waits for.
    pub(crate) call_timeout: Duration,
    /// Counters of this client; failures by kind.
    pub(crate) stats: Stats,
}

impl Attachment {
    /// Attaches to a depot inside this process.
    pub fn embedded(depot: Depot) -> Result<Arc<Self>> {
        let (id, pool, config) = (depot.id(), depot.pool(), depot.config().clone());
        let user = depot.user();
        let this = Self::new(Target::Embedded(depot, user), Duration::from_millis(config.timeout_ms));
        let welcome = Welcome {
            depot: id,
            is_divided: pool.regions().len() > 1,
            timeout_ms: config.timeout_ms,
            waiting_queue_depth: config.waiting_queue_depth as u64,
            running_queue_depth: config.running_queue_depth as u64,
        };
        let pool = Arc::new(AttachedPool::new(id, pool));
        *this.pool.lock() = Some(Arc::clone(&pool));
        *this.current.write() = Some(Arc::new(Generation::new(welcome, pool)));
        this.set_passes_through(config.passes_through());
        Ok(Arc::new(this))
    }

    /// Attaches to the depot at `path`, and starts one with `command` if none answers. Waits up to `wait` for the first
    /// attachment, then continues in the background. Only a peer with which communication is impossible is an error.
    pub fn connect(
        path: PathBuf,
        command: Option<Vec<String>>,
        wait: Duration,
        call_timeout: Duration,
    ) -> Result<Arc<Self>> {
        let spawner = command.map(|command| Spawner::new(path.clone(), command));
        let this = Arc::new(Self::new(Target::Socket { path, spawner }, call_timeout));
        let weak = Arc::downgrade(&this);
        std::thread::Builder::new()
            .name("kvdepot-attach".to_owned())
            .spawn(move || keep_attached(&weak))
            .map_err(|e| Error::io("cannot start a thread", e))?;
        let deadline = Instant::now() + wait;
        let mut signal = this.signal.lock();
        while this.generation().is_err() {
            if let Some(error) = this.refused.lock().clone() {
                return Err(error);
            }
            if this.wake.wait_until(&mut signal, deadline).timed_out() {
                break;
            }
        }
        drop(signal);
        Ok(this)
    }

    fn new(target: Target, call_timeout: Duration) -> Self {
        Self {
            target,
            current: RwLock::new(None),
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

    /// Makes a namespace known here, and to the depot if one is attached.
    pub fn register(self: &Arc<Self>, spec: &Arc<NamespaceSpec>) -> Result<()> {
        {
            let mut namespaces = self.namespaces.lock();
            if !namespaces.iter().any(|known| known.canonical() == spec.canonical()) {
                namespaces.push(Arc::clone(spec));
            }
        }
        let Ok(generation) = self.generation() else { return Ok(()) };
        match self.open(&generation, spec) {
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::Timeout | ErrorKind::Closed | ErrorKind::Unavailable
                ) =>
            {
                Ok(())
            }
            // Retried in the background; until then all of its blocks are misses (P2).
            Err(error) if error.kind() == ErrorKind::NoSpace => {
                tracing::warn!("a namespace is not opened yet, its blocks are misses: {error}");
                Ok(())
            }
            other => other.map(|_| ()),
        }
    }

    fn open(self: &Arc<Self>, generation: &Arc<Generation>, spec: &NamespaceSpec) -> Result<NamespaceHandle> {
        if let Some(handle) = generation.handles.read().get(spec.canonical()) {
            return Ok(*handle);
        }
        let mut lane = self.lane(generation, HANDSHAKE_WAIT)?;
        let request = Request::OpenNamespace { canonical: spec.canonical().into() };
        let response = lane.call(request, Instant::now() + HANDSHAKE_WAIT);
        let Response::Namespace { handle, .. } = response? else { return Err(unexpected()) };
        lane.finish();
        generation.handles.write().insert(spec.canonical().to_owned(), handle);
        Ok(handle)
    }

    /// Returns the namespace's number at the depot of this generation. Never waits: if it is not open yet, it is being
    /// opened.
    pub(crate) fn handle(&self, generation: &Generation, spec: &NamespaceSpec) -> Result<NamespaceHandle> {
        let handle = generation.handles.read().get(spec.canonical()).copied();
        handle.ok_or_else(|| Error::new(ErrorKind::Unavailable, "the depot does not know this namespace yet"))
    }

    /// Returns a lane of this generation, new or reused.
    pub(crate) fn lane(self: &Arc<Self>, generation: &Arc<Generation>, wait: Duration) -> Result<LaneGuard> {
        if let Some(lane) = generation.lanes.lock().pop() {
            return Ok(LaneGuard {
                attachment: Arc::clone(self),
                generation: Arc::clone(generation),
                lane: Some(lane),
                whole: false,
            });
        }
        let lane = match &self.target {
            Target::Embedded(depot, user) => Lane::embedded(depot.session_of(user)),
            Target::Socket { path, .. } => match Lane::connect(path, Instant::now() + wait) {
                Ok((lane, welcome, _)) if welcome.depot == generation.welcome.depot => lane,
                Ok(_) => {
                    // It is attached in a moment.
                    self.note_take_over(generation);
                    self.lost(generation, "another depot answers now");
                    return Err(Error::new(ErrorKind::Unavailable, "the depot was replaced"));
                }
                // A depot with too many connections closes new ones without an answer, and keeps serving the others.
                Err(error)
                    if matches!(error.kind(), ErrorKind::Closed | ErrorKind::Busy)
                        && !generation.hung_up() =>
                {
                    return Err(Error::new(
                        ErrorKind::Busy,
                        "the depot refused another connection: it has reached its limit, or has just exited",
                    )
                    .with_source(error));
                }
                Err(error) => {
                    self.lost(generation, &error.to_string());
                    return Err(error);
                }
            },
        };
        Ok(LaneGuard {
            attachment: Arc::clone(self),
            generation: Arc::clone(generation),
            lane: Some(lane),
            whole: false,
        })
    }

    /// Returns a lane that is not returned for reuse.
    pub(crate) fn lane_of_its_own(self: &Arc<Self>, generation: &Arc<Generation>) -> Result<Lane> {
        let lane = self.lane(generation, HANDSHAKE_WAIT)?.into_lane();
        lane.ok_or_else(|| Error::new(ErrorKind::Closed, "the lane is out of step"))
    }

    /// Makes a call on a lane. After a transport error the lane is dropped and the depot counts as lost, as does a depot
    /// that hands its pool over.
    fn call_on<T>(
        &self,
        generation: &Arc<Generation>,
        slot: &mut Option<Lane>,
        call: impl FnOnce(&mut Lane) -> Result<T>,
    ) -> Result<T> {
        let lane = slot.as_mut().ok_or_else(|| Error::new(ErrorKind::Closed, "the lane is out of step"))?;
        let outcome = call(lane);
        if lane.is_handed_over_after(&outcome) {
            self.hands_over(generation);
        }
        outcome.inspect_err(|error| {
            *slot = None;
            self.lost(generation, &error.to_string());
        })
    }

    /// Returns whether the depot answers a call in time. If not, it counts as lost.
    fn is_answering(self: &Arc<Self>, generation: &Arc<Generation>) -> bool {
        if let Ok(mut lane) = self.lane(generation, self.call_timeout)
            && lane.call(Request::Ping, Instant::now() + self.call_timeout).is_ok()
        {
            lane.finish();
        }
        !generation.lost.load(Ordering::Acquire)
    }

    /// Notes that the depot of this generation has announced that another one takes its pool over.
    pub(crate) fn hands_over(&self, generation: &Arc<Generation>) {
        self.note_take_over(generation);
        self.lost(generation, HANDS_OVER);
    }

    /// Notes that another depot takes the pool of this generation over.
    fn note_take_over(&self, generation: &Generation) {
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
        let _signal = self.signal.lock();
        self.wake.notify_all();
    }

    /// Releases the mapped pool with its registrations: immediately, or after the last copy that uses it.
    fn give_up_pool(&self) {
        let pool = self.pool.lock().take();
        if let Some(pool) = pool {
            pool.give_up(&self.devices);
        }
    }

    /// Returns the pool of the depot with this id, mapping it if needed. The pool of any other depot is released.
    fn take_pool(&self, depot: u64, passed: PassedPool) -> Result<Arc<AttachedPool>> {
        if let Some(pool) = self.pool.lock().as_ref().filter(|pool| pool.depot() == depot) {
            return Ok(Arc::clone(pool));
        }
        self.give_up_pool();
        let pool = Arc::new(AttachedPool::new(depot, passed.map()?));
        *self.pool.lock() = Some(Arc::clone(&pool));
        Ok(pool)
    }

    /// Opens the namespaces that this generation does not know yet. Tries all of them and returns the first error.
    fn open_missing(self: &Arc<Self>, generation: &Arc<Generation>) -> Result<()> {
        let specs = self.namespaces.lock().clone();
        let mut outcome = Ok(());
        for spec in specs {
            outcome = outcome.and(self.open(generation, &spec).map(drop));
        }
        outcome
    }

    /// Tells the depot, once, when no copy of this process can concern an earlier depot's pool. Until then a depot that
    /// has that pool after a crash gives out no part of it.
    fn tell_ended(self: &Arc<Self>, generation: &Arc<Generation>) {
        if generation.told_ended.load(Ordering::Acquire) || !has_earlier_ended(generation.welcome.depot) {
            return;
        }
        if let Ok(mut lane) = self.lane(generation, HANDSHAKE_WAIT)
            && lane.call(Request::CopiesEnded, Instant::now() + HANDSHAKE_WAIT).is_ok()
        {
            generation.told_ended.store(true, Ordering::Release);
            lane.finish();
        }
    }

    fn try_attach(self: &Arc<Self>) -> Result<()> {
        let Target::Socket { path, .. } = &self.target else { return Ok(()) };
        let (lane, welcome, passed) =
            Lane::connect(path, Instant::now() + HANDSHAKE_WAIT).inspect_err(|error| {
                // No process listens: the attached depot is dead. A slow depot is `Timeout`, and its pool is kept.
                if error.kind() == ErrorKind::Unavailable {
                    self.give_up_pool();
                }
            })?;
        let pool = self.take_pool(welcome.depot, passed)?;
        let generation = Arc::new(Generation::new(welcome, pool));
        generation.lanes.lock().push(lane);
        if let Err(error) = self.open_missing(&generation) {
            tracing::warn!("a namespace cannot be opened and is retried: {error}");
        }
        // The lane that opened everything is connected: the scheduler's first claim must not wait for a connect.
        *generation.claims.lock() = generation.lanes.lock().pop();
        let mut current = self.current.write();
        // A caller that finds it lost from here on finds it in place, and removes it again.
        if generation.lost.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Unavailable, "the depot was lost while it was attached"));
        }
        if self.stopping.load(Ordering::Acquire) {
            self.give_up_pool();
            return Err(Error::new(ErrorKind::Closed, "the attachment was closed"));
        }
        *current = Some(generation);
        self.next_depot.no_more();
        drop(current);
        tracing::info!("attached to the depot at {}", path.display());
        Ok(())
    }
}

/// The background thread: attaches whenever there is no depot, until the attachment is dropped.
fn keep_attached(weak: &Weak<Attachment>) {
    let mut pause = RETRY_MIN;
    loop {
        let Some(this) = weak.upgrade() else { return };
        if this.stopping.load(Ordering::Acquire) {
            return;
        }
        if let Ok(generation) = this.generation() {
            pause = RETRY_MIN;
            // An idle process would take a dead depot for a living one until a load on it fails.
            if generation.hung_up() {
                this.lost(&generation, "it hung up");
            } else {
                this.tell_ended(&generation);
                if let Err(error) = this.open_missing(&generation) {
                    tracing::debug!("a namespace cannot be opened and is retried: {error}");
                }
            }
        } else {
            match this.try_attach() {
                Ok(()) => {
                    *this.refused.lock() = None;
                    this.trouble.lock().clear();
                    if let Target::Socket { spawner: Some(spawner), .. } = &this.target {
                        spawner.answered();
                    }
                }
                Err(error) => {
                    let refused = matches!(
                        error.kind(),
                        ErrorKind::Version | ErrorKind::Protocol | ErrorKind::Permission
                    );
                    // A caller that waits for the attachment may read this only after the next attempt.
                    if refused {
                        *this.refused.lock() = Some(error.clone());
                    }
                    // The reason for a loss says more than that no depot has answered since.
                    let mut trouble = this.trouble.lock();
                    if refused || trouble.is_empty() {
                        *trouble = error.to_string();
                    }
                    drop(trouble);
                    if error.kind() == ErrorKind::Unavailable
                        && this.next_depot.until().is_none()
                        && let Target::Socket { spawner: Some(spawner), .. } = &this.target
                    {
                        spawner.start();
                    }
                }
            }
            let _signal = this.signal.lock();
            this.wake.notify_all();
        }
        let mut signal = this.signal.lock();
        let stopping = this.stopping.load(Ordering::Acquire);
        if this.generation().is_ok() || stopping {
            // Woken when a call finds the depot lost; otherwise periodically, to notice without a call that the depot
            // is gone or the attachment was dropped.
            this.wake.wait_for(&mut signal, WATCH);
        } else {
            this.wake.wait_for(&mut signal, pause);
            pause = (pause * 2).min(if this.next_depot.until().is_some() {
                RETRY_TAKE_OVER_MAX
            } else {
                RETRY_MAX
            });
        }
    }
}

impl Generation {
    fn new(welcome: Welcome, pool: Arc<AttachedPool>) -> Self {
        Self {
            welcome,
            pool,
            lanes: Mutex::new(Vec::new()),
            handles: RwLock::new(HashMap::new()),
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

    /// Returns whether the depot has hung up. A lane in use is left alone: its user notices it.
    fn hung_up(&self) -> bool {
        let claims = self.claims.try_lock().is_some_and(|lane| lane.as_ref().is_some_and(Lane::hung_up));
        claims || self.lanes.lock().first().is_some_and(Lane::hung_up)
    }

    /// Returns whether the depot has announced that it hands its pool over, as far as was noticed.
    pub(crate) fn is_handed_over(&self) -> bool {
        self.handed_over.load(Ordering::Acquire)
    }

    /// Returns whether the depot has announced on an unused lane that it hands its pool over.
    fn is_told(&self) -> bool {
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

    /// Makes a request on the lane of the claims, about the hashes `ahead` and those of the request. A lane that is out
    /// of step is dropped, and its claims' leases with it.
    pub(crate) fn ask_claims(
        self: &Arc<Self>,
        attachment: &Arc<Attachment>,
        ahead: &[BlockHash],
        request: Request<'_>,
        deadline: Instant,
    ) -> Result<Response> {
        let mut claims = self.claims.lock();
        if self.lost.load(Ordering::Acquire) {
            *claims = None;
            return Err(Error::new(ErrorKind::Unavailable, "the depot was lost"));
        }
        if claims.is_none() {
            *claims = attachment.lane(self, attachment.call_timeout)?.into_lane();
        }
        let named = request.namespaces();
        let call = |lane: &mut Lane| {
            for hashes in ahead.chunks(BATCH_HASHES_MAX) {
                lane.tell(Request::ClaimHashes { hashes: Hashes(hash_bytes(hashes).into()) }, deadline)?;
            }
            lane.call(request, deadline)
        };
        let response = attachment.call_on(self, &mut claims, call)?;
        self.checked(&named, response)
    }
}

/// A lane in use. Dropping it closes it, which ends its leases. `finish` returns it for reuse instead, when nothing is
/// leased on it any more.
pub(crate) struct LaneGuard {
    attachment: Arc<Attachment>,
    generation: Arc<Generation>,
    lane: Option<Lane>,
    whole: bool,
}

impl LaneGuard {
    /// Makes a call. `Failed` answers are returned as errors and leave the lane in step.
    pub(crate) fn call(&mut self, request: Request<'_>, deadline: Instant) -> Result<Response> {
        let named = request.namespaces();
        let call = |lane: &mut Lane| lane.call(request, deadline);
        let response = self.attachment.call_on(&self.generation, &mut self.lane, call)?;
        self.generation.checked(&named, response)
    }

    /// Makes the depot place blocks requested on this lane near a NUMA node, where it has space.
    pub(crate) fn wish_near(&mut self, node: Option<u32>, deadline: Instant) -> Result<()> {
        let tell = |lane: &mut Lane| lane.wish_near(node, deadline);
        self.attachment.call_on(&self.generation, &mut self.lane, tell)
    }

    /// Like `call`, for a request that may wait for tiers: a depot that answers no calls is lost after `call_timeout`,
    /// not only at the deadline.
    pub(crate) fn call_patiently(&mut self, request: Request<'_>, deadline: Instant) -> Result<Response> {
        let (attachment, generation) = (&self.attachment, &self.generation);
        let is_answering = || attachment.is_answering(generation);
        let patience = attachment.call_timeout;
        let named = request.namespaces();
        let call = |lane: &mut Lane| lane.call_patiently(request, deadline, patience, is_answering);
        let response = attachment.call_on(generation, &mut self.lane, call)?;
        generation.checked(&named, response)
    }

    fn into_lane(mut self) -> Option<Lane> {
        self.lane.take()
    }

    /// Takes the lane with everything leased on it; calls fail from now on.
    pub(crate) fn take(&mut self) -> Option<Lane> {
        self.lane.take()
    }

    /// Returns the lane for reuse. It must hold no lease any more.
    pub(crate) fn finish(mut self) {
        self.whole = true;
    }
}

impl Drop for LaneGuard {
    fn drop(&mut self) {
        if let (true, Some(lane)) = (self.whole, self.lane.take()) {
            let mut lanes = self.generation.lanes.lock();
            if lanes.len() < IDLE_LANES_MAX && !self.generation.lost.load(Ordering::Acquire) {
                lanes.push(lane);
            }
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
