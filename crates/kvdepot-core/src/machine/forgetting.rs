//! Forgetting: of past epochs, as soon as nothing of them is left, and of unused namespaces, when others need their
//! place.
//!
//! A namespace is *idle* if it has no user, its epoch does not move and is stored in every tier, no request, tier or
//! client has anything in flight in it, and its blocks are in all tiers that should have them. Only idle namespaces are
//! forgotten, the least recently used first. Their blocks leave the pool in bounded pieces.

use super::Machine;
use super::catalog::{Namespace, NamespaceHandle};
use super::event::{Effects, Forgotten, Job, Owner};
use super::flaw::Flaw;
use super::names::SpaceId;
use crate::error::{Error, ErrorKind, Result};

/// Owner of requests of the depot itself, which uses no namespace.
const NOBODY: Owner = 0;

impl Machine {
    /// Records that an owner uses a namespace from now on.
    pub(super) fn begin_use(&mut self, owner: Owner, handle: NamespaceHandle) -> Result<()> {
        self.catalog.get(handle)?;
        if owner != NOBODY {
            self.users.may_use(owner, Some(handle), self.namespaces_per_owner_max())?;
            self.users.begin(owner, handle);
        }
        Ok(())
    }

    const fn namespaces_per_owner_max(&self) -> usize {
        self.namespaces_max.div_ceil(2)
    }

    /// Makes space for a namespace that `owner` is about to open.
    pub(super) fn make_room(&mut self, owner: Owner, out: &mut Effects) -> Result<()> {
        if let Some(handle) = self.whose_place(owner)? {
            self.forget_namespace(handle, out);
        }
        Ok(())
    }

    /// Returns an error if `owner` may not open an unknown namespace, with the reason.
    pub fn may_open(&self, owner: Owner) -> Result<()> {
        self.whose_place(owner).map(drop)
    }

    /// Returns the namespace that must be forgotten for a new one of `owner`, if any.
    fn whose_place(&self, owner: Owner) -> Result<Option<NamespaceHandle>> {
        if owner != NOBODY {
            self.users.may_use(owner, None, self.namespaces_per_owner_max())?;
        }
        if self.catalog.len() < self.namespaces_max {
            return Ok(None);
        }
        let idle =
            |handle: &NamespaceHandle| self.catalog.get(*handle).is_ok_and(|known| self.is_idle(known));
        match self.users.unused().find(idle) {
            // The namespaces to hand over have been counted already.
            Some(_) if self.frozen => Err(Error::new(
                ErrorKind::Unavailable,
                "the depot is handing its pool over to another one, which will answer in a moment",
            )),
            Some(handle) => Ok(Some(handle)),
            None => Err(Error::new(
                ErrorKind::NoSpace,
                "every namespace that the depot knows is in use, or not written to its tiers yet: end clients of models \
                 and layouts that are not served any more, or start another depot for some",
            )
            .with("namespaces_max", self.namespaces_max)
            .with("namespaces_without_clients", self.users.unused().count())),
        }
    }

    /// Returns whether a namespace is idle; see the module.
    fn is_idle(&self, namespace: &Namespace) -> bool {
        let writing = !self.pool.uses.is_idle(namespace.space) || !self.flow.uses.is_unused(namespace.space);
        (!namespace.is_moving() || self.flaws.has(Flaw::ForgetUnstored))
            && self.catalog.may_forget(namespace)
            && self.catalog.has_one_space(namespace)
            && (!writing || self.flaws.has(Flaw::ForgetWhileBusy))
    }

    fn forget_namespace(&mut self, handle: NamespaceHandle, out: &mut Effects) {
        self.users.went(handle);
        if let Some((root, space)) = self.catalog.forget(handle) {
            self.counters.namespaces_forgotten += 1;
            out.forgotten.push(Forgotten { handle, root });
            self.leave(space, out);
        }
    }

    /// Removes the contents of a space that its namespace has left, in pieces.
    pub(super) fn leave(&mut self, space: SpaceId, out: &mut Effects) {
        self.left.push(space);
        if self.pool.uses.has_slots(space) {
            self.pool.note_left(space);
            self.sweep.again = self.sweep.at.is_some();
            if !self.sweep.again {
                self.sweep.at = Some(0);
                out.again.push(Job::Sweep);
            }
        }
    }

    /// Checks the next slots for blocks that no client can request.
    pub(super) fn sweep(&mut self, out: &mut Effects) {
        let Some(at) = self.sweep.at else { return };
        let (catalog, pace) = (&self.catalog, self.pace);
        let passed = |space| !catalog.is_live(space);
        self.sweep.at = match self.pool.doom_some(at, pace.walk_slots, pace.sweep_dooms, passed) {
            next if next < self.pool.numbers() => Some(next),
            _ => std::mem::take(&mut self.sweep.again).then_some(0),
        };
        if self.sweep.at.is_some() {
            out.again.push(Job::Sweep);
        }
    }

    /// Forgets spaces that were left and that no slot, request or turn of a key names any more. A tier that has not
    /// completed a command of such a space keeps a slot or a turn there.
    pub(super) fn forget_spaces(&mut self) {
        let Self { left, pool, flow, catalog, .. } = self;
        left.append(&mut pool.uses.take_unused());
        left.append(&mut flow.uses.take_unused());
        for space in left.drain(..) {
            let in_flow = !flow.uses.is_unused(space) && !flow.flaws.has(Flaw::ForgetSpaceEarly);
            if !catalog.is_live(space) && pool.uses.is_unused(space) && !in_flow {
                catalog.forget_space(space);
            }
        }
    }
}
