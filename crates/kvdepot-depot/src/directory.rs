//! The namespaces for lookups, and what is counted of each: read without the machine's lock, written under it.

use std::sync::Arc;

use hashbrown::HashMap;
use hashbrown::hash_map::Entry as Slot;
use kvdepot_core::machine::{NamespaceHandle, Opened};
use kvdepot_core::{BlockHash, BlockKey, Error, ErrorKind, NamespaceId, NamespaceSpec, Result};
use parking_lot::RwLock;
use smallvec::SmallVec;

use crate::usage::Tally;

/// A known namespace.
#[derive(Debug)]
struct Entry {
    opened: Opened,
    /// What is counted of it, in all its epochs.
    tally: Arc<Tally>,
}

#[derive(Debug, Default)]
struct Entries {
    namespaces: HashMap<NamespaceHandle, Entry>,
    current: HashMap<NamespaceId, NamespaceHandle>,
    by_root: HashMap<NamespaceId, NamespaceHandle>,
    /// What keys of a namespace carried before its last reset.
    before_reset: HashMap<NamespaceHandle, NamespaceId>,
}

impl Entries {
    fn get(&self, handle: NamespaceHandle) -> Option<&Opened> {
        self.namespaces.get(&handle).map(|entry| &entry.opened)
    }

    /// Returns what is counted of the namespace with this current id.
    fn tally_of(&self, id: NamespaceId) -> Option<&Arc<Tally>> {
        self.namespaces.get(self.current.get(&id)?).map(|entry| &entry.tally)
    }
}

