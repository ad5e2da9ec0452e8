//! Opens namespaces and moves them to other epochs.
//!
//! No lock is held across I/O. One thread at a time has the turn of a namespace; a hung file system blocks that
//! namespace alone, and its callers no longer than `open_wait`. What is to be stored is recorded in `Inner::wanted`
//! before the first I/O, and a namespace recorded there is closed: nothing reads or writes it until its epoch is
//! stored. Lock order: `Inner`, then `State`.

use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::limits::{EPOCH_RETRY_MS, NAMESPACES_STORED_MAX};
use kvdepot_core::{Error, ErrorKind, NamespaceId, NamespaceSpec, Result};

use super::epochs::Unstored;
use super::shared::Shared;
use super::space::{NamespaceFile, Space};
use crate::{BlockingCalls, Done};

/// The turn of a namespace; given back when dropped.
pub(super) struct Turn<S: Deref<Target = Shared>>(S, NamespaceId);

impl<S: Deref<Target = Shared>> Drop for Turn<S> {
    fn drop(&mut self) {
        self.0.namespaces.end_turn(self.1);
    }
}

/// A call that opens a namespace or moves it, until it has been answered.
pub(super) struct Opening<'a> {
    pub(super) shared: &'a Arc<Shared>,
    pub(super) calls: &'a BlockingCalls,
    pub(super) spec: &'a Arc<NamespaceSpec>,
    pub(super) at_least: u32,
    pub(super) deadline: Instant,
    pub(super) done: Done<u32>,
}

impl Opening<'_> {
    /// See [`crate::Tier::open_namespace`].
    pub(super) fn open(self) {
        if let Err(error) = self.shared.admit_root(self.spec.root()) {
            return (self.done)(Err(error));
        }
        let (spec, at_least) = (Arc::clone(self.spec), self.at_least);
        self.in_turn(move |shared| shared.open_in_turn(&spec, at_least));
    }

    /// See [`crate::Tier::advance_epoch`].
    pub(super) fn advance(mut self) {
        let root = self.spec.root();
        if let Err(error) = self.shared.admit_root(root) {
            return (self.done)(Err(error));
        }
        // Before any I/O: from here on nothing old is served, whatever the file system does.
        self.shared.close(self.spec, self.at_least, true);
        let (shared, done) = (Arc::clone(self.shared), self.done);
        self.done = Box::new(move |outcome| {
            if let Err(error) = &outcome {
                tracing::error!(
                    %error, namespace = %root,
                    "a reset is not stored: this tier gives misses for the namespace until it is. It is tried again by \
                     itself; a depot that ends before that may serve blocks from before the reset after its restart"
                );
                keep_trying(&shared);
            }
            done(outcome);
        });
        self.in_turn(move |shared| shared.settle(root));
    }

    /// Runs `work` on a thread that has the namespace's turn; the answer comes by the deadline.
    fn in_turn(self, work: impl FnOnce(&Shared) -> Result<u32> + Send + 'static) {
        let root = self.spec.root();
        let open_wait = self.shared.config.open_wait;
        let deadline = self.deadline.min(Instant::now() + open_wait);
        let late = move |root| late(root, open_wait);
        let shared = Arc::clone(self.shared);
        let run = move || {
            if !shared.namespaces.take_turn(root, deadline) {
                return Err(late(root));
            }
            let turn = Turn(Arc::clone(&shared), root);
            let outcome = work(&turn.0);
            drop(turn);
            // Here and not in the caller, which may have stopped waiting before the namespace was closed.
            if outcome.is_err() && shared.namespaces.is_wanted(root) {
                keep_trying(&shared);
            }
            outcome
        };
        let done = self.done;
        let told = move |outcome: Result<u32>| {
            done(
                outcome.map_err(|error| if error.kind() == ErrorKind::Timeout { late(root) } else { error }),
            );
        };
        self.calls.run(deadline, run, Box::new(told));
    }
}

