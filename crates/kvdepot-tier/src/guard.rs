//! Circuit breakers: a tier that keeps failing is disabled for a while, and this is reported (P2).
//!
//! A breaker for the entire tier counts failures of reads and probes, and a second one those of writes, so that a full
//! disk can still be read. `failures_max` consecutive failures open the breaker. After a pause that doubles each time,
//! one operation is let through as a trial, and its outcome decides. Failures of single blocks (a write's `NotFound`,
//! `Corrupt`), of the caller (`Config`, a deadline in the past) or of the load (`Busy`) say nothing about the tier.
//! Neither does an answer that may have come from an index without I/O (`Miss`, `AlreadyThere`, a probe's count).
//!
//! An operation that has not ended [`OVERDUE`] after its deadline has hung: it counts as a failure then, and not again if
//! it ends with one.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kvdepot_core::limits::OVERDUE;
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId, NamespaceSpec, Result};
use parking_lot::Mutex;

use crate::{
    Done, Fetched, LeaseItem, Presence, ReadItem, Tier, TierEvents, TierMemory, TierServer, TierUsage,
    WriteItem, Written,
};

/// When a guarded tier is disabled, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuardConfig {
    /// Consecutive failures that disable it.
    pub failures_max: u32,
    /// First pause.
    pub off_min: Duration,
    /// Longest pause.
    pub off_max: Duration,
}

impl Default for GuardConfig {
    fn default() -> Self {
        Self { failures_max: 5, off_min: Duration::from_secs(1), off_max: Duration::from_secs(60) }
    }
}

/// Source of the time; tests provide their own.
pub type Clock = Arc<dyn Fn() -> Instant + Send + Sync>;

/// A tier with circuit breakers.
pub struct Guarded<T> {
    inner: T,
    shared: Arc<Shared>,
}

struct Shared {
    name: String,
    config: GuardConfig,
    clock: Clock,
    reads: Mutex<Breaker>,
    writes: Mutex<Breaker>,
    reads_begun: Mutex<Begun>,
    writes_begun: Mutex<Begun>,
    listener: Mutex<Option<Weak<dyn TierEvents>>>,
    told: Mutex<Told>,
}

/// What the listener knows of the entire tier.
#[derive(Debug, Default)]
struct Told {
    is_off: bool,
    /// Whether some thread is telling it more.
    is_telling: bool,
}

/// The breaker.
#[derive(Clone, Copy, Debug)]
enum Side {
    /// Reads: if it is open, the entire tier is off.
    Tier,
    /// Writes only.
    Writes,
}

#[derive(Debug, Default)]
struct Breaker {
    failures: u32,
    /// Off until then; `None` = on.
    off_until: Option<Instant>,
    /// The pause that led to `off_until`.
    pause: Duration,
    /// The deadline of the trial in flight: one that has not completed by then has failed.
    trial_until: Option<Instant>,
}

/// Operations that have not ended, and have not hung, by their deadlines. Trials are not among them: the breaker watches
/// them.
#[derive(Debug, Default)]
struct Begun {
    ever: u64,
    until: BTreeSet<(Instant, u64)>,
}

/// One of them.
type BegunOne = (Instant, u64);

impl Begun {
    fn begin(&mut self, deadline: Instant) -> BegunOne {
        self.ever += 1;
        self.until.insert((deadline, self.ever));
        (deadline, self.ever)
    }

    /// Takes the first operation that has hung.
    fn take_hung(&mut self, now: Instant) -> Option<BegunOne> {
        let first = self.until.first().copied();
        let first = first.filter(|(deadline, _)| now.saturating_duration_since(*deadline) >= OVERDUE);
        first.inspect(|first| {
            self.until.remove(first);
        })
    }
}

/// A breaker's answer to an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pass {
    On,
    Trial,
    Off,
}

impl Breaker {
    fn is_off(&self, now: Instant) -> bool {
        self.off_until.is_some_and(|until| now < until)
    }

    /// Decides whether an operation may proceed. After a pause only one may, as a trial.
    fn ask(&mut self, now: Instant, deadline: Instant, config: &GuardConfig) -> Pass {
        match self.off_until {
            None => Pass::On,
            Some(until) if now < until => Pass::Off,
            Some(_) => match self.trial_until {
                Some(end) if now < end => Pass::Off,
                Some(_) => {
                    self.go_off(now, config);
                    Pass::Off
                }
                None => {
                    self.trial_until = Some(deadline);
                    Pass::Trial
                }
            },
        }
    }

