//! Opening namespaces on all servers, and resets, which every server must learn of.
//!
//! A reset closes the namespace on every server before any is asked. A server opens again when this tier has moved it
//! by a request that names the epoch it leaves, so its blocks of the new epoch are all from after the reset. A server
//! that is already in that epoch or a later one may have been moved before the reset. In that case no server keeps the
//! number: all are moved to a later one. But a server that was still behind when it was asked after the reset had begun
//! was moved since then, even if only by a request whose answer was lost: it has taken the reset.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kvdepot_core::{Error, ErrorKind, NamespaceId, NamespaceSpec, Result, next_epoch};

use super::config::RemoteProtocol;
use super::everyone::Everyone;
use super::job::{Job, Opened, What};
use super::server::{Dialect, Server};
use super::spaces::{ServerSet, Space, bit};
use crate::Done;

/// Maximum number of tries to move all servers to one epoch while other clients move them, too.
const ADVANCES_MAX: usize = 3;
/// Clocks that show more are wrong, and must not use up the numbers of epochs.
const CLOCK_EPOCHS_MAX: u32 = 3 << 30;

/// Returns the end of one phase of work that must be finished by `deadline`, so that a server that hangs leaves time
/// for the next phase.
fn phase_end(timeout: Duration, deadline: Instant) -> Instant {
    let left = deadline.saturating_duration_since(Instant::now());
    Instant::now() + timeout.min(left / 2)
}

/// Result of moving all servers to an epoch.
struct Told {
    /// Names a server that could not be moved, and will be when it comes back.
    outcome: Result<()>,
    /// Whether a server refused to be moved from its epoch.
    is_refused: bool,
}

impl Everyone {
    /// Returns the newest epoch that any server knows, or `at_least`. All reachable servers know it when this returns.
    pub(super) fn open(&self, spec: &Arc<NamespaceSpec>, at_least: u32, deadline: Instant) -> u32 {
        // From here on, a server that comes back is moved to it.
        let epoch = self.enter_at_least(spec, at_least);
        if let Err(error) = self.settle(spec, at_least, deadline) {
            tracing::debug!(%error, namespace = %spec.root(), "a namespace is not open at every remote server");
        }
        self.shared.spaces.lock().get(spec.root()).map_or(epoch, |space| space.epoch)
    }

    /// Begins a reset before any server is asked: nothing of the namespace is read or written until servers have taken
    /// it.
    pub(super) fn leave_epoch(&self, spec: &Arc<NamespaceSpec>, at_least: u32) -> Result<()> {
        let mut spaces = self.shared.spaces.lock();
        let known = spaces.get(spec.root()).map_or(0, |space| space.epoch);
        let old = spaces.begin_reset(spec, next_epoch(known, at_least)?, self.all_servers());
        drop(spaces);
        if let Some(old) = old {
            self.shared.beliefs.forget_namespace(old);
        }
        Ok(())
    }

    /// Makes all servers take a reset that [`Self::leave_epoch`] began.
    pub(super) fn advance(&self, spec: &Arc<NamespaceSpec>, at_least: u32, deadline: Instant) -> Result<u32> {
        let outcome = self.settle(spec, at_least, deadline);
        if let Err(error) = &outcome {
            tracing::error!(
                %error, namespace = %spec.root(),
                "a reset is not stored at every remote server: those that have not taken it are not used for the namespace \
                 until they have; this is retried automatically"
            );
        }
        outcome
    }

    fn all_servers(&self) -> ServerSet {
        (0..self.servers.len()).map(bit).sum()
    }

    /// Moves all servers to one epoch: the newest that any of them knows, or a later one if a reset requires it.
    fn settle(&self, spec: &Arc<NamespaceSpec>, at_least: u32, deadline: Instant) -> Result<u32> {
        let _turn = self.shared.turns.take(spec.root(), deadline)?;
        for attempt in 1.. {
            let reset = self.shared.spaces.lock().get(spec.root()).map_or(0, |space| space.own.last);
            let opened = self.ask_opened(spec, phase_end(self.shared.config.timeout, deadline));
            let epoch = self.choose(spec, at_least, &opened, reset)?;
            let told = self.move_behind(spec, epoch, &opened, deadline);
            if told.outcome.is_ok() {
                self.doubt(spec.root(), deadline)?;
            }
            // Another client was faster, or a server failed in between and the next number shows when the reset was.
            let is_worth_it = told.is_refused || (self.is_to_be_ordered(spec) && self.may_order());
            if attempt >= ADVANCES_MAX || !is_worth_it || Instant::now() >= deadline {
                return told.outcome.map(|()| epoch);
            }
        }
        unreachable!("the last attempt returns")
    }

