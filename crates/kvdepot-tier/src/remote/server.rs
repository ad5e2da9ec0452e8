//! One server: its queued requests, its connections, and its health.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvdepot_core::limits::{
    REMOTE_BATCH_BYTES_MAX, REMOTE_IDLE_LOOK_MS, REMOTE_PARTING_MAX, REMOTE_QUEUE_MAX,
    REMOTE_READS_IN_A_ROW_MAX, REMOTE_SECOND_WRITER_BYTES,
};
use kvdepot_core::{Error, ErrorKind, NamespaceSpec, Result};
use parking_lot::{Condvar, Mutex};

use super::conn::{Conn, Host};
use super::job::{Job, What};
use super::lookup::Addresses;
use super::parting::Parting;
use super::shared::Shared;
use super::spaces::Space;
use crate::TierServer;

/// Protocol of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dialect {
    /// Ours.
    Own,
    /// InfiniStore's.
    Infini,
}

/// Health of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Health {
    /// Not known yet: requests wait.
    New,
    /// At least one connection.
    Up,
    /// No connection: requests fail immediately, so that nothing waits for it (P2).
    Down,
}

/// One server.
#[derive(Debug)]
pub(super) struct Server {
    /// Its index in the configuration.
    pub(super) index: usize,
    pub(super) address: String,
    pub(super) addresses: Addresses,
    pub(super) shared: Arc<Shared>,
    state: Mutex<State>,
    /// Signalled when jobs are queued that no sender takes without being woken.
    work: Condvar,
    /// Signalled when connections are made or lost.
    changed: Condvar,
    /// Number of times that it owed an answer for too long.
    silences: AtomicU64,
    /// Number of times that another server took its place while connections were open.
    era: AtomicU64,
}

#[derive(Debug)]
struct State {
    health: Health,
    up: usize,
    /// Connections with our own protocol, for the timer.
    conns: Vec<Arc<Conn>>,
    first: VecDeque<Job>,
    writes: VecDeque<Job>,
    /// Number of connections that are sending blocks.
    writing: usize,
    /// A sender was woken and has not looked for jobs since then.
    is_woken: bool,
    reads_in_a_row: u32,
    /// Its last known protocol.
    dialect: Option<Dialect>,
    /// The depot that it last reported.
    depot: Option<u64>,
    /// Connections that ended in the middle of a write, and that the server has not closed.
    parting: Vec<Arc<Parting>>,
    /// Number of connections that broke or could not be made.
    failures: u64,
    last_error: Option<Error>,
}

impl State {
    /// Returns whether enough blocks are queued for one more connection to take some of them.
    fn is_worth_another_writer(&self) -> bool {
        let enough_bytes = match self.dialect {
            // Each of its puts waits for the answer to the previous one.
            Some(Dialect::Infini) => 1,
            _ => REMOTE_SECOND_WRITER_BYTES,
        };
        let mut bytes = 0;
        self.writes.iter().any(|job| {
            bytes += job.write_bytes();
            bytes >= enough_bytes
        })
    }
}

impl Server {
    pub(super) fn new(index: usize, address: String, addresses: Addresses, shared: Arc<Shared>) -> Self {
        let state = State {
            health: Health::New,
            up: 0,
            conns: Vec::new(),
            first: VecDeque::new(),
            writes: VecDeque::new(),
            writing: 0,
            is_woken: false,
            reads_in_a_row: 0,
            dialect: None,
            depot: None,
            parting: Vec::new(),
            failures: 0,
            last_error: None,
        };
        let (state, work, changed) = (Mutex::new(state), Condvar::new(), Condvar::new());
        Self {
            index,
            address,
            addresses,
            shared,
            state,
            work,
            changed,
            silences: AtomicU64::new(0),
            era: AtomicU64::new(0),
        }
    }

    pub(super) fn health(&self) -> Health {
        self.state.lock().health
    }

    /// Moves the server to a namespace's epoch by `ask`, whose answer other threads may wait for.
    pub(super) fn move_to(&self, space: &Space, ask: impl FnOnce() -> Result<()>) -> Result<()> {
        let root = space.spec.root();
        self.shared.spaces.lock().asks(root, self.index);
        let answer = ask();
        self.shared.answered(root, space.epoch, self.index, &answer);
        answer
    }

