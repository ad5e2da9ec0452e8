//! One epoch for pool and tiers: the highest that any of them knows.
//!
//! Every tier stores its own epoch, and other depots may advance shared tiers. The pool follows the highest epoch, and
//! lagging tiers are notified. A background thread checks periodically: it opens namespaces that a tier could not open,
//! notifies a tier that came back, and follows another depot's reset.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::RecvTimeoutError;
use hashbrown::HashSet;
use kvdepot_core::limits::NAMESPACE_OPEN_MS;
use kvdepot_core::machine::{Machine, NamespaceHandle, Opened, Owner, Reply, Request};
use kvdepot_core::{Error, ErrorKind, NamespaceId, NamespaceSpec, Result};
use kvdepot_tier::Done;

use crate::locate::timed_out;
use crate::openings::Opening;
use crate::runner::Runner;

/// Interval of checks of all namespaces: how long another depot's reset may go unnoticed.
const LOOK_INTERVAL: Duration = Duration::from_secs(30);
/// Interval of attempts to open a namespace in a tier that could not.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Number of rounds through the tiers. A further round is only needed if a tier was advanced meanwhile.
const ROUNDS_MAX: usize = 4;

/// How late after its deadline a tier's answer is still accepted.
const ANSWER_GRACE: Duration = Duration::from_secs(1);
/// Within this time a client is told whether its namespace is open, whatever tiers do.
pub(crate) const OPEN_ANSWER: Duration = Duration::from_millis(NAMESPACE_OPEN_MS + 500);

/// Number of namespaces that tiers are asked about at a time: all classes of values.
const TOGETHER_MAX: usize = 64;

/// The owner of the depot's own requests, which leases nothing.
const NOBODY: Owner = 0;

/// How long tiers are asked and waited for.
#[derive(Clone, Copy)]
struct Patience {
    /// The deadline of their work.
    deadline: Instant,
    /// Until when their answers are accepted.
    end: Instant,
}

impl Patience {
    /// As long as for any other operation.
    fn of_operation(runner: &Runner) -> Self {
        let deadline = runner.config.deadline();
        Self { deadline, end: deadline + ANSWER_GRACE }
    }

    /// While a client waits for a namespace to be opened: whatever a tier does, the client has its answer before it takes
    /// the depot for lost (P2, P6).
    fn of_opening(runner: &Runner) -> Self {
        let (now, whole) = (Instant::now(), Self::of_operation(runner));
        let deadline = whole.deadline.min(now + Duration::from_millis(NAMESPACE_OPEN_MS));
        Self { deadline, end: whole.end.min(now + OPEN_ANSWER) }
    }

    /// No longer than a caller waits, if it says so.
    fn within(self, most: Option<Duration>) -> Self {
        let Some(by) = most.map(|most| Instant::now() + most) else { return self };
        Self { deadline: self.deadline.min(by), end: self.end.min(by) }
    }
}

/// The tiers' answer about a namespace.
struct Told {
    epoch: u32,
    /// Why a tier did not store it.
    error: Option<Error>,
}

/// A namespace that the tiers are notified about.
struct Question {
    spec: Arc<NamespaceSpec>,
    told: Told,
    /// The last answer of each tier.
    known: Vec<Option<u32>>,
    failed: Vec<bool>,
}

impl Question {
    fn new(spec: &Arc<NamespaceSpec>, at_least: u32, tiers: usize) -> Self {
        let told = Told { epoch: at_least, error: None };
        Self { spec: Arc::clone(spec), told, known: vec![None; tiers], failed: vec![false; tiers] }
    }

    /// Returns whether a tier should be asked (again).
    fn is_open(&self, tier: usize) -> bool {
        !self.failed[tier] && self.known[tier] != Some(self.told.epoch)
    }

    /// Returns the final answer. A tier that still lags after all rounds has not stored the epoch.
    fn settled(mut self) -> Told {
        if let Some(behind) = (0..self.known.len()).find(|&tier| self.is_open(tier)) {
            let error =
                Error::new(ErrorKind::Busy, "tiers changed a namespace's epoch while it was being stored");
            self.told.error.get_or_insert_with(|| error.with("tier_number", behind));
        }
        self.told
    }

