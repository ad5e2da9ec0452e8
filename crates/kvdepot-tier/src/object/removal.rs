//! Removal of blocks, and deletion of objects from before a reset.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures_util::{StreamExt, TryStreamExt, stream};
use hashbrown::{HashMap, HashSet};
use kvdepot_core::limits::OBJECT_SWEEP_PAUSE_MS;
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId, Result};
use object_store::path::Path;
use tokio::time::{Instant as TokioInstant, timeout_at};

use super::link::{Fault, Lane};
use super::names::epoch_of;
use super::packs::PackName;
use super::shared::{Shared, late};
use crate::Done;

/// Pause before past epochs that could not be deleted are tried again.
const SWEEP_AGAIN: Duration = Duration::from_secs(60);

impl Shared {
    /// See [`crate::Tier::remove`].
    pub(super) fn remove(self: &Arc<Self>, keys: Vec<BlockKey>, done: Done<()>) {
        let leaving = self.beliefs.leaving(keys);
        let (shared, answer) = (Arc::clone(self), self.owed.answer(done));
        self.runtime.spawn(async move {
            let deadline = shared.patience();
            let work = shared.remove_now(leaving.keys(), deadline);
            let outcome = timeout_at(TokioInstant::from_std(deadline), work).await;
            let outcome = outcome.unwrap_or_else(|_| Err(late()));
            // The block may be written again before anyone is notified.
            drop(leaving);
            answer.end(outcome);
        });
    }

    async fn remove_now(&self, keys: &[BlockKey], deadline: Instant) -> Result<()> {
        self.wait_for_writes(keys).await;
        let (mut paths, mut later) = (Vec::with_capacity(keys.len()), None);
        for key in keys {
            if self.beliefs.writing.lock().is_doubtful(key) {
                let what = "a store may still make a write of a block that is to be removed: it is removed after that";
                later = Some(Error::new(ErrorKind::Busy, what).with("key", key));
                continue;
            }
            match self.place(key) {
                Ok((_, path)) => paths.push(path),
                Err(error) => later = Some(error),
            }
        }
        let packs = self.packs_of(keys, &mut paths).await.map_err(Fault::into_error)?;
        for (id, name) in &packs {
            self.doom_pack(*id, *name, keys)?;
        }
        for some in paths.chunks(self.config.cloud.deletes_max()) {
            self.delete(some, deadline).await.map_err(Fault::into_error)?;
        }
        for (id, name) in packs {
            self.pack_is_gone(id, name, keys);
        }
        later.map_or(Ok(()), Err)
    }

    /// Adds the paths of packs with any of these blocks, also of those that other depots have written.
    async fn packs_of(
        &self,
        keys: &[BlockKey],
        paths: &mut Vec<Path>,
    ) -> Result<Vec<(NamespaceId, PackName)>, Fault> {
        let ids: HashSet<NamespaceId> = keys.iter().map(|key| key.namespace).collect();
        let mut spaces = HashMap::new();
        for id in ids {
            let space =
                self.spaces.lock().with_id(&id).filter(|space| Self::may_be_packed(&space.spec)).cloned();
            let Some(space) = space else { continue };
            self.list_packs(id, &space).await?;
            spaces.insert(id, space);
        }
        let mut packs = self.packs_with(keys);
        packs.retain(|(id, name)| {
            let space = spaces.get(id);
            paths.extend(space.map(|at| self.names.pack(at.spec.root(), at.epoch, &name.to_string())));
            space.is_some()
        });
        Ok(packs)
    }

    /// Waits until no write of these blocks is in flight here. No new one begins, because they are leaving.
    async fn wait_for_writes(&self, keys: &[BlockKey]) {
        loop {
            let written = self.written.notified();
            tokio::pin!(written);
            written.as_mut().enable();
            if !keys.iter().any(|key| self.beliefs.writing.lock().is_written(key)) {
                return;
            }
            written.await;
        }
    }

    /// Deletes objects, ignoring those that do not exist.
    pub(super) async fn delete(&self, paths: &[Path], deadline: Instant) -> Result<(), Fault> {
        let mut turn = self.link.turn(Lane::Removals, deadline).await?;
        loop {
            let all = stream::iter(paths.to_vec()).map(Ok).boxed();
            let deleted = self.link.store.delete_stream(all).filter_map(async |one| match one {
                Err(object_store::Error::NotFound { .. }) => None,
                other => Some(other),
            });
            let deleted = std::pin::pin!(deleted);
            match self.link.within(deleted.try_for_each(async |_| Ok(()))).await {
                Ok(()) => {
                    turn.good();
                    return Ok(());
                }
                Err(fault) => turn.again(fault).await?,
            }
        }
    }

    /// Deletes the objects of past epochs, as long as the tier lives.
    pub(super) async fn sweep_forever(self: Arc<Self>) {
        loop {
            let root = self.to_sweep.lock().pop_front();
            let Some(root) = root else {
                self.sweep.notified().await;
                continue;
            };
            match self.sweep_one(root).await {
                Ok(()) => {}
                Err(fault) => {
                    // To the end of the queue.
                    self.to_sweep.lock().insert(root);
                    tracing::debug!(error = %fault.into_error(), namespace = %root, "past epochs are not deleted yet");
                    tokio::time::sleep(SWEEP_AGAIN).await;
                }
            }
        }
    }

    async fn sweep_one(&self, root: NamespaceId) -> Result<(), Fault> {
        // A closed namespace is swept when it is next opened.
        let Some(current) = self.spaces.lock().epoch(root) else { return Ok(()) };
        let dirs = {
            let turn = self.link.turn(Lane::Reads, self.patience()).await?;
            let listed =
                self.link.within(self.link.store.list_with_delimiter(Some(&self.names.blocks(root)))).await?;
            turn.good();
            listed.common_prefixes
        };
        for dir in dirs {
            if epoch_of(&dir).is_none_or(|epoch| epoch >= current) {
                continue;
            }
            loop {
                let paths = {
                    let turn = self.link.turn(Lane::Reads, self.patience()).await?;
                    let listed = self.link.store.list(Some(&dir)).take(self.config.cloud.deletes_max());
                    let paths: Vec<Path> =
                        self.link.within(listed.map_ok(|meta| meta.location).try_collect()).await?;
                    turn.good();
                    paths
                };
                if paths.is_empty() {
                    break;
                }
                self.delete(&paths, self.patience()).await?;
                self.link.meter.swept.fetch_add(paths.len() as u64, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(OBJECT_SWEEP_PAUSE_MS)).await;
            }
        }
        Ok(())
    }
}