    /// Returns its state, for `stat`.
    pub(super) fn describe(&self) -> TierServer {
        let state = self.state.lock();
        TierServer {
            address: self.address.clone(),
            up: state.health == Health::Up,
            connections: state.up,
            failures: state.failures,
            last_error: state.last_error.as_ref().map(Error::to_string),
        }
    }

    fn is_down(&self) -> Error {
        Error::new(ErrorKind::Unavailable, "a remote server is not there").with("server", &self.address)
    }

    /// Queues a request. Its `done` is called in any case, possibly immediately.
    pub(super) fn submit(&self, job: Job) {
        self.submit_all([job]);
    }

    /// Queues requests together, so that similar ones are sent in one frame.
    pub(super) fn submit_all(&self, jobs: impl IntoIterator<Item = Job>) {
        let mut refused = Vec::new();
        let mut state = self.state.lock();
        for job in jobs {
            let error = if state.health == Health::Down || self.shared.is_stopping() {
                self.is_down()
            } else if state.first.len() + state.writes.len() >= REMOTE_QUEUE_MAX {
                Error::new(ErrorKind::Busy, "too many requests wait for a remote server")
                    .with("server", &self.address)
            } else {
                let queue = if job.is_write() { &mut state.writes } else { &mut state.first };
                queue.push_back(job);
                continue;
            };
            refused.push((job, error));
        }
        self.wake_a_sender(&mut state);
        drop(state);
        refused.into_iter().for_each(|(job, error)| job.fail(error));
    }

    /// Wakes a sender, unless one will come anyway: jobs that arrive in the meantime are sent together with the job
    /// that it was woken for.
    fn wake_a_sender(&self, state: &mut State) {
        if state.is_woken {
            return;
        }
        let is_wanted = !state.first.is_empty()
            || (state.writing == 0 && !state.writes.is_empty())
            || (state.writing < self.writers_max() && state.is_worth_another_writer());
        if is_wanted {
            state.is_woken = self.work.notify_one();
        }
    }

    /// Returns the maximum number of writing connections; one connection is left for requests that wait for answers.
    fn writers_max(&self) -> usize {
        (self.shared.config.connections - 1).max(1)
    }

    /// Returns the next requests for a connection, similar enough to be sent as one, and at most `count_max`. It returns
    /// none if the connection is over.
    pub(super) fn take(&self, is_over: impl Fn() -> bool, count_max: usize) -> Vec<Job> {
        let mut state = self.state.lock();
        loop {
            if is_over() || self.shared.is_stopping() {
                // It may have been woken for a job that another sender has taken.
                self.wake_a_sender(&mut state);
                return Vec::new();
            }
            let may_write = state.writing < self.writers_max() && !state.writes.is_empty();
            let turn =
                may_write && (state.first.is_empty() || state.reads_in_a_row >= REMOTE_READS_IN_A_ROW_MAX);
            if turn {
                state.reads_in_a_row = 0;
                state.writing += 1;
                let jobs = batch(&mut state.writes, count_max);
                self.wake_a_sender(&mut state);
                return jobs;
            }
            if !state.first.is_empty() {
                state.reads_in_a_row = state.reads_in_a_row.saturating_add(1);
                let jobs = batch(&mut state.first, count_max);
                self.wake_a_sender(&mut state);
                return jobs;
            }
            self.work.wait_for(&mut state, Duration::from_millis(REMOTE_IDLE_LOOK_MS));
            state.is_woken = false;
        }
    }

    /// Records that a batch of writes was sent.
    pub(super) fn write_ended(&self) {
        let mut state = self.state.lock();
        state.writing -= 1;
        self.wake_a_sender(&mut state);
    }

    /// Fails requests that have waited past their deadline, here and on connections.
    pub(super) fn expire(&self, now: Instant) {
        let mut late = Vec::new();
        let mut state = self.state.lock();
        let State { first, writes, .. } = &mut *state;
        for queue in [first, writes] {
            if queue.iter().any(|job| job.deadline <= now) {
                let (over, rest) = std::mem::take(queue).into_iter().partition(|job| job.deadline <= now);
                *queue = rest;
                late.push(over);
            }
        }
        // The sender that was to take it may hang on its own connection.
        if !(state.first.is_empty() && state.writes.is_empty()) {
            self.work.notify_one();
        }
        let conns = state.conns.clone();
        drop(state);
        late.into_iter().flat_map(VecDeque::into_iter).for_each(|job| job.fail(self.too_late()));
        let silent = conns.iter().filter(|conn| conn.expire(self, now)).count();
        if silent > 0 {
            self.fell_silent();
            conns.iter().for_each(|conn| conn.close_if_quiet(self, now));
        }
    }