    fn answered(&mut self, tier: usize, name: &str, outcome: Result<u32>) {
        match outcome {
            Ok(epoch) => {
                self.known[tier] = Some(epoch);
                self.told.epoch = self.told.epoch.max(epoch);
            }
            Err(error) => {
                self.failed[tier] = true;
                self.told.error = Some(error.with("tier", name));
            }
        }
    }
}

/// What becomes of a new namespace about which one of several tiers does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unanswered {
    /// It is not opened: for values, of which a tier may have earlier ones, and for other depots, which name its epoch.
    Refused,
    /// It is opened provisionally: until all tiers have answered, it has the pool only. Refused if the pool keeps nothing.
    Provisional,
}

/// Opens namespaces in the depot and all tiers. Returns one outcome for each.
///
/// A tier that fails may know of a reset that the others missed, so their blocks must not be served without its answer.
/// The pool holds nothing from before. A single tier is left for later, and the namespace has the epoch of its answer if
/// no reset was missed. Of several tiers, none is used until all have answered.
pub(crate) fn open(
    runner: &Arc<Runner>,
    user: Owner,
    specs: &[Arc<NamespaceSpec>],
    unanswered: Unanswered,
    most: Option<Duration>,
) -> Vec<Result<Opened>> {
    let _openings = begin_openings(runner, specs.iter());
    let patience = Patience::of_opening(runner).within(most);
    let told = tell(runner, specs.iter().map(|spec| (spec, 0)), patience);
    specs.iter().zip(told).map(|(spec, told)| open_told(runner, user, spec, told, unanswered)).collect()
}

/// Keeps tiers from closing the namespaces until the returned values are dropped.
fn begin_openings<'a, 'b>(
    runner: &'a Runner,
    specs: impl Iterator<Item = &'b Arc<NamespaceSpec>>,
) -> Vec<Opening<'a>> {
    specs.map(|spec| runner.openings.begin(&runner.locator, spec.root())).collect()
}

fn open_told(
    runner: &Arc<Runner>,
    user: Owner,
    spec: &Arc<NamespaceSpec>,
    told: Told,
    unanswered: Unanswered,
) -> Result<Opened> {
    let (spec, epoch) = (Arc::clone(spec), told.epoch);
    let request = match &told.error {
        None => Request::OpenNamespace { spec, epoch },
        Some(error) if !is_passing(error) => return Err(error.clone()),
        Some(error) if runner.locator.tiers.len() == 1 => {
            tracing::warn!(
                %error, namespace = %spec.root(),
                "a tier cannot open a namespace: the namespace is used without that tier, which is retried"
            );
            Request::OpenNamespace { spec, epoch }
        }
        Some(error) if unanswered == Unanswered::Provisional && runner.look(Machine::keeps) => {
            tracing::warn!(
                %error, namespace = %spec.root(),
                "a tier cannot open a namespace: until it can, the namespace is kept in the pool only, and no tier is used \
                 for it"
            );
            Request::OpenProvisionally { spec, epoch, provisional: new_provisional() }
        }
        Some(error) => return Err(error.clone()),
    };
    let opened = namespace(runner, user, request)?;
    // Its remains from before it was forgotten may be ahead of the tiers.
    if told.error.is_some() || opened.epoch > told.epoch {
        runner.looks.soon(opened.handle);
    }
    Ok(opened)
}

