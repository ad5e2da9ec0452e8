//! Namespaces and their epochs. An epoch of a namespace is a *space*: a small number that names of blocks inside the
//! machine have in place of the 16-byte id.

use std::sync::Arc;

use hashbrown::HashMap;

use crate::error::{Error, ErrorKind, Result};
use crate::key::{BlockHash, BlockKey, NamespaceId, NamespaceSpec, epoch_moves, next_epoch};
use crate::regions::RegionIndex;

use super::flaw::{Flaw, Flaws};
use super::names::{PoolKey, SpaceId};

/// A namespace's number at this depot. It is never reused: the number of a forgotten namespace is invalid (P1).
pub type NamespaceHandle = u64;

/// A namespace at its current epoch.
#[derive(Clone, Debug)]
pub struct Namespace {
    /// Its number at this depot.
    pub handle: NamespaceHandle,
    /// Its fingerprinted specification.
    pub spec: Arc<NamespaceSpec>,
    /// Its epoch.
    pub epoch: u32,
    /// The id that keys carry now. While the namespace is being advanced, and while it is provisional, an id that no epoch
    /// has.
    pub id: NamespaceId,
    pub(crate) space: SpaceId,
    /// Number of advances in flight.
    advancing: u32,
    /// Whether a tier has not stored the epoch, as far as is known here.
    unstored: bool,
    /// Whether a tier has not answered about the namespace since it was opened. Until then it has the pool only: tiers are
    /// neither asked for its blocks nor given any.
    pub provisional: bool,
    /// The preferred region of the pool for its blocks.
    pub(crate) near: Option<RegionIndex>,
    /// Whether its readers can read blocks in a tier's memory, as far as their loads have told.
    pub(crate) in_place: bool,
}

impl Namespace {
    pub(crate) const fn pool_key(&self, hash: BlockHash) -> PoolKey {
        PoolKey { space: self.space, hash }
    }

    /// Returns the bytes that one block takes in the pool.
    pub(crate) fn slot_bytes(&self) -> u64 {
        self.spec.layout().slot_bytes()
    }

    /// Returns whether its epoch is moving, or is not stored everywhere: it must not be forgotten now.
    pub(crate) const fn is_moving(&self) -> bool {
        self.advancing > 0 || self.unstored
    }

    /// Returns whether its keys carry the id of its epoch.
    pub(crate) const fn has_epoch_id(&self) -> bool {
        self.advancing == 0 && !self.provisional
    }
}

/// A space.
#[derive(Clone, Copy, Debug)]
struct Space {
    /// The id that its keys carry.
    id: NamespaceId,
    root: NamespaceId,
    epoch: u32,
    /// The namespace whose keys carry it now; `None` if it has left this epoch or is not known any more.
    handle: Option<NamespaceHandle>,
}

/// Maximum number of epochs of forgotten namespaces that a depot without tiers remembers.
const EPOCHS_KEPT_MAX: usize = 1 << 17;

/// All namespaces, by number, and all spaces of which something is left.
#[derive(Clone, Debug, Default)]
pub(crate) struct Catalog {
    namespaces: HashMap<NamespaceHandle, Namespace>,
    by_root: HashMap<NamespaceId, NamespaceHandle>,
    spaces: HashMap<SpaceId, Space>,
    by_id: HashMap<NamespaceId, SpaceId>,
    /// Number of spaces of each namespace, known or not.
    spaces_of: HashMap<NamespaceId, u32>,
    /// Spaces of forgotten namespaces that still have blocks.
    forgotten: HashMap<NamespaceId, SpaceId>,
    /// Epochs of forgotten namespaces, if no tier stores them: a reset must not be undone (P1).
    epochs_kept: Option<HashMap<NamespaceId, u32>>,
    handles_ever: NamespaceHandle,
    spaces_ever: u32,
    pub(crate) flaws: Flaws,
}

impl Catalog {
    /// Makes an empty catalog. `is_alone`: there is no tier that stores epochs.
    pub(crate) fn new(is_alone: bool) -> Self {
        Self { epochs_kept: is_alone.then(HashMap::new), ..Self::default() }
    }

