//! Users of namespaces. Namespaces without users are kept in the order of their last use.

use std::collections::{BTreeMap, BTreeSet};

use hashbrown::HashMap;

use super::catalog::NamespaceHandle;
use super::event::Owner;
use crate::error::{Error, ErrorKind, Result};

#[derive(Clone, Copy, Debug)]
struct Standing {
    users: u32,
    /// Its position among those without users.
    place: u64,
}

/// Users by namespace; see the module.
#[derive(Clone, Debug, Default)]
pub(crate) struct Users {
    by_owner: HashMap<Owner, BTreeSet<NamespaceHandle>>,
    namespaces: HashMap<NamespaceHandle, Standing>,
    unused: BTreeMap<u64, NamespaceHandle>,
    places: u64,
}

impl Users {
    const fn next_place(&mut self) -> u64 {
        self.places += 1;
        self.places
    }

    /// Adds a new namespace without users.
    pub(super) fn came(&mut self, handle: NamespaceHandle) {
        let place = self.next_place();
        self.namespaces.insert(handle, Standing { users: 0, place });
        self.unused.insert(place, handle);
    }

    /// Removes a namespace. It had no users.
    pub(super) fn went(&mut self, handle: NamespaceHandle) {
        if let Some(standing) = self.namespaces.remove(&handle) {
            self.unused.remove(&standing.place);
        }
    }

    /// Refuses an owner that already uses `max` namespaces and would use another one.
    pub(super) fn may_use(&self, owner: Owner, handle: Option<NamespaceHandle>, max: usize) -> Result<()> {
        let Some(used) = self.by_owner.get(&owner) else { return Ok(()) };
        if used.len() < max || handle.is_some_and(|handle| used.contains(&handle)) {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::NoSpace,
            "this client has reached its limit of namespaces: end clients of models and layouts that are not served any \
             more, or start another depot for some",
        )
        .with("namespaces_used", used.len())
        .with("namespaces_per_client_max", max))
    }

    /// Records that an owner uses a namespace from now on, until it closes it or ends.
    pub(super) fn begin(&mut self, owner: Owner, handle: NamespaceHandle) {
        let Some(standing) = self.namespaces.get_mut(&handle) else { return };
        if self.by_owner.entry(owner).or_default().insert(handle) {
            standing.users += 1;
            self.unused.remove(&standing.place);
        }
    }

    /// Ends an owner's use of a namespace, if it uses it.
    pub(super) fn end(&mut self, owner: Owner, handle: NamespaceHandle) {
        let Some(used) = self.by_owner.get_mut(&owner) else { return };
        if !used.remove(&handle) {
            return;
        }
        if used.is_empty() {
            self.by_owner.remove(&owner);
        }
        self.left(handle);
    }

    /// Ends all uses of an owner.
    pub(super) fn end_owner(&mut self, owner: Owner) {
        for handle in self.by_owner.remove(&owner).unwrap_or_default() {
            self.left(handle);
        }
    }

    fn left(&mut self, handle: NamespaceHandle) {
        if let Some(standing) = self.namespaces.get_mut(&handle) {
            standing.users -= 1;
            self.touch(handle);
        }
    }

    /// Records a use of a namespace now. Only namespaces without users are reordered.
    pub(super) fn touch(&mut self, handle: NamespaceHandle) {
        if self.namespaces.get(&handle).is_none_or(|standing| standing.users > 0) {
            return;
        }
        let place = self.next_place();
        if let Some(standing) = self.namespaces.get_mut(&handle) {
            self.unused.remove(&standing.place);
            standing.place = place;
            self.unused.insert(place, handle);
        }
    }

    /// Returns the namespaces without users, the least recently used first.
    pub(super) fn unused(&self) -> impl Iterator<Item = NamespaceHandle> + '_ {
        self.unused.values().copied()
    }

    /// Returns the number of known namespaces, and of uses of them. For tests.
    #[cfg(any(test, feature = "model"))]
    pub(super) fn len(&self) -> (usize, usize) {
        (self.namespaces.len(), self.by_owner.values().map(BTreeSet::len).sum())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(users: &Users) -> Vec<NamespaceHandle> {
        users.unused().collect()
    }

    #[test]
    fn those_without_users_stand_in_the_order_of_their_last_use() {
        let mut users = Users::default();
        (1..=4).for_each(|handle| users.came(handle));
        users.begin(7, 1);
        users.begin(8, 1);
        users.begin(7, 2);
        assert_eq!(order(&users), [3, 4]);
        users.touch(3);
        users.touch(1);
        assert_eq!(order(&users), [4, 3]);
        users.end_owner(7);
        assert_eq!(order(&users), [4, 3, 2], "1 has another user");
        users.end_owner(8);
        users.went(3);
        assert_eq!(order(&users), [4, 2, 1]);
        assert_eq!(users.len(), (3, 0));
    }

    #[test]
    fn an_owner_that_closes_a_namespace_may_use_another_one() {
        let mut users = Users::default();
        (1..=3).for_each(|handle| users.came(handle));
        users.begin(7, 1);
        users.begin(8, 1);
        users.begin(7, 2);
        users.end(7, 3);
        assert_eq!(users.len(), (3, 3), "it did not use that one");
        users.end(7, 1);
        users.end(7, 1);
        assert_eq!(order(&users), [3], "1 has another user");
        assert!(users.may_use(7, Some(3), 2).is_ok());
        users.end(8, 1);
        assert_eq!(order(&users), [3, 1]);
        users.end(7, 2);
        users.end_owner(7);
        users.end_owner(8);
        assert_eq!((order(&users), users.len()), (vec![3, 1, 2], (3, 0)));
    }

    #[test]
    fn an_owner_has_its_share_and_no_more() {
        let mut users = Users::default();
        (1..=3).for_each(|handle| users.came(handle));
        users.begin(7, 1);
        users.begin(7, 2);
        let refused = users.may_use(7, Some(3), 2).unwrap_err().to_string();
        assert!(refused.contains("namespaces_per_client_max=2"), "{refused}");
        assert!(users.may_use(7, None, 2).is_err());
        assert!(users.may_use(7, Some(2), 2).is_ok(), "it uses this one already");
        assert!(users.may_use(8, Some(3), 2).is_ok());
    }
}
