//! The runner: the only code that takes the machine's lock. It feeds events, carries out effects after unlocking, and
//! wakes exactly the thread that a reply belongs to.
//!
//! Commands leave in the order of the steps that made them: they enter one outbox under the machine's lock, and one
//! thread at a time takes them out and passes them to the tiers in batches. A tier that completes an operation inside
//! its call only adds to the outbox, so the stack stays flat.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;
use kvdepot_core::lease::LeaseId;
use kvdepot_core::machine::{
    Batch, Command, Effects, Event, Job, Machine, Nanos, Outcome, Owner, REQUEST_BLOCKS, Reply, Request,
    Token,
};
use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_tier::{Tier, TierMemory};
use parking_lot::Mutex;

use crate::advances::Advances;
use crate::commands::{Ended, Said, TierCommands};
use crate::config::DepotConfig;
use crate::death::{DeathGuard, Life};
use crate::floors::Floors;
use crate::history::{self, History};
use crate::holds::{Holds, LongestHolds};
use crate::ledger::Ledger;
use crate::locate::{Locator, timed_out};
use crate::looks::Looks;
use crate::openings::Openings;
use crate::pool::PoolMapping;
use crate::probers::Probers;
use crate::stats::{self, Now};
use crate::waiters::Waiter;

#[cfg(test)]
#[path = "late_reply_tests.rs"]
mod late_reply_tests;

/// Time that a request may take for its own pieces, however short its deadline is: even one that has no time to wait
/// learns what the pool has.
const OWN_WORK_MIN: Duration = Duration::from_millis(100);
/// How long a reply may be on its way from the thread whose step made it.
const DELIVERY_WAIT: Duration = Duration::from_secs(1);

/// State shared by all threads of a depot.
pub(crate) struct Runner {
    pub(crate) config: DepotConfig,
    pub(crate) id: u64,
    pub(crate) pool: Arc<PoolMapping>,
    /// Memory of a tier in which blocks are leased where they lie.
    pub(crate) memory: Option<TierMemory>,
    /// The data for the next depot after a crash of this one, if that is enabled.
    pub(crate) ledger: Option<Ledger>,
    machine: Mutex<Machine>,
    outbox: Mutex<VecDeque<Command>>,
    /// Whether a thread is taking commands out of the outbox.
    executing: AtomicBool,
    /// Work of the machine without a waiting request.
    jobs: Mutex<VecDeque<Job>>,
    /// The waiting requests, and whether replies can still come.
    pub(crate) life: Life,
    pub(crate) probers: Probers,
    pub(crate) looks: Looks,
    pub(crate) advances: Advances,
    pub(crate) openings: Openings,
    pub(crate) floors: Floors,
    /// Everything that lookups need to find blocks.
    pub(crate) locator: Arc<Locator>,
    pub(crate) commands: TierCommands,
    /// Wakes the pump.
    kicks: Sender<()>,
    pub(crate) stopping: AtomicBool,
    /// Set before `stopping`: requests that wait for writes are answered immediately.
    pub(crate) ending: AtomicBool,
    /// Whether [`crate::Depot::finish`] was called.
    pub(crate) finished: AtomicBool,
    owners: AtomicU64,
    tokens: AtomicU64,
    began: Instant,
    holds: Holds,
    history: Mutex<History>,
}

/// A request that was begun.
pub(crate) enum Asked {
    Answered(Result<Reply>),
    Waits { token: Token, owner: Owner, waiter: Arc<Waiter>, deadline: Instant },
}

impl Runner {
    pub(crate) fn new(
        config: DepotConfig,
        pool: Arc<PoolMapping>,
        machine: Machine,
        names: Vec<&'static str>,
        (tiers, memory): (Vec<Arc<dyn Tier>>, Option<TierMemory>),
        ledger: Option<Ledger>,
        kicks: Sender<()>,
    ) -> Self {
        let (began, timeout) = (Instant::now(), Duration::from_millis(config.timeout_ms));
        let locator = Arc::new(Locator::new(tiers, timeout, config.evicted_blocks_remembered));
        Self {
            commands: TierCommands::new(Arc::clone(&locator), names, Arc::clone(&pool), began, timeout),
            config,
            id: kvdepot_io::random::number(),
            pool,
            memory,
            ledger,
            machine: Mutex::new(machine),
            outbox: Mutex::default(),
            executing: AtomicBool::new(false),
            jobs: Mutex::default(),
            life: Life::default(),
            probers: Probers::default(),
            looks: Looks::default(),
            advances: Advances::default(),
            openings: Openings::default(),
            floors: Floors::default(),
            locator,
            kicks,
            stopping: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            finished: AtomicBool::new(false),
            owners: AtomicU64::new(1),
            tokens: AtomicU64::new(1),
            began,
            holds: Holds::new(began),
            history: Mutex::new(History::new()),
        }
    }

