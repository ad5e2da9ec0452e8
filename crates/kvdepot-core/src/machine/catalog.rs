//! Namespaces and their epochs. An epoch of a namespace is a *space*: a small number that block names inside the machine
//! carry in place of the 16-byte id.

use std::sync::Arc;

use hashbrown::HashMap;

use crate::error::{Error, ErrorKind, Result};
use crate::key::{BlockHash, BlockKey, NamespaceId, NamespaceSpec, epoch_moves, next_epoch};
use crate::limits::NAMESPACES_MAX;

use super::names::{PoolKey, SpaceId};

/// A namespace's number at this depot, valid until the depot ends.
pub type NamespaceHandle = u32;

/// A namespace at its current epoch.
#[derive(Clone, Debug)]
pub struct Namespace {
    /// Its number at this depot.
    pub handle: NamespaceHandle,
    /// What was fingerprinted.
    pub spec: Arc<NamespaceSpec>,
    /// Its epoch.
    pub epoch: u32,
    /// What keys carry now. While the namespace is being advanced, an id that no epoch has.
    pub id: NamespaceId,
    pub(crate) space: SpaceId,
    /// Advances under way.
    advancing: u32,
}

impl Namespace {
    pub(crate) const fn pool_key(&self, hash: BlockHash) -> PoolKey {
        PoolKey { space: self.space, hash }
    }

    /// Bytes that one block takes in the pool.
    pub(crate) fn slot_bytes(&self) -> u64 {
        self.spec.layout().slot_bytes()
    }
}

/// All namespaces, by number. They are never forgotten while the depot lives, so a number stays valid.
#[derive(Clone, Debug, Default)]
pub(crate) struct Catalog {
    namespaces: Vec<Namespace>,
    by_root: HashMap<NamespaceId, NamespaceHandle>,
    /// Every epoch that keys carried since the depot began: tiers may still end what they were told in an earlier one.
    ids: HashMap<SpaceId, NamespaceId>,
    spaces: HashMap<NamespaceId, (SpaceId, NamespaceHandle)>,
    spaces_ever: u32,
}

impl Catalog {
    pub(crate) fn get(&self, handle: NamespaceHandle) -> Result<&Namespace> {
        self.namespaces.get(handle as usize).ok_or_else(|| unknown(handle))
    }

    /// A namespace, if its keys carry `id` now; whatever they carry without one.
    pub(crate) fn get_as(&self, handle: NamespaceHandle, id: Option<NamespaceId>) -> Result<&Namespace> {
        let namespace = self.get(handle)?;
        if id.is_some_and(|id| id != namespace.id) {
            return Err(Error::new(ErrorKind::NotFound, "the namespace's epoch has passed: open it again")
                .with("handle", handle));
        }
        Ok(namespace)
    }

    pub(crate) fn len(&self) -> usize {
        self.namespaces.len()
    }

    /// The namespace whose keys carry this id now.
    pub(crate) fn by_id(&self, id: NamespaceId) -> Option<&Namespace> {
        let &(space, handle) = self.spaces.get(&id)?;
        Some(&self.namespaces[handle as usize]).filter(|namespace| namespace.space == space)
    }

    /// A tier's key as the machine names it, of whatever epoch.
    pub(crate) fn any_pool_key(&self, key: &BlockKey) -> Option<PoolKey> {
        self.spaces.get(&key.namespace).map(|&(space, _)| PoolKey { space, hash: key.hash })
    }

    /// A client's key as the machine names it; None when its namespace is not open here or its epoch has passed.
    pub(crate) fn pool_key(&self, key: &BlockKey) -> Option<PoolKey> {
        self.by_id(key.namespace).map(|namespace| namespace.pool_key(key.hash))
    }

    /// The name of a block in tiers.
    pub(crate) fn block_key(&self, key: &PoolKey) -> BlockKey {
        let namespace = *self.ids.get(&key.space).expect("spaces are never forgotten");
        BlockKey { namespace, hash: key.hash }
    }

    /// Whether keys of this space can still be asked for.
    pub(crate) fn is_live(&self, space: SpaceId) -> bool {
        self.ids.get(&space).is_some_and(|&id| self.by_id(id).is_some())
    }

    /// Makes a namespace known, or moves a known one forward to `epoch`. The space that this left behind.
    pub(crate) fn open(
        &mut self,
        spec: &Arc<NamespaceSpec>,
        epoch: u32,
    ) -> Result<(NamespaceHandle, Option<SpaceId>)> {
        let root = spec.root();
        if let Some(&handle) = self.by_root.get(&root) {
            let behind = self.get(handle)?.epoch < epoch;
            return Ok((handle, if behind { self.enter(handle, epoch)? } else { None }));
        }
        if self.namespaces.len() >= NAMESPACES_MAX {
            return Err(Error::new(
                ErrorKind::NoSpace,
                "the depot knows too many namespaces: restart it to forget them",
            )
            .with("namespaces_max", NAMESPACES_MAX));
        }
        let handle = self.namespaces.len() as NamespaceHandle;
        let (id, space) = (spec.id(epoch), self.next_space());
        self.namespaces.push(Namespace { handle, spec: Arc::clone(spec), epoch, id, space, advancing: 0 });
        self.by_root.insert(root, handle);
        self.ids.insert(space, id);
        self.spaces.insert(id, (space, handle));
        Ok((handle, None))
    }

