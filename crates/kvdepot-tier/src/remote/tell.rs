//! Requests that go to several servers, or that nobody waits for.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use hashbrown::{HashMap, HashSet};
use kvdepot_core::limits::BATCH_HASHES_MAX;
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId, NamespaceSpec, Result, next_epoch};
use parking_lot::Mutex;

use super::Shared;
use super::job::{Job, Opened, What};
use super::server::{Health, Server};
use crate::Done;

/// The tier's servers, for work that may outlive the call which began it.
#[derive(Clone)]
pub(super) struct Everyone {
    pub(super) shared: Arc<Shared>,
    pub(super) servers: Arc<[Arc<Server>]>,
}

/// Tries to move all servers to one epoch while other clients move them, too.
const ADVANCES_MAX: usize = 3;

/// Removals that several servers are asked for, and who waits for all of them.
struct Removal {
    left: usize,
    error: Option<Error>,
    done: Option<Done<()>>,
}

impl Everyone {
    /// Has servers forget blocks; until one has, its block is a miss here.
    pub(super) fn remove(&self, keys: Vec<BlockKey>, done: Done<()>) {
        let mut asks: HashMap<(usize, NamespaceId), Vec<BlockKey>> = HashMap::new();
        {
            let mut writing = self.shared.writing.lock();
            keys.iter().for_each(|key| writing.leave(*key));
        }
        {
            let mut known = self.shared.known.lock();
            keys.iter().for_each(|key| known.forget(key));
        }
        for key in keys {
            asks.entry((self.shared.places.of(&key), key.namespace)).or_default().push(key);
        }
        let asks: Vec<(usize, Vec<BlockKey>)> =
            asks.into_iter().flat_map(|((server, _), keys)| in_frames(server, keys)).collect();
        if asks.is_empty() {
            return done(Ok(()));
        }
        let removal = Removal { left: asks.len(), error: None, done: Some(done) };
        let (removal, deadline) =
            (Arc::new(Mutex::new(removal)), Instant::now() + self.shared.config.timeout);
        for (server, keys) in asks {
            self.shared.begun();
            let (shared, removal, asked) = (Arc::clone(&self.shared), Arc::clone(&removal), keys.clone());
            let done = move |outcome: Result<()>| {
                if let Err(error) = &outcome {
                    tracing::debug!(keys = asked.len(), first = ?asked.first(), %error, "remote blocks could not be removed");
                }
                let mut writing = shared.writing.lock();
                asked.iter().for_each(|key| writing.left(key));
                drop(writing);
                ended(&removal, outcome.err());
                shared.ended();
            };
            self.servers[server].submit(Job { deadline, what: What::Remove { keys, done: Box::new(done) } });
        }
    }
}

/// One of the servers has answered.
fn ended(removal: &Mutex<Removal>, error: Option<Error>) {
    let mut removal = removal.lock();
    removal.left -= 1;
    removal.error = removal.error.take().or(error);
    if removal.left > 0 {
        return;
    }
    let (done, error) = (removal.done.take(), removal.error.take());
    drop(removal);
    if let Some(done) = done {
        done(error.map_or(Ok(()), Err));
    }
}

/// Keys of one server and namespace, as many at a time as a frame holds.
pub(super) fn in_frames(server: usize, keys: Vec<BlockKey>) -> Vec<(usize, Vec<BlockKey>)> {
    keys.chunks(BATCH_HASHES_MAX).map(|some| (server, some.to_vec())).collect()
}

/// Keys that several servers are asked about.
pub(super) struct Probe {
    shared: Arc<Shared>,
    keys: Vec<BlockKey>,
    state: Mutex<ProbeState>,
}

struct ProbeState {
    there: HashSet<BlockKey>,
    left: usize,
    error: Option<Error>,
    done: Option<Done<usize>>,
}

