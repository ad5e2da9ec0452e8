//! Requests that go to several servers, or that nobody waits for.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Instant;

use hashbrown::HashSet;
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceSpec, Result, epoch_moves};
use parking_lot::Mutex;

use super::job::{Job, Opened, What};
use super::server::{Health, Server};
use super::{RemoteTier, Shared};
use crate::Done;

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
    /// The newest epoch that any server knows, which all that are there know when this returns.
    pub(super) fn open_everywhere(&self, spec: &NamespaceSpec) -> u32 {
        let spec = Arc::new(spec.clone());
        let before = {
            let mut spaces = self.shared.spaces.lock();
            let epoch = spaces.epoch(&spec).unwrap_or(0);
            // From here on a server that comes back is told of it.
            spaces.enter(&spec, epoch);
            epoch
        };
        let deadline = Instant::now() + self.shared.config.timeout;
        let opened = self.ask_opened(&spec, deadline);
        let epochs = opened.iter().flatten().map(|opened| opened.epoch);
        let epoch = epochs.max().unwrap_or(0).max(before);
        {
            let mut spaces = self.shared.spaces.lock();
            // Somebody may have gone further meanwhile.
            if spaces.epoch(&spec).is_none_or(|now| now < epoch) {
                spaces.enter(&spec, epoch);
            }
        }
        let _ = self.move_behind(&spec, epoch, &opened);
        self.shared.spaces.lock().epoch(&spec).unwrap_or(epoch)
    }

    pub(super) fn set_epoch_everywhere(&self, spec: &NamespaceSpec, epoch: u32) -> Result<()> {
        let before = self.shared.spaces.lock().epoch(spec);
        let before = before.unwrap_or_else(|| self.open_everywhere(spec));
        if !epoch_moves(before, epoch)? {
            return Ok(());
        }
        let spec = Arc::new(spec.clone());
        let old = self.shared.spaces.lock().enter(&spec, epoch);
        if let Some(old) = old {
            self.shared.known.lock().forget_namespace(old);
        }
        let deadline = Instant::now() + self.shared.config.timeout;
        let told = || self.move_behind(&spec, epoch, &self.ask_opened(&spec, deadline));
        // A connection that was just made may have told the server already, which knows the old name no more.
        told().or_else(|_| told())
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

    /// Moves servers that are behind; an error names one that could not be told, and will be when it comes back.
    fn move_behind(&self, spec: &Arc<NamespaceSpec>, epoch: u32, opened: &[Option<Opened>]) -> Result<()> {
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
        for (server, receive) in asked {
            match wait(&receive, deadline) {
                Ok(Ok(())) => {}
                Ok(Err(error)) => outcome = Err(untold(server).with_source(error)),
                Err(_) => outcome = Err(untold(server)),
            }
        }
        outcome
    }
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