fn late(root: NamespaceId, open_wait: Duration) -> Error {
    Error::new(ErrorKind::Timeout, "a tier's file system does not answer: the namespace stays closed")
        .with("namespace", root)
        .with("waited_ms_max", open_wait.as_millis())
}

/// Starts the thread that retries to store what is wanted; it ends when everything is stored.
fn keep_trying(shared: &Arc<Shared>) {
    let mut inner = shared.namespaces.inner.lock();
    if inner.is_retrying || inner.is_stopping {
        return;
    }
    let mine = Arc::clone(shared);
    let thread = std::thread::Builder::new().name("kvd-posix-epoch".to_owned());
    match thread.spawn(move || retry(&mine)) {
        Ok(_) => inner.is_retrying = true,
        Err(error) => tracing::error!(%error, "cannot start a thread: the next reset or opening tries again"),
    }
}

fn retry(shared: &Arc<Shared>) {
    loop {
        let roots: Vec<NamespaceId> = {
            let mut inner = shared.namespaces.inner.lock();
            let until = Instant::now() + Duration::from_millis(EPOCH_RETRY_MS);
            while !inner.is_stopping && !shared.namespaces.changed.wait_until(&mut inner, until).timed_out() {
            }
            if inner.is_stopping || inner.wanted.is_empty() {
                inner.is_retrying = false;
                return;
            }
            inner.wanted.keys().copied().collect()
        };
        for root in roots {
            // A hung file system keeps the turn and is left alone.
            if let Some(_turn) = shared.try_turn(root) {
                match shared.settle(root) {
                    Ok(epoch) => tracing::warn!(namespace = %root, epoch, "a reset is stored now"),
                    Err(error) => tracing::debug!(%error, namespace = %root, "a reset is still not stored"),
                }
            }
        }
    }
}

impl Shared {
    /// Returns the turn of a namespace, if nobody has it.
    pub(super) fn try_turn(&self, root: NamespaceId) -> Option<Turn<&Self>> {
        self.namespaces.take_turn(root, Instant::now()).then(|| Turn(self, root))
    }

    fn admit_root(&self, root: NamespaceId) -> Result<()> {
        let state = self.lock();
        if state.roots.len() >= NAMESPACES_STORED_MAX && !state.roots.contains_key(&root) {
            return Err(Error::new(
                ErrorKind::NoSpace,
                "the tier's directories hold too many namespaces: remove those of models that are not served any more",
            )
            .with("namespaces_max", NAMESPACES_STORED_MAX));
        }
        Ok(())
    }

    /// Makes a namespace unreachable until an epoch is stored.
    fn close(&self, spec: &NamespaceSpec, at_least: u32, advance: bool) {
        let mut inner = self.namespaces.inner.lock();
        inner.want(spec, at_least, advance);
        self.retire_namespace(spec.root());
    }

    fn open_in_turn(&self, spec: &NamespaceSpec, at_least: u32) -> Result<u32> {
        let root = spec.root();
        if self.namespaces.is_wanted(root) {
            self.close(spec, at_least, false);
            return self.settle(root);
        }
        let known = self.known_epoch(root);
        let stored = match (self.stored(root), known) {
            (Ok(stored), _) => stored,
            (Err(error), Some(epoch)) if epoch >= at_least => {
                tracing::debug!(%error, namespace = %root, "cannot check whether a namespace has a new epoch");
                return Ok(epoch);
            }
            (Err(error), _) => return Err(error),
        };
        let epoch = stored.epoch.max(at_least).max(known.unwrap_or(0));
        if stored.epoch < epoch {
            self.close(spec, epoch, false);
            return self.settle(root);
        }
        let file = self.describe(spec, epoch, &stored);
        if !stored.is_described(&file)
            && let Err(error) = self.write_described(&file, &stored)
            && stored.file().is_none()
        {
            // Other nodes could not know how its files are laid out.
            return Err(error);
        }
        let inner = self.namespaces.inner.lock();
        if inner.wanted.contains_key(&root) {
            return Err(Error::new(ErrorKind::Busy, "the namespace is being reset").with("namespace", root));
        }
        self.make_current(file);
        Ok(epoch)
    }