    /// Returns an error if a server has taken a reset but may not have stored it: it serves nothing old until it
    /// crashes.
    fn doubt(&self, root: NamespaceId, deadline: Instant) -> Result<()> {
        let deadline = phase_end(self.shared.config.timeout, deadline);
        let mut spaces = self.shared.spaces.lock();
        // Another thread asked it, and it has moved: its answer shows whether it stored the epoch.
        while spaces.is_unanswered(root) && Instant::now() < deadline {
            self.shared.answers.wait_until(&mut spaces, deadline);
        }
        let Some((server, error)) = spaces.doubt(root) else { return Ok(()) };
        let what = "a remote server has taken a reset, but did not say that it stored it: reset again before it crashes";
        Err(Error::new(ErrorKind::Unavailable, what)
            .with("server", &self.servers[*server].address)
            .with_source(error.clone()))
    }

    fn is_to_be_ordered(&self, spec: &NamespaceSpec) -> bool {
        let spaces = self.shared.spaces.lock();
        spaces.get(spec.root()).is_some_and(|space| space.own.owed != 0 && !space.own.is_ordered)
    }

    /// Chooses the epoch to move the servers to, now that they have reported theirs. They were asked while `reset` was
    /// the last one.
    fn choose(
        &self,
        spec: &Arc<NamespaceSpec>,
        at_least: u32,
        opened: &[Option<Opened>],
        reset: u64,
    ) -> Result<u32> {
        let may_order = self.may_order();
        let servers = |is: &dyn Fn(u32) -> bool| -> ServerSet {
            let is = |opened: &Option<Opened>| opened.is_some_and(|opened| is(opened.epoch));
            opened.iter().enumerate().filter(|(_, opened)| is(opened)).map(|(server, _)| bit(server)).sum()
        };
        let mut spaces = self.shared.spaces.lock();
        let known = spaces.get(spec.root()).map_or(0, |space| space.epoch);
        spaces.are_there(spec.root(), servers(&|there| there >= known));
        let (epoch, owed, is_ordered) = spaces
            .get(spec.root())
            .map_or((0, 0, false), |space| (space.epoch, space.own.owed, space.own.is_ordered));
        let newest = newest(opened).max(epoch);
        let owing = || opened.iter().enumerate().filter(|(server, _)| owed & bit(*server) != 0);
        // Its blocks of this epoch may be from before the reset.
        let is_taken = owing().any(|(_, opened)| opened.is_some_and(|opened| opened.epoch >= epoch));
        let is_away = owing().any(|(_, opened)| opened.is_none());
        let is_to_be_ordered = is_away && !is_ordered && may_order;
        let (epoch, old) = if is_taken || is_to_be_ordered {
            let next = next_epoch(newest, at_least)?;
            let next = if is_away && may_order { next.max(clock_epoch()) } else { next };
            (next, spaces.advance(spec, next, self.all_servers(), is_away && may_order))
        } else {
            let epoch = newest.max(at_least);
            (epoch, spaces.follow(spec, epoch))
        };
        spaces.were_behind(spec.root(), reset, servers(&|there| there < epoch));
        drop(spaces);
        if let Some(old) = old {
            self.shared.beliefs.forget_namespace(old);
        }
        Ok(epoch)
    }

    /// Returns whether all servers accept any number as an epoch. An InfiniStore server has an entry for each epoch,
    /// and a server that was never reached may be InfiniStore's.
    fn may_order(&self) -> bool {
        let config = &self.shared.config;
        config.protocol == RemoteProtocol::Kvdepot
            || config.token.is_some()
            || self.servers.iter().all(|server| server.dialect() == Some(Dialect::Own))
    }

    /// Makes `epoch` the current one unless a later one is, and returns the current one. Knowledge about earlier epochs
    /// is dropped.
    fn enter_at_least(&self, spec: &Arc<NamespaceSpec>, epoch: u32) -> u32 {
        let mut spaces = self.shared.spaces.lock();
        let epoch = spaces.get(spec.root()).map_or(epoch, |space| space.epoch.max(epoch));
        let old = spaces.enter(spec, epoch);
        drop(spaces);
        if let Some(old) = old {
            self.shared.beliefs.forget_namespace(old);
        }
        epoch
    }

