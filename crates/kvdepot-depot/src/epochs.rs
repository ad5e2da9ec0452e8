//! One epoch over pool and tiers: the highest that any of them knows.
//!
//! Every tier stores an epoch of its own, and other depots may move those that are shared. The pool follows the highest,
//! and tiers that lag are told. A thread looks again now and then: it opens what a tier could not open, tells a tier that
//! came back, and follows a reset of another depot.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::RecvTimeoutError;
use hashbrown::HashSet;
use kvdepot_core::machine::{NamespaceHandle, Opened, Owner, Reply, Request};
use kvdepot_core::{Error, ErrorKind, NamespaceId, NamespaceSpec, Result};

use crate::runner::{Runner, random};

/// Between two looks at all namespaces: how long another depot's reset may go unnoticed.
const LOOK_INTERVAL: Duration = Duration::from_secs(30);
/// Between two tries to open a namespace in a tier that could not.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Rounds through the tiers; each one is needed only if a tier was moved on meanwhile.
const ROUNDS_MAX: usize = 4;

/// Namespaces that tiers are asked about at a time: all classes of values.
const TOGETHER_MAX: usize = 64;

/// Requests of the depot itself, which leases nothing.
const NOBODY: Owner = 0;

/// What the tiers answered.
struct Told {
    epoch: u32,
    /// Why a tier did not store it.
    error: Option<Error>,
}

/// Makes a namespace known to the depot and all tiers.
///
/// A tier that fails may know of a reset that the others missed, so that their blocks are not to be served without its
/// answer. Only a tier that is alone can be left for later: the pool holds nothing from before.
pub(crate) fn open(runner: &Arc<Runner>, user: Owner, spec: NamespaceSpec) -> Result<Opened> {
    let _opening = runner.openings.begin(&runner.locator, spec.root());
    let told = tell(runner, &spec, 0);
    match &told.error {
        Some(error) if runner.locator.tiers.len() == 1 && is_passing(error) => tracing::warn!(
            %error, namespace = %spec.root(),
            "a tier cannot open a namespace: it is used without that tier, which is tried again"
        ),
        Some(error) => return Err(error.clone()),
        None => {}
    }
    let request = Request::OpenNamespace { spec: Arc::new(spec), epoch: told.epoch };
    let opened = namespace(runner, user, request)?;
    // What is left of it from before it was forgotten may be ahead of what the tiers said.
    if told.error.is_some() || opened.epoch > told.epoch {
        runner.looks.soon(opened.handle);
    }
    Ok(opened)
}

/// Makes a namespace known of which the pool may hold blocks from before: not without the answer of every tier, because one
/// that fails may know of a reset.
pub(crate) fn reopen(runner: &Arc<Runner>, spec: &Arc<NamespaceSpec>, epoch: u32) -> Result<Opened> {
    let _opening = runner.openings.begin(&runner.locator, spec.root());
    let told = tell(runner, spec, epoch);
    match told.error {
        None => {
            let request = Request::OpenNamespace { spec: Arc::clone(spec), epoch: told.epoch };
            namespace(runner, NOBODY, request)
        }
        Some(error) => Err(error),
    }
}

/// Whether a failure may end by itself; the others are for people to mend.
fn is_passing(error: &Error) -> bool {
    !matches!(error.kind(), ErrorKind::Config | ErrorKind::Version | ErrorKind::Unsupported)
}

/// Opens a namespace in all tiers until they agree on an epoch that is at least `at_least`.
fn tell(runner: &Arc<Runner>, spec: &NamespaceSpec, at_least: u32) -> Told {
    let mut told = Told { epoch: at_least, error: None };
    let mut known: Vec<Option<u32>> = vec![None; runner.locator.tiers.len()];
    let mut failed = vec![false; runner.locator.tiers.len()];
    for _ in 0..ROUNDS_MAX {
        for (index, tier) in runner.locator.tiers.iter().enumerate() {
            if failed[index] || known[index] == Some(told.epoch) {
                continue;
            }
            match tier.open_namespace(spec, told.epoch) {
                Ok(epoch) => {
                    known[index] = Some(epoch);
                    told.epoch = told.epoch.max(epoch);
                }
                Err(error) => {
                    failed[index] = true;
                    told.error = Some(error.with("tier", tier.name()));
                }
            }
        }
        if known.iter().zip(&failed).all(|(known, failed)| *failed || *known == Some(told.epoch)) {
            break;
        }
    }
    told
}