    /// Stores what is wanted for a namespace, and opens it. The caller has the turn.
    fn settle(&self, root: NamespaceId) -> Result<u32> {
        let Some(wanted) = self.namespaces.inner.lock().wanted.get(&root).cloned() else {
            // Somebody has stored it in the meantime.
            return self.known_epoch(root).ok_or_else(|| {
                Error::new(ErrorKind::Busy, "the namespace is not open yet").with("namespace", root)
            });
        };
        let outcome = self.store_epoch(&wanted.spec, wanted.at_least, wanted.advance);
        let mut inner = self.namespaces.inner.lock();
        let is_last = inner.wanted.get(&root).is_some_and(|now| now.request == wanted.request);
        match outcome {
            Ok(file) if is_last => {
                inner.wanted.remove(&root);
                let epoch = file.epoch;
                self.make_current(file);
                Ok(epoch)
            }
            Ok(_) => {
                Err(Error::new(ErrorKind::Busy, "the namespace is being reset again").with("namespace", root))
            }
            Err(Unstored { decided, error }) => {
                if let (true, Some(epoch), Some(now)) = (is_last, decided, inner.wanted.get_mut(&root)) {
                    (now.at_least, now.advance) = (epoch, false);
                }
                Err(error)
            }
        }
    }

    fn known_epoch(&self, root: NamespaceId) -> Option<u32> {
        let state = self.lock();
        state.roots.get(&root).and_then(|id| state.spaces.get(id)).map(|space| space.epoch)
    }

    /// Makes a stored epoch the current one, and has its files looked for.
    fn make_current(&self, file: NamespaceFile) {
        let id = file.spec.id(file.epoch);
        let root = file.spec.root();
        if self.lock().roots.get(&root).is_some_and(|known| *known != id) {
            self.retire_namespace(root);
        }
        if !self.lock().spaces.contains_key(&id) {
            self.install(file);
        }
        let mut state = self.lock();
        if let Some(space) = state.spaces.get(&id).map(Arc::clone)
            && !state.scanned.contains(&id)
        {
            state.chores.enqueue_scan(&space, self.devices.len(), true);
            self.work.notify_one();
        }
        if !state.counted {
            // The namespace was out of sight in the meantime.
            state.chores.discover = true;
            self.work.notify_one();
        }
    }

    /// Makes a namespace known that its directory describes, unless an epoch must be stored first.
    pub(super) fn install_unless_wanted(&self, file: NamespaceFile) {
        let inner = self.namespaces.inner.lock();
        if !inner.wanted.contains_key(&file.spec.root()) {
            self.install(file);
        }
    }

    fn install(&self, file: NamespaceFile) {
        let space = Arc::new(Space::new(file.spec, file.epoch, file.sharded));
        let mut state = self.lock();
        for directory in 0..self.devices.len() {
            if let Some(bytes) = state.unnamed.remove(&(space.root, directory)) {
                state.uncharge_missing(bytes);
            }
        }
        state.roots.insert(space.root, space.id);
        state.spaces.insert(space.id, space);
    }
}

#[cfg(test)]
mod tests {
    use kvdepot_core::BlockHash;

    use super::super::PosixConfig;
    use super::super::state::Prior;
    use super::*;

    #[test]
    fn a_turn_is_one_thread_s_until_it_ends() {
        let prior = Prior { bound: None, total: None, set: BlockHash([0; 16]) };
        let shared = Shared::new(PosixConfig::new("/nowhere"), Vec::new(), Vec::new(), 0, prior);
        let (one, two) = (NamespaceId([1; 16]), NamespaceId([2; 16]));
        let turn = shared.try_turn(one);
        assert!(turn.is_some() && shared.try_turn(two).is_some());
        // Twice: a failed attempt must not end the turn that it runs into.
        assert!(shared.try_turn(one).is_none());
        assert!(shared.try_turn(one).is_none());
        drop(turn);
        assert!(shared.try_turn(one).is_some());
    }
}