    pub(crate) fn next_owner(&self) -> Owner {
        self.owners.fetch_add(1, Ordering::Relaxed)
    }

    /// Converts a moment to the machine's time.
    pub(crate) fn nanos(&self, moment: Instant) -> Nanos {
        u64::try_from(moment.saturating_duration_since(self.began).as_nanos()).unwrap_or(u64::MAX)
    }

    /// Returns the deadline of an operation that begins now.
    pub(crate) fn deadline(&self) -> Nanos {
        self.nanos(self.config.deadline())
    }

    /// Makes one step. Nothing that waits, calls a tier or wakes a thread happens under the lock.
    fn step(&self, event: impl FnOnce() -> Event) -> Effects {
        let mut effects = Effects::default();
        let hold = Holds::begin();
        let mut machine = self.machine.lock();
        // Dropped before the lock: no thread may step a machine left half changed by a panic.
        let _guard = DeathGuard(&self.life);
        if self.life.is_dead() {
            return effects;
        }
        let locked = Instant::now();
        let event = event();
        let name = event.name();
        machine.step(self.nanos(locked), event, &mut effects);
        // Locked before anything shows that blocks are gone: a lookup that misses one waits until the reason is recorded.
        let noting = (!effects.gone.is_empty()).then(|| self.locator.misses.begin_noting());
        self.locator.presence.set(&effects.visible);
        self.locator.events.pool_changed(&effects.visible);
        effects.visible.clear();
        if let Some(ledger) = &self.ledger {
            effects.forgotten.iter().for_each(|forgotten| ledger.forgotten(forgotten.handle));
            effects.namespaces.iter().for_each(|opened| ledger.opened(opened));
            effects.proofs.drain(..).for_each(|proof| ledger.apply(proof));
        }
        for forgotten in &effects.forgotten {
            self.locator.directory.forget(forgotten.handle);
        }
        for opened in effects.namespaces.drain(..) {
            self.locator.directory.apply(opened);
        }
        if !effects.commands.is_empty() {
            self.outbox.lock().extend(effects.commands.drain(..));
        }
        drop(machine);
        self.holds.end(&hold, locked, name);
        if let Some(noting) = noting {
            noting.note(&effects.gone);
        }
        effects.missed.drain(..).for_each(|missed| self.locator.claim_missed(missed));
        effects.settled.drain(..).for_each(|settled| self.locator.claim_settled(&settled));
        effects.closed.drain(..).for_each(|closed| self.commands.closed(closed));
        effects
    }

    /// Feeds an event and its consequences. Returns the reply to `own`, if it came. Until then, or until its time is
    /// over (P2), this thread continues work that was cut into pieces, since it waits for it. Other work is left to the
    /// pump.
    fn feed(
        &self,
        event: impl FnOnce() -> Event,
        own: Option<(Token, Option<Instant>)>,
    ) -> Option<Result<Reply>> {
        let effects = self.step(event);
        self.follow(effects, own)
    }

    /// Carries out a step's effects, and feeds what follows from them; as [`Self::feed`].
    fn follow(&self, mut effects: Effects, own: Option<(Token, Option<Instant>)>) -> Option<Result<Reply>> {
        let mut reply = None;
        let mut todo = VecDeque::new();
        loop {
            for (token, outcome) in effects.replies {
                let outcome = outcome.map(Reply::listed);
                if own.is_some_and(|(own, _)| own == token) {
                    reply = Some(outcome);
                } else if let Some((owner, Ok(late))) = self.life.waiters.deliver(token, outcome) {
                    todo.extend(self.give_back(owner, late));
                }
            }
            for forgotten in effects.forgotten {
                self.openings.close_if_unknown(&self.locator, forgotten.root);
            }
            for question in effects.questions {
                let locations = self.locator.locate_among(&question.keys, question.tiers);
                todo.push_back(Event::Located { ask: question.ask, locations });
            }
            let is_late = |deadline: Instant| !effects.again.is_empty() && Instant::now() >= deadline;
            let waits = reply.is_none() && own.is_some_and(|(_, until)| !until.is_some_and(is_late));
            for job in effects.again {
                if waits {
                    todo.push_back(Event::Continue(job));
                } else {
                    self.jobs.lock().push_back(job);
                    self.kick();
                }
            }
            let Some(event) = todo.pop_front() else { return reply };
            effects = self.step(|| event);
        }
    }

