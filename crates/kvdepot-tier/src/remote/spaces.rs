//! Namespaces that a Remote tier serves, and what their keys carry now.

use std::sync::Arc;

use hashbrown::HashMap;
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId, NamespaceSpec, Result};

/// One namespace in its current epoch.
#[derive(Clone, Debug)]
pub(super) struct Space {
    pub(super) spec: Arc<NamespaceSpec>,
    pub(super) epoch: u32,
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
        let before = self.by_root.insert(root, Space { spec: Arc::clone(spec), epoch });
        let old = before.map(|space| space.spec.id(space.epoch)).filter(|old| *old != id);
        if let Some(old) = old {
            self.current.remove(&old);
        }
        self.current.insert(id, root);
        old
    }

    pub(super) fn all(&self) -> Vec<Space> {
        self.by_root.values().cloned().collect()
    }
}
