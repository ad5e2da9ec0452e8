//! The thread that takes a depot's turns with the ledger.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hashbrown::HashSet;
use kvdepot_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use super::book::Book;
use super::chain::{Chain, Found, LEDGER_DIR, Wrote};
use super::codec::LEDGER_BYTES_MAX;
use super::member::{Fate, Member, Refusal, Survey};
use super::terms::times;
use crate::posix::capacity;
use crate::posix::identity::{Identity, TEMPORARY_PREFIX};
use crate::posix::shared::Shared;
use crate::posix::state::State;
use crate::posix::threads::start_thread;

/// Attempts to write a version before others, in one turn.
const ATTEMPTS_MAX: usize = 64;
/// How long after a failed turn the next one begins, unless that is due earlier.
const RETRY: Duration = Duration::from_secs(1);
/// How often a depot takes a turn that waits for others to give something up.
const HUNGRY_INTERVAL: Duration = Duration::from_millis(500);
/// Tiers of this process that take part in a ledger.
static LIVING: Mutex<Option<HashSet<u64>>> = Mutex::new(None);

/// Starts the thread, if the tier takes part in a ledger.
pub(in crate::posix) fn start(shared: &Arc<Shared>) -> Result<()> {
    if shared.lock().purse.is_none() {
        return Ok(());
    }
    for device in &shared.devices[1..] {
        if device.stat(Path::new(LEDGER_DIR)).is_ok_and(|stat| stat.is_some()) {
            return Err(Error::new(
                ErrorKind::Config,
                "with posix_capacity_shared all depots name the same directories in the same order, and this one, which \
                 is not the first here, has a ledger: put it first, or remove the ledger if no depot uses it any more",
            )
            .with("path", device.root().join(LEDGER_DIR).display()));
        }
    }
    Chain::new(Arc::clone(shared.device(0))).check()?;
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
        member: Member::new(who, shared.cap, shared.devices.len() as u64, times),
        last: Instant::now(),
        has_failed: false,
        has_told_cap: false,
    };
    let renew = Duration::from_millis(times.renew_ms);
    let mut next = Instant::now();
    while runner.wait(next) {
        super::clearing::clear(shared);
        next = match runner.turn() {
            Ok(()) => Instant::now() + renew,
            Err(error) => {
                runner.fail(&error);
                let next = Instant::now() + RETRY.min(renew);
                if error.kind() == ErrorKind::NoSpace {
                    // Nobody else would make room: no write gets as far as finding the file system full.
                    let _ = shared.make_room(0, LEDGER_BYTES_MAX as u64, next);
                }
                next
            }
        };
    }
    runner.leave();
    LIVING.lock().get_or_insert_default().remove(&tier);
}

/// Returns what is known of a member: of its process, or in this process of its tier.
fn fate(who: &str) -> Fate {
    let Some(process) = Identity::of_temporary(&format!("{TEMPORARY_PREFIX}{who}")) else {
        return Fate::Unseen;
    };
    if process == *Identity::own() {
        let tier = who.rsplit('-').next().and_then(|tier| tier.parse().ok());
        let is_open = tier.is_some_and(|tier: u64| LIVING.lock().get_or_insert_default().contains(&tier));
        return if is_open { Fate::Runs } else { Fate::Closed };
    }
    match process.is_alive() {
        None => Fate::Unseen,
        Some(true) => Fate::Runs,
        Some(false) => Fate::Ended,
    }
}

struct Runner<'a> {
    shared: &'a Arc<Shared>,
    chain: Chain,
    member: Member,
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
            let mut next = next;
            if state.purse.as_ref().is_some_and(|purse| purse.hungry > 0) {
                next = next.min(self.last + HUNGRY_INTERVAL);
            }
            if state.leftovers.has_new() {
                // Not at once: a disk that fails every write would make every depot write ledgers all the time.
                next = next.min(self.last + RETRY);
            }
            let told = matches!(state.survey, Survey::Bytes(_) | Survey::Failed);
            // After a failure only the time counts.
            let is_due = !self.has_failed && (asked || told);
            if is_due || state.wait_until(&self.shared.ledger, next) {
                return state.chores.stop_at.is_none();
            }
        }
    }

    /// Takes a turn.
    fn turn(&mut self) -> Result<()> {
        self.last = Instant::now();
        let directories = self.shared.devices.len() as u64;
        for _ in 0..ATTEMPTS_MAX {
            let began_ms = self.shared.now_ms();
            let (number, book) = match self.chain.read()? {
                Found::Nothing => (0, Book::new(self.first_bound(), directories)),
                Found::Book(number, book) => (number, book),
                Found::Damaged(number) => {
                    tracing::warn!(
                        path = %self.chain.path().display(), number,
                        "a tier's ledger is damaged and begins anew: until all members have joined again, blocks are \
                         stored only by replacing other blocks"
                    );
                    (number, Book::after_loss(self.shared.cap, directories))
                }
            };
            // After the reading: what is reported must not be older than what was read.
            let turn = {
                let mut state = self.shared.lock();
                let reserved = state.reserved.values().sum();
                let (survey, now_ms) = (state.survey, self.shared.now_ms());
                let Some(purse) = &mut state.purse else { return Ok(()) };
                self.member.turn(book, purse, reserved, survey, now_ms, fate)
            };
            let turn = turn.map_err(|refusal| self.refuse(refusal))?;
            match self.chain.write(number, &turn.book) {
                Ok(Wrote::Yes) => return self.written(&turn, began_ms),
                Ok(Wrote::Lost) => {
                    if let Some(purse) = &mut self.shared.lock().purse {
                        Member::lost(&turn, purse);
                    }
                }
                Ok(Wrote::Unknown) => {}
                Err(error) => return Err(error),
            }
        }
        Err(Error::new(ErrorKind::Busy, "other depots kept updating the ledger first")
            .with("path", self.chain.path().display()))
    }

    fn refuse(&self, refusal: Refusal) -> Error {
        let path = self.chain.path();
        match refusal {
            Refusal::TooMany => Error::new(
                ErrorKind::Busy,
                "a directory is shared by too many depots: stop some, or set posix_capacity_shared to false for all",
            )
            .with("depots_max", super::book::MEMBERS_MAX),
            Refusal::OtherDirectories(theirs) => Error::new(
                ErrorKind::Config,
                "with posix_capacity_shared all depots name the same directories in the same order, and the others have \
                 another number of them: correct the configuration of this depot, or stop the others first",
            )
            .with("directories", self.shared.devices.len())
            .with("directories_of_others", theirs),
        }
        .with("path", path.display())
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
            && let Err(error) =
                start_thread(self.shared, "kvd-posix-survey", |shared| super::survey::run(shared))
        {
            self.shared.survey_ended(Err(error));
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
            if !matches!(self.chain.write(number, &book), Ok(Wrote::Lost)) {
                return;
            }
        }
    }
}