    fn go_off(&mut self, now: Instant, config: &GuardConfig) {
        self.pause = self.pause.saturating_mul(2).clamp(config.off_min, config.off_max);
        self.off_until = Some(now + self.pause);
        self.trial_until = None;
    }
}

/// Splits a batch into the items that go to the tier and those that the breaker holds back.
fn let_through<T>(mut batch: Vec<T>, pass: Pass) -> (Vec<T>, Vec<T>) {
    let through = match pass {
        Pass::On => batch.len(),
        Pass::Trial => batch.len().min(1),
        Pass::Off => 0,
    };
    let held_back = batch.split_off(through);
    (batch, held_back)
}

/// The meaning of an outcome for the tier.
enum Verdict<'a> {
    Good,
    Nothing,
    Bad(&'a Error),
}

/// Judges an outcome. `did_io` tells whether the device was used for a successful one.
fn judge<T>(outcome: &Result<T>, did_io: impl Fn(&T) -> bool) -> Verdict<'_> {
    use ErrorKind::{Busy, Config, Corrupt, NotFound};
    match outcome {
        Ok(value) if did_io(value) => Verdict::Good,
        Ok(_) => Verdict::Nothing,
        Err(error) if matches!(error.kind(), NotFound | Corrupt | Config | Busy) => Verdict::Nothing,
        Err(error) => Verdict::Bad(error),
    }
}

impl Shared {
    const fn breaker(&self, side: Side) -> &Mutex<Breaker> {
        match side {
            Side::Tier => &self.reads,
            Side::Writes => &self.writes,
        }
    }

    const fn begun(&self, side: Side) -> &Mutex<Begun> {
        match side {
            Side::Tier => &self.reads_begun,
            Side::Writes => &self.writes_begun,
        }
    }

    /// Counts the operations that have hung by now.
    fn note_hung(&self) {
        for side in [Side::Tier, Side::Writes] {
            let now = (self.clock)();
            let next = || self.begun(side).lock().take_hung(now);
            while let Some((deadline, _)) = next() {
                let error = Error::new(ErrorKind::Timeout, "an operation has hung")
                    .with("late_ms", (now - deadline).as_millis());
                self.note(side, Pass::On, Verdict::Bad(&error));
            }
        }
    }

    fn ask(&self, side: Side, deadline: Instant) -> Pass {
        self.breaker(side).lock().ask((self.clock)(), deadline, &self.config)
    }

    fn off(&self) -> Error {
        Error::new(ErrorKind::Unavailable, "the tier keeps failing and is switched off for a while")
            .with("tier", &self.name)
    }

    /// Records the end of an operation, and notifies the listener if the entire tier went off or on.
    fn note(&self, side: Side, pass: Pass, verdict: Verdict<'_>) {
        if self.judge(side, pass, verdict) && matches!(side, Side::Tier) {
            self.tell();
        }
    }

    /// Tells the listener whether the entire tier is off, until it knows how it is now. One thread does so at a time, so
    /// that what it hears last is so, and no lock is held meanwhile.
    fn tell(&self) {
        loop {
            // The clone releases the lock before the call.
            let Some(listener) = self.listener.lock().as_ref().and_then(Weak::upgrade) else { return };
            let is_off = self.reads.lock().off_until.is_some();
            {
                let mut told = self.told.lock();
                if told.is_telling || told.is_off == is_off {
                    return;
                }
                *told = Told { is_off, is_telling: true };
            }
            if is_off {
                listener.went_down()
            } else {
                listener.came_back()
            }
            self.told.lock().is_telling = false;
        }
    }