/// Opens namespaces of which the pool may hold earlier blocks, at no less than these epochs. Returns one outcome for
/// each. A tier that fails may know of a reset, so a namespace is not opened unless every tier answers. Its epoch still
/// holds when it is opened later, because possibly nothing else knows of it (P1).
///
/// No client waits for it, and a tier that is given up costs these blocks: it may take as long as any operation.
pub(crate) fn reopen(runner: &Arc<Runner>, namespaces: &[(String, u32)]) -> Vec<Result<Opened>> {
    let specs: Vec<Result<Arc<NamespaceSpec>>> =
        namespaces.iter().map(|(text, _)| NamespaceSpec::from_canonical(text).map(Arc::new)).collect();
    let _openings = begin_openings(runner, specs.iter().flatten());
    let known =
        specs.iter().zip(namespaces).filter_map(|(spec, (_, epoch))| Some((spec.as_ref().ok()?, *epoch)));
    let mut told = tell(runner, known, Patience::of_operation(runner)).into_iter();
    let reopened = specs.into_iter().map(|spec| {
        let spec = spec?;
        let Told { epoch, error } = told.next().expect("one answer for each namespace");
        if let Some(error) = error {
            runner.floors.raise(&spec, epoch, runner.ledger.as_ref());
            return Err(error);
        }
        namespace(runner, NOBODY, Request::OpenNamespace { spec, epoch })
    });
    reopened.collect()
}

/// Returns whether a failure may pass without intervention.
fn is_passing(error: &Error) -> bool {
    !matches!(error.kind(), ErrorKind::Config | ErrorKind::Version | ErrorKind::Unsupported)
}

/// Opens namespaces in all tiers until these agree on an epoch for each, no lower than the given one and its floor.
///
/// All rounds share the time: a tier that hangs costs one wait.
fn tell<'a>(
    runner: &Runner,
    namespaces: impl Iterator<Item = (&'a Arc<NamespaceSpec>, u32)>,
    patience: Patience,
) -> Vec<Told> {
    let tiers = &runner.locator.tiers;
    let mut questions: Vec<Question> = namespaces
        .map(|(spec, at_least)| Question::new(spec, at_least.max(runner.floors.of(spec.root())), tiers.len()))
        .collect();
    for _ in 0..ROUNDS_MAX {
        let asked: Vec<(usize, usize)> = (0..questions.len())
            .flat_map(|question| (0..tiers.len()).map(move |tier| (question, tier)))
            .filter(|&(question, tier)| questions[question].is_open(tier))
            .collect();
        if asked.is_empty() {
            break;
        }
        let ask = |(question, tier): (usize, usize), done| {
            let Question { spec, told, .. } = &questions[question];
            tiers[tier].open_namespace(spec, told.epoch, patience.deadline, done);
        };
        let answers = wait_for_all(&asked, patience, ask);
        for ((question, tier), outcome) in asked.into_iter().zip(answers) {
            questions[question].answered(tier, tiers[tier].name(), outcome);
        }
    }
    let settled = questions.into_iter().map(|question| {
        let root = question.spec.root();
        let told = question.settled();
        if told.error.is_none() {
            runner.floors.stored(root, told.epoch, runner.ledger.as_ref());
        }
        told
    });
    settled.collect()
}

/// Like [`tell`], for one namespace.
fn tell_one(runner: &Runner, spec: &Arc<NamespaceSpec>, at_least: u32, most: Option<Duration>) -> Told {
    tell(runner, std::iter::once((spec, at_least)), Patience::of_operation(runner).within(most))
        .pop()
        .expect("one namespace, one answer")
}

/// Begins one call for each item and waits for all of them, as long as patience lasts. Returns one outcome for each, in
/// their order.
fn wait_for_all<I: Copy>(items: &[I], patience: Patience, begin: impl Fn(I, Done<u32>)) -> Vec<Result<u32>> {
    let (send, receive) = crossbeam_channel::unbounded();
    for (index, &item) in items.iter().enumerate() {
        let send = send.clone();
        begin(item, Box::new(move |outcome| drop(send.send((index, outcome)))));
    }
    drop(send);
    let mut outcomes: Vec<Option<Result<u32>>> = vec![None; items.len()];
    for _ in items {
        match receive.recv_deadline(patience.end) {
            Ok((index, outcome)) => outcomes[index] = Some(outcome),
            Err(_) => break,
        }
    }
    let silent = || Err(timed_out("a tier did not answer about a namespace"));
    outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(silent)).collect()
}

