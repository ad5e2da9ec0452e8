//! The thread that takes a depot's turns with the ledger.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hashbrown::HashSet;
use kvdepot_core::limits::BLOCK_ALIGN_BYTES;
use kvdepot_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use super::book::Book;
use super::chain::{Chain, Found, Wrote};
use super::member::{Member, Survey, Times};
use super::purse::{Purse, Refused};
use crate::posix::capacity;
use crate::posix::identity::{Identity, TEMPORARY_PREFIX};
use crate::posix::maintenance::start_thread;
use crate::posix::state::{Shared, State};

/// Attempts to write a version before others, in one turn.
const ATTEMPTS_MAX: usize = 64;
/// How long after a failed turn the next one begins, unless that is due earlier.
const RETRY: Duration = Duration::from_secs(1);
/// How often a depot takes a turn that waits for others to give something up.
const HUNGRY_INTERVAL: Duration = Duration::from_millis(500);
/// Failed writes that are remembered until their files are known to be gone; what is forgotten counts as used until
/// the next survey.
const LEFTOVERS_MAX: usize = 4096;

/// Tiers of this process that take part in a ledger.
static LIVING: Mutex<Option<HashSet<u64>>> = Mutex::new(None);

/// A write that failed: its bytes are free once its temporary file is known to be gone.
#[derive(Debug)]
pub(in crate::posix) struct Leftover {
    pub(in crate::posix) directory: usize,
    pub(in crate::posix) temporary: PathBuf,
    pub(in crate::posix) bytes: u64,
    /// The membership in which they were spent.
    member: Option<u64>,
}

/// The account of a tier whose cap covers what other depots write, too; `None` if its cap is its own.
pub(in crate::posix) fn open_purse(shared: &crate::PosixConfig, cap: u64) -> Option<Purse> {
    let is_for_all = shared.capacity_shared && shared.shared && shared.capacity_bytes > 0;
    let patience_ms = times(shared).lease_ms / 2;
    is_for_all.then(|| Purse::new(cap, shared.write_threads as u64, patience_ms))
}

fn times(config: &crate::PosixConfig) -> Times {
    Times::of(u64::try_from(config.ledger_lease.as_millis()).unwrap_or(u64::MAX).max(12))
}

/// Starts the thread, if the tier takes part in a ledger.
pub(in crate::posix) fn start(shared: &Arc<Shared>) -> Result<()> {
    if shared.lock().purse.is_none() {
        return Ok(());
    }
    start_thread(shared, "kvd-posix-ledger", run)
}

fn run(shared: &Arc<Shared>) {
    // Relaxed: only uniqueness counts.
    static TIERS: AtomicU64 = AtomicU64::new(0);
    let tier = TIERS.fetch_add(1, Ordering::Relaxed);
    LIVING.lock().get_or_insert_default().insert(tier);
    let own = Identity::own();
    let who = format!("{}-{}-{}-{tier}", own.host, own.pid, own.start_time);
    let times = times(&shared.config);
    let mut runner = Runner {
        shared,
        chain: Chain::new(Arc::clone(shared.device(0))),
        member: Member::new(who, shared.cap, times),
        stuck: Vec::new(),
        last: Instant::now(),
        has_failed: false,
        has_told_cap: false,
    };
    let renew = Duration::from_millis(times.renew_ms);
    let mut next = Instant::now();
    while runner.wait(next) {
        runner.clear_leftovers();
        next = match runner.turn() {
            Ok(true) => Instant::now() + renew,
            // No ledger can be kept here.
            Ok(false) => break,
            Err(error) => {
                runner.fail(&error);
                Instant::now() + RETRY.min(renew)
            }
        };
    }
    runner.leave();
    LIVING.lock().get_or_insert_default().remove(&tier);
}

/// Returns whether a member is known to have ended: its process, or in this process its tier.
fn is_dead(who: &str) -> bool {
    let Some(process) = Identity::of_temporary(&format!("{TEMPORARY_PREFIX}{who}")) else { return false };
    if process == *Identity::own() {
        let tier = who.rsplit('-').next().and_then(|tier| tier.parse().ok());
        return tier.is_some_and(|tier: u64| !LIVING.lock().get_or_insert_default().contains(&tier));
    }
    process.is_alive() == Some(false)
}

struct Runner<'a> {
    shared: &'a Arc<Shared>,
    chain: Chain,
    member: Member,
    /// Failed writes whose files could not be removed: tried again in every turn.
    stuck: Vec<Leftover>,
    /// When the last turn began.
    last: Instant,
    has_failed: bool,
    has_told_cap: bool,
}

