//! The thread that forgets blocks of past epochs, ends writes that waited too long, and retries to store epochs.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kvdepot_core::limits::EPOCH_RETRY_MS;
use kvdepot_core::{Error, ErrorKind, NamespaceId, NamespaceSpec, Result};

use super::spaces::Opening;
use super::state::{Answers, PIECE_SLOTS, Shared};
use crate::{BlockingCalls, Done};

/// How often waiting writes are checked, while there are any.
const TICK: Duration = Duration::from_millis(100);
const RETRY: Duration = Duration::from_millis(EPOCH_RETRY_MS);

pub(super) fn run(shared: &Arc<Shared>, calls: &Weak<BlockingCalls>) {
    let mut retry_at = None;
    loop {
        let mut answers = Answers::new();
        let mut state = shared.lock();
        if state.stopping {
            return;
        }
        if let Some(id) = state.over.front().copied() {
            drop(state);
            shared.forget_all(id);
            shared.lock().over.pop_front();
            shared.changed.notify_all();
            continue;
        }
        let now = Instant::now();
        state.expire(now, &mut answers);
        if state.spaces.is_wanted() {
            let due = *retry_at.get_or_insert(now + RETRY);
            if due <= now {
                retry_at = None;
                drop(state);
                shared.answer(answers);
                shared.try_again(calls);
                continue;
            }
        } else {
            retry_at = None;
        }
        if answers.is_empty() {
            let tick = (!state.inflight.is_empty()).then_some(now + TICK);
            match tick.into_iter().chain(retry_at).min() {
                Some(at) => drop(shared.keep.wait_until(&mut state, at)),
                None => shared.keep.wait(&mut state),
            }
        }
        drop(state);
        shared.answer(answers);
    }
}

impl Shared {
    /// Forgets all blocks of a namespace's epoch, in pieces.
    fn forget_all(&self, id: NamespaceId) {
        let mut from = Some(0);
        while let Some(at) = from {
            let mut state = self.lock();
            let (keys, next) = state.index.keys(id, at, PIECE_SLOTS);
            for key in keys {
                state.index.remove(&key);
            }
            from = next.filter(|_| state.index.has(id));
        }
    }

    fn try_again(self: &Arc<Self>, calls: &Weak<BlockingCalls>) {
        // Whoever is storing a table now stores everything that is wanted.
        let (Some(calls), false) = (calls.upgrade(), self.table.is_locked()) else { return };
        let shared = Arc::clone(self);
        let done: Done<()> = Box::new(|outcome| match outcome {
            Ok(()) => tracing::warn!("epochs of a Slab tier are stored now"),
            Err(error) => tracing::debug!(%error, "epochs of a Slab tier are still not stored"),
        });
        calls.run(Instant::now() + self.config.open_wait, move || shared.store(), done);
    }

    /// Stores what is wanted: one table for all waiting namespaces.
    fn store(&self) -> Result<()> {
        let mut number = self.table.lock();
        let rows = {
            let state = self.lock();
            if !state.spaces.is_wanted() {
                return Ok(());
            }
            state.spaces.rows()
        };
        *number += 1;
        self.medium.store_rows(*number, &rows)?;
        self.lock().spaces.stored(&rows);
        Ok(())
    }

    /// See [`crate::Tier::open_namespace`].
    pub(super) fn open_namespace(
        self: &Arc<Self>,
        calls: &BlockingCalls,
        spec: &Arc<NamespaceSpec>,
        at_least: u32,
        deadline: Instant,
        done: Done<u32>,
    ) {
        let opening = {
            let mut state = self.lock();
            let opening = state.spaces.open(spec, at_least);
            state.note_over();
            opening
        };
        self.keep.notify_one();
        match opening {
            Err(error) => done(Err(error)),
            Ok(Opening::Open(epoch)) => done(Ok(epoch)),
            Ok(Opening::Store(epoch)) => self.in_time(calls, spec.root(), epoch, deadline, done, false),
        }
    }

    /// See [`crate::Tier::advance_epoch`].
    pub(super) fn advance_epoch(
        self: &Arc<Self>,
        calls: &BlockingCalls,
        spec: &Arc<NamespaceSpec>,
        at_least: u32,
        deadline: Instant,
        done: Done<u32>,
    ) {
        let (epoch, root) = {
            let mut state = self.lock();
            let epoch = state.spaces.advance(spec, at_least);
            state.note_over();
            (epoch, spec.root())
        };
        self.keep.notify_one();
        let epoch = match epoch {
            Ok(epoch) => epoch,
            Err(error) => return done(Err(error)),
        };
        let told: Done<u32> = Box::new(move |outcome| {
            if let Err(error) = &outcome {
                tracing::error!(
                    %error, namespace = %root,
                    "a reset is not stored: this tier gives misses for the namespace until it is. It is tried again by \
                     itself; a depot that ends before that may serve blocks from before the reset after its restart"
                );
            }
            done(outcome);
        });
        self.in_time(calls, root, epoch, deadline, told, true);
    }

    /// Stores an epoch and reports it, or reports that the medium does not answer.
    fn in_time(
        self: &Arc<Self>,
        calls: &BlockingCalls,
        root: NamespaceId,
        epoch: u32,
        deadline: Instant,
        done: Done<u32>,
        own: bool,
    ) {
        let (shared, wait) = (Arc::clone(self), self.config.open_wait);
        let work = move || {
            shared.store()?;
            let stored = shared.lock().spaces.epoch(root).filter(|stored| *stored >= epoch);
            // A reset reports its own number, even if another reset followed it.
            stored.map(|stored| if own { epoch } else { stored }).ok_or_else(|| {
                Error::new(ErrorKind::Busy, "the namespace is being reset again").with("namespace", root)
            })
        };
        let told = move |outcome: Result<u32>| {
            done(outcome.map_err(|error| {
                match error.kind() {
                    ErrorKind::Timeout => Error::new(
                        ErrorKind::Timeout,
                        "a Slab tier's medium does not answer: the namespace stays closed",
                    )
                    .with("namespace", root)
                    .with("waited_ms_max", wait.as_millis()),
                    _ => error,
                }
            }));
        };
        calls.run(deadline.min(Instant::now() + wait), work, Box::new(told));
    }
}

#[cfg(test)]
mod tests {
    use kvdepot_core::BlockLayout;

    use super::super::{SlabConfig, SlabTier};
    use crate::Tier;
    use crate::conformance::{Bench, spec};

    #[test]
    fn a_past_epoch_has_no_keys_before_the_keeper_forgets_them() {
        let dir = tempfile::tempdir().unwrap();
        let config = SlabConfig {
            capacity_bytes: 64 << 20,
            segment_bytes: 4 << 20,
            ..SlabConfig::new(dir.path().join("medium"))
        };
        let tier = std::sync::Arc::new(SlabTier::open(config).unwrap());
        let one = spec("one", BlockLayout::new(vec![vec![4096]]).unwrap());
        let bench = Bench::with(std::sync::Arc::<SlabTier>::clone(&tier), one);
        bench.write_all(3);
        bench.drain();
        let old = bench.spec.id(bench.epoch);
        assert_eq!(tier.keys(old).len(), 3);
        // Like a reset, but nobody wakes the keeper.
        let mut state = tier.shared.lock();
        state.spaces.advance(&std::sync::Arc::new(bench.spec.clone()), 0).unwrap();
        assert!(state.note_over() && state.index.has(old));
        drop(state);
        assert!(tier.keys(old).is_empty());
    }
}