/// Advances namespaces to epochs that no tier had, pool first. Returns one outcome for each.
pub(crate) fn advance(runner: &Arc<Runner>, handles: &[NamespaceHandle]) -> Vec<Result<Opened>> {
    let tiers = &runner.locator.tiers;
    let _advance = runner.advances.begin(handles);
    // From here on no old block is served from memory or written.
    let begun: Vec<Result<Opened>> =
        handles.iter().map(|&namespace| begin_advance(runner, namespace)).collect();
    let _openings = begin_openings(runner, begun.iter().flatten().map(|begun| &begun.spec));
    let asked: Vec<(&Opened, usize)> =
        begun.iter().flatten().flat_map(|begun| (0..tiers.len()).map(move |tier| (begun, tier))).collect();
    let patience = Patience::of_operation(runner);
    let ask = |(begun, tier): (&Opened, usize), done| {
        tiers[tier].advance_epoch(&begun.spec, begun.epoch, patience.deadline, done);
    };
    let mut answers = wait_for_all(&asked, patience, ask).into_iter();
    // A tier that cannot be reached must not keep the others from learning it.
    let moved: Vec<Result<(Opened, Option<Error>)>> = begun
        .iter()
        .zip(handles)
        .map(|(begun, &handle)| {
            let begun = begun.as_ref().map_err(Clone::clone)?;
            let mut told = Question::new(&begun.spec, begun.epoch, tiers.len());
            for (tier, answer) in answers.by_ref().take(tiers.len()).enumerate() {
                told.answered(tier, tiers[tier].name(), answer);
            }
            let Told { epoch, error } = told.told;
            // With several tiers, those asked before a tier that is ahead have stored another epoch.
            let stored = error.is_none() && tiers.len() <= 1;
            let ended = namespace(runner, NOBODY, Request::EndAdvance { namespace: handle, epoch, stored })?;
            Ok((ended, error))
        })
        .collect();
    agree(runner, moved)
}

fn begin_advance(runner: &Arc<Runner>, handle: NamespaceHandle) -> Result<Opened> {
    namespace(runner, NOBODY, Request::BeginAdvance { namespace: handle, provisional: new_provisional() })
}

/// Returns an id that no epoch has.
fn new_provisional() -> NamespaceId {
    NamespaceId(kvdepot_io::random::id())
}

/// After an advance: tells tiers with a lower epoch about the highest one.
fn agree(runner: &Arc<Runner>, moved: Vec<Result<(Opened, Option<Error>)>>) -> Vec<Result<Opened>> {
    let ended = moved.iter().flatten().filter(|(_, error)| error.is_none());
    let mut told = match runner.locator.tiers.len() {
        0 | 1 => Vec::new(),
        _ => tell(runner, ended.map(|(ended, _)| (&ended.spec, ended.epoch)), Patience::of_operation(runner)),
    }
    .into_iter();
    let outcomes = moved.into_iter().map(|moved| match moved? {
        (ended, Some(error)) => {
            runner.looks.soon(ended.handle);
            log_reset(&ended, Err(&error));
            Err(error)
        }
        (ended, None) => {
            let settled = match told.next() {
                Some(told) => settle(runner, ended.handle, told),
                None => Ok(ended.clone()),
            };
            log_reset(settled.as_ref().unwrap_or(&ended), settled.as_ref().map(drop));
            settled
        }
    });
    outcomes.collect()
}

fn log_reset(namespace: &Opened, outcome: std::result::Result<(), &Error>) {
    let (root, epoch) = (namespace.spec.root(), namespace.epoch);
    match outcome {
        Ok(()) => tracing::info!(namespace = %root, epoch, "a namespace was reset"),
        Err(error) => {
            tracing::warn!(namespace = %root, epoch, %error, "a namespace was reset, but not in every tier");
        }
    }
}

/// Follows the tiers' answers about an epoch. Fails while one of them has not stored it.
fn settle(runner: &Arc<Runner>, handle: NamespaceHandle, told: Told) -> Result<Opened> {
    let opened = follow(runner, handle, told.epoch, told.error.is_none())?;
    match told.error {
        None => Ok(opened),
        Some(error) => {
            runner.looks.soon(handle);
            Err(error)
        }
    }
}