    /// Makes a request with an immediate reply. A request for many blocks is made piece by piece.
    pub(crate) fn ask(self: &Arc<Self>, owner: Owner, request: Request) -> Result<Reply> {
        let mut batch = match Batch::of(request) {
            Ok(batch) => batch,
            Err(request) => return self.ask_with(owner, || request),
        };
        loop {
            let piece = batch.next();
            let reply = self.ask_with(owner, || piece);
            if let Some(reply) = batch.answered(reply) {
                return reply;
            }
        }
    }

    /// Like [`Self::ask`]; `request` is made under the machine's lock.
    pub(crate) fn ask_with(
        self: &Arc<Self>,
        owner: Owner,
        request: impl FnOnce() -> Request,
    ) -> Result<Reply> {
        let token = self.tokens.fetch_add(1, Ordering::Relaxed);
        let reply = self.feed(|| Event::Request { token, owner, request: request() }, Some((token, None)));
        self.kick_if_queued();
        reply.unwrap_or_else(|| {
            self.life.ensure_alive()?;
            Err(Error::new(ErrorKind::Unsupported, "the request has no immediate reply"))
        })
    }

    /// Makes a request whose reply may take until the deadline; then it contains what is known.
    pub(crate) fn ask_within(
        self: &Arc<Self>,
        owner: Owner,
        request: Request,
        deadline: Instant,
    ) -> Result<Reply> {
        let asked = self.begin_within(owner, request, deadline);
        self.answer_within(asked)
    }

    /// Begins a request whose reply may take until the deadline. [`Self::answer_within`] must follow.
    pub(crate) fn begin_within(self: &Arc<Self>, owner: Owner, request: Request, deadline: Instant) -> Asked {
        let token = self.tokens.fetch_add(1, Ordering::Relaxed);
        let waiter = self.life.waiters.register(token);
        // After it was registered: a death from now on answers it.
        if let Err(dead) = self.life.ensure_alive() {
            self.life.waiters.forget(token);
            return Asked::Answered(Err(dead));
        }
        let own = Some((token, Some(deadline.max(Instant::now() + OWN_WORK_MIN))));
        if let Some(reply) = self.feed(|| Event::Request { token, owner, request }, own) {
            self.life.waiters.forget(token);
            self.kick_if_queued();
            return Asked::Answered(reply);
        }
        self.execute_queued();
        Asked::Waits { token, owner, waiter, deadline }
    }

    /// Waits for the reply to a request that was begun.
    pub(crate) fn answer_within(self: &Arc<Self>, asked: Asked) -> Result<Reply> {
        let (token, owner, waiter, deadline) = match asked {
            Asked::Answered(reply) => return reply,
            Asked::Waits { token, owner, waiter, deadline } => (token, owner, waiter, deadline),
        };
        if let Some(reply) = waiter.wait(deadline) {
            return reply;
        }
        // If the request is complete already, another thread has the reply and delivers it: it may contain leases.
        if let Some(reply) = self.feed(|| Event::Expire { token }, Some((token, None))) {
            self.life.waiters.forget(token);
            return reply;
        }
        let reply = waiter.wait(Instant::now() + DELIVERY_WAIT);
        let reply = reply.or_else(|| self.life.waiters.give_up(token, owner, &waiter));
        reply.unwrap_or_else(|| Err(timed_out("a request found no reply")))
    }

    /// Returns the requests that give back what a reply grants that nobody waits for any more.
    fn give_back(&self, owner: Owner, late: Reply) -> Vec<Event> {
        let leases: Vec<LeaseId> = match late {
            Reply::Slots(outcomes) => outcomes.iter().filter_map(leased).collect(),
            Reply::Claim(progress) => {
                let request = Request::ClaimRelease { claim: progress.claim };
                return vec![self.request(owner, request)];
            }
            _ => return Vec::new(),
        };
        let release = |leases: &[LeaseId]| self.request(owner, Request::Release { leases: leases.to_vec() });
        leases.chunks(REQUEST_BLOCKS).map(release).collect()
    }

    /// Returns a request whose reply nobody waits for.
    fn request(&self, owner: Owner, request: Request) -> Event {
        Event::Request { token: self.tokens.fetch_add(1, Ordering::Relaxed), owner, request }
    }

    /// Feeds an event without a reply.
    pub(crate) fn tell(self: &Arc<Self>, event: Event) {
        self.feed(|| event, None);
        self.execute_queued();
    }

    /// Like [`Self::tell`], for threads whose own work must not wait for tiers.
    pub(crate) fn tell_and_leave(self: &Arc<Self>, event: Event) {
        self.feed(|| event, None);
        self.kick_if_queued();
    }

