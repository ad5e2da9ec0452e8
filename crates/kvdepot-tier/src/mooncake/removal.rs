//! Removals, which Mooncake refuses while a reader has a lease on the value.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::limits::{
    MOONCAKE_BATCH_BLOCKS_MAX, MOONCAKE_CORRUPT_MAX, MOONCAKE_CORRUPT_TRIES, MOONCAKE_REMOVE_TRIES,
};
use kvdepot_core::{BlockKey, Error, ErrorKind, Result};

use super::link::Call;
use super::names;
use super::protocol::MooncakeOp;
use super::shared::{Shared, code, one_more, refused};
use crate::{BlockingCalls, Done};

impl Shared {
    /// See [`crate::Tier::remove`].
    pub(super) fn remove(self: &Arc<Self>, calls: &BlockingCalls, keys: Vec<BlockKey>, done: Done<()>) {
        let leaving = self.beliefs.leaving(keys);
        let (shared, answer) = (Arc::clone(self), self.owed.answer(done));
        let deadline = Instant::now() + self.config.timeout * 2;
        let work = move || {
            let outcome = shared.remove_all(leaving.keys(), deadline);
            // The blocks may be written again before anyone is notified.
            drop(leaving);
            outcome
        };
        calls.run(deadline, work, Box::new(move |outcome| answer.end(outcome)));
    }

    fn remove_all(&self, keys: &[BlockKey], deadline: Instant) -> Result<()> {
        self.wait_for_writes(keys, deadline)?;
        let (tries, pause_ms) = MOONCAKE_REMOVE_TRIES;
        let mut left = keys.to_vec();
        for _ in 0..tries {
            let refusal = self.remove_now(&mut left, deadline)?;
            let Some(refusal) = refusal else { return Ok(()) };
            if refusal.kind() != ErrorKind::Busy
                || self.link.stops_within(Duration::from_millis(pause_ms).min(self.left(deadline)))
            {
                return Err(refusal);
            }
        }
        let what = "readers' leases keep blocks in Mooncake: they are removed later";
        Err(Error::new(ErrorKind::Busy, what).with("blocks", left.len()))
    }

    fn left(&self, deadline: Instant) -> Duration {
        deadline.saturating_duration_since(Instant::now())
    }

    /// Waits until no write of these blocks is in flight here. No new one begins, because they are leaving.
    fn wait_for_writes(&self, keys: &[BlockKey], deadline: Instant) -> Result<()> {
        let mut writing = self.beliefs.writing.lock();
        while keys.iter().any(|key| writing.is_written(key)) {
            if self.written.wait_until(&mut writing, deadline).timed_out() {
                return Err(Error::new(ErrorKind::Timeout, "a block is still being written"));
            }
        }
        Ok(())
    }

    /// Removes what can be removed now from Mooncake and from `keys`. Returns why others are left.
    fn remove_now(&self, keys: &mut Vec<BlockKey>, deadline: Instant) -> Result<Option<Error>> {
        let mut refusal = None;
        let mut left = Vec::new();
        for some in std::mem::take(keys).chunks(MOONCAKE_BATCH_BLOCKS_MAX) {
            let mut asked = Vec::with_capacity(some.len());
            for key in some {
                if self.beliefs.writing.lock().is_doubtful(key) {
                    let what = "Mooncake may still make a write of a block that is to be removed";
                    refusal = Some(Error::new(ErrorKind::Busy, what).with("key", key));
                    left.push(*key);
                    continue;
                }
                let place = self.named.lock().place(key);
                match place {
                    Ok(place) => asked.push((*key, names::block(&self.config.prefix, key, place.token))),
                    Err(error) => {
                        refusal = Some(error);
                        left.push(*key);
                    }
                }
            }
            if asked.is_empty() {
                continue;
            }
            let names: Vec<String> = asked.iter().map(|(_, name)| name.clone()).collect();
            let call = Call { op: MooncakeOp::Remove, keys: names, at: Vec::new(), bytes: Vec::new() };
            let answered = self.link.call(call, None, deadline, None).map_err(|failed| failed.error)?;
            for ((key, name), code) in asked.into_iter().zip(answered.codes) {
                match code {
                    0.. | code::NOT_FOUND => {}
                    other => {
                        if other == code::HAS_LEASE {
                            one_more(&self.figures.refused_by_lease);
                        }
                        refusal = Some(refused(other, &name));
                        left.push(key);
                    }
                }
            }
        }
        *keys = left;
        Ok(refusal)
    }

    /// Makes a corrupt block absent here until [`Shared::remove_corrupt`] has removed it: the read that found it has a
    /// lease on it.
    pub(super) fn set_aside(&self, key: BlockKey) {
        {
            let mut corrupt = self.corrupt.lock();
            if corrupt.len() >= MOONCAKE_CORRUPT_MAX || corrupt.insert(key, MOONCAKE_CORRUPT_TRIES).is_some()
            {
                return;
            }
        }
        self.beliefs.leave(&[key]);
    }

    /// Tries to remove the corrupt blocks.
    pub(super) fn remove_corrupt(self: &Arc<Self>) {
        let keys: Vec<BlockKey> = self.corrupt.lock().keys().copied().collect();
        if keys.is_empty() || !self.link.is_up() {
            return;
        }
        let mut left = keys.clone();
        let deadline = Instant::now() + self.config.timeout;
        if let Err(error) = self.remove_now(&mut left, deadline) {
            tracing::debug!(%error, "corrupt blocks in Mooncake are not removed yet");
            left.clone_from(&keys);
        }
        let over: Vec<BlockKey> = {
            let mut corrupt = self.corrupt.lock();
            let is_over = |key: &BlockKey, tries: &mut u32| {
                *tries -= 1;
                // In an epoch that has passed, it has no name any more.
                *tries == 0 || !left.contains(key) || self.named.lock().place(key).is_err()
            };
            let over: Vec<BlockKey> = keys
                .into_iter()
                .filter(|key| corrupt.get_mut(key).is_some_and(|tries| is_over(key, tries)))
                .collect();
            for key in &over {
                corrupt.remove(key);
            }
            over
        };
        self.beliefs.left(&over);
    }
}
