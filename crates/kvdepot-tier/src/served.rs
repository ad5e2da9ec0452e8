//! Namespaces that a tier over a network serves, each in one epoch. A tier adds what else it must know of each.

use std::sync::Arc;

use hashbrown::HashMap;
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId, NamespaceSpec, Result};

/// A namespace in its epoch.
#[derive(Clone, Debug)]
pub(crate) struct Space<Own> {
    pub(crate) spec: Arc<NamespaceSpec>,
    pub(crate) epoch: u32,
    /// What the tier adds.
    pub(crate) own: Own,
}

impl<Own> Space<Own> {
    /// Returns the id that its keys carry.
    fn id(&self) -> NamespaceId {
        self.spec.id(self.epoch)
    }

    pub(crate) fn block_bytes(&self) -> usize {
        usize::try_from(self.spec.layout().block_bytes()).expect("BLOCK_BYTES_MAX fits an address")
    }
}

/// The namespaces that a tier knows. It serves some of them.
#[derive(Debug)]
pub(crate) struct Served<Own> {
    by_root: HashMap<NamespaceId, Space<Own>>,
    /// Root by the id that keys carry; only for served namespaces.
    current: HashMap<NamespaceId, NamespaceId>,
}

impl<Own> Default for Served<Own> {
    fn default() -> Self {
        Self { by_root: HashMap::new(), current: HashMap::new() }
    }
}

impl<Own> Served<Own> {
    /// Returns the served namespace whose keys these are now (P8).
    pub(crate) fn of(&self, key: &BlockKey) -> Result<&Space<Own>> {
        self.with_id(&key.namespace).ok_or_else(|| {
            Error::new(ErrorKind::NotFound, "a block's namespace is not open, or its epoch has passed")
                .with("key", key)
        })
    }

    /// Returns the served namespace whose keys carry this id.
    pub(crate) fn with_id(&self, id: &NamespaceId) -> Option<&Space<Own>> {
        self.current.get(id).and_then(|root| self.by_root.get(root))
    }

    /// Returns whether keys with this id are served.
    pub(crate) fn has_id(&self, id: &NamespaceId) -> bool {
        self.current.contains_key(id)
    }

    /// Returns whether a namespace is served.
    pub(crate) fn is_served(&self, root: NamespaceId) -> bool {
        self.get(root).is_some_and(|space| self.has_id(&space.id()))
    }

    pub(crate) fn get(&self, root: NamespaceId) -> Option<&Space<Own>> {
        self.by_root.get(&root)
    }

    pub(crate) fn get_mut(&mut self, root: NamespaceId) -> Option<&mut Space<Own>> {
        self.by_root.get_mut(&root)
    }

    /// Returns all namespaces that the tier knows, served or not.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Space<Own>> {
        self.by_root.values()
    }

    /// Stops serving a namespace, and keeps what is known of it. Returns the id that its keys carried; `None` if it was
    /// not served.
    pub(crate) fn hide(&mut self, root: NamespaceId) -> Option<NamespaceId> {
        let id = self.get(root)?.id();
        self.current.remove(&id).map(|_| id)
    }

    /// Forgets a namespace. Returns the id that its keys carried, whether it was served or not.
    pub(crate) fn forget(&mut self, root: NamespaceId) -> Option<NamespaceId> {
        let id = self.by_root.remove(&root)?.id();
        self.current.remove(&id);
        Some(id)
    }

    /// Returns the number of known namespaces, and of served ones.
    #[cfg(test)]
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.by_root.len(), self.current.len())
    }
}

impl<Own: Default> Served<Own> {
    /// Moves a namespace, which may be new, to an epoch, and serves it there if `serve` says so. Returns the previous id
    /// of its keys if it has changed; those are not served any more.
    pub(crate) fn enter(
        &mut self,
        spec: &Arc<NamespaceSpec>,
        epoch: u32,
        serve: bool,
    ) -> Option<NamespaceId> {
        let (root, id) = (spec.root(), spec.id(epoch));
        let new = || Space { spec: Arc::clone(spec), epoch, own: Own::default() };
        let space = self.by_root.entry(root).or_insert_with(new);
        let before = space.id();
        space.epoch = epoch;
        let old = (before != id).then_some(before);
        if let Some(old) = old {
            self.current.remove(&old);
        }
        if serve {
            self.current.insert(id, root);
        }
        old
    }
}
