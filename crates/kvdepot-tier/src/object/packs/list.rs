//! Lists of packs, in the background: how a depot finds the packs of others, and those that are gone.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{StreamExt, stream};
use hashbrown::HashSet;
use kvdepot_core::limits::{OBJECT_PACK_HEADS_MAX, OBJECT_PACK_OPEN_MS, OBJECT_PACK_SKEW_MS};
use kvdepot_core::{ErrorKind, NamespaceId};
use object_store::{GetOptions, GetRange, ObjectMeta, ObjectStore};

use super::codec::{self, Entry, PackName};
use super::now_ms;
use crate::object::link::{Fault, Lane};
use crate::object::meter::one_more;
use crate::object::shared::Shared;
use crate::spaces::Space;

impl Shared {
    /// Lists the packs of a namespace in the background if that is due.
    pub(in crate::object) fn list_packs_if_due(self: &Arc<Self>, id: NamespaceId) {
        drop(self.begin_list(id));
    }

    /// Waits a short time for the first list of a namespace that has just been opened.
    pub(in crate::object) async fn first_list(self: &Arc<Self>, id: NamespaceId, deadline: Instant) {
        let Some(list) = self.begin_list(id) else { return };
        let until = deadline.min(Instant::now() + Duration::from_millis(OBJECT_PACK_OPEN_MS));
        drop(tokio::time::timeout_at(until.into(), list).await);
    }

    fn begin_list(self: &Arc<Self>, id: NamespaceId) -> Option<tokio::task::JoinHandle<()>> {
        let began = Instant::now();
        let space = {
            let spaces = self.spaces.lock();
            let space = spaces.with_id(&id).filter(|space| self.is_packed(&space.spec))?;
            if !self.packs.index.lock().begin_list(id, began, self.config.pack_list_pause) {
                return None;
            }
            space.clone()
        };
        let shared = Arc::clone(self);
        Some(self.runtime.spawn(async move {
            if let Err(fault) = shared.list_packs(id, &space).await {
                let (error, namespace) = (fault.into_error(), space.spec.root());
                tracing::debug!(%error, %namespace, "cannot list the packs of a namespace");
            }
            shared.packs.index.lock().listed(id, began);
        }))
    }

    /// Reads the names of packs since shortly before the newest known one, and the heads of new ones.
    pub(in crate::object) async fn list_packs(&self, id: NamespaceId, space: &Space) -> Result<(), Fault> {
        let (root, epoch) = (space.spec.root(), space.epoch);
        let newest_ms = self.packs.index.lock().listed_to_ms(id).map_or(0, |newest| newest.min(now_ms()));
        let from = PackName { time_ms: newest_ms.saturating_sub(OBJECT_PACK_SKEW_MS), random: 0, blocks: 0 };
        // Packs that are written while the list is made are not in it.
        let before = self.packs.index.lock().names_from(id, from);
        let found: Vec<ObjectMeta> = {
            let turn = self.link.turn(Lane::Reads, self.patience()).await?;
            let (dir, after) =
                (self.names.packs(root, epoch), self.names.pack(root, epoch, &from.to_string()));
            let mut list = self.link.store.list_with_offset(Some(&dir), &after);
            let mut found = Vec::new();
            // A long list takes many requests, each of which has the store's time.
            while let Some(meta) = self.link.within(async { list.next().await.transpose() }).await? {
                found.push(meta);
            }
            turn.good();
            found
        };
        let named =
            found.into_iter().filter_map(|meta| Some((PackName::parse(meta.location.filename()?)?, meta)));
        let mut named: Vec<(PackName, ObjectMeta)> = named.collect();
        let there: HashSet<PackName> = named.iter().map(|(name, _)| *name).collect();
        for name in before.into_iter().filter(|name| !there.contains(name)) {
            self.pack_is_gone(id, name, &[]);
        }
        // The newest first: the oldest ones have no room if there are too many.
        let mut room = {
            let mut index = self.packs.index.lock();
            named.retain(|(name, _)| !index.seen(id, *name, Instant::now()));
            index.room()
        };
        named.sort_unstable_by_key(|(name, _)| Reverse(*name));
        let fits = |(name, _): &(PackName, ObjectMeta)| {
            let fits = room.checked_sub(u64::from(name.blocks));
            room = fits.unwrap_or(0);
            fits.is_some()
        };
        let heads = named.into_iter().take_while(fits).map(|(name, meta)| self.learn_pack(id, name, meta));
        let mut heads = stream::iter(heads).buffer_unordered(OBJECT_PACK_HEADS_MAX);
        while let Some(outcome) = heads.next().await {
            outcome?;
        }
        self.packs.index.lock().list_is_whole(id);
        Ok(())
    }

    /// Reads the head of a pack. A damaged one is only not used: its depot may still read its blocks.
    async fn learn_pack(&self, id: NamespaceId, name: PackName, meta: ObjectMeta) -> Result<(), Fault> {
        let mut turn = self.link.turn(Lane::Reads, self.patience()).await?;
        let range = GetRange::Bounded(0..name.head_bytes() as u64);
        let head = loop {
            let options = GetOptions { range: Some(range.clone()), ..GetOptions::default() };
            let got = self
                .link
                .within(async { self.link.store.get_opts(&meta.location, options).await?.bytes().await });
            match got.await {
                Ok(head) => break head,
                Err(Fault::Missing(_)) => {
                    turn.good();
                    return Ok(());
                }
                Err(fault) => turn.again(fault).await?,
            }
        };
        turn.good();
        let entries = codec::decode(&head, name, id, meta.size).unwrap_or_else(|error| {
            if error.kind() == ErrorKind::Corrupt {
                one_more(&self.link.meter.corrupt);
            }
            tracing::warn!(%error, object = %meta.location, "a pack cannot be used");
            // Known without blocks, its head is not read again.
            Vec::new()
        });
        self.note_pack(id, name, entries);
        Ok(())
    }

    /// Records that a pack is in the bucket, unless its namespace has been reset or closed.
    pub(super) fn note_pack(&self, id: NamespaceId, name: PackName, entries: Vec<Entry>) {
        // Both locks: a reset that hides the namespace afterwards forgets the pack as well.
        let spaces = self.spaces.lock();
        if spaces.has_id(&id) {
            self.packs.index.lock().learn(id, name, entries, Instant::now());
        }
    }
}
