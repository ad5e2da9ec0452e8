//! How a process attaches to a depot: finds or starts it, maps its pool, opens the namespaces, and after a loss begins
//! again in the background.

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kvdepot_core::{Error, ErrorKind, NamespaceSpec, Result};

use crate::client::attach::{Attachment, Known, Target};
use crate::client::attached_pool::{AttachedPool, has_earlier_ended};
use crate::client::generation::Generation;
use crate::client::lane::{Lane, PassedPool};
use crate::client::lane_guard::HANDSHAKE_WAIT;
use crate::client::spawn::Spawner;
use crate::client::tier_memory;
use crate::message::Request;

/// Pauses between attempts to attach.
const RETRY_MIN: Duration = Duration::from_millis(20);
const RETRY_MAX: Duration = Duration::from_secs(1);
/// Longest pause while another depot takes the pool over.
const RETRY_TAKE_OVER_MAX: Duration = Duration::from_millis(40);
/// Once the depot has failed to open a namespace for so long, the others are opened after the attachment is there.
const OPEN_BEFORE_ATTACHED: Duration = Duration::from_secs(1);
/// How often an attached process checks whether its depot is still there.
pub(super) const WATCH: Duration = Duration::from_millis(200);

impl Attachment {
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

    /// Makes a namespace known here, and to the depot if one is attached.
    pub fn register(self: &Arc<Self>, spec: &Arc<NamespaceSpec>) -> Result<()> {
        self.register_for(spec, false)
    }

    /// Like `register`, for a store that can read blocks where a tier keeps them, if `in_place`. The depot is told, so that
    /// the first claim leases them there.
    pub(super) fn register_for(self: &Arc<Self>, spec: &Arc<NamespaceSpec>, in_place: bool) -> Result<()> {
        let known = {
            let mut namespaces = self.namespaces.lock();
            let at = namespaces.iter().position(|known| known.spec.canonical() == spec.canonical());
            let at = at.unwrap_or_else(|| {
                namespaces.push(Known { spec: Arc::clone(spec), in_place, has_failed: false });
                namespaces.len() - 1
            });
            namespaces[at].in_place |= in_place;
            namespaces[at].clone()
        };
        let Ok(generation) = self.generation() else { return Ok(()) };
        match self.open_noted(&generation, &known) {
            // Retried in the background; until then all of its blocks are misses (P2).
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::Timeout
                        | ErrorKind::Closed
                        | ErrorKind::Unavailable
                        | ErrorKind::Busy
                        | ErrorKind::NoSpace
                ) =>
            {
                if error.kind() == ErrorKind::NoSpace {
                    tracing::warn!("a namespace is not opened yet, its blocks are misses: {error}");
                }
                self.tend_embedded(&generation);
                Ok(())
            }
            other => other,
        }
    }

    /// Opens a namespace, and tells the depot if it is to be read in a tier's memory. Does neither twice.
    fn open(self: &Arc<Self>, generation: &Arc<Generation>, known: &Known) -> Result<()> {
        let canonical = known.spec.canonical();
        let opened = generation.handles.read().get(canonical).copied();
        let is_told = |handle| generation.told_in_place.lock().contains(&handle);
        let in_place = known.in_place && !opened.is_some_and(is_told) && generation.reads_in_place();
        if opened.is_some() && !in_place {
            return Ok(());
        }
        let mut lane = self.lane(generation, self.background_wait())?;
        let handle = match opened {
            Some(handle) => handle,
            None => generation.open_namespace(&mut lane, canonical)?,
        };
        if in_place {
            lane.tell(Request::ReadsInPlace { namespace: handle }, Instant::now() + self.background_wait())?;
            generation.told_in_place.lock().insert(handle);
        }
        lane.finish();
        generation.handles.write().insert(canonical.to_owned(), handle);
        // It may have been closed since this namespace was taken from the list.
        self.leave_if_closed(generation, canonical);
        Ok(())
    }

    /// Opens the namespaces that this generation does not know yet. Tries all of them and returns the first error.
    pub(super) fn open_missing(self: &Arc<Self>, generation: &Arc<Generation>) -> Result<()> {
        self.open_missing_while(generation, || true)
    }

    /// Like `open_missing`. After a failure it goes on only if `goes_on`.
    fn open_missing_while(
        self: &Arc<Self>,
        generation: &Arc<Generation>,
        goes_on: impl Fn() -> bool,
    ) -> Result<()> {
        let mut namespaces = self.namespaces.lock().clone();
        // One that waits for a tier in vain must not delay those that work.
        namespaces.sort_by_key(|known| known.has_failed);
        let mut outcome = Ok(());
        for known in namespaces {
            if let Err(error) = self.open_noted(generation, &known) {
                outcome = outcome.and(Err(error));
                if !goes_on() || generation.is_lost() {
                    break;
                }
            }
        }
        outcome
    }

    /// Like `open`, and notes for the next time whether it failed.
    fn open_noted(self: &Arc<Self>, generation: &Arc<Generation>, known: &Known) -> Result<()> {
        let outcome = self.open(generation, known);
        let mut namespaces = self.namespaces.lock();
        if let Some(known) = namespaces.iter_mut().find(|it| it.spec.canonical() == known.spec.canonical()) {
            known.has_failed = outcome.is_err();
        }
        drop(namespaces);
        outcome
    }

    /// Tells the depot, once, when no copy of this process can concern an earlier depot's pool. Until then a depot that
    /// has that pool after a crash gives out no part of it.
    fn tell_ended(self: &Arc<Self>, generation: &Arc<Generation>) {
        if generation.told_ended.load(Ordering::Acquire) || !has_earlier_ended(generation.welcome.depot) {
            return;
        }
        if let Ok(mut lane) = self.lane(generation, self.background_wait())
            && lane.call(Request::CopiesEnded, Instant::now() + self.background_wait()).is_ok()
        {
            generation.told_ended.store(true, Ordering::Release);
            lane.finish();
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

    fn try_attach(self: &Arc<Self>) -> Result<()> {
        let Target::Socket { path, .. } = &self.target else { return Ok(()) };
        let (mut lane, welcome, passed) =
            Lane::connect(path, Instant::now() + HANDSHAKE_WAIT).inspect_err(|error| {
                // No process listens: the attached depot is dead. A slow depot is `Timeout`, and its pool is kept.
                if error.kind() == ErrorKind::Unavailable {
                    self.give_up_pool();
                }
            })?;
        let pool = self.take_pool(welcome.depot, passed)?;
        let asked = welcome.has_memory.then(|| tier_memory::ask(&mut lane, Instant::now() + HANDSHAKE_WAIT));
        let memory = match asked {
            None => None,
            Some(Ok(memory)) => memory,
            // The answer came without its descriptor: this process may have none left.
            Some(Err(error)) if matches!(error.kind(), ErrorKind::Busy | ErrorKind::Protocol) => {
                tracing::warn!("blocks of the depot's medium come through its pool: {error}");
                None
            }
            Some(Err(error)) => return Err(error),
        };
        let generation = Arc::new(Generation::new(welcome, pool, memory));
        generation.lanes.lock().push(lane);
        let opening = Instant::now();
        let goes_on = || opening.elapsed() < OPEN_BEFORE_ATTACHED;
        if let Err(error) = self.open_missing_while(&generation, goes_on) {
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
                this.tend_namespaces(&generation);
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
