//! Opens namespaces and moves them to other epochs. One epoch is written at a time; a hung medium blocks openings and
//! resets, but no reads, and blocks callers no longer than `open_wait`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::limits::EPOCH_RETRY_MS;
use kvdepot_core::{NamespaceId, NamespaceSpec, Result, next_epoch};
use kvdepot_io::IoEngine;

use super::epochs::{Change, Epochs};
use super::layout::EpochRecord;
use super::state::{Shared, Wanted};
use crate::{BlockingCalls, Done};

/// A call that opens a namespace or moves it.
pub(super) struct Opening<'a> {
    pub(super) shared: &'a Arc<Shared>,
    pub(super) engine: &'a Arc<dyn IoEngine>,
    pub(super) calls: &'a BlockingCalls,
    pub(super) spec: &'a Arc<NamespaceSpec>,
    pub(super) at_least: u32,
    pub(super) deadline: Instant,
    pub(super) done: Done<u32>,
}

impl Opening<'_> {
    /// See [`crate::Tier::open_namespace`].
    pub(super) fn open(self) {
        self.begin(None);
    }

    /// See [`crate::Tier::advance_epoch`]. From here on nothing old is served, whatever the medium does.
    pub(super) fn advance(self) {
        let request = self.shared.close(self.spec, self.at_least);
        self.begin(Some(request));
    }

    fn begin(self, advance: Option<u64>) {
        let deadline = self.deadline.min(Instant::now() + self.shared.config.open_wait);
        let (spec, at_least) = (Arc::clone(self.spec), self.at_least);
        let (pending, engine) = (Pending::begin(self.shared, spec.root()), Arc::downgrade(self.engine));
        let work = move || {
            let shared = &pending.shared;
            let (epoch, past) = shared.move_to(&spec, at_least, advance)?;
            if let (Some(engine), Some(past)) = (engine.upgrade(), past) {
                shared.retire(&engine, past);
            }
            Ok(epoch)
        };
        let (shared, root, done) = (Arc::clone(self.shared), self.spec.root(), self.done);
        let told = move |outcome: Result<u32>| {
            shared.deliver_events();
            if let Err(error) = &outcome
                && shared.lock().wanted.contains_key(&root)
            {
                tracing::error!(
                    %error, namespace = %root,
                    "a reset is not stored: until it is, all blocks of the namespace are misses in this tier. It is retried automatically"
                );
                keep_trying(&shared);
            }
            done(outcome);
        };
        self.calls.run(deadline, work, Box::new(told));
    }
}

/// A call that opens a namespace or moves it, until it has no effect any more: it may outlast its answer.
struct Pending {
    shared: Arc<Shared>,
    root: NamespaceId,
}

impl Pending {
    fn begin(shared: &Arc<Shared>, root: NamespaceId) -> Self {
        shared.lock().begin_call(root);
        Self { shared: Arc::clone(shared), root }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        self.shared.lock().end_call(self.root);
    }
}

impl Shared {
    /// See [`crate::Tier::close_namespace`].
    pub(super) fn close_namespace(&self, root: NamespaceId) {
        self.lock().close(root);
    }

    /// Makes a namespace unreachable until a new epoch is stored; returns the number of this request.
    fn close(&self, spec: &Arc<NamespaceSpec>, at_least: u32) -> u64 {
        let mut state = self.lock();
        state.requests += 1;
        let request = state.requests;
        state.want(spec, at_least, request);
        request
    }

