//! The namespaces for lookups: read without the machine's lock, written under it.

use hashbrown::HashMap;
use kvdepot_core::machine::{NamespaceHandle, Opened};
use kvdepot_core::{BlockHash, BlockKey, Error, ErrorKind, NamespaceId, NamespaceSpec, Result};
use parking_lot::RwLock;

#[derive(Debug, Default)]
struct Entries {
    namespaces: HashMap<NamespaceHandle, Opened>,
    current: HashMap<NamespaceId, NamespaceHandle>,
    by_root: HashMap<NamespaceId, NamespaceHandle>,
    /// What keys of a namespace carried before its last reset.
    before_reset: HashMap<NamespaceHandle, NamespaceId>,
}

#[derive(Debug, Default)]
pub(crate) struct Directory {
    entries: RwLock<Entries>,
}

impl Directory {
    /// Stores the machine's current data of a namespace.
    pub(crate) fn apply(&self, opened: Opened) {
        let mut entries = self.entries.write();
        let (handle, id) = (opened.handle, opened.id);
        entries.by_root.insert(opened.spec.root(), handle);
        if let Some(before) = entries.namespaces.insert(handle, opened).filter(|before| before.id != id) {
            entries.current.remove(&before.id);
            entries.before_reset.insert(handle, before.id);
        }
        entries.current.insert(id, handle);
    }

    /// Removes a namespace that the machine has forgotten.
    pub(crate) fn forget(&self, handle: NamespaceHandle) {
        let mut entries = self.entries.write();
        if let Some(gone) = entries.namespaces.remove(&handle) {
            entries.current.remove(&gone.id);
            entries.by_root.remove(&gone.spec.root());
            entries.before_reset.remove(&handle);
        }
    }

    /// Returns the namespace's id before its last reset at this depot.
    pub(crate) fn before_reset(&self, handle: NamespaceHandle) -> Option<NamespaceId> {
        self.entries.read().before_reset.get(&handle).copied()
    }

    pub(crate) fn get(&self, handle: NamespaceHandle) -> Result<Opened> {
        self.entries.read().namespaces.get(&handle).cloned().ok_or_else(|| unknown(handle))
    }

    /// Returns the current id of each of these namespaces; unknown handles are skipped.
    pub(crate) fn ids(&self, handles: impl Iterator<Item = NamespaceHandle>) -> Vec<NamespaceId> {
        let entries = self.entries.read();
        handles.filter_map(|handle| entries.namespaces.get(&handle).map(|entry| entry.id)).collect()
    }

    /// Returns the handles of all namespaces.
    pub(crate) fn handles(&self) -> Vec<NamespaceHandle> {
        self.entries.read().namespaces.keys().copied().collect()
    }

    /// Returns at most `most` namespaces by their handles, after this one.
    pub(crate) fn list(&self, after: Option<NamespaceHandle>, most: usize) -> Vec<Opened> {
        let entries = self.entries.read();
        let mut handles: Vec<NamespaceHandle> = entries.namespaces.keys().copied().collect();
        handles.sort_unstable();
        let wanted = handles.iter().filter(|&&handle| after.is_none_or(|after| handle > after));
        wanted.take(most).filter_map(|handle| entries.namespaces.get(handle).cloned()).collect()
    }

    /// Returns all namespaces.
    pub(crate) fn all(&self) -> Vec<Opened> {
        self.entries.read().namespaces.values().cloned().collect()
    }

    /// Returns the current ids of at most `count` namespaces, without those in `but`.
    pub(crate) fn current_ids(&self, count: usize, but: &[NamespaceId]) -> Vec<NamespaceId> {
        let entries = self.entries.read();
        entries.current.keys().filter(|id| !but.contains(id)).take(count).copied().collect()
    }

    /// Returns whether a namespace is known, in any epoch.
    pub(crate) fn knows(&self, root: NamespaceId) -> bool {
        self.entries.read().by_root.contains_key(&root)
    }

    /// Returns the namespace with this description, if it is known.
    pub(crate) fn find(&self, spec: &NamespaceSpec) -> Option<Opened> {
        let entries = self.entries.read();
        let handle = *entries.by_root.get(&spec.root())?;
        entries.namespaces.get(&handle).cloned()
    }

    /// Returns the namespace with this current id.
    pub(crate) fn by_id(&self, id: NamespaceId) -> Option<Opened> {
        let entries = self.entries.read();
        let handle = *entries.current.get(&id)?;
        entries.namespaces.get(&handle).cloned()
    }

    /// Returns the namespaces with these current ids; others are skipped.
    pub(crate) fn handles_of(&self, ids: impl Iterator<Item = NamespaceId>) -> Vec<NamespaceHandle> {
        let entries = self.entries.read();
        ids.filter_map(|id| entries.current.get(&id).copied()).collect()
    }

    /// Returns the keys of these blocks in the namespace's current epoch.
    pub(crate) fn keys(
        &self,
        handle: NamespaceHandle,
        hashes: impl Iterator<Item = BlockHash>,
    ) -> Result<Vec<BlockKey>> {
        let namespace = self.get(handle)?.id;
        Ok(hashes.map(|hash| BlockKey { namespace, hash }).collect())
    }

    /// Returns for each key whether its namespace is open here, in the key's epoch.
    pub(crate) fn are_current(&self, keys: &[BlockKey]) -> Vec<bool> {
        let entries = self.entries.read();
        let mut last = None;
        keys.iter()
            .map(|key| match last {
                Some((namespace, current)) if namespace == key.namespace => current,
                _ => {
                    let current = entries.current.contains_key(&key.namespace);
                    last = Some((key.namespace, current));
                    current
                }
            })
            .collect()
    }
}

fn unknown(handle: NamespaceHandle) -> Error {
    Error::new(
        ErrorKind::NotFound,
        "no such namespace at this depot: it may have been forgotten, open it again",
    )
    .with("handle", handle)
}
