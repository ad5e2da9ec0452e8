//! Lists of packs, in the background: how a depot finds the packs of others, and those that are gone.

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{StreamExt, stream};
use hashbrown::HashSet;
use kvdepot_core::limits::{
    OBJECT_PACK_HEADS_MAX, OBJECT_PACK_OPEN_MS, OBJECT_PACK_SKEW_MS, OBJECT_PACKS_LISTED_MAX,
};
use kvdepot_core::{Error, ErrorKind, NamespaceId, Result};
use object_store::{GetOptions, GetRange, ObjectStore};

use super::codec::{self, Entry, PackName};
use super::index::Learnt;
use super::now_ms;
use crate::object::link::{Fault, Lane};
use crate::object::meter::one_more;
use crate::object::shared::Shared;
use crate::spaces::Space;

/// Number of packs handled while a lock is held once.
const PIECE: usize = 128;

impl Shared {
    /// Lists the packs of a namespace in the background if that is due.
    pub(in crate::object) fn list_packs_if_due(self: &Arc<Self>, id: NamespaceId) {
        drop(self.begin_list(id, false));
    }

    /// Waits a short time for the first list of a namespace that has just been opened.
    pub(in crate::object) async fn first_list(self: &Arc<Self>, id: NamespaceId, deadline: Instant) {
        let Some(list) = self.begin_list(id, true) else { return };
        let until = deadline.min(Instant::now() + Duration::from_millis(OBJECT_PACK_OPEN_MS));
        drop(tokio::time::timeout_at(until.into(), list).await);
    }

    fn begin_list(
        self: &Arc<Self>,
        id: NamespaceId,
        only_first: bool,
    ) -> Option<tokio::task::JoinHandle<()>> {
        let began = Instant::now();
        let space = {
            let spaces = self.spaces.lock();
            let space = spaces.with_id(&id).filter(|space| self.is_packed(&space.spec))?;
            if !self.packs.index.lock().begin_list(id, began, self.config.pack_list_pause, only_first) {
                return None;
            }
            space.clone()
        };
        let shared = Arc::clone(self);
        Some(self.runtime.spawn(async move {
            if let Err(fault) = shared.list_packs(id, &space).await {
                let (error, namespace) = (fault.into_error(), space.spec.root());
                tracing::debug!(%error, %namespace, "cannot list all packs of a namespace");
            }
            shared.packs.index.lock().listed(id, began);
        }))
    }

    /// Reads the names of packs since shortly before the last whole list, and the heads of new ones. Afterwards all packs
    /// are known that were in the bucket before, as far as there is room for them and their heads can be read at all.
    pub(in crate::object) async fn list_packs(&self, id: NamespaceId, space: &Space) -> Result<(), Fault> {
        let began_ms = now_ms();
        let since_ms =
            self.packs.index.lock().whole_at_ms(id).unwrap_or(0).saturating_sub(OBJECT_PACK_SKEW_MS);
        let from = PackName { time_ms: since_ms, random: 0, blocks: 0 };
        // Packs that are written while the list is made are not in it.
        let before = self.names_from(id, from);
        let mut turn = self.link.turn(Lane::Reads, self.patience()).await?;
        let found = loop {
            match self.names_of_packs(space, from).await {
                Ok(found) => break found,
                Err(fault) => turn.again(fault).await?,
            }
        };
        turn.good();
        drop(turn);
        let there: HashSet<PackName> = found.iter().map(|(name, _)| *name).collect();
        for name in before.into_iter().filter(|name| !there.contains(name)) {
            self.pack_is_gone(id, name, &[]);
        }
        let mut new = Vec::new();
        for piece in found.chunks(PIECE) {
            let (mut index, now) = (self.packs.index.lock(), Instant::now());
            new.extend(piece.iter().filter(|(name, _)| !index.seen(id, *name, now)));
        }
        // The newest first: there may be no room for the oldest.
        new.sort_unstable_by_key(|(name, _)| Reverse(*name));
        let heads = new.into_iter().map(|(name, bytes)| self.learn_pack(id, space, name, bytes));
        let mut heads = stream::iter(heads).buffer_unordered(OBJECT_PACK_HEADS_MAX);
        let mut failed = None;
        while let Some(outcome) = heads.next().await {
            match outcome {
                Ok(Learnt::NoRoom) => break,
                Ok(Learnt::Known | Learnt::Deleted) => {}
                // The others are of use nevertheless.
                Err(fault) => failed = Some(fault),
            }
        }
        if let Some(fault) = failed {
            return Err(fault);
        }
        self.packs.index.lock().list_was_whole(id, began_ms);
        Ok(())
    }