impl Runner<'_> {
    /// Waits until something is to be done; `false` when the tier is being closed.
    fn wait(&self, next: Instant) -> bool {
        let mut state = self.shared.lock();
        loop {
            if state.chores.stop_at.is_some() {
                return false;
            }
            let asked = state
                .purse
                .as_ref()
                .is_some_and(|purse| purse.wanted > 0 || purse.can_pay() || purse.is_fed());
            let next = if state.purse.as_ref().is_some_and(|purse| purse.hungry > 0) {
                next.min(self.last + HUNGRY_INTERVAL)
            } else {
                next
            };
            let told = matches!(state.survey, Survey::Bytes(_) | Survey::Failed);
            // After a failure only the time counts.
            let is_due = !self.has_failed && (asked || told || !state.leftovers.is_empty());
            if is_due || state.wait_until(&self.shared.ledger, next) {
                return state.chores.stop_at.is_none();
            }
        }
    }

    /// Takes a turn; `false` if no ledger can be kept on this file system.
    fn turn(&mut self) -> Result<bool> {
        self.last = Instant::now();
        for _ in 0..ATTEMPTS_MAX {
            let began_ms = self.shared.now_ms();
            let (number, book) = match self.chain.read()? {
                Found::Nothing => (0, Book::new(self.first_bound())),
                Found::Book(number, book) => (number, book),
                Found::Damaged(number) => {
                    tracing::warn!(
                        path = %self.chain.path().display(), number,
                        "a tier's ledger is damaged and begins anew: until all members have joined again, blocks are \
                         only stored in the place of others"
                    );
                    (number, Book::after_loss(self.shared.cap))
                }
            };
            // After the reading: what is reported must not be older than what was read.
            let turn = {
                let mut state = self.shared.lock();
                let reserved = state.reserved.values().sum();
                let (survey, now_ms) = (state.survey, self.shared.now_ms());
                let Some(purse) = &mut state.purse else { return Ok(false) };
                self.member.turn(book, purse, reserved, survey, now_ms, is_dead)
            };
            let Some(turn) = turn else {
                return Err(Error::new(ErrorKind::NoSpace, "a directory is shared by too many depots")
                    .with("path", self.chain.path().display())
                    .with("depots_max", super::book::MEMBERS_MAX));
            };
            let names = [self.shared.temporary_name(), self.shared.temporary_name()];
            match self.chain.write(number, &turn.book, names) {
                Ok(Wrote::Yes) => {
                    self.written(&turn, began_ms)?;
                    return Ok(true);
                }
                Ok(Wrote::Lost) => {
                    if let Some(purse) = &mut self.shared.lock().purse {
                        Member::lost(&turn, purse);
                    }
                }
                Ok(Wrote::Unknown) => {}
                Err(error) if error.kind() == ErrorKind::Unsupported => {
                    tracing::warn!(
                        %error,
                        "the tier's cap is kept for this depot alone, because no ledger can be kept here: together \
                         with other depots it may be exceeded"
                    );
                    self.shared.lock().purse = None;
                    self.shared.changed.notify_all();
                    return Ok(false);
                }
                Err(error) => return Err(error),
            }
        }
        Err(Error::new(ErrorKind::Busy, "other depots were faster to write the ledger")
            .with("path", self.chain.path().display()))
    }

    fn written(&mut self, turn: &super::member::Turn, began_ms: u64) -> Result<()> {
        let mut state = self.shared.lock();
        let State { purse, survey, .. } = &mut *state;
        let Some(purse) = purse else { return Ok(()) };
        self.member.written(turn, purse, began_ms);
        // Not an end that came after the turn was decided upon.
        if turn.has_told {
            *survey = Survey::None;
        }
        if turn.surveys {
            *survey = Survey::Running;
        }
        let (cap, is_in_debt) = (purse.cap(), purse.is_in_debt());
        drop(state);
        if cap < self.shared.cap && !std::mem::replace(&mut self.has_told_cap, true) {
            tracing::warn!(
                path = %self.chain.path().display(), capacity_bytes = self.shared.cap, in_force = cap,
                "another depot that shares this directory has a smaller cap, which holds for all"
            );
        }
        if std::mem::take(&mut self.has_failed) {
            tracing::warn!(path = %self.chain.path().display(), "the ledger is back: blocks are stored again");
        }
        self.shared.changed.notify_all();
        if is_in_debt {
            self.shared.unlinks.notify_one();
        }
        if turn.surveys
            && start_thread(self.shared, "kvd-posix-survey", |shared| super::survey::run(shared)).is_err()
        {
            self.shared.lock().survey = Survey::Failed;
        }
        Ok(())
    }

    fn fail(&mut self, error: &Error) {
        if !std::mem::replace(&mut self.has_failed, true) {
            tracing::warn!(
                %error, path = %self.chain.path().display(),
                "the ledger of a shared directory cannot be kept: blocks are read from it, and no longer stored when \
                 this lasts"
            );
        }
    }

    /// What the directories may hold before anybody has counted.
    fn first_bound(&self) -> u64 {
        let shared = self.shared;
        let is_local = shared.devices.iter().all(|device| device.overwrites());
        let used = if is_local { capacity::used_bytes(&shared.devices) } else { None };
        used.unwrap_or(shared.cap).min(shared.cap)
    }

    /// Makes sure that failed writes have left nothing.
    fn clear_leftovers(&mut self) {
        let mut leftovers = std::mem::take(&mut self.stuck);
        leftovers.append(&mut self.shared.lock().leftovers);
        for leftover in leftovers {
            if let Err(error) = self.shared.device(leftover.directory).unlink(&leftover.temporary) {
                tracing::debug!(%error, "a file of a failed write stays for now");
                if self.stuck.len() < LEFTOVERS_MAX {
                    self.stuck.push(leftover);
                }
                continue;
            }
            let mut state = self.shared.lock();
            if let Some(purse) = state.purse.as_mut().filter(|purse| purse.id == leftover.member) {
                purse.free(leftover.bytes);
            }
        }
        self.shared.changed.notify_all();
    }

    /// Gives back what is left when the tier is closed, after the last files were unlinked.
    fn leave(&self) {
        let (id, until) = {
            let mut state = self.shared.lock();
            let Some(until) = state.chores.stop_at else { return };
            while state.chores.threads > 1 && !state.wait_until(&self.shared.changed, until) {}
            let Some(purse) = &mut state.purse else { return };
            // Nothing is written from here on.
            purse.valid_until_ms = 0;
            (purse.id.take(), until)
        };
        let Some(id) = id else { return };
        for _ in 0..ATTEMPTS_MAX {
            if Instant::now() >= until {
                return;
            }
            let Ok(Found::Book(number, mut book)) = self.chain.read() else { return };
            {
                let mut state = self.shared.lock();
                let reserved = state.reserved.values().sum();
                let row = book.row_of(Some(id), self.member.who());
                let (Some(purse), Some(row)) = (&mut state.purse, row) else { return };
                purse.renew(row);
                let unspent = purse.unspent();
                book.leave(id, unspent, reserved);
            }
            let names = [self.shared.temporary_name(), self.shared.temporary_name()];
            if !matches!(self.chain.write(number, &book, names), Ok(Wrote::Lost)) {
                return;
            }
        }
    }
}