    /// Returns a `Done` that records the end of an operation, and then passes it on.
    fn watched<T: 'static>(
        self: &Arc<Self>,
        side: Side,
        pass: Pass,
        deadline: Instant,
        did_io: fn(&T) -> bool,
        done: Done<T>,
    ) -> Done<T> {
        let shared = Arc::clone(self);
        let begun = (pass == Pass::On).then(|| self.begun(side).lock().begin(deadline));
        Box::new(move |outcome| {
            let had_hung = begun.is_some_and(|one| !shared.begun(side).lock().until.remove(&one));
            match judge(&outcome, did_io) {
                Verdict::Bad(_) if had_hung => {}
                verdict => shared.note(side, pass, verdict),
            }
            done(outcome);
        })
    }

    /// Returns whether the breaker has opened or closed.
    fn judge(&self, side: Side, pass: Pass, verdict: Verdict<'_>) -> bool {
        let mut breaker = self.breaker(side).lock();
        match verdict {
            Verdict::Nothing if pass == Pass::Trial => breaker.trial_until = None,
            Verdict::Nothing => {}
            Verdict::Good if pass == Pass::Trial => {
                *breaker = Breaker::default();
                tracing::warn!(tier = %self.name, ?side, "circuit breaker closed: the tier responds again");
                return true;
            }
            // A late success from before the pause must not end it.
            Verdict::Good if breaker.off_until.is_some() => {}
            Verdict::Good => breaker.failures = 0,
            Verdict::Bad(error) => return self.note_failure(side, pass, error, &mut breaker),
        }
        false
    }

    fn note_failure(&self, side: Side, pass: Pass, error: &Error, breaker: &mut Breaker) -> bool {
        breaker.failures = breaker.failures.saturating_add(1);
        if pass == Pass::Trial {
            breaker.go_off((self.clock)(), &self.config);
            tracing::trace!(tier = %self.name, ?side, %error, "a trial failed");
        } else if breaker.off_until.is_none() && breaker.failures >= self.config.failures_max {
            breaker.go_off((self.clock)(), &self.config);
            let pause_ms = u64::try_from(breaker.pause.as_millis()).unwrap_or(u64::MAX);
            tracing::warn!(
                tier = %self.name, ?side, failures = breaker.failures, pause_ms, %error,
                "circuit breaker opened: the tier keeps failing"
            );
            return true;
        }
        false
    }
}

impl<T: Tier> Guarded<T> {
    /// Guards a tier, using the system's clock.
    pub fn new(inner: T, config: GuardConfig) -> Self {
        Self::with_clock(inner, config, Arc::new(Instant::now))
    }

    /// Guards a tier, using the caller's clock.
    pub fn with_clock(inner: T, config: GuardConfig, clock: Clock) -> Self {
        let (name, reads, writes) = (inner.name().to_owned(), Mutex::default(), Mutex::default());
        let (reads_begun, writes_begun) = (Mutex::default(), Mutex::default());
        let (listener, told) = (Mutex::default(), Mutex::default());
        let shared = Shared { name, config, clock, reads, writes, reads_begun, writes_begun, listener, told };
        Self { inner, shared: Arc::new(shared) }
    }

    /// Returns the guarded tier.
    pub const fn inner(&self) -> &T {
        &self.inner
    }

    /// Returns whether the entire tier is off now.
    pub fn is_off(&self) -> bool {
        self.shared.reads.lock().is_off((self.shared.clock)())
    }

    /// Uses the guard's own clock, like everything here.
    fn is_ahead(&self, deadline: Instant) -> bool {
        deadline > (self.shared.clock)()
    }

    /// Returns whether writes are off now, together with the tier or alone.
    pub fn writes_are_off(&self) -> bool {
        self.is_off() || self.shared.writes.lock().is_off((self.shared.clock)())
    }
}

impl<T: fmt::Debug> fmt::Debug for Guarded<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guarded")
            .field("inner", &self.inner)
            .field("reads", &self.shared.reads)
            .field("writes", &self.shared.writes)
            .finish_non_exhaustive()
    }
}

impl<T: Tier> Tier for Guarded<T> {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn open_namespace(&self, spec: &Arc<NamespaceSpec>, at_least: u32, deadline: Instant, done: Done<u32>) {
        self.inner.open_namespace(spec, at_least, deadline, done);
    }

    /// Never held back: old bytes must become unreachable in any state of the device.
    fn advance_epoch(&self, spec: &Arc<NamespaceSpec>, at_least: u32, deadline: Instant, done: Done<u32>) {
        self.inner.advance_epoch(spec, at_least, deadline, done);
    }

    fn close_namespace(&self, root: NamespaceId) {
        self.inner.close_namespace(root);
    }

    fn is_down(&self, key: &BlockKey) -> bool {
        self.is_off() || self.inner.is_down(key)
    }

    fn peek(&self, keys: &[BlockKey], out: &mut Vec<Presence>) {
        if self.is_off() {
            out.clear();
            out.resize(keys.len(), Presence::Absent);
        } else {
            self.inner.peek(keys, out);
        }
    }

    fn probe(&self, keys: Vec<BlockKey>, deadline: Instant, done: Done<usize>) {
        if self.is_off() {
            return done(Ok(0));
        }
        let (shared, in_time) = (Arc::clone(&self.shared), self.is_ahead(deadline));
        let watched = move |outcome: Result<usize>| {
            if in_time {
                shared.note(Side::Tier, Pass::On, judge(&outcome, |_| false));
            }
            done(outcome);
        };
        self.inner.probe(keys, deadline, Box::new(watched));
    }