    /// Returns the `Done` and the receiver of a request that is waited for. It counts as in flight, because otherwise
    /// its deadline would not be checked.
    fn waited_for<T: Send + 'static>(&self) -> (Done<T>, Receiver<Result<T>>) {
        let ((send, receive), shared) = (channel(), Arc::clone(&self.shared));
        shared.begun();
        let done = move |outcome| {
            drop(send.send(outcome));
            shared.ended();
        };
        (Box::new(done), receive)
    }

    /// Returns the answer of each server about a namespace; `None` for an unreachable one.
    fn ask_opened(&self, spec: &Arc<NamespaceSpec>, deadline: Instant) -> Vec<Option<Opened>> {
        let asked: Vec<Receiver<Result<Opened>>> =
            self.servers.iter().map(|server| self.begin_to_ask(server, spec, deadline)).collect();
        asked.iter().map(|receive| wait(receive, deadline).ok()?.ok()).collect()
    }

    /// Asks a server about a namespace, as soon as the server is known to be reachable.
    fn begin_to_ask(
        &self,
        server: &Server,
        spec: &Arc<NamespaceSpec>,
        deadline: Instant,
    ) -> Receiver<Result<Opened>> {
        let (done, receive) = self.waited_for();
        server.submit(Job { deadline, what: What::Open { spec: Arc::clone(spec), done } });
        receive
    }

    fn begin_to_move(
        &self,
        server: &Server,
        spec: &Arc<NamespaceSpec>,
        opened: Opened,
        epoch: u32,
        deadline: Instant,
    ) -> Receiver<Result<()>> {
        let (done, receive) = self.waited_for();
        let what = What::SetEpoch { spec: Arc::clone(spec), now: opened.namespace, epoch, done };
        server.submit(Job { deadline, what });
        receive
    }

    /// Makes one server take a reset that it owes, without the others if its answers allow that, because they may hang
    /// (P2).
    pub(super) fn retry_at(&self, index: usize, space: &Space) -> Result<()> {
        let (server, spec, root) = (&self.servers[index], &space.spec, space.spec.root());
        let deadline = Instant::now() + self.shared.config.timeout;
        let opened = wait(&self.begin_to_ask(server, spec, deadline), deadline)
            .unwrap_or_else(|_| Err(untold(server)));
        match opened {
            Ok(opened) if opened.epoch < space.epoch => {
                self.shared.spaces.lock().were_behind(root, space.own.last, bit(index));
                server.move_to(space, || {
                    let moved = self.begin_to_move(server, spec, opened, space.epoch, deadline);
                    wait(&moved, deadline).unwrap_or_else(|_| Err(untold(server)))
                })
            }
            Ok(opened) if self.shared.spaces.lock().is_there(root, opened.epoch, index) => Ok(()),
            Err(error) if space.own.is_ordered => Err(error),
            // Its epoch does not show whether it took the reset, or the reset's number does not show when it was: all
            // move to a later one.
            _ => self.settle(spec, 0, Instant::now() + self.shared.config.timeout * 4).map(drop),
        }
    }

    /// Moves the servers that are behind.
    fn move_behind(
        &self,
        spec: &Arc<NamespaceSpec>,
        epoch: u32,
        opened: &[Option<Opened>],
        deadline: Instant,
    ) -> Told {
        // It does not depend on the time that a hanging server has left of an earlier answer, because the others must
        // be asked, too.
        let deadline = phase_end(self.shared.config.timeout, deadline);
        let mut asked = Vec::new();
        let mut told = Told { outcome: Ok(()), is_refused: false };
        for (index, (server, opened)) in self.servers.iter().zip(opened).enumerate() {
            match opened {
                Some(opened) if opened.epoch >= epoch => {}
                Some(opened) => {
                    self.shared.spaces.lock().asks(spec.root(), index);
                    asked.push((index, self.begin_to_move(server, spec, *opened, epoch, deadline)));
                }
                None => told.outcome = Err(untold(server)),
            }
        }
        let mut failed = None;
        for (index, receive) in asked {
            let server = &self.servers[index];
            let answer = wait(&receive, deadline).unwrap_or_else(|_| Err(server.too_late()));
            self.shared.answered(spec.root(), epoch, index, &answer);
            let Err(error) = answer else { continue };
            let is_refused = error.kind() == ErrorKind::NotFound;
            let error = untold(server).with_source(error);
            told.is_refused |= is_refused;
            if is_refused {
                told.outcome = Err(error);
            } else {
                failed = Some(error);
            }
        }
        if let Some(error) = failed {
            told.outcome = Err(error);
        }
        told
    }
}

/// Returns the clock's time in seconds. With it, two resets that reach different servers get different numbers, and the
/// later one the higher, although neither knows of the other. A later opening takes the higher one.
fn clock_epoch() -> u32 {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    u32::try_from(seconds).ok().filter(|seconds| *seconds <= CLOCK_EPOCHS_MAX).unwrap_or(0)
}

/// Returns the newest epoch in the servers' answers.
fn newest(opened: &[Option<Opened>]) -> u32 {
    opened.iter().flatten().map(|opened| opened.epoch).max().unwrap_or(0)
}

/// Waits for an answer until `deadline`.
fn wait<T>(receive: &Receiver<T>, deadline: Instant) -> Result<T, RecvTimeoutError> {
    receive.recv_timeout(deadline.saturating_duration_since(Instant::now()))
}

fn untold(server: &Server) -> Error {
    Error::new(
        ErrorKind::Unavailable,
        "a remote server did not get a reset; it gets it when it comes back, as long as this depot runs",
    )
    .with("server", &server.address)
}
