//! Packs: objects that hold several small blocks each, so that a hit and a dump cost fewer requests.
//!
//! A pack is written once and never changed. Nothing points to it: depots find the packs of others by listing a
//! namespace's packs in the background, never while a request waits. A pack is deleted as a whole, and the depot above
//! hears that its other blocks are lost. Namespaces with values have no packs: a value can be replaced, and an old one
//! must not come back out of a pack that this depot has not heard of.

mod codec;
mod gather;
mod index;
mod list;
mod read;
mod write;

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use hashbrown::HashSet;
use kvdepot_core::limits::OBJECT_PACK_BLOCKS_MIN;
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId, NamespaceSpec, Result};
use parking_lot::{Mutex, MutexGuard};

use super::config::ObjectConfig;
use super::shared::Shared;
pub(super) use codec::PackName;
use gather::Gather;
pub(super) use index::{Found, PackIndex};
pub(super) use read::Packed;
pub(super) use write::Waiting;

/// What a tier knows about packs, and the blocks that wait for theirs.
#[derive(Debug)]
pub(super) struct PackState {
    /// Locked after the tier's beliefs, never before them.
    index: Mutex<PackIndex>,
    waiting: Mutex<Gather<Waiting>>,
    /// Blocks to read with the next requests.
    reading: Mutex<Vec<Packed>>,
}

impl PackState {
    pub(super) fn new(config: &ObjectConfig) -> Self {
        Self {
            index: Mutex::new(PackIndex::new(config.present_ttl)),
            waiting: Mutex::new(Gather::new(config.pack_bytes)),
            reading: Mutex::default(),
        }
    }

    /// Locks what is known, for several blocks.
    pub(super) fn index(&self) -> MutexGuard<'_, PackIndex> {
        self.index.lock()
    }

    /// Returns where a block lies.
    pub(super) fn find(&self, key: &BlockKey, now: Instant) -> Option<Found> {
        self.index.lock().find(key, now)
    }

    /// Drops the blocks that wait for a request.
    pub(super) fn abandon_waiting(&self) {
        let all = (self.waiting.lock().take_all(), std::mem::take(&mut *self.reading.lock()));
        // Not under the locks: their callers are answered.
        drop(all);
    }

    pub(super) fn forget(&self, id: NamespaceId) {
        let gone = self.index.lock().forget(id);
        // Not under the lock: it may be large.
        drop(gone);
    }

    /// Returns the number of blocks in known packs, and of their bytes.
    pub(super) fn usage(&self) -> (u64, u64) {
        self.index.lock().usage()
    }

    /// Returns whether a namespace has packs.
    pub(super) fn has(&self, id: NamespaceId) -> bool {
        self.index.lock().has(id)
    }

    /// See [`crate::Tier::keys_from`].
    pub(super) fn keys_from(&self, id: NamespaceId, from_ms: u64) -> (Vec<BlockKey>, Option<u64>) {
        self.index.lock().keys_from(id, from_ms)
    }
}

/// Milliseconds since 1970.
fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(0)
}

impl Shared {
    /// Returns whether the blocks of a namespace are packed by this depot.
    pub(super) fn is_packed(&self, spec: &NamespaceSpec) -> bool {
        let most = self.config.pack_bytes / OBJECT_PACK_BLOCKS_MIN;
        most > 0 && spec.layout().slot_bytes() <= most && Self::may_be_packed(spec)
    }

    /// Returns whether depots may pack the blocks of a namespace.
    pub(super) fn may_be_packed(spec: &NamespaceSpec) -> bool {
        !spec.holds_values()
    }

    /// Returns the packs with any of these blocks, and whose they are.
    pub(super) fn packs_with(&self, keys: &[BlockKey]) -> Vec<(NamespaceId, PackName)> {
        let mut packs: Vec<(NamespaceId, PackName)> = Vec::new();
        for key in keys {
            let with = self.packs.index.lock().with_block(key);
            packs.extend(with.into_iter().map(|name| (key.namespace, name)));
        }
        packs.sort_unstable_by_key(|(id, name)| (id.0, *name));
        packs.dedup();
        packs
    }

    /// Serves a pack no more, because it is to be deleted, and reports its blocks as lost, except `known`: the caller
    /// reports or removes these.
    pub(super) fn doom_pack(&self, id: NamespaceId, name: PackName, known: &[BlockKey]) -> Result<()> {
        let gone = self.packs.index.lock().doom(id, name).ok_or_else(|| {
            Error::new(ErrorKind::Busy, "a bucket does not delete the packs of blocks that are to be removed")
                .with("namespace", id)
        })?;
        self.tell_lost_but(gone, known);
        Ok(())
    }

    /// Forgets a pack that is not in the bucket any more, and reports blocks that are nowhere else as lost, except `known`.
    pub(super) fn pack_is_gone(&self, id: NamespaceId, name: PackName, known: &[BlockKey]) {
        let gone = self.packs.index.lock().deleted(id, name);
        self.tell_lost_but(gone, known);
    }

    fn tell_lost_but(&self, mut gone: Vec<BlockKey>, known: &[BlockKey]) {
        let known: HashSet<&BlockKey> = known.iter().collect();
        gone.retain(|key| !known.contains(key));
        if !gone.is_empty() {
            self.tell_lost(&gone);
        }
    }
}
