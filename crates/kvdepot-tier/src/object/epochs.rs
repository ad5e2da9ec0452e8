//! Epochs of namespaces in a bucket, and how they advance.
//!
//! There is one small object for each namespace that was ever reset. It is written on the condition that it has not
//! changed since it was read (`If-Match`), or that it still does not exist (`If-None-Match`). Google compares generations
//! instead (`x-goog-if-generation-match`, 0 for none). So of several depots that
//! reset concurrently each gets its own epoch, and none goes back. A namespace without the object is in epoch 0. Stores
//! that ignore conditions are detected before the first namespace is opened, and refused.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::limits::EPOCH_RETRY_MS;
use kvdepot_core::{Error, ErrorKind, NamespaceId, NamespaceSpec, Result};
use kvdepot_io::checksum::crc64;
use object_store::path::Path;
use object_store::{ObjectStoreExt, PutMode, PutOptions, PutPayload, UpdateVersion};
use tokio::time::{Instant as TokioInstant, timeout_at};

use super::cloud::Cloud;
use super::link::{Fault, Lane};
use super::shared::{Shared, late};
use crate::Done;

/// Maximum size of an epoch's object.
const BYTES_MAX: u64 = 4096;

/// Returns the text of an epoch's object: `kvdepot epoch 1 <namespace> <epoch> <checksum of the text before>`.
fn written(root: NamespaceId, epoch: u32) -> String {
    let text = format!("kvdepot epoch 1 {root} {epoch} ");
    format!("{text}{:016x}\n", crc64(text.as_bytes()))
}

fn parsed(text: &[u8], root: NamespaceId) -> Result<u32> {
    let epoch = std::str::from_utf8(text).ok().and_then(|text| text.split(' ').nth(4)?.parse().ok());
    epoch.filter(|epoch| written(root, *epoch).as_bytes() == text).ok_or_else(|| {
        let what = "the object with a namespace's epoch is damaged: write it again, or remove it to begin with epoch 0";
        Error::new(ErrorKind::Corrupt, what).with("namespace", root)
    })
}

fn when(mode: PutMode) -> PutOptions {
    PutOptions { mode, ..PutOptions::default() }
}

impl Shared {
    /// See [`crate::Tier::open_namespace`].
    pub(super) fn open_namespace(
        self: &Arc<Self>,
        spec: &Arc<NamespaceSpec>,
        at_least: u32,
        deadline: Instant,
        done: Done<u32>,
    ) {
        let (shared, spec, answer) = (Arc::clone(self), Arc::clone(spec), self.owed.answer(done));
        self.runtime.spawn(async move {
            let work = shared.open(&spec, at_least, deadline);
            let outcome = timeout_at(TokioInstant::from_std(deadline), work).await;
            if let Ok(Ok(epoch)) = outcome {
                shared.first_list(spec.id(epoch), deadline).await;
            }
            shared.keep_trying();
            answer.end(outcome.unwrap_or_else(|_| Err(late())));
        });
    }

    /// See [`crate::Tier::advance_epoch`].
    pub(super) fn advance_epoch(
        self: &Arc<Self>,
        spec: &Arc<NamespaceSpec>,
        at_least: u32,
        deadline: Instant,
        done: Done<u32>,
    ) {
        // Before any request: from here on no old block is served, whatever the store does.
        self.leave(spec, at_least, true);
        let (shared, spec, answer) = (Arc::clone(self), Arc::clone(spec), self.owed.answer(done));
        self.runtime.spawn(async move {
            let work = shared.settle(spec.root(), deadline);
            let outcome = timeout_at(TokioInstant::from_std(deadline), work).await;
            let outcome = outcome.unwrap_or_else(|_| Err(late()));
            if let Err(error) = &outcome {
                tracing::error!(
                    %error, namespace = %spec.root(),
                    "a reset is not stored: the Object tier gives misses for the namespace until it is. Retries are \
                     automatic; a depot that ends before that may serve blocks from before the reset after its restart"
                );
            }
            shared.keep_trying();
            answer.end(outcome);
        });
    }

    fn leave(&self, spec: &Arc<NamespaceSpec>, at_least: u32, advance: bool) {
        let old = self.spaces.lock().want(spec, at_least, advance);
        if let Some(old) = old {
            self.forget_namespace(old);
        }
    }