/// Keys in a row that carry the same id.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) keys: usize,
    /// What is counted of their namespace; `None` if it is not open here, or in another epoch.
    pub(crate) tally: Option<Arc<Tally>>,
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
        let before = match entries.namespaces.entry(handle) {
            Slot::Occupied(mut slot) => Some(std::mem::replace(&mut slot.get_mut().opened, opened)),
            Slot::Vacant(slot) => {
                slot.insert(Entry { opened, tally: Arc::default() });
                None
            }
        };
        if let Some(before) = before.filter(|before| before.id != id) {
            entries.current.remove(&before.id);
            entries.before_reset.insert(handle, before.id);
        }
        entries.current.insert(id, handle);
    }

    /// Removes a namespace that the machine has forgotten.
    pub(crate) fn forget(&self, handle: NamespaceHandle) {
        let mut entries = self.entries.write();
        if let Some(Entry { opened: gone, .. }) = entries.namespaces.remove(&handle) {
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
        self.entries.read().get(handle).cloned().ok_or_else(|| unknown(handle))
    }

    /// Returns the current id of each of these namespaces; unknown handles are skipped.
    pub(crate) fn ids(&self, handles: impl Iterator<Item = NamespaceHandle>) -> Vec<NamespaceId> {
        let entries = self.entries.read();
        handles.filter_map(|handle| entries.get(handle).map(|opened| opened.id)).collect()
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
        wanted.take(most).filter_map(|&handle| entries.get(handle).cloned()).collect()
    }

    /// Returns all namespaces.
    pub(crate) fn all(&self) -> Vec<Opened> {
        self.entries.read().namespaces.values().map(|entry| entry.opened.clone()).collect()
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
        entries.get(handle).cloned()
    }

    /// Returns the namespace with this current id.
    pub(crate) fn by_id(&self, id: NamespaceId) -> Option<Opened> {
        let entries = self.entries.read();
        let handle = *entries.current.get(&id)?;
        entries.get(handle).cloned()
    }

    /// Returns the namespace's current id, and what is counted of it.
    pub(crate) fn counted(&self, handle: NamespaceHandle) -> Result<(NamespaceId, Arc<Tally>)> {
        let entries = self.entries.read();
        let entry = entries.namespaces.get(&handle).ok_or_else(|| unknown(handle))?;
        Ok((entry.opened.id, Arc::clone(&entry.tally)))
    }

    /// Returns what is counted of a namespace, if it is known.
    pub(crate) fn tally(&self, handle: NamespaceHandle) -> Option<Arc<Tally>> {
        self.entries.read().namespaces.get(&handle).map(|entry| Arc::clone(&entry.tally))
    }

    /// Returns what is counted of the namespace with this current id.
    pub(crate) fn tally_of(&self, id: NamespaceId) -> Option<Arc<Tally>> {
        self.entries.read().tally_of(id).map(Arc::clone)
    }

    /// Returns what is counted of all namespaces.
    pub(crate) fn tallies(&self) -> Vec<(NamespaceHandle, Arc<Tally>)> {
        let entries = self.entries.read();
        entries.namespaces.iter().map(|(&handle, entry)| (handle, Arc::clone(&entry.tally))).collect()
    }

    /// Counts a claim of these namespaces: so many blocks of each, of which so many were hits.
    pub(crate) fn count_claim(&self, namespaces: &[NamespaceHandle], asked: usize, hit: usize) {
        let entries = self.entries.read();
        let known = namespaces.iter().filter_map(|handle| entries.namespaces.get(handle));
        known.for_each(|entry| entry.tally.looked_up(asked, hit));
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

    /// Cuts keys into runs of one namespace each: mostly it is one.
    pub(crate) fn runs(&self, keys: &[BlockKey]) -> SmallVec<[Run; 1]> {
        let entries = self.entries.read();
        let runs = keys.chunk_by(|one, next| one.namespace == next.namespace);
        runs.map(|run| Run { keys: run.len(), tally: entries.tally_of(run[0].namespace).map(Arc::clone) })
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

#[cfg(test)]
mod tests {
    use kvdepot_core::BlockLayout;

    use super::*;

    fn opened(handle: NamespaceHandle, epoch: u32) -> Opened {
        let layout = BlockLayout::uniform(1, &[4096]).expect("a layout");
        let spec = NamespaceSpec::new(&format!("{{\"model\":\"{handle}\"}}"), layout).expect("a description");
        Opened { handle, id: spec.id(epoch), epoch, has_epoch_id: true, spec: Arc::new(spec) }
    }

    fn looked_up(directory: &Directory, handle: NamespaceHandle) -> Option<(u64, u64)> {
        let used = directory.tally(handle)?.told()?;
        Some((used.lookup_blocks, used.lookup_hit_blocks))
    }

    #[test]
    fn a_claim_counts_for_its_namespaces_after_a_reset_and_for_none_that_was_forgotten() {
        let directory = Directory::default();
        (0..3).for_each(|handle| directory.apply(opened(handle, 0)));
        directory.count_claim(&[0, 1], 10, 4);
        directory.apply(opened(0, 1));
        directory.forget(1);
        directory.count_claim(&[0, 1], 5, 5);
        assert_eq!([0, 1, 2].map(|handle| looked_up(&directory, handle)), [Some((15, 9)), None, None]);
    }

    #[test]
    fn what_was_counted_goes_with_its_namespace() {
        let directory = Directory::default();
        directory.apply(opened(0, 0));
        let tally = Arc::downgrade(&directory.tally(0).expect("a tally"));
        directory.apply(opened(0, 1));
        assert!(tally.upgrade().is_some(), "a reset loses no count");
        directory.forget(0);
        assert!(tally.upgrade().is_none() && directory.tallies().is_empty());
    }

    #[test]
    fn keys_are_cut_where_their_namespace_changes() {
        let directory = Directory::default();
        (0..2).for_each(|handle| directory.apply(opened(handle, 0)));
        let key = |(handle, epoch)| BlockKey {
            namespace: opened(handle, epoch).id,
            hash: kvdepot_core::BlockHash([0; 16]),
        };
        let keys = [(0, 0), (0, 0), (1, 0), (0, 1), (0, 0)].map(key);
        let runs = directory.runs(&keys);
        let told: Vec<_> = runs.iter().map(|run| (run.keys, run.tally.is_some())).collect();
        assert_eq!(told, [(2, true), (1, true), (1, false), (1, true)]);
        assert!(directory.runs(&[]).is_empty());
    }
}