    /// Returns whether a namespace's epoch can be remembered after the namespace is forgotten, if that is needed.
    pub(crate) fn may_forget(&self, namespace: &Namespace) -> bool {
        namespace.epoch == 0 || self.epochs_kept.as_ref().is_none_or(|kept| kept.len() < EPOCHS_KEPT_MAX)
    }

    pub(crate) fn get(&self, handle: NamespaceHandle) -> Result<&Namespace> {
        self.namespaces.get(&handle).ok_or_else(|| unknown(handle))
    }

    fn get_mut(&mut self, handle: NamespaceHandle) -> Result<&mut Namespace> {
        self.namespaces.get_mut(&handle).ok_or_else(|| unknown(handle))
    }

    /// Sets the preferred region of the pool for its blocks.
    pub(crate) fn set_near(&mut self, handle: NamespaceHandle, region: RegionIndex) {
        if let Some(namespace) = self.namespaces.get_mut(&handle) {
            namespace.near = Some(region);
        }
    }

    /// Notes that a reader of a namespace can read blocks in a tier's memory. Others that cannot get copies.
    pub(crate) fn reads_in_place(&mut self, handle: NamespaceHandle) {
        if let Some(namespace) = self.namespaces.get_mut(&handle) {
            namespace.in_place = true;
        }
    }

    /// Returns the preferred region of the pool for a space's blocks.
    pub(crate) fn near(&self, space: SpaceId) -> Option<RegionIndex> {
        self.namespaces.get(&self.spaces.get(&space)?.handle?)?.near
    }

    /// Returns a namespace, if its keys carry `id` now; without an id in any case.
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

    /// Returns the number of provisional namespaces.
    pub(crate) fn provisional_len(&self) -> usize {
        self.namespaces.values().filter(|namespace| namespace.provisional).count()
    }

    /// Returns the number of spaces of which something is left, including those of known namespaces.
    pub(crate) fn spaces_len(&self) -> usize {
        self.spaces.len()
    }

    /// Returns all namespaces, in the order of their numbers.
    pub(crate) fn all(&self) -> Vec<&Namespace> {
        let mut all: Vec<&Namespace> = self.namespaces.values().collect();
        all.sort_unstable_by_key(|namespace| namespace.handle);
        all
    }

    /// Returns the number of a known namespace.
    pub(crate) fn find(&self, spec: &NamespaceSpec) -> Option<NamespaceHandle> {
        self.by_root.get(&spec.root()).copied()
    }

    /// Returns the namespace whose keys carry this id now.
    pub(crate) fn by_id(&self, id: NamespaceId) -> Option<&Namespace> {
        let space = self.spaces.get(self.by_id.get(&id)?)?;
        self.namespaces.get(&space.handle?)
    }

    /// Returns the machine's name for a tier's key of any epoch.
    pub(crate) fn any_pool_key(&self, key: &BlockKey) -> Option<PoolKey> {
        self.by_id.get(&key.namespace).map(|&space| PoolKey { space, hash: key.hash })
    }

    /// Returns the machine's name for a client's key; `None` if its namespace is not open here or its epoch has passed.
    pub(crate) fn pool_key(&self, key: &BlockKey) -> Option<PoolKey> {
        self.by_id(key.namespace).map(|namespace| namespace.pool_key(key.hash))
    }

    /// Returns a block's key in tiers.
    pub(crate) fn block_key(&self, key: &PoolKey) -> BlockKey {
        let space = self.spaces.get(&key.space).expect("a space is known while anything names it");
        BlockKey { namespace: space.id, hash: key.hash }
    }