impl Shared {
    /// Unlinks a file that is none of the index's, and notes in the ledger what that frees. Returns whether it existed.
    pub(in crate::posix) fn unlink_counted(&self, directory: usize, path: &Path) -> Result<bool> {
        let device = self.device(directory);
        // Only what lies in an epoch's directory was ever counted: no descriptions, checkpoints and probes.
        let is_counted = path.components().count() > 2 && self.lock().purse.is_some();
        let stat = if is_counted { device.stat(path).ok().flatten() } else { None };
        let unlinked = device.unlink(path)?;
        if let Some(stat) = stat.filter(|_| unlinked)
            && let Some(purse) = &mut self.lock().purse
        {
            purse.free(stat.bytes.next_multiple_of(BLOCK_ALIGN_BYTES));
        }
        Ok(unlinked)
    }
}

impl State {
    /// Spends the bytes of a write in the ledger, if there is one.
    pub(in crate::posix) fn spend(&mut self, bytes: u64, now_ms: u64) -> std::result::Result<(), Refused> {
        self.purse.as_mut().map_or(Ok(()), |purse| purse.spend(bytes, now_ms))
    }

    /// Notes that a write failed whose bytes were spent.
    pub(in crate::posix) fn leave_over(&mut self, directory: usize, temporary: PathBuf, bytes: u64) {
        if let Some(purse) = &self.purse
            && self.leftovers.len() < LEFTOVERS_MAX
        {
            self.leftovers.push(Leftover { directory, temporary, bytes, member: purse.id });
        }
    }
}
