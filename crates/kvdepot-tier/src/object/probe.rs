//! Probes a bucket for blocks. Unknown blocks are requested with `HEAD`, from the front, and more at a time as long as
//! all are present.
//!
//! A prompt that is new costs one request, not one per block. Requests continue to their end even if the caller does
//! not wait any longer, so the next lookup knows the answers.

use std::sync::Arc;
use std::time::Instant;

use kvdepot_core::limits::OBJECT_PROBE_BLOCKS_MAX;
use kvdepot_core::{BlockKey, Error, ErrorKind, Result};
use object_store::ObjectStoreExt;
use object_store::path::Path;
use tokio::sync::oneshot;
use tokio::time::{Instant as TokioInstant, timeout_at};

use super::link::{Fault, Lane};
use super::packs::PackIndex;
use super::shared::{Shared, in_time};
use crate::known::Known;
use crate::{Done, Presence};

/// Growth factor of the window from one round to the next.
const WIDER: usize = 8;

/// Returns what is known of a block, from packs and from answers about its own object.
fn presence(known: &Known, packs: &PackIndex, key: &BlockKey, now: Instant) -> Presence {
    match known.presence(key, now) {
        Presence::Present => Presence::Present,
        known => packs.find(key, now).map_or(known, |found| found.presence()),
    }
}

impl Shared {
    /// See [`crate::Tier::peek`].
    pub(super) fn peek(&self, keys: &[BlockKey], out: &mut Vec<Presence>) {
        out.clear();
        if self.link.is_off() {
            return out.resize(keys.len(), Presence::Absent);
        }
        let now = Instant::now();
        let spaces = self.spaces.lock();
        let writing = self.beliefs.writing.lock();
        let known = self.beliefs.known.lock();
        let packs = self.packs.index();
        out.extend(keys.iter().map(|key| {
            if writing.is_leaving(key) || spaces.of(key).is_err() {
                return Presence::Absent;
            }
            presence(&known, &packs, key, now)
        }));
    }

    /// Returns what is known of a block.
    pub(super) fn presence(&self, key: &BlockKey, now: Instant) -> Presence {
        let known = self.beliefs.known.lock();
        presence(&known, &self.packs.index(), key, now)
    }

    /// See [`crate::Tier::probe`].
    pub(super) fn probe(self: &Arc<Self>, keys: Vec<BlockKey>, deadline: Instant, done: Done<usize>) {
        if let Err(error) = in_time(deadline) {
            return done(Err(error));
        }
        let (shared, answer) = (Arc::clone(self), self.owed.answer(done));
        self.runtime.spawn(async move {
            let mut count = 0;
            let work = shared.count(&keys, &mut count);
            let outcome = timeout_at(TokioInstant::from_std(deadline), work).await;
            if let Some(missed) = keys.get(count) {
                // Another depot may have packed it: a later lookup knows.
                shared.list_packs_if_due(missed.namespace);
            }
            answer.end(match outcome {
                Ok(Err(error)) if count == 0 => Err(error),
                // Blocks that are not known by the deadline are misses for now.
                _ => Ok(count),
            });
        });
    }

    /// Counts the leading blocks that are present, as far as it has come.
    async fn count(self: &Arc<Self>, keys: &[BlockKey], count: &mut usize) -> Result<()> {
        let mut width = 1;
        let mut known = Vec::new();
        while *count < keys.len() {
            self.peek(&keys[*count..], &mut known);
            let mut asks = Vec::new();
            for (key, presence) in keys[*count..].iter().zip(&known) {
                match presence {
                    Presence::Present => asks.push(None),
                    Presence::Unknown if asks.iter().flatten().count() < width => {
                        asks.push(Some(self.ask(*key)))
                    }
                    Presence::Unknown | Presence::Absent => break,
                }
            }
            if asks.is_empty() {
                return Ok(());
            }
            for ask in asks {
                let is_there = match ask {
                    None => true,
                    Some(answer) => answer
                        .await
                        .unwrap_or_else(|_| Err(Error::new(ErrorKind::Closed, "the tier is closing")))?,
                };
                if !is_there {
                    return Ok(());
                }
                *count += 1;
            }
            width = (width * WIDER).min(OBJECT_PROBE_BLOCKS_MAX);
        }
        Ok(())
    }

    /// Requests a block, or joins a request in flight.
    fn ask(self: &Arc<Self>, key: BlockKey) -> oneshot::Receiver<Result<bool>> {
        let (send, receive) = oneshot::channel();
        let is_first = {
            let mut asked = self.asked.lock();
            let waiting = asked.entry(key).or_default();
            waiting.push(send);
            waiting.len() == 1
        };
        if is_first {
            let shared = Arc::clone(self);
            self.runtime.spawn(async move {
                let deadline = shared.patience();
                let work = shared.look(&key, deadline);
                let outcome = timeout_at(TokioInstant::from_std(deadline), work).await;
                let outcome = outcome.unwrap_or_else(|_| Err(super::shared::late()));
                let waiting = shared.asked.lock().remove(&key).unwrap_or_default();
                waiting.into_iter().for_each(|waiter| drop(waiter.send(outcome.clone())));
            });
        }
        receive
    }

    async fn look(&self, key: &BlockKey, deadline: Instant) -> Result<bool> {
        let Ok((space, path)) = self.place(key) else { return Ok(false) };
        let removals = self.beliefs.removals();
        if self.beliefs.writing.lock().is_leaving(key) {
            return Ok(false);
        }
        if self.is_in_a_pack(key, &space, deadline).await.map_err(Fault::into_error)? {
            return Ok(true);
        }
        let found = self.head(&path, deadline).await.map_err(Fault::into_error)?;
        match found {
            Some(bytes) => self.note_present(*key, bytes, removals),
            None => self.beliefs.note_absent(*key),
        }
        Ok(found.is_some())
    }

    pub(super) async fn head(&self, path: &Path, deadline: Instant) -> Result<Option<u64>, Fault> {
        let mut turn = self.link.turn(Lane::Reads, deadline).await?;
        loop {
            match self.link.within(self.link.store.head(path)).await {
                Ok(meta) => {
                    turn.good();
                    return Ok(Some(meta.size));
                }
                Err(Fault::Missing(_)) => {
                    turn.good();
                    return Ok(None);
                }
                Err(fault) => turn.again(fault).await?,
            }
        }
    }
}
