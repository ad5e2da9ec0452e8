//! Namespaces that a depot knows: description, current epoch, and the number that clients name them by.

use std::sync::Arc;

use hashbrown::HashMap;
use kvdepot_core::limits::NAMESPACES_MAX;
use kvdepot_core::{BlockHash, BlockKey, Error, ErrorKind, NamespaceId, NamespaceSpec, Result};

use crate::message::NamespaceHandle;

/// One namespace.
#[derive(Clone, Debug)]
pub(crate) struct Namespace {
    pub(crate) spec: Arc<NamespaceSpec>,
    pub(crate) epoch: u32,
    /// What keys carry now; changes with the epoch.
    pub(crate) id: NamespaceId,
}

impl Namespace {
    pub(crate) const fn key(&self, hash: BlockHash) -> BlockKey {
        BlockKey { namespace: self.id, hash }
    }

    /// Bytes that one block takes in the pool.
    pub(crate) fn slot_bytes(&self) -> u64 {
        self.spec.layout().slot_bytes()
    }
}

/// All namespaces, by handle. They are few, and never forgotten while the depot lives, so a handle stays good.
#[derive(Debug, Default)]
pub(crate) struct Namespaces {
    entries: Vec<Namespace>,
    by_id: HashMap<NamespaceId, NamespaceHandle>,
}

impl Namespaces {
    pub(crate) fn get(&self, handle: NamespaceHandle) -> Result<&Namespace> {
        self.entries.get(handle as usize).ok_or_else(|| unknown(handle))
    }

    /// The handle of this description, if it is known.
    pub(crate) fn find(&self, spec: &NamespaceSpec) -> Option<NamespaceHandle> {
        let index = self.entries.iter().position(|entry| entry.spec.canonical() == spec.canonical())?;
        NamespaceHandle::try_from(index).ok()
    }

    /// The handle of the namespace whose keys carry this id now.
    pub(crate) fn handle_of(&self, id: NamespaceId) -> Option<NamespaceHandle> {
        self.by_id.get(&id).copied()
    }

    pub(crate) fn add(&mut self, spec: NamespaceSpec, epoch: u32) -> Result<NamespaceHandle> {
        if self.entries.len() >= NAMESPACES_MAX {
            return Err(Error::new(
                ErrorKind::NoSpace,
                "the depot knows too many namespaces: restart it to forget them",
            )
            .with("namespaces_max", NAMESPACES_MAX));
        }
        let id = spec.id(epoch);
        let handle = self.entries.len() as NamespaceHandle;
        self.entries.push(Namespace { spec: Arc::new(spec), epoch, id });
        self.by_id.insert(id, handle);
        Ok(handle)
    }

    /// Moves to `epoch`; returns the id that became unreachable.
    pub(crate) fn set_epoch(&mut self, handle: NamespaceHandle, epoch: u32) -> Result<NamespaceId> {
        let entry = self.entries.get_mut(handle as usize).ok_or_else(|| unknown(handle))?;
        let old = entry.id;
        entry.epoch = epoch;
        entry.id = entry.spec.id(epoch);
        self.by_id.remove(&old);
        self.by_id.insert(entry.id, handle);
        Ok(old)
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }
}

fn unknown(handle: NamespaceHandle) -> Error {
    Error::new(ErrorKind::Protocol, "no such namespace at this depot").with("handle", handle)
}