impl Probe {
    pub(super) fn new(
        shared: Arc<Shared>,
        keys: Vec<BlockKey>,
        there: HashSet<BlockKey>,
        left: usize,
        done: Done<usize>,
    ) -> Self {
        Self { shared, keys, state: Mutex::new(ProbeState { there, left, error: None, done: Some(done) }) }
    }

    pub(super) fn answered(&self, asked: &[BlockKey], outcome: Result<Vec<bool>>) {
        let mut state = self.state.lock();
        match outcome {
            Ok(answers) => {
                let spaces = self.shared.spaces.lock();
                let mut known = self.shared.known.lock();
                for (key, there) in asked.iter().zip(answers) {
                    if let Ok(space) = spaces.of(key) {
                        known.note(*key, there, if there { space.block_bytes() as u64 } else { 0 });
                        if there {
                            state.there.insert(*key);
                        }
                    }
                }
            }
            // What no server could tell is a miss.
            Err(error) => state.error = Some(error),
        }
        state.left -= 1;
        let over = state.left == 0;
        drop(state);
        if over {
            self.end();
        }
    }

    pub(super) fn end(&self) {
        let mut state = self.state.lock();
        let count = self.keys.iter().take_while(|key| state.there.contains(*key)).count();
        let outcome = match state.error.take() {
            Some(error) if count == 0 => Err(error),
            _ => Ok(count),
        };
        let done = state.done.take();
        drop(state);
        if let Some(done) = done {
            done(outcome);
        }
        self.shared.ended();
    }
}

/// When phase after phase of work ends that has to be over by `deadline`: a server that hangs leaves the next one its time.
fn phase_end(timeout: Duration, deadline: Instant) -> Instant {
    let left = deadline.saturating_duration_since(Instant::now());
    Instant::now() + timeout.min(left / 2)
}

impl Everyone {
    /// The newest epoch that any server knows, or `at_least`; all servers that are there know it when this returns.
    pub(super) fn open(&self, spec: &Arc<NamespaceSpec>, at_least: u32, deadline: Instant) -> u32 {
        // From here on a server that comes back is told of it.
        let before = self.enter_at_least(spec, at_least);
        let opened = self.ask_opened(spec, phase_end(self.shared.config.timeout, deadline));
        // Somebody may have gone further meanwhile.
        let epoch = self.enter_at_least(spec, newest(&opened).max(before));
        let told = self.move_behind(spec, epoch, &opened, deadline).0.is_ok();
        self.shared.spaces.lock().told(spec, epoch, told);
        self.shared.spaces.lock().epoch(spec).unwrap_or(epoch)
    }

    /// Moves on before any server is asked: an epoch that this tier has not had.
    pub(super) fn leave_epoch(&self, spec: &Arc<NamespaceSpec>, at_least: u32) -> Result<u32> {
        let known = self.shared.spaces.lock().epoch(spec);
        Ok(self.enter_at_least(spec, next_epoch(known.unwrap_or(0), at_least)?))
    }

    /// Moves all servers to an epoch that none of them had, `epoch` or a later one. A server that another client moves at
    /// the same moment refuses, because the move names the epoch that it leaves; then a later epoch is tried.
    pub(super) fn advance(
        &self,
        spec: &Arc<NamespaceSpec>,
        mut epoch: u32,
        at_least: u32,
        deadline: Instant,
    ) -> Result<u32> {
        let mut outcome = Ok(());
        for attempt in 0..ADVANCES_MAX {
            let opened = self.ask_opened(spec, phase_end(self.shared.config.timeout, deadline));
            // The first time nobody may have it; later some servers have it from this very call.
            let taken = newest(&opened);
            if taken > epoch || (attempt == 0 && taken == epoch) {
                epoch = self.enter_at_least(spec, next_epoch(taken, at_least)?);
            }
            let refused;
            (outcome, refused) = self.move_behind(spec, epoch, &opened, deadline);
            // Another client was faster, or a connection that was just made told the server of this epoch already.
            if !refused {
                break;
            }
        }
        self.shared.spaces.lock().told(spec, epoch, outcome.is_ok());
        outcome.map(|()| epoch)
    }