    /// Stores the epoch that a namespace shall be in, and opens it; returns the epoch, and the id of the one that is
    /// over. With `advance`, a new epoch, for the request with that number.
    fn move_to(
        &self,
        spec: &Arc<NamespaceSpec>,
        at_least: u32,
        advance: Option<u64>,
    ) -> Result<(u32, Option<NamespaceId>)> {
        let root = spec.root();
        let mut epochs = self.epochs.lock();
        let (wanted, request) = {
            let mut state = self.lock();
            if let Some(request) = advance {
                // Whoever stored an epoch since the request was made, for another call, has opened the namespace.
                state.want(spec, at_least, request);
            }
            let wanted = state.wanted.get(&root);
            // Of several resets the last one opens the namespace.
            (wanted.map(|wanted| wanted.at_least), advance.or(wanted.map(|wanted| wanted.request)))
        };
        let stored = epochs.get(root);
        if stored.is_none() {
            self.make_place(&mut epochs)?;
        }
        let now = stored.map_or(epochs.least(), |(epoch, _)| epoch);
        let least = at_least.max(wanted.unwrap_or(0));
        // Whoever opens a namespace whose reset is not stored yet stores it.
        let is_new = advance.is_some() || wanted.is_some();
        let epoch = if is_new { next_epoch(now, least)? } else { now.max(least) };
        let is_stored = stored == Some((epoch, true));
        if !is_stored {
            let record = EpochRecord { root, epoch, id: spec.id(epoch) };
            let change = epochs.change(record)?;
            self.out_of_reach(root, &record);
            self.store(&mut epochs, change)?;
        }
        let mut state = self.lock();
        // A later request wants another epoch: what this one stored is returned to its caller, but nobody opens it.
        if state.wanted.get(&root).map(|wanted| wanted.request) == request {
            state.wanted.remove(&root);
            state.open(spec, epoch);
        }
        let past = stored.filter(|(past, _)| *past != epoch).map(|(past, _)| spec.id(past));
        Ok((epoch, past))
    }

    /// Writes a change, one copy after the other.
    fn store(&self, epochs: &mut Epochs, change: Change) -> Result<()> {
        let mut next = Some(change);
        while let Some(change) = next {
            self.check_owner()?;
            self.medium.write(change.at, &change.bytes)?;
            self.medium.persist()?;
            self.check_owner()?;
            // Noted for each copy: if the second fails, the next attempt must not overwrite the first.
            epochs.stored(&change);
            next = change.other(epochs);
        }
        Ok(())
    }

    /// Forgets namespaces that have no blocks and are not open, until a new one has a place.
    fn make_place(&self, epochs: &mut Epochs) -> Result<()> {
        while epochs.is_full() {
            let forgotten = {
                let state = self.lock();
                epochs.forget(|root, id| {
                    state.roots.contains_key(&root)
                        || state.wanted.contains_key(&root)
                        || id.is_some_and(|id| state.slots.has_any(id))
                })?
            };
            let Some(change) = forgotten else { break };
            tracing::debug!(path = %self.medium.path().display(), "a medium forgets a namespace without blocks");
            self.store(epochs, change)?;
        }
        Ok(())
    }

    /// Closes a namespace that is open in an epoch other than the one about to be stored.
    fn out_of_reach(&self, root: NamespaceId, next: &EpochRecord) {
        let mut state = self.lock();
        if state.roots.get(&root).is_some_and(|id| *id != next.id) {
            state.take_out(root);
        }
    }
}

/// Starts the thread that retries to store what is wanted; it ends when everything is stored.
fn keep_trying(shared: &Arc<Shared>) {
    {
        let mut state = shared.lock();
        if state.is_retrying || state.is_stopping {
            return;
        }
        state.is_retrying = true;
    }
    let mine = Arc::clone(shared);
    let thread = std::thread::Builder::new().name("kvd-dax-epoch".to_owned());
    if let Err(error) = thread.spawn(move || retry(&mine)) {
        shared.lock().is_retrying = false;
        tracing::error!(%error, "cannot start a thread: the next reset or opening tries again");
    }
}

fn retry(shared: &Shared) {
    loop {
        let wanted: Vec<Wanted> = {
            let mut state = shared.lock();
            let until = Instant::now() + Duration::from_millis(EPOCH_RETRY_MS);
            while !state.is_stopping && !shared.wait_changed(&mut state, until) {}
            if state.is_stopping || state.wanted.is_empty() {
                state.is_retrying = false;
                return;
            }
            state.wanted.values().cloned().collect()
        };
        for wanted in wanted {
            let root = wanted.spec.root();
            match shared.move_to(&wanted.spec, wanted.at_least, None) {
                Ok((epoch, _)) => tracing::warn!(namespace = %root, epoch, "a reset is stored now"),
                Err(error) => tracing::debug!(%error, namespace = %root, "a reset is still not stored"),
            }
            shared.deliver_events();
        }
    }
}

impl Shared {
    /// Waits under the lock; returns whether the time is over.
    fn wait_changed(
        &self,
        state: &mut parking_lot::MutexGuard<'_, super::state::State>,
        until: Instant,
    ) -> bool {
        self.changed.wait_until(state, until).timed_out()
    }

    /// Ends the retry thread.
    pub(super) fn stop(&self) {
        self.lock().is_stopping = true;
        self.changed.notify_all();
        self.clock.stop();
        self.ahead.stop();
    }
}