    /// Moves a namespace to `epoch`, never back. The space that it left, if it moved.
    pub(crate) fn enter(&mut self, handle: NamespaceHandle, epoch: u32) -> Result<Option<SpaceId>> {
        if !epoch_moves(self.get(handle)?.epoch, epoch)? {
            return Ok(None);
        }
        let entry = &mut self.namespaces[handle as usize];
        entry.epoch = epoch;
        if entry.advancing > 0 {
            return Ok(None);
        }
        let id = entry.spec.id(epoch);
        Ok(Some(self.move_to(handle, id)))
    }

    /// Begins to advance: until [`Self::end_advance`] keys carry `provisional`, an id that no epoch has. The next epoch's
    /// would not do, because a tier that another depot has moved may hold blocks of it from before. The space that it
    /// left.
    pub(crate) fn begin_advance(
        &mut self,
        handle: NamespaceHandle,
        provisional: NamespaceId,
    ) -> Result<SpaceId> {
        let epoch = next_epoch(self.get(handle)?.epoch, 0)?;
        let entry = &mut self.namespaces[handle as usize];
        entry.epoch = epoch;
        entry.advancing += 1;
        Ok(self.move_to(handle, provisional))
    }

    /// Ends an advance, in an epoch that is at least `epoch`. The space that it left, if no other advance is under way.
    pub(crate) fn end_advance(&mut self, handle: NamespaceHandle, epoch: u32) -> Result<Option<SpaceId>> {
        let known = self.get(handle)?;
        if known.advancing == 0 {
            return self.enter(handle, known.epoch.max(epoch));
        }
        let entry = &mut self.namespaces[handle as usize];
        entry.advancing -= 1;
        entry.epoch = entry.epoch.max(epoch);
        if entry.advancing > 0 {
            return Ok(None);
        }
        let id = entry.spec.id(entry.epoch);
        Ok(Some(self.move_to(handle, id)))
    }

    /// Gives a namespace another id; the space that it left.
    fn move_to(&mut self, handle: NamespaceHandle, id: NamespaceId) -> SpaceId {
        let space = self.next_space();
        let entry = &mut self.namespaces[handle as usize];
        let left = std::mem::replace(&mut entry.space, space);
        entry.id = id;
        self.ids.insert(space, id);
        self.spaces.insert(id, (space, handle));
        left
    }

    const fn next_space(&mut self) -> SpaceId {
        self.spaces_ever += 1;
        SpaceId(self.spaces_ever)
    }
}

fn unknown(handle: NamespaceHandle) -> Error {
    Error::new(ErrorKind::Protocol, "no such namespace at this depot").with("handle", handle)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BlockLayout;

    fn spec(name: &str) -> Arc<NamespaceSpec> {
        let facts = format!("{{\"model\":\"{name}\"}}");
        Arc::new(NamespaceSpec::new(&facts, BlockLayout::uniform(1, &[4096]).unwrap()).unwrap())
    }

    #[test]
    fn a_key_of_an_epoch_that_passed_names_nothing() {
        let mut catalog = Catalog::default();
        let (handle, left) = catalog.open(&spec("a"), 0).unwrap();
        assert_eq!(left, None);
        let old = catalog.get(handle).unwrap().clone();
        let key = BlockKey { namespace: old.id, hash: BlockHash([1; 16]) };
        let pool_key = catalog.pool_key(&key).unwrap();
        assert_eq!(catalog.enter(handle, 3).unwrap(), Some(old.space));
        assert_eq!(catalog.pool_key(&key), None);
        assert_eq!(catalog.block_key(&pool_key), key, "tiers may still end what they were told of it");
        assert_eq!(catalog.any_pool_key(&key), Some(pool_key));
        assert!(!catalog.is_live(old.space));
    }

    #[test]
    fn opening_again_moves_forward_and_never_back() {
        let mut catalog = Catalog::default();
        let (handle, _) = catalog.open(&spec("a"), 2).unwrap();
        assert_eq!(catalog.open(&spec("a"), 1).unwrap(), (handle, None));
        assert!(catalog.open(&spec("a"), 5).unwrap().1.is_some());
        assert_eq!(catalog.get(handle).unwrap().epoch, 5);
        assert!(catalog.enter(handle, 4).is_err());
        assert_eq!(catalog.open(&spec("b"), 0).unwrap().0, handle + 1);
    }

    #[test]
    fn no_epoch_is_served_while_the_next_one_is_not_known() {
        let mut catalog = Catalog::default();
        let (handle, _) = catalog.open(&spec("a"), 3).unwrap();
        let is_an_epoch =
            |catalog: &Catalog| (0..20).any(|epoch| spec("a").id(epoch) == catalog.get(handle).unwrap().id);
        catalog.begin_advance(handle, NamespaceId([1; 16])).unwrap();
        assert!(!is_an_epoch(&catalog));
        // A look that another thread began earlier.
        assert_eq!(catalog.open(&spec("a"), 6).unwrap(), (handle, None));
        assert!(!is_an_epoch(&catalog));
        catalog.begin_advance(handle, NamespaceId([2; 16])).unwrap();
        assert_eq!(catalog.end_advance(handle, 7).unwrap(), None, "another advance is under way");
        assert!(!is_an_epoch(&catalog));
        assert!(catalog.end_advance(handle, 5).unwrap().is_some());
        let namespace = catalog.get(handle).unwrap();
        assert_eq!((namespace.id, namespace.epoch), (spec("a").id(7), 7));
    }
}
