//! Namespaces that a Remote tier serves, and what their keys carry now.

use std::sync::Arc;

use hashbrown::HashMap;
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId, NamespaceSpec, Result};

/// One namespace in its current epoch.
#[derive(Clone, Debug)]
pub(super) struct Space {
    pub(super) spec: Arc<NamespaceSpec>,
    pub(super) epoch: u32,
    /// Whether a server may not know of the epoch: it is told when it comes back.
    pub(super) untold: bool,
}

impl Space {
    pub(super) fn block_bytes(&self) -> usize {
        usize::try_from(self.spec.layout().block_bytes()).expect("BLOCK_BYTES_MAX fits an address")
    }
}

#[derive(Debug, Default)]
pub(super) struct Spaces {
    by_root: HashMap<NamespaceId, Space>,
    /// From what keys carry to the root.
    current: HashMap<NamespaceId, NamespaceId>,
}

impl Spaces {
    /// The namespace whose keys these are now (P8).
    pub(super) fn of(&self, key: &BlockKey) -> Result<Space> {
        let space = self.current.get(&key.namespace).and_then(|root| self.by_root.get(root));
        space.cloned().ok_or_else(|| {
            Error::new(ErrorKind::NotFound, "a block's namespace is not open, or its epoch has passed")
                .with("key", key)
        })
    }

    /// Whether keys of this namespace and epoch are served.
    pub(super) fn is_open(&self, key: &BlockKey) -> bool {
        self.current.contains_key(&key.namespace)
    }

    /// The epoch of a namespace, if it is open.
    pub(super) fn epoch(&self, spec: &NamespaceSpec) -> Option<u32> {
        self.by_root.get(&spec.root()).map(|space| space.epoch)
    }

    /// Enters a namespace, or moves it to another epoch: the id that keys carried before, when it has changed.
    pub(super) fn enter(&mut self, spec: &Arc<NamespaceSpec>, epoch: u32) -> Option<NamespaceId> {
        let (root, id) = (spec.root(), spec.id(epoch));
        let untold = self.by_root.get(&root).is_some_and(|space| space.untold);
        let before = self.by_root.insert(root, Space { spec: Arc::clone(spec), epoch, untold });
        let old = before.map(|space| space.spec.id(space.epoch)).filter(|old| *old != id);
        if let Some(old) = old {
            self.current.remove(&old);
        }
        self.current.insert(id, root);
        old
    }

    /// Notes whether all servers were told of a namespace's epoch.
    pub(super) fn told(&mut self, spec: &NamespaceSpec, epoch: u32, told: bool) {
        if let Some(space) = self.by_root.get_mut(&spec.root()).filter(|space| space.epoch == epoch) {
            // Nothing is told of the first epoch: no server has any before it.
            space.untold = !told && epoch > 0;
        }
    }

    /// Forgets a namespace, unless a server is to be told of its epoch: what its keys carried.
    pub(super) fn close(&mut self, root: NamespaceId) -> Option<NamespaceId> {
        let space = self.by_root.get(&root).filter(|space| !space.untold)?;
        let id = space.spec.id(space.epoch);
        self.by_root.remove(&root);
        self.current.remove(&id);
        Some(id)
    }

    pub(super) fn all(&self) -> Vec<Space> {
        self.by_root.values().cloned().collect()
    }
}