    async fn open(
        self: &Arc<Self>,
        spec: &Arc<NamespaceSpec>,
        at_least: u32,
        deadline: Instant,
    ) -> Result<u32> {
        let root = spec.root();
        self.keeps_conditions.get_or_try_init(|| self.try_conditions(deadline)).await?;
        if self.spaces.lock().wanted(root).is_some() {
            self.leave(spec, at_least, false);
            return self.settle(root, deadline).await;
        }
        let known = {
            let spaces = self.spaces.lock();
            spaces.epoch(root).filter(|epoch| spaces.is_open(root) && *epoch >= at_least)
        };
        let stored = match (self.stored(root, deadline).await, known) {
            (Ok((epoch, _)), _) => epoch,
            (Err(error), Some(epoch)) if error.kind() != ErrorKind::Corrupt => {
                tracing::debug!(%error, namespace = %root, "cannot check whether a namespace has a new epoch");
                return Ok(epoch);
            }
            (Err(error), _) => return Err(error),
        };
        let epoch = stored.max(at_least).max(known.unwrap_or(0));
        if stored < epoch {
            self.leave(spec, epoch, false);
            return self.settle(root, deadline).await;
        }
        let was_open = known == Some(epoch);
        let old = self.spaces.lock().enter(spec, epoch)?;
        self.entered(root, old, was_open);
        Ok(epoch)
    }

    /// Records that a namespace is served in an epoch that is new to this tier.
    fn entered(&self, root: NamespaceId, old: Option<NamespaceId>, was_open: bool) {
        if let Some(old) = old {
            self.forget_namespace(old);
        }
        if !was_open && self.config.sweep {
            self.to_sweep.lock().insert(root);
            self.sweep.notify_one();
        }
    }

    /// Stores the requested epoch of a namespace, and serves it.
    async fn settle(&self, root: NamespaceId, deadline: Instant) -> Result<u32> {
        // One at a time: two tasks would each store an epoch for the same request.
        let turns = Arc::clone(self.settling.lock().entry(root).or_default());
        let outcome = {
            let _turn = turns.lock().await;
            self.settle_now(root, deadline).await
        };
        let mut settling = self.settling.lock();
        // Only the map and this task have it: no other waits.
        if Arc::strong_count(&turns) == 2 {
            settling.remove(&root);
        }
        outcome
    }

    async fn settle_now(&self, root: NamespaceId, deadline: Instant) -> Result<u32> {
        self.keeps_conditions.get_or_try_init(|| self.try_conditions(deadline)).await?;
        let wanted = self.spaces.lock().wanted(root);
        let Some(wanted) = wanted else {
            // Another task has stored it in the meantime.
            let epoch = self.spaces.lock().epoch(root);
            return epoch.ok_or_else(|| {
                Error::new(ErrorKind::Busy, "the namespace is not open yet").with("namespace", root)
            });
        };
        let epoch = loop {
            let (stored, version) = self.stored(root, deadline).await?;
            let target = wanted.target(stored)?;
            if target == stored {
                break target;
            }
            let mode = version.map_or(PutMode::Create, PutMode::Update);
            match self.put_when(&self.names.epoch(root), &written(root, target), mode, deadline).await {
                Ok(()) => break target,
                // Another depot was first, or this one was but got no answer: the stored epoch tells.
                Err(Fault::Conflict(_)) => {}
                Err(fault) => return Err(fault.into_error()),
            }
        };
        let settled = self.spaces.lock().settled(&wanted, epoch);
        if !settled {
            return Err(
                Error::new(ErrorKind::Busy, "the namespace is being reset again").with("namespace", root)
            );
        }
        self.entered(root, None, false);
        Ok(epoch)
    }

    /// Returns the stored epoch, and the version that distinguishes it from later ones; `None` if nothing is stored.
    async fn stored(&self, root: NamespaceId, deadline: Instant) -> Result<(u32, Option<UpdateVersion>)> {
        let path = self.names.epoch(root);
        let mut turn = self.link.turn(Lane::Epochs, deadline).await.map_err(Fault::into_error)?;
        let (text, version) = loop {
            let got = self.link.within(async {
                let got = self.link.store.get(&path).await?;
                let version =
                    UpdateVersion { e_tag: got.meta.e_tag.clone(), version: got.meta.version.clone() };
                let text = if got.meta.size <= BYTES_MAX { got.bytes().await? } else { bytes::Bytes::new() };
                Ok((text, version))
            });
            match got.await {
                Ok(got) => break got,
                Err(Fault::Missing(_)) => {
                    turn.good();
                    return Ok((0, None));
                }
                Err(fault) => turn.again(fault).await.map_err(Fault::into_error)?,
            }
        };
        turn.good();
        Ok((parsed(&text, root)?, Some(version)))
    }