    /// Records that one of its connections waited for an answer for too long. Connections without progress end together
    /// with it; otherwise each of them would cost its own silence (P2).
    pub(super) fn fell_silent(&self) {
        self.silences.fetch_add(1, Ordering::AcqRel);
        self.wake();
    }

    /// Returns how often it has fallen silent.
    pub(super) fn silences(&self) -> u64 {
        self.silences.load(Ordering::Acquire)
    }

    pub(super) fn too_late(&self) -> Error {
        Error::new(ErrorKind::Timeout, "a remote server did not answer in time").with("server", &self.address)
    }

    /// Returns the error of a connection whose server another one has replaced.
    pub(super) fn is_replaced(&self) -> Error {
        Error::new(ErrorKind::Unavailable, "another depot has taken the place of a remote server")
            .with("server", &self.address)
    }

    /// Returns how often another server took its place while connections were open.
    pub(super) fn era(&self) -> u64 {
        self.era.load(Ordering::Acquire)
    }

    /// Counts a new connection to this depot, before it serves. Connections to the depot that it replaces end: one
    /// server must not be two stores. Returns the era that it belongs to.
    pub(super) fn came(&self, dialect: Dialect, depot: Option<u64>) -> u64 {
        let mut state = self.state.lock();
        let first = state.health != Health::Up;
        let is_same = state.dialect == Some(dialect) && state.depot == depot;
        // One that cannot tell which depot it is may be another one.
        let is_other = !is_same || (first && depot.is_none());
        let is_replaced = !first && !is_same;
        (state.dialect, state.depot) = (Some(dialect), depot);
        // It counts before the earlier ones end, or the server would be down in between.
        state.up += usize::from(!first);
        let era = self.era.fetch_add(u64::from(is_replaced), Ordering::AcqRel) + u64::from(is_replaced);
        let ending: Vec<Arc<Conn>> = if is_replaced {
            state.conns.iter().filter(|conn| conn.depot != depot).cloned().collect()
        } else {
            Vec::new()
        };
        drop(state);
        if is_replaced {
            tracing::warn!(
                server = %self.address, ?dialect,
                "another depot has taken the place of a remote server: connections to the earlier one are closed"
            );
            self.wake();
        }
        let error = self.is_replaced();
        ending.iter().for_each(|conn| conn.close(self, &error));
        // After the earlier one's last answers, and before this connection serves: what it learns must be kept.
        let had = if is_other { self.shared.forget_server(self.index) } else { Vec::new() };
        let mut state = self.state.lock();
        state.health = Health::Up;
        state.up += usize::from(first);
        drop(state);
        self.changed.notify_all();
        if first {
            tracing::info!(server = %self.address, ?dialect, "a remote server is reachable");
        }
        // A server that cannot tell which depot it is may have them all. Its connection may only have broken.
        if depot.is_some() {
            self.shared.tell_lost(&had);
        }
        era
    }

    pub(super) fn went(&self, error: &Error, was_up: bool) {
        let is_stopping = self.shared.is_stopping();
        let mut state = self.state.lock();
        state.up -= usize::from(was_up);
        let mut is_news = false;
        if !is_stopping {
            state.failures += 1;
            let before = state.last_error.replace(error.clone());
            is_news = before.is_none_or(|before| before.message() != error.message());
        }
        if state.up > 0 {
            return;
        }
        let before = std::mem::replace(&mut state.health, Health::Down);
        is_news |= before != Health::Down;
        let mut waiting: Vec<Job> = state.first.drain(..).collect();
        waiting.extend(state.writes.drain(..));
        drop(state);
        self.changed.notify_all();
        if is_news && !is_stopping {
            tracing::warn!(server = %self.address, %error, "a remote server is unreachable: its blocks are misses");
        }
        waiting.into_iter().for_each(|job| job.fail(self.is_down()));
    }