/// Advances a namespace to at least this epoch, pool first. A tier that does not answer within `most` is told again in the
/// background.
pub(crate) fn raise(
    runner: &Arc<Runner>,
    known: &Opened,
    epoch: u32,
    most: Option<Duration>,
) -> Result<Opened> {
    // Until the tiers have it, it must not be forgotten here.
    let opened = follow(runner, known.handle, epoch, false)?;
    let _openings = begin_openings(runner, std::iter::once(&known.spec));
    let told = tell_one(runner, &known.spec, opened.epoch, most);
    settle(runner, known.handle, told)
}

/// Advances a known namespace to at least this epoch. `stored` says whether all tiers have stored it.
fn follow(runner: &Arc<Runner>, handle: NamespaceHandle, epoch: u32, stored: bool) -> Result<Opened> {
    namespace(runner, NOBODY, Request::FollowEpoch { namespace: handle, epoch, stored })
}

/// Returns the machine's reply to a request about a namespace.
pub(crate) fn namespace(runner: &Arc<Runner>, owner: Owner, request: Request) -> Result<Opened> {
    match runner.ask(owner, request)? {
        Reply::Namespace(opened) => Ok(opened),
        _ => Err(Error::new(ErrorKind::Protocol, "the machine gave another reply")),
    }
}

/// Asks the tiers about namespaces and follows their answers. Returns the namespaces for which a tier failed.
fn look(runner: &Arc<Runner>, handles: &[NamespaceHandle]) -> Vec<NamespaceHandle> {
    let mark = runner.advances.mark();
    let known: Vec<Opened> =
        handles.iter().filter_map(|&handle| runner.locator.directory.get(handle).ok()).collect();
    let _openings = begin_openings(runner, known.iter().map(|known| &known.spec));
    // In the background a tier that is merely slow gets the time that it had not when a client waited.
    let known_epochs = known.iter().map(|known| (&known.spec, known.epoch));
    let told = tell(runner, known_epochs, Patience::of_operation(runner));
    let mut failed = Vec::new();
    for (known, told) in known.iter().zip(told) {
        // An advance of this depot's own is logged where it is made.
        if told.epoch > known.epoch && !runner.advances.any_since(mark, known.handle) {
            tracing::info!(
                namespace = %known.spec.root(), epoch = told.epoch, "another depot reset a namespace"
            );
        }
        if let Some(error) = &told.error {
            tracing::debug!(%error, namespace = %known.spec.root(), "a tier cannot open a namespace yet");
            failed.push(known.handle);
        }
        // A tier that merely does not answer now has stored the earlier epoch.
        if told.error.is_none() || told.epoch > known.epoch {
            let followed = follow(runner, known.handle, told.epoch, told.error.is_none());
            if !known.has_epoch_id && followed.is_ok_and(|now| now.has_epoch_id) {
                tracing::info!(namespace = %known.spec.root(), "all tiers have answered about a namespace, and are used");
            }
        }
    }
    failed
}

/// Checks requested namespaces immediately, failed ones a second later, and all of them periodically.
pub(crate) fn watch(runner: &Arc<Runner>) {
    let mut failed: HashSet<NamespaceHandle> = HashSet::new();
    let (mut all_at, mut again_at) = (Instant::now() + LOOK_INTERVAL, Instant::now() + RETRY_INTERVAL);
    while !runner.stopping.load(Ordering::Acquire) {
        let until = if failed.is_empty() { all_at } else { again_at.min(all_at) };
        let handles: Vec<NamespaceHandle> = match runner.looks.next(until) {
            Ok(Some(handle)) => vec![handle],
            Ok(None) | Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) if Instant::now() >= all_at => {
                all_at = Instant::now() + LOOK_INTERVAL;
                runner.locator.directory.handles()
            }
            Err(RecvTimeoutError::Timeout) => failed.iter().copied().collect(),
        };
        for handles in handles.chunks(TOGETHER_MAX) {
            if runner.stopping.load(Ordering::Acquire) {
                return;
            }
            let still_failing = look(runner, handles);
            failed.retain(|handle| !handles.contains(handle));
            failed.extend(still_failing);
        }
        again_at = Instant::now() + RETRY_INTERVAL;
    }
}