/// Moves a namespace to an epoch that no tier had, pool first.
pub(crate) fn advance(runner: &Arc<Runner>, handle: NamespaceHandle) -> Result<Opened> {
    // From here on nothing old is served from memory, and nothing old is written any more.
    let request = Request::BeginAdvance { namespace: handle, provisional: random_id() };
    let begun = namespace(runner, NOBODY, request)?;
    let (spec, mut epoch) = (begun.spec, begun.epoch);
    let _opening = runner.openings.begin(&runner.locator, spec.root());
    let mut error = None;
    for tier in &runner.locator.tiers {
        // A tier that cannot be told must not keep the others from it.
        match tier.advance_epoch(&spec, epoch) {
            Ok(newer) => epoch = newer.max(epoch),
            Err(e) => error = Some(e.with("tier", tier.name())),
        }
    }
    // Of several, those that were asked before a tier that is ahead have stored another epoch.
    let stored = error.is_none() && runner.locator.tiers.len() <= 1;
    let ended = namespace(runner, NOBODY, Request::EndAdvance { namespace: handle, epoch, stored })?;
    if let Some(error) = error {
        runner.looks.soon(handle);
        return Err(error);
    }
    if stored {
        return Ok(ended);
    }
    let told = tell(runner, &spec, epoch);
    let opened = follow(runner, handle, told.epoch, told.error.is_none())?;
    match told.error {
        None => Ok(opened),
        Some(error) => {
            runner.looks.soon(handle);
            Err(error)
        }
    }
}

/// Moves a namespace to at least this epoch, pool first.
pub(crate) fn raise(runner: &Arc<Runner>, known: &Opened, epoch: u32) -> Result<Opened> {
    // Until the tiers have it, it must not be forgotten here.
    let opened = follow(runner, known.handle, epoch, false)?;
    let _opening = runner.openings.begin(&runner.locator, known.spec.root());
    let told = tell(runner, &known.spec, opened.epoch);
    let opened = follow(runner, known.handle, told.epoch, told.error.is_none())?;
    match told.error {
        None => Ok(opened),
        Some(error) => {
            runner.looks.soon(opened.handle);
            Err(error)
        }
    }
}

/// Moves a namespace that is known to at least this epoch, which all tiers have `stored` or not.
fn follow(runner: &Arc<Runner>, handle: NamespaceHandle, epoch: u32, stored: bool) -> Result<Opened> {
    namespace(runner, NOBODY, Request::FollowEpoch { namespace: handle, epoch, stored })
}

/// What the machine says to a request about a namespace.
pub(crate) fn namespace(runner: &Arc<Runner>, owner: Owner, request: Request) -> Result<Opened> {
    match runner.ask(owner, request)? {
        Reply::Namespace(opened) => Ok(opened),
        _ => Err(Error::new(ErrorKind::Protocol, "the machine gave another reply")),
    }
}

/// An id that no epoch of any namespace has.
fn random_id() -> NamespaceId {
    let mut id = [0; 16];
    id[..8].copy_from_slice(&random().to_le_bytes());
    id[8..].copy_from_slice(&random().to_le_bytes());
    NamespaceId(id)
}

/// Asks the tiers about a namespace and follows what they say; `false` if one of them failed.
fn look(runner: &Arc<Runner>, handle: NamespaceHandle) -> bool {
    let Ok(known) = runner.locator.directory.get(handle) else { return true };
    let (spec, epoch) = (known.spec, known.epoch);
    let _opening = runner.openings.begin(&runner.locator, spec.root());
    let told = tell(runner, &spec, epoch);
    if told.epoch > epoch {
        tracing::info!(namespace = %spec.root(), epoch = told.epoch, "another depot reset a namespace");
    }
    if let Some(error) = &told.error {
        tracing::debug!(%error, namespace = %spec.root(), "a tier cannot open a namespace yet");
    }
    // A tier that only does not answer now has stored what it was told before.
    if told.error.is_none() || told.epoch > epoch {
        let _ = follow(runner, handle, told.epoch, told.error.is_none());
    }
    told.error.is_none()
}

/// Looks at what is asked for at once, at what failed a second later, and at everything now and then.
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
            let answered = together(handles, |&handle| look(runner, handle));
            for (&handle, answered) in handles.iter().zip(answered) {
                if answered {
                    failed.remove(&handle);
                } else {
                    failed.insert(handle);
                }
            }
        }
        again_at = Instant::now() + RETRY_INTERVAL;
    }
}

/// Does something that may wait for tiers for each of many namespaces, at most `TOGETHER_MAX` at a time. One outcome each,
/// in their order.
pub(crate) fn together<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    if let [item] = items {
        return vec![work(item)];
    }
    let mut outcomes = Vec::with_capacity(items.len());
    for items in items.chunks(TOGETHER_MAX) {
        std::thread::scope(|scope| {
            let work = &work;
            let begun: Vec<_> = items
                .iter()
                .map(|item| {
                    let thread = std::thread::Builder::new().name("kvdepot-open".to_owned());
                    thread.spawn_scoped(scope, move || work(item))
                })
                .collect();
            for (item, begun) in items.iter().zip(begun) {
                outcomes.push(match begun {
                    Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                    // Without a thread it takes its turn here.
                    Err(_) => work(item),
                });
            }
        });
    }
    outcomes
}