    pub(super) fn dialect(&self) -> Option<Dialect> {
        self.state.lock().dialect
    }

    /// Waits for the connection's turn: the first connection tries to reach the server; the others follow when it is
    /// reachable.
    pub(super) fn wait_for_turn(&self, index: usize) {
        let mut state = self.state.lock();
        let is_to_wait = |state: &State| {
            // Each holds a socket: a server that takes writes and hangs gets no more of them.
            (index > 0 && state.up == 0) || state.parting.len() >= REMOTE_PARTING_MAX
        };
        while is_to_wait(&state) && !self.shared.is_stopping() {
            self.changed.wait(&mut state);
        }
    }

    /// Starts to wait for the server's end of a connection.
    pub(super) fn part(&self, parting: Parting) {
        self.state.lock().parting.push(Arc::new(parting));
    }

    /// Checks which connections the server has closed: it no longer carries out their writes.
    pub(super) fn look_at_parting(&self) {
        let parting = {
            let state = self.state.lock();
            if state.parting.is_empty() {
                return;
            }
            state.parting.clone()
        };
        // They are read without the lock, which lookups need.
        let over: Vec<Arc<Parting>> = parting.into_iter().filter(|parting| parting.is_over()).collect();
        if !over.is_empty() {
            let mut writing = self.shared.beliefs.writing.lock();
            over.iter().for_each(|parting| writing.settle(&parting.keys));
            drop(writing);
            let is_over = |parting: &Arc<Parting>| over.iter().any(|over| Arc::ptr_eq(over, parting));
            self.state.lock().parting.retain(|parting| !is_over(parting));
            self.changed.notify_all();
        }
    }

    pub(super) fn pause(&self, pause: Duration) {
        let until = Instant::now() + pause;
        let mut state = self.state.lock();
        while !self.shared.is_stopping() && !self.changed.wait_until(&mut state, until).timed_out() {}
    }

    /// Stops the server when the tier ends: connections close and threads exit.
    pub(super) fn stop(&self) {
        self.addresses.close();
        let conns = self.state.lock().conns.clone();
        let error = Error::new(ErrorKind::Closed, "the tier is closing");
        conns.iter().for_each(|conn| conn.close(self, &error));
        self.wake();
    }

    /// Tells the server on each connection that a namespace is not used any more: otherwise it would keep a place for it as
    /// long as any of them lives.
    pub(super) fn close_namespace(&self, spec: &Arc<NamespaceSpec>) {
        let conns = self.state.lock().conns.clone();
        conns.iter().for_each(|conn| conn.close_namespace(spec));
        self.wake();
    }

    /// Adds a connection with our own protocol.
    pub(super) fn add_conn(&self, conn: &Arc<Conn>) {
        self.state.lock().conns.push(Arc::clone(conn));
    }

    pub(super) fn forget_conn(&self, conn: &Arc<Conn>) {
        self.state.lock().conns.retain(|other| !Arc::ptr_eq(other, conn));
    }
}

/// Takes the first job, and the similar ones directly after it, up to `count_max` in all.
fn batch(queue: &mut VecDeque<Job>, count_max: usize) -> Vec<Job> {
    let mut jobs: Vec<Job> = queue.pop_front().into_iter().collect();
    let mut bytes = 0;
    while jobs.len() < count_max
        && let (Some(last), Some(next)) = (jobs.last(), queue.front())
    {
        let together = match (&last.what, &next.what) {
            (What::Get { key: a, .. }, What::Get { key: b, .. }) => a.namespace == b.namespace,
            (What::Put { key: a, from: x, .. }, What::Put { key: b, from: y, .. }) => {
                bytes += x.len() as u64;
                a.namespace == b.namespace
                    && x.len() == y.len()
                    && bytes + y.len() as u64 <= REMOTE_BATCH_BYTES_MAX
            }
            _ => false,
        };
        if !together {
            break;
        }
        jobs.extend(queue.pop_front());
    }
    jobs
}

impl Host for Server {
    fn shared(&self) -> &Shared {
        &self.shared
    }

    fn wake(&self) {
        drop(self.state.lock());
        self.work.notify_all();
        self.changed.notify_all();
    }

    fn too_late(&self) -> Error {
        Self::too_late(self)
    }
}
