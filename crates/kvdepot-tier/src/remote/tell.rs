//! Requests that go to several servers, or that nobody waits for.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Instant;

use hashbrown::HashSet;
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceSpec, Result, next_epoch};
use parking_lot::Mutex;

use super::job::{Job, Opened, What};
use super::server::{Health, Server};
use super::{RemoteTier, Shared};
use crate::Done;

/// Tries to move all servers to one epoch while other clients move them, too.
const ADVANCES_MAX: usize = 3;

/// Has a server forget a block; until it has, the block is a miss here.
pub(super) fn remove(shared: &Arc<Shared>, server: &Arc<Server>, key: BlockKey) {
    shared.begun();
    shared.writing.lock().leave(key);
    shared.known.lock().forget(&key);
    let again = Arc::clone(shared);
    let done = move |outcome: Result<()>| {
        if let Err(error) = outcome {
            tracing::debug!(%key, %error, "a remote block could not be removed");
        }
        again.writing.lock().left(&key);
        again.ended();
    };
    let deadline = Instant::now() + shared.config.timeout;
    server.submit(Job { deadline, what: What::Remove { key, done: Box::new(done) } });
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

impl RemoteTier {
    /// The newest epoch that any server knows, or `at_least`; all servers that are there know it when this returns.
    pub(super) fn open_everywhere(&self, spec: &NamespaceSpec, at_least: u32) -> u32 {
        let spec = Arc::new(spec.clone());
        // From here on a server that comes back is told of it.
        let before = self.enter_at_least(&spec, at_least);
        let deadline = Instant::now() + self.shared.config.timeout;
        let opened = self.ask_opened(&spec, deadline);
        // Somebody may have gone further meanwhile.
        let epoch = self.enter_at_least(&spec, newest(&opened).max(before));
        let told = self.move_behind(&spec, epoch, &opened).0.is_ok();
        self.shared.spaces.lock().told(&spec, epoch, told);
        self.shared.spaces.lock().epoch(&spec).unwrap_or(epoch)
    }

    /// Moves all servers to an epoch that none of them had. A server that another client moves at the same moment
    /// refuses, because the move names the epoch that it leaves; then a later epoch is tried.
    pub(super) fn advance_everywhere(&self, spec: &NamespaceSpec, at_least: u32) -> Result<u32> {
        let spec = Arc::new(spec.clone());
        let known = self.shared.spaces.lock().epoch(&spec);
        let mut epoch = self.enter_at_least(&spec, next_epoch(known.unwrap_or(0), at_least)?);
        let mut outcome = Ok(());
        for attempt in 0..ADVANCES_MAX {
            let deadline = Instant::now() + self.shared.config.timeout;
            let opened = self.ask_opened(&spec, deadline);
            // The first time nobody may have it; later some servers have it from this very call.
            let taken = newest(&opened);
            if taken > epoch || (attempt == 0 && taken == epoch) {
                epoch = self.enter_at_least(&spec, next_epoch(taken, at_least)?);
            }
            let refused;
            (outcome, refused) = self.move_behind(&spec, epoch, &opened);
            // Another client was faster, or a connection that was just made told the server of this epoch already.
            if !refused {
                break;
            }
        }
        self.shared.spaces.lock().told(&spec, epoch, outcome.is_ok());
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
    ) -> (Result<()>, bool) {
        // Not the time that a server which hangs has left of an earlier answer: the others are to be told.
        let deadline = Instant::now() + self.shared.config.timeout;
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
