//! Namespaces that a tier over a shared store serves, and epochs that it must store before it serves a namespace again.

use std::sync::Arc;

use hashbrown::HashMap;
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId, NamespaceSpec, Result, next_epoch};

use crate::served::{self, Served};

/// A namespace in its epoch.
pub(crate) type Space = served::Space<()>;

/// An epoch to store.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub(crate) spec: Arc<NamespaceSpec>,
    pub(crate) at_least: u32,
    /// Whether it must be one that was never used before.
    pub(crate) advance: bool,
    /// Changes with every reset: the epoch stored for an earlier one is not enough.
    request: u64,
}

impl Wanted {
    /// Returns the epoch to store where this one is stored; nothing is to be done if it is the same.
    pub(crate) fn target(&self, stored: u32) -> Result<u32> {
        if self.advance { next_epoch(stored, self.at_least) } else { Ok(stored.max(self.at_least)) }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Spaces {
    served: Served<()>,
    wanted: HashMap<NamespaceId, Wanted>,
    requests: u64,
}

impl Spaces {
    /// Returns the namespace whose keys these are now (P8).
    pub(crate) fn of(&self, key: &BlockKey) -> Result<&Space> {
        self.served.of(key)
    }

    /// Returns the namespace whose keys carry this id now.
    pub(crate) fn with_id(&self, id: &NamespaceId) -> Option<&Space> {
        self.served.with_id(id)
    }

    /// Returns whether keys with this id are served.
    pub(crate) fn has_id(&self, id: &NamespaceId) -> bool {
        self.served.has_id(id)
    }

    /// Returns the highest epoch that was stored, or seen in the store, and not forgotten.
    pub(crate) fn epoch(&self, root: NamespaceId) -> Option<u32> {
        self.served.get(root).map(|space| space.epoch)
    }

    /// Returns whether it is served.
    pub(crate) fn is_open(&self, root: NamespaceId) -> bool {
        self.served.is_served(root)
    }

    /// Serves a namespace in a stored epoch, unless a later one is known or another one must be stored. Returns the
    /// previous id of its keys if it has changed.
    pub(crate) fn enter(&mut self, spec: &Arc<NamespaceSpec>, epoch: u32) -> Result<Option<NamespaceId>> {
        let root = spec.root();
        if self.wanted.contains_key(&root) || self.epoch(root).is_some_and(|known| known > epoch) {
            return Err(Error::new(ErrorKind::Busy, "the namespace is being reset").with("namespace", root));
        }
        Ok(self.served.enter(spec, epoch, true))
    }

    /// Makes a namespace unreachable until an epoch is stored: none before the known one, and with `advance` a later one,
    /// even if the store has lost the known one or the caller does not know it. Returns the id that its keys carry.
    pub(crate) fn want(
        &mut self,
        spec: &Arc<NamespaceSpec>,
        at_least: u32,
        advance: bool,
    ) -> Option<NamespaceId> {
        self.requests += 1;
        let (root, request) = (spec.root(), self.requests);
        let not_before = self.epoch(root).map_or(0, |known| known.saturating_add(u32::from(advance)));
        let at_least = at_least.max(not_before);
        let new = || Wanted { spec: Arc::clone(spec), at_least, advance, request };
        let wanted = self.wanted.entry(root).or_insert_with(new);
        if advance && !wanted.advance {
            // The epoch to store may be in use elsewhere.
            wanted.at_least = wanted.at_least.saturating_add(1);
        }
        wanted.at_least = wanted.at_least.max(at_least);
        wanted.advance |= advance;
        if advance {
            wanted.request = request;
        }
        self.served.hide(root)
    }

    pub(crate) fn wanted(&self, root: NamespaceId) -> Option<Wanted> {
        self.wanted.get(&root).cloned()
    }

    pub(crate) fn all_wanted(&self) -> Vec<NamespaceId> {
        self.wanted.keys().copied().collect()
    }

    /// Records that an epoch was stored for a request. Returns whether it is served now: not if there was another
    /// request in the meantime.
    pub(crate) fn settled(&mut self, wanted: &Wanted, epoch: u32) -> bool {
        let root = wanted.spec.root();
        let is_enough = |now: &Wanted| now.request == wanted.request && now.at_least <= epoch;
        if !self.wanted.get(&root).is_some_and(is_enough) {
            return false;
        }
        self.wanted.remove(&root);
        self.enter(&wanted.spec, epoch).is_ok()
    }

    /// Forgets a namespace, unless an epoch must be stored. Returns the id that its keys carried.
    pub(crate) fn close(&mut self, root: NamespaceId) -> Option<NamespaceId> {
        self.served.forget(root)
    }
}

#[cfg(test)]
mod tests {
    use kvdepot_core::BlockHash;
    use kvdepot_core::BlockLayout;

    use super::*;

    fn spec() -> Arc<NamespaceSpec> {
        let layout = BlockLayout::new(vec![vec![100]]).unwrap();
        Arc::new(crate::conformance::spec("one", layout))
    }

    /// A store that lost its epoch, or a caller that does not know it, must not lose the reset.
    #[test]
    fn a_reset_below_the_known_epoch_goes_beyond_it() {
        let (spec, mut spaces) = (spec(), Spaces::default());
        let root = spec.root();
        spaces.enter(&spec, 5).unwrap();
        spaces.want(&spec, 0, true);
        let first = spaces.wanted(root).unwrap();
        assert_eq!(first.at_least, 6);
        assert!(!spaces.settled(&first, 1), "the known epoch is later");
        assert!(spaces.wanted(root).is_some(), "it is still to be stored");
        assert!(spaces.settled(&first, 6) && spaces.is_open(root));
        spaces.want(&spec, 2, false);
        let second = spaces.wanted(root).unwrap();
        assert_eq!(second.at_least, 6, "an opener may not know it, either");
        assert!(spaces.settled(&second, 6) && spaces.is_open(root));
    }

    #[test]
    fn a_reset_is_served_when_it_is_stored_and_the_last() {
        let spec = spec();
        let key = |epoch| BlockKey { namespace: spec.id(epoch), hash: BlockHash([0; 16]) };
        let mut spaces = Spaces::default();
        assert_eq!(spaces.enter(&spec, 3).unwrap(), None);
        assert!(spaces.of(&key(3)).is_ok() && spaces.of(&key(2)).is_err());
        assert_eq!(spaces.want(&spec, 0, true), Some(spec.id(3)));
        let first = spaces.wanted(spec.root()).unwrap();
        assert!(
            spaces.of(&key(3)).is_err() && spaces.enter(&spec, 9).is_err() && !spaces.is_open(spec.root())
        );
        assert_eq!(spaces.want(&spec, 8, true), None);
        assert!(!spaces.settled(&first, 4), "a reset came after it");
        let second = spaces.wanted(spec.root()).unwrap();
        assert!(second.advance && second.at_least == 8);
        assert_eq!(spaces.want(&spec, 8, false), None);
        assert!(spaces.settled(&second, 8) && spaces.of(&key(8)).is_ok());
        spaces.want(&spec, 9, false);
        let third = spaces.wanted(spec.root()).unwrap();
        spaces.want(&spec, 11, false);
        assert!(!spaces.settled(&third, 9), "an opener knows a later one");
        let last = spaces.wanted(spec.root()).unwrap();
        assert!(spaces.settled(&last, 11) && spaces.of(&key(11)).is_ok());
        assert!(spaces.enter(&spec, 7).is_err(), "an epoch never goes back");
        assert_eq!(spaces.close(spec.root()), Some(spec.id(11)));
        assert!(spaces.of(&key(11)).is_err());
    }
}