    /// Returns the known packs of an epoch of a namespace from a name on.
    fn names_from(&self, id: NamespaceId, mut from: PackName) -> Vec<PackName> {
        let mut all = Vec::new();
        loop {
            let piece = self.packs.index.lock().names_from(id, from, PIECE);
            let Some(last) = piece.last() else { return all };
            from = PackName { blocks: last.blocks + 1, ..*last };
            all.extend(piece);
        }
    }

    /// Returns the names and lengths of the newest packs in the bucket from a name on.
    async fn names_of_packs(&self, space: &Space, from: PackName) -> Result<Vec<(PackName, u64)>, Fault> {
        let (root, epoch) = (space.spec.root(), space.epoch);
        let (dir, after) = (self.names.packs(root, epoch), self.names.pack(root, epoch, &from.to_string()));
        let mut list = self.link.store.list_with_offset(Some(&dir), &after);
        let mut found = VecDeque::new();
        // A long list takes many requests, each of which has the store's time.
        while let Some(meta) = self.link.within(async { list.next().await.transpose() }).await? {
            let Some(name) = meta.location.filename().and_then(PackName::parse) else { continue };
            if found.len() == OBJECT_PACKS_LISTED_MAX {
                found.pop_front();
            }
            found.push_back((name, meta.size));
        }
        Ok(found.into())
    }

    /// Reads the head of a pack. One that is damaged, or that the store does not give, is only not used: its depot may still
    /// read its blocks.
    async fn learn_pack(
        &self,
        id: NamespaceId,
        space: &Space,
        name: PackName,
        bytes: u64,
    ) -> Result<Learnt, Fault> {
        let entries = match self.head_of_pack(id, space, name, bytes).await {
            Ok(entries) => entries,
            Err(Fault::Missing(_)) => return Ok(Learnt::Deleted),
            Err(Fault::Corrupt(error)) => {
                if error.kind() == ErrorKind::Corrupt {
                    one_more(&self.link.meter.corrupt);
                }
                tracing::warn!(%error, pack = %name, namespace = %space.spec.root(), "a pack cannot be used");
                // Known without blocks, its head is not read again.
                Vec::new()
            }
            Err(fault) => {
                if !self.packs.index.lock().head_failed(id, name) {
                    return Err(fault);
                }
                let error = fault.into_error();
                tracing::warn!(%error, pack = %name, namespace = %space.spec.root(), "a pack cannot be read");
                Vec::new()
            }
        };
        Ok(self.note_pack(id, name, entries))
    }

    async fn head_of_pack(
        &self,
        id: NamespaceId,
        space: &Space,
        name: PackName,
        bytes: u64,
    ) -> Result<Vec<Entry>, Fault> {
        let head_bytes = name.head_bytes() as u64;
        if bytes <= head_bytes {
            let error = Error::new(ErrorKind::Corrupt, "a pack is shorter than its head");
            return Err(Fault::Corrupt(error.with("bytes", bytes)));
        }
        let path = self.names.pack(space.spec.root(), space.epoch, &name.to_string());
        let mut turn = self.link.turn(Lane::Reads, self.patience()).await?;
        let head = loop {
            let options =
                GetOptions { range: Some(GetRange::Bounded(0..head_bytes)), ..GetOptions::default() };
            let got =
                self.link.within(async { self.link.store.get_opts(&path, options).await?.bytes().await });
            match got.await {
                Ok(head) => break head,
                Err(fault) => turn.again(fault).await?,
            }
        };
        turn.good();
        codec::decode(&head, name, id, bytes).map_err(Fault::Corrupt)
    }

    /// Records that a pack is in the bucket, unless its namespace has been reset or closed.
    pub(super) fn note_pack(&self, id: NamespaceId, name: PackName, entries: Vec<Entry>) -> Learnt {
        // Both locks: a reset that hides the namespace afterwards forgets the pack as well.
        let spaces = self.spaces.lock();
        if !spaces.has_id(&id) {
            return Learnt::Deleted;
        }
        self.packs.index.lock().learn(id, name, entries, Instant::now())
    }
}