    async fn put_when(&self, path: &Path, text: &str, mode: PutMode, deadline: Instant) -> Result<(), Fault> {
        let mut turn = self.link.turn(Lane::Epochs, deadline).await?;
        loop {
            let payload = PutPayload::from(text.to_owned().into_bytes());
            let put = self.link.store.put_opts(path, payload, when(mode.clone()));
            match self.link.within(put).await {
                Ok(_) => {
                    turn.good();
                    return Ok(());
                }
                Err(Fault::Missing(error)) => return Err(Fault::Refused(no_bucket(error))),
                Err(fault) => turn.again(fault).await?,
            }
        }
    }

    /// Checks that the store honours conditions: a store that ignores them would let an epoch go back.
    async fn try_conditions(&self, deadline: Instant) -> Result<()> {
        let path = self.names.trial(kvdepot_io::random::number());
        let put = |mode| self.put_when(&path, "kvdepot: may be deleted\n", mode, deadline);
        match put(PutMode::Create).await {
            // No other depot uses this name: it is from an earlier try that was not answered.
            Ok(()) | Err(Fault::Conflict(_)) => {}
            Err(fault) => return Err(fault.into_error()),
        }
        let mut kept = true;
        for mode in [PutMode::Create, PutMode::Update(Cloud::no_version())] {
            match put(mode).await {
                Err(Fault::Conflict(_)) => {}
                Ok(()) => kept = false,
                Err(fault) => return Err(fault.into_error()),
            }
        }
        if let Err(fault) = self.link.within(self.link.store.delete(&path)).await {
            tracing::debug!(error = %fault.into_error(), %path, "an object that only tested the store remains there");
        }
        if kept {
            return Ok(());
        }
        let what = format!(
            "the store ignores the conditions of a write ({}): depots that share it could undo each other's resets",
            self.config.cloud.conditions()
        );
        Err(Error::new(ErrorKind::Unsupported, what).with(self.config.cloud.bucket(), &self.config.bucket))
    }

    /// Starts a task that retries while there are epochs to store.
    fn keep_trying(self: &Arc<Self>) {
        if self.spaces.lock().all_wanted().is_empty()
            || std::mem::replace(&mut *self.is_retrying.lock(), true)
        {
            return;
        }
        let shared = Arc::clone(self);
        self.runtime.spawn(async move {
            loop {
                tokio::time::sleep(Duration::from_millis(EPOCH_RETRY_MS)).await;
                let wanted = shared.spaces.lock().all_wanted();
                for root in wanted {
                    let deadline = shared.patience();
                    let work = shared.settle(root, deadline);
                    match timeout_at(TokioInstant::from_std(deadline), work).await {
                        Ok(Ok(epoch)) => tracing::warn!(namespace = %root, epoch, "a reset is stored now"),
                        Ok(Err(error)) => {
                            tracing::debug!(%error, namespace = %root, "a reset is still not stored");
                        }
                        Err(_) => tracing::debug!(namespace = %root, "a reset is still not stored"),
                    }
                }
                let mut is_retrying = shared.is_retrying.lock();
                if shared.spaces.lock().all_wanted().is_empty() {
                    *is_retrying = false;
                    return;
                }
            }
        });
    }
}

/// The meaning of a 404 for a write.
pub(super) fn no_bucket(error: Error) -> Error {
    let what = "the store has no such bucket, or does not know the access key: look at object_url, object_endpoint and \
                the credentials";
    Error::new(ErrorKind::Unavailable, what).with_source(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_epoch_is_no_epoch() {
        let root = NamespaceId([9; 16]);
        let good = written(root, 41);
        assert_eq!(parsed(good.as_bytes(), root).unwrap(), 41);
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone().into_bytes();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(parsed(&bad, root).unwrap_err().kind(), ErrorKind::Corrupt, "bit {bit}");
        }
        assert!(parsed(b"", root).is_err() && parsed(good.as_bytes(), NamespaceId([8; 16])).is_err());
    }
}