    /// Makes another thread pass queued work to the tiers soon.
    fn kick_if_queued(&self) {
        if !self.outbox.lock().is_empty() {
            self.kick();
        }
    }

    fn kick(&self) {
        // If the channel is full, a wake-up is pending already.
        let _ = self.kicks.try_send(());
    }

    /// Passes queued commands to the tiers, unless another thread is doing so.
    pub(crate) fn execute_queued(self: &Arc<Self>) {
        if self.outbox.lock().is_empty() {
            return;
        }
        // Weak: an operation that ends after the depot has no receiver, and must not be the last to hold its tiers.
        let again = Arc::downgrade(self);
        // A panic in a tier's thread kills the depot: the machine never learns the end of that operation.
        let ended: Ended = Arc::new(move |event, said| {
            let Some(runner) = again.upgrade() else { return };
            let _guard = DeathGuard(&runner.life);
            if let Some(Said { tier, key, is_there }) = said {
                let locator = &runner.locator;
                locator.events.tier_changed(tier, &*locator.tiers[tier], &[key], is_there);
            }
            runner.tell(event);
        });
        loop {
            if self.executing.swap(true, Ordering::AcqRel) {
                return;
            }
            let turn = Turn(&self.executing);
            let _guard = DeathGuard(&self.life);
            let mut commands = VecDeque::new();
            loop {
                std::mem::swap(&mut commands, &mut *self.outbox.lock());
                if commands.is_empty() {
                    break;
                }
                if self.life.is_dead() || self.stopping.load(Ordering::Acquire) {
                    commands.clear();
                }
                self.commands.execute(&mut commands, &ended);
            }
            drop(turn);
            // Commands added since the last check, while this thread still had the turn, are left to this thread.
            if self.outbox.lock().is_empty() {
                return;
            }
        }
    }

    /// Continues work without a waiting request, one step at a time.
    pub(crate) fn work_off(self: &Arc<Self>) {
        self.execute_queued();
        loop {
            let job = self.jobs.lock().pop_front();
            let Some(job) = job else { return };
            self.tell(Event::Continue(job));
        }
    }

    /// Abandons probes whose tier did not answer in time.
    pub(crate) fn expire_probes(self: &Arc<Self>) {
        while let Some(ask) = self.commands.overdue_probe() {
            self.tell(Event::Probed { ask, outcome: Err(timed_out("a tier did not answer")) });
        }
    }

    /// Reads from the machine under its lock. `look` must not wait.
    pub(crate) fn look<T>(&self, look: impl FnOnce(&Machine) -> T) -> T {
        let hold = Holds::begin();
        let machine = self.machine.lock();
        let locked = Instant::now();
        let seen = look(&machine);
        drop(machine);
        self.holds.end(&hold, locked, "look");
        seen
    }

    /// Returns the longest holds of the machine's lock in the last one to two minutes.
    pub(crate) fn longest_holds(&self) -> LongestHolds {
        self.holds.longest(Instant::now())
    }

    /// Forgets the longest holds.
    pub(crate) fn forget_holds(&self) {
        self.holds.forget();
    }

    /// Returns the depot's numbers of this moment.
    pub(crate) fn numbers(&self) -> Now {
        let mut numbers = self.locator.stats.to_json();
        let (counters, gauges, regions) =
            self.look(|machine| (machine.counters().clone(), machine.gauges(), machine.regions()));
        stats::merge(&mut numbers, &counters);
        for (name, value) in stats::gauges(&gauges) {
            numbers.insert(name.to_owned(), value.into());
        }
        Now { numbers, counters, gauges, regions }
    }

    pub(crate) fn uptime_ms(&self) -> u64 {
        self.nanos(Instant::now()) / 1_000_000
    }

    /// Ends a minute of the history, if it is over.
    pub(crate) fn keep_history(&self) {
        let now_ms = self.uptime_ms();
        if self.history.lock().is_due(now_ms) {
            let kept = history::kept(&self.numbers().numbers);
            self.history.lock().mark(now_ms, kept);
        }
    }

    /// Returns what was counted in each minute of the last hour.
    pub(crate) fn history(&self) -> serde_json::Value {
        let kept = history::kept(&self.numbers().numbers);
        self.history.lock().to_json(self.uptime_ms(), &kept)
    }
}

fn leased(outcome: &Outcome) -> Option<LeaseId> {
    match outcome {
        Outcome::Leased(leased) => Some(leased.lease),
        Outcome::Have | Outcome::Refused(_) => None,
    }
}

/// A thread's turn at the outbox. It also ends by a panic.
struct Turn<'a>(&'a AtomicBool);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl fmt::Debug for Runner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Runner({})", self.config.pipeline)
    }
}