    /// Makes `epoch` the current one unless a later one is: which is. What was known of earlier ones is forgotten.
    fn enter_at_least(&self, spec: &Arc<NamespaceSpec>, epoch: u32) -> u32 {
        let mut spaces = self.shared.spaces.lock();
        let epoch = spaces.epoch(spec).map_or(epoch, |now| now.max(epoch));
        let old = spaces.enter(spec, epoch);
        drop(spaces);
        if let Some(old) = old {
            self.shared.known.lock().forget_namespace(old);
        }
        epoch
    }

    /// What ends a request that somebody waits for; it is under way meanwhile, or nobody would look at its deadline.
    fn waited_for<T: Send + 'static>(&self) -> (Done<T>, Receiver<Result<T>>) {
        let ((send, receive), shared) = (channel(), Arc::clone(&self.shared));
        shared.begun();
        let done = move |outcome| {
            drop(send.send(outcome));
            shared.ended();
        };
        (Box::new(done), receive)
    }

    /// What each server says of a namespace; `None` for one that is not there.
    fn ask_opened(&self, spec: &Arc<NamespaceSpec>, deadline: Instant) -> Vec<Option<Opened>> {
        let asked: Vec<Option<Receiver<Result<Opened>>>> = self
            .servers
            .iter()
            .map(|server| {
                (server.settle(deadline) == Health::Up).then(|| {
                    let (done, receive) = self.waited_for();
                    server.submit(Job { deadline, what: What::Open { spec: Arc::clone(spec), done } });
                    receive
                })
            })
            .collect();
        let wait = |receive: Receiver<Result<Opened>>| wait(&receive, deadline).ok()?.ok();
        asked.into_iter().map(|receive| receive.and_then(wait)).collect()
    }

    /// Moves servers that are behind; an error names one that could not be told, and will be when it comes back. Also
    /// whether a server answered that it will not be moved from where it was.
    fn move_behind(
        &self,
        spec: &Arc<NamespaceSpec>,
        epoch: u32,
        opened: &[Option<Opened>],
        deadline: Instant,
    ) -> (Result<()>, bool) {
        // Not the time that a server which hangs has left of an earlier answer: the others are to be told.
        let deadline = phase_end(self.shared.config.timeout, deadline);
        let mut asked = Vec::new();
        let mut outcome = Ok(());
        for (server, opened) in self.servers.iter().zip(opened) {
            match opened {
                Some(opened) if opened.epoch >= epoch => {}
                Some(opened) => {
                    let (done, receive) = self.waited_for();
                    let what = What::SetEpoch { spec: Arc::clone(spec), now: opened.namespace, epoch, done };
                    server.submit(Job { deadline, what });
                    asked.push((server, receive));
                }
                None => outcome = Err(untold(server)),
            }
        }
        let mut refused = false;
        for (server, receive) in asked {
            match wait(&receive, deadline) {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    refused |= error.kind() == ErrorKind::NotFound;
                    outcome = Err(untold(server).with_source(error));
                }
                Err(_) => outcome = Err(untold(server)),
            }
        }
        (outcome, refused)
    }
}

/// The newest epoch that a server answered.
fn newest(opened: &[Option<Opened>]) -> u32 {
    opened.iter().flatten().map(|opened| opened.epoch).max().unwrap_or(0)
}

/// Takes an answer that has come, or comes by `deadline`.
fn wait<T>(receive: &Receiver<T>, deadline: Instant) -> Result<T, RecvTimeoutError> {
    receive.recv_timeout(deadline.saturating_duration_since(Instant::now()))
}

fn untold(server: &Server) -> Error {
    Error::new(
        ErrorKind::Unavailable,
        "a remote server could not be told of a reset; it is told when it comes back, as long as this depot runs",
    )
    .with("server", &server.address)
}
