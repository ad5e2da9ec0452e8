//! Users of namespaces: a process, whose sessions come and go, or a single session.

use std::fmt;
use std::sync::Arc;

use kvdepot_core::machine::{Event, Owner};

use crate::death::DeathGuard;
use crate::runner::Runner;

/// A user of namespaces, with a quota of those that the depot can know. Namespaces opened by its sessions are not
/// forgotten before the last of the sessions and this value are dropped. Clones are the same user.
#[derive(Clone)]
pub struct User(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    runner: Arc<Runner>,
    owner: Owner,
}

impl User {
    pub(crate) fn new(runner: Arc<Runner>) -> Self {
        let owner = runner.next_owner();
        Self(Arc::new(Inner { runner, owner }))
    }

    pub(crate) fn owner(&self) -> Owner {
        self.0.owner
    }

    /// Returns a weak reference to this user.
    pub fn downgrade(&self) -> WeakUser {
        WeakUser(Arc::downgrade(&self.0))
    }
}

/// A weak reference to a user.
#[derive(Clone)]
pub struct WeakUser(std::sync::Weak<Inner>);

impl WeakUser {
    /// Returns the user, if it still exists.
    pub fn upgrade(&self) -> Option<User> {
        self.0.upgrade().map(User)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if !self.runner.life.is_dead() {
            let _guard = DeathGuard(&self.runner.life);
            self.runner.tell_and_leave(Event::OwnerEnded { owner: self.owner });
        }
    }
}

impl fmt::Debug for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "User({})", self.0.owner)
    }
}

impl fmt::Debug for WeakUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WeakUser")
    }
}