    /// If a trial is due, the first block of a batch is the trial.
    fn read(&self, reads: Vec<ReadItem>, deadline: Instant) {
        if !self.is_ahead(deadline) || reads.is_empty() {
            return self.inner.read(reads, deadline);
        }
        let pass = self.shared.ask(Side::Tier, deadline);
        let (reads, held_back) = let_through(reads, pass);
        let watched = reads.into_iter().map(|read| {
            let done =
                self.shared.watched(Side::Tier, pass, deadline, |end| *end == Fetched::Whole, read.done);
            ReadItem { done, ..read }
        });
        let watched: Vec<ReadItem> = watched.collect();
        if !watched.is_empty() {
            self.inner.read(watched, deadline);
        }
        for read in held_back {
            let off = self.shared.off().with("key", read.key);
            read.end(Err(off));
        }
    }

    fn memory(&self) -> Result<Option<TierMemory>> {
        self.inner.memory()
    }

    /// Like `read`.
    fn lease(&self, leases: Vec<LeaseItem>, deadline: Instant) {
        if !self.is_ahead(deadline) || leases.is_empty() {
            return self.inner.lease(leases, deadline);
        }
        let pass = self.shared.ask(Side::Tier, deadline);
        let (leases, held_back) = let_through(leases, pass);
        let watched = leases.into_iter().map(|lease| {
            let done = self.shared.watched(Side::Tier, pass, deadline, Option::is_some, lease.done);
            LeaseItem { done, ..lease }
        });
        let watched: Vec<LeaseItem> = watched.collect();
        if !watched.is_empty() {
            self.inner.lease(watched, deadline);
        }
        for lease in held_back {
            let off = self.shared.off().with("key", lease.key);
            (lease.done)(Err(off));
        }
    }

    fn end_leases(&self, places: &[u64]) {
        self.inner.end_leases(places);
    }

    /// While the tier waits for a trial, a write may be the trial: otherwise a depot whose clients request only unknown
    /// blocks would never try.
    fn write(&self, writes: Vec<WriteItem>, deadline: Instant) {
        if !self.is_ahead(deadline) || writes.is_empty() {
            return self.inner.write(writes, deadline);
        }
        let (side, pass) = match self.shared.ask(Side::Tier, deadline) {
            Pass::On => (Side::Writes, self.shared.ask(Side::Writes, deadline)),
            pass => (Side::Tier, pass),
        };
        let (writes, held_back) = let_through(writes, pass);
        let watched = writes.into_iter().map(|write| {
            let done = self.shared.watched(side, pass, deadline, |end| *end == Written::New, write.done);
            WriteItem { done, ..write }
        });
        let watched: Vec<WriteItem> = watched.collect();
        if !watched.is_empty() {
            self.inner.write(watched, deadline);
        }
        for write in held_back {
            let off = self.shared.off().with("key", write.key);
            write.end(Err(off));
        }
    }

    fn remove(&self, keys: Vec<BlockKey>, done: Done<()>) {
        self.inner.remove(keys, done);
    }

    fn part(&self, key: &BlockKey) -> usize {
        self.inner.part(key)
    }

    fn touch(&self, keys: &[BlockKey]) {
        if !self.is_off() {
            self.inner.touch(keys);
        }
    }

    fn attach(&self, events: Weak<dyn TierEvents>) {
        *self.shared.listener.lock() = Some(Weak::clone(&events));
        // It may have gone off before.
        self.shared.tell();
        self.inner.attach(events);
    }

    fn usage(&self) -> TierUsage {
        self.inner.usage()
    }

    fn servers(&self) -> Vec<TierServer> {
        self.inner.servers()
    }

    fn write_window_bytes(&self) -> u64 {
        self.inner.write_window_bytes()
    }

    fn engine(&self) -> &'static str {
        self.inner.engine()
    }

    fn figures(&self) -> Vec<(&'static str, u64)> {
        self.inner.figures()
    }

    /// Also lists the blocks of a tier that is switched off.
    fn keys(&self, namespace: NamespaceId) -> Vec<BlockKey> {
        self.inner.keys(namespace)
    }

    /// Returns nothing while the tier is switched off, because nothing can be read then.
    fn keys_from(&self, namespace: NamespaceId, from: u64) -> (Vec<BlockKey>, Option<u64>) {
        if self.is_off() { (Vec::new(), None) } else { self.inner.keys_from(namespace, from) }
    }

    fn tick(&self) {
        self.shared.note_hung();
        self.inner.tick();
    }

    fn drain(&self, deadline: Instant) -> bool {
        self.inner.drain(deadline)
    }
}