    /// Returns a function like [`Self::block_key`] for many keys, most of which are of one space.
    pub(crate) fn block_keys(&self) -> impl FnMut(&PoolKey) -> BlockKey + '_ {
        let mut last: Option<(SpaceId, NamespaceId)> = None;
        move |key| {
            let known = last.filter(|&(space, _)| space == key.space);
            let namespace = known.map_or_else(|| self.block_key(key).namespace, |(_, id)| id);
            last = Some((key.space, namespace));
            BlockKey { namespace, hash: key.hash }
        }
    }

    /// The root of a space's namespace, and whether that is known now.
    pub(crate) fn root(&self, space: SpaceId) -> Option<(NamespaceId, bool)> {
        let root = self.spaces.get(&space)?.root;
        Some((root, self.by_root.contains_key(&root)))
    }

    /// Returns whether a space belongs to a namespace that is provisional now.
    pub(crate) fn is_provisional(&self, space: SpaceId) -> bool {
        let namespace = self.spaces.get(&space).and_then(|space| self.namespaces.get(&space.handle?));
        namespace.is_some_and(|namespace| namespace.provisional)
    }

    /// Returns whether tiers get no blocks of a space, because one of them has not answered about its namespace.
    pub(crate) fn stays_in_pool(&self, space: SpaceId) -> bool {
        self.is_provisional(space) && !self.flaws.has(Flaw::ProvisionalWritten)
    }

    /// Whether keys of this space can still be asked for.
    pub(crate) fn is_live(&self, space: SpaceId) -> bool {
        self.spaces.get(&space).is_some_and(|space| space.handle.is_some())
    }

    #[cfg(any(test, feature = "model"))]
    pub(crate) fn knows(&self, space: SpaceId) -> bool {
        self.spaces.contains_key(&space)
    }

    /// Returns whether nothing is left of a namespace's earlier spaces.
    pub(crate) fn has_one_space(&self, namespace: &Namespace) -> bool {
        self.spaces_of.get(&namespace.spec.root()) == Some(&1)
    }

    /// Makes an unknown namespace known, in `epoch` or a later one. With a `provisional` id, which no epoch has, it is
    /// provisional: what is dumped meanwhile is lost when it moves to its epoch.
    pub(crate) fn open(
        &mut self,
        spec: &Arc<NamespaceSpec>,
        mut epoch: u32,
        provisional: Option<NamespaceId>,
    ) -> NamespaceHandle {
        let (root, mut handle) = (spec.root(), self.handles_ever);
        self.handles_ever += 1;
        if self.flaws.has(Flaw::HandlesUsedAgain) {
            handle = (0..).find(|handle| !self.namespaces.contains_key(handle)).unwrap_or(handle);
        }
        // It was forgotten only recently: what is left of it still belongs to it, in its epoch.
        let kept = self.epochs_kept.as_mut().and_then(|kept| kept.remove(&root)).unwrap_or(0);
        let left = self.forgotten.remove(&root);
        epoch = epoch.max(kept);
        epoch = left.and_then(|space| self.spaces.get(&space)).map_or(epoch, |left| left.epoch.max(epoch));
        let id = provisional.unwrap_or_else(|| spec.id(epoch));
        let same = left.filter(|space| self.spaces.get(space).is_some_and(|left| left.id == id));
        let space = same.unwrap_or_else(|| self.new_space(Space { id, root, epoch, handle: None }));
        if let Some(entry) = self.spaces.get_mut(&space) {
            entry.handle = Some(handle);
        }
        let spec = Arc::clone(spec);
        let namespace = Namespace {
            handle,
            spec,
            epoch,
            id,
            space,
            advancing: 0,
            unstored: false,
            provisional: provisional.is_some(),
            near: None,
            in_place: false,
        };
        self.namespaces.insert(handle, namespace);
        self.by_root.insert(root, handle);
        handle
    }

    /// Forgets a namespace. Returns its space, of which something may be left. Nothing may be in flight in it.
    pub(crate) fn forget(&mut self, handle: NamespaceHandle) -> Option<(NamespaceId, SpaceId)> {
        let namespace = self.namespaces.remove(&handle)?;
        let root = namespace.spec.root();
        self.by_root.remove(&root);
        if let Some(kept) = &mut self.epochs_kept
            && namespace.epoch > 0
        {
            kept.insert(root, namespace.epoch);
        }
        if let Some(space) = self.spaces.get_mut(&namespace.space) {
            space.handle = None;
            self.forgotten.insert(root, namespace.space);
        }
        Some((root, namespace.space))
    }

    /// Forgets a space that is not named any more.
    pub(crate) fn forget_space(&mut self, space: SpaceId) {
        let Some(gone) = self.spaces.remove(&space) else { return };
        if self.by_id.get(&gone.id) == Some(&space) {
            self.by_id.remove(&gone.id);
        }
        if self.forgotten.get(&gone.root) == Some(&space) {
            self.forgotten.remove(&gone.root);
        }
        if let Some(spaces) = self.spaces_of.get_mut(&gone.root) {
            *spaces -= 1;
            if *spaces == 0 {
                self.spaces_of.remove(&gone.root);
            }
        }
    }

    /// Moves a namespace to `epoch`, but never back. Returns the space that it left, if it moved.
    pub(crate) fn enter(&mut self, handle: NamespaceHandle, epoch: u32) -> Result<Option<SpaceId>> {
        let entry = self.get_mut(handle)?;
        if !epoch_moves(entry.epoch, epoch)? {
            return Ok(None);
        }
        entry.epoch = epoch;
        if !entry.has_epoch_id() {
            return Ok(None);
        }
        let id = entry.spec.id(epoch);
        Ok(Some(self.move_to(handle, id)))
    }

    /// Moves a namespace to `epoch` or a later one; `stored`: all tiers have stored it.
    pub(crate) fn follow(
        &mut self,
        handle: NamespaceHandle,
        epoch: u32,
        stored: bool,
    ) -> Result<Option<SpaceId>> {
        let entry = self.get_mut(handle)?;
        if entry.epoch > epoch {
            // Information about an earlier epoch is not valid for this one.
            return Ok(None);
        }
        entry.unstored = !stored;
        if stored && std::mem::take(&mut entry.provisional) {
            entry.epoch = epoch;
            let id = entry.has_epoch_id().then(|| entry.spec.id(epoch));
            return Ok(id.map(|id| self.move_to(handle, id)));
        }
        self.enter(handle, epoch)
    }

    /// Begins an advance: until [`Self::end_advance`] keys carry `provisional`, an id that no epoch has. The next
    /// epoch's id would not do, because a tier that another depot has moved may have earlier blocks of it. Returns the
    /// space that the namespace left.
    pub(crate) fn begin_advance(
        &mut self,
        handle: NamespaceHandle,
        provisional: NamespaceId,
    ) -> Result<SpaceId> {
        let entry = self.get_mut(handle)?;
        entry.epoch = next_epoch(entry.epoch, 0)?;
        entry.advancing += 1;
        Ok(self.move_to(handle, provisional))
    }

    /// Completes an advance, to `epoch` or a later one; `stored`: all tiers have stored it. Returns the space that the
    /// namespace left, if no other advance is in flight.
    pub(crate) fn end_advance(
        &mut self,
        handle: NamespaceHandle,
        epoch: u32,
        stored: bool,
    ) -> Result<Option<SpaceId>> {
        let entry = self.get_mut(handle)?;
        if entry.epoch <= epoch {
            entry.unstored = !stored;
        }
        if entry.advancing == 0 {
            let epoch = entry.epoch.max(epoch);
            return self.enter(handle, epoch);
        }
        entry.advancing -= 1;
        entry.epoch = entry.epoch.max(epoch);
        if !entry.has_epoch_id() {
            return Ok(None);
        }
        let id = entry.spec.id(entry.epoch);
        Ok(Some(self.move_to(handle, id)))
    }

    /// Gives a namespace another id. Returns the space that it left.
    fn move_to(&mut self, handle: NamespaceHandle, id: NamespaceId) -> SpaceId {
        let entry = &self.namespaces[&handle];
        let (root, epoch, left) = (entry.spec.root(), entry.epoch, entry.space);
        let space = self.new_space(Space { id, root, epoch, handle: Some(handle) });
        if let Some(past) = self.spaces.get_mut(&left) {
            past.handle = None;
        }
        if let Some(entry) = self.namespaces.get_mut(&handle) {
            (entry.space, entry.id) = (space, id);
        }
        left
    }

    fn new_space(&mut self, entry: Space) -> SpaceId {
        loop {
            // Wraps around after four thousand million, and skips numbers that are still in use.
            self.spaces_ever = self.spaces_ever.checked_add(1).unwrap_or(1);
            let space = SpaceId(self.spaces_ever);
            if !self.spaces.contains_key(&space) {
                self.by_id.insert(entry.id, space);
                *self.spaces_of.entry(entry.root).or_default() += 1;
                self.spaces.insert(space, entry);
                return space;
            }
        }
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
    use super::*;
    use crate::BlockLayout;

    fn spec(name: &str) -> Arc<NamespaceSpec> {
        let facts = format!("{{\"model\":\"{name}\"}}");
        Arc::new(NamespaceSpec::new(&facts, BlockLayout::uniform(1, &[4096]).unwrap()).unwrap())
    }

    #[test]
    fn a_key_of_an_epoch_that_passed_names_nothing() {
        let mut catalog = Catalog::default();
        let handle = catalog.open(&spec("a"), 0, None);
        let old = catalog.get(handle).unwrap().clone();
        let key = BlockKey { namespace: old.id, hash: BlockHash([1; 16]) };
        let pool_key = catalog.pool_key(&key).unwrap();
        assert_eq!(catalog.enter(handle, 3).unwrap(), Some(old.space));
        assert_eq!(catalog.pool_key(&key), None);
        assert_eq!(catalog.block_key(&pool_key), key, "tiers may still end what they were told of it");
        assert_eq!(catalog.any_pool_key(&key), Some(pool_key));
        assert!(!catalog.is_live(old.space) && !catalog.has_one_space(catalog.get(handle).unwrap()));
        catalog.forget_space(old.space);
        assert_eq!(catalog.any_pool_key(&key), None);
        assert!(catalog.has_one_space(catalog.get(handle).unwrap()));
    }

    #[test]
    fn an_epoch_moves_forward_and_never_back() {
        let mut catalog = Catalog::default();
        let handle = catalog.open(&spec("a"), 2, None);
        assert_eq!(catalog.follow(handle, 1, true).unwrap(), None);
        assert!(catalog.follow(handle, 5, true).unwrap().is_some());
        assert_eq!(catalog.get(handle).unwrap().epoch, 5);
        assert!(catalog.enter(handle, 4).is_err());
        assert_eq!(catalog.open(&spec("b"), 0, None), handle + 1);
    }

    #[test]
    fn no_epoch_is_served_while_the_next_one_is_not_known() {
        let mut catalog = Catalog::default();
        let handle = catalog.open(&spec("a"), 3, None);
        let is_an_epoch =
            |catalog: &Catalog| (0..20).any(|epoch| spec("a").id(epoch) == catalog.get(handle).unwrap().id);
        catalog.begin_advance(handle, NamespaceId([1; 16])).unwrap();
        assert!(!is_an_epoch(&catalog));
        // An answer to a query that another thread began earlier.
        assert_eq!(catalog.follow(handle, 6, true).unwrap(), None);
        assert!(!is_an_epoch(&catalog));
        catalog.begin_advance(handle, NamespaceId([2; 16])).unwrap();
        assert_eq!(catalog.end_advance(handle, 7, true).unwrap(), None, "another advance is under way");
        assert!(!is_an_epoch(&catalog));
        assert!(catalog.end_advance(handle, 5, true).unwrap().is_some());
        let namespace = catalog.get(handle).unwrap();
        assert_eq!((namespace.id, namespace.epoch), (spec("a").id(7), 7));
        assert!(!namespace.is_moving());
    }

    #[test]
    fn a_provisional_namespace_has_no_epochs_id_until_all_tiers_have_answered() {
        let mut catalog = Catalog::default();
        let handle = catalog.open(&spec("a"), 3, Some(NamespaceId([1; 16])));
        let namespace = |catalog: &Catalog| catalog.get(handle).unwrap().clone();
        let first = namespace(&catalog);
        assert_eq!((first.id, first.epoch), (NamespaceId([1; 16]), 3));
        assert!(catalog.is_provisional(first.space) && !first.is_moving());
        assert_eq!(catalog.follow(handle, 4, false).unwrap(), None, "a tier has not answered");
        assert_eq!(catalog.enter(handle, 5).unwrap(), None);
        assert_eq!(catalog.begin_advance(handle, NamespaceId([2; 16])).unwrap(), first.space);
        assert_eq!(catalog.follow(handle, 6, true).unwrap(), None, "an advance is under way");
        assert_eq!(namespace(&catalog).id, NamespaceId([2; 16]));
        let second = namespace(&catalog).space;
        assert_eq!(catalog.end_advance(handle, 7, true).unwrap(), Some(second));
        assert_eq!((namespace(&catalog).id, namespace(&catalog).epoch), (spec("a").id(7), 7));

        let handle = catalog.open(&spec("b"), 0, Some(NamespaceId([3; 16])));
        let space = catalog.get(handle).unwrap().space;
        catalog.begin_advance(handle, NamespaceId([4; 16])).unwrap();
        assert_eq!(catalog.end_advance(handle, 2, false).unwrap(), None, "a tier has not answered");
        let advanced = catalog.get(handle).unwrap().clone();
        assert_eq!((advanced.id, advanced.epoch), (NamespaceId([4; 16]), 2));
        assert!(catalog.is_provisional(advanced.space) && !catalog.is_live(space));
        assert_eq!(catalog.follow(handle, 1, true).unwrap(), None, "an answer about an earlier epoch");
        assert_eq!(catalog.follow(handle, 2, true).unwrap(), Some(advanced.space));
        assert_eq!(catalog.get(handle).unwrap().id, spec("b").id(2));
    }

    #[test]
    fn an_advance_that_is_not_stored_moves_until_that_very_epoch_is() {
        let mut catalog = Catalog::default();
        let handle = catalog.open(&spec("a"), 0, None);
        catalog.begin_advance(handle, NamespaceId([1; 16])).unwrap();
        assert!(catalog.get(handle).unwrap().is_moving());
        catalog.end_advance(handle, 4, false).unwrap();
        for (epoch, stored, is_moving) in
            [(3, true, true), (4, true, false), (4, false, true), (4, true, false), (5, false, true)]
        {
            catalog.follow(handle, epoch, stored).unwrap();
            assert_eq!(catalog.get(handle).unwrap().is_moving(), is_moving, "epoch {epoch}, stored {stored}");
        }
    }

    #[test]
    fn a_forgotten_namespace_has_another_number_and_what_is_left_of_its_space() {
        let mut catalog = Catalog::default();
        let old = catalog.open(&spec("a"), 3, None);
        let namespace = catalog.get(old).unwrap().clone();
        let key = BlockKey { namespace: namespace.id, hash: BlockHash([1; 16]) };
        assert_eq!(catalog.forget(old), Some((spec("a").root(), namespace.space)));
        assert!(catalog.get(old).is_err() && catalog.pool_key(&key).is_none());
        assert_eq!(catalog.block_key(&namespace.pool_key(key.hash)), key);
        // Its tiers may report an earlier epoch than the space's blocks have seen.
        let new = catalog.open(&spec("a"), 1, None);
        assert!(new != old && catalog.get(old).is_err());
        let again = catalog.get(new).unwrap();
        assert_eq!((again.space, again.epoch), (namespace.space, 3));
        assert_eq!((catalog.len(), catalog.spaces_len()), (1, 1));
        catalog.forget(new);
        catalog.forget_space(namespace.space);
        let last = catalog.open(&spec("a"), 0, None);
        assert_eq!(catalog.get(last).unwrap().epoch, 0, "nothing is left of it");
    }

    #[test]
    fn without_tiers_an_epoch_outlives_its_namespace() {
        for (is_alone, epoch) in [(true, 5), (false, 0)] {
            let mut catalog = Catalog::new(is_alone);
            let handle = catalog.open(&spec("a"), 0, None);
            catalog.enter(handle, 5).unwrap();
            let (_, space) = catalog.forget(handle).unwrap();
            // Nothing is left of it.
            catalog.forget_space(space);
            let again = catalog.open(&spec("a"), 0, None);
            assert_eq!(catalog.get(again).unwrap().epoch, epoch, "alone: {is_alone}");
        }
    }
}
