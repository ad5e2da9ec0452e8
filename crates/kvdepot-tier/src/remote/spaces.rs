//! Namespaces that a Remote tier serves, the ids that their keys carry now, and the servers that have not taken a
//! reset.
//!
//! A reset is *owed* by each server from its beginning until this tier itself has moved that server to the reset's
//! epoch, or a later one. The blocks of a server that owes it may be from before the reset, whatever their epoch,
//! because another depot may have begun that epoch earlier. So nothing of the namespace is read from or written to that
//! server in the meantime (P1).

use std::collections::VecDeque;
use std::sync::Arc;

use kvdepot_core::limits::{REMOTE_OWED_CLOSED_MAX, REMOTE_SERVERS_MAX};
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId, NamespaceSpec, Result};

use crate::served::{self, Served};

/// A set of the tier's servers, one bit each, by their indexes in the configuration.
pub(super) type ServerSet = u64;
const _: () = assert!(REMOTE_SERVERS_MAX <= ServerSet::BITS as usize);

pub(super) const fn bit(server: usize) -> ServerSet {
    1 << server
}

/// One namespace in its current epoch.
pub(super) type Space = served::Space<Resets>;

/// What is known of a namespace's resets.
#[derive(Clone, Debug, Default)]
pub(super) struct Resets {
    /// Servers that owe the last reset.
    pub(super) owed: ServerSet,
    /// Servers that were before the namespace's epoch when they were asked since the last reset began. If one of them is now in that
    /// epoch or a later one, it was moved after that beginning, by whatever client.
    behind: ServerSet,
    /// Servers that are being asked to move, by any thread.
    asking: ServerSet,
    /// Servers that were asked to move since the last reset began, and answered that they could not store the epoch, or
    /// nothing. If one has moved anyway, it may forget that in a crash.
    unsure: Vec<(usize, Error)>,
    /// Whether the epoch's number shows that its reset was after earlier resets that other servers know.
    pub(super) is_ordered: bool,
    /// Number of the last reset, counted over all namespaces.
    pub(super) last: u64,
}

#[derive(Debug, Default)]
pub(super) struct Spaces {
    /// Open namespaces are served.
    served: Served<Resets>,
    /// Namespaces that were closed while a server owes their reset, oldest first.
    closed: VecDeque<NamespaceId>,
    /// Number of resets that have begun.
    begun: u64,
}

impl Spaces {
    /// Returns the namespace whose keys these are now (P8).
    pub(super) fn of(&self, key: &BlockKey) -> Result<&Space> {
        self.served.of(key)
    }

    /// Like [`Self::of`], if the key's server has taken the namespace's last reset.
    pub(super) fn at(&self, key: &BlockKey, server: usize) -> Result<&Space> {
        let space = self.of(key)?;
        if space.own.owed & bit(server) == 0 {
            return Ok(space);
        }
        let what =
            "a remote server has not taken a reset of the namespace yet: it is not used for it until it has";
        Err(Error::new(ErrorKind::Unavailable, what).with("key", key))
    }

    /// Returns whether keys of this namespace and epoch are served.
    pub(super) fn is_open(&self, key: &BlockKey) -> bool {
        self.served.has_id(&key.namespace)
    }

    /// Returns a namespace that is open, or whose reset is owed.
    pub(super) fn get(&self, root: NamespaceId) -> Option<&Space> {
        self.served.get(root)
    }

    fn resets(&mut self, root: NamespaceId) -> Option<&mut Resets> {
        self.served.get_mut(root).map(|space| &mut space.own)
    }

    /// Opens a namespace, or moves it to `epoch`. Returns the previous id of its keys if it has changed. Owed resets
    /// stay owed.
    pub(super) fn enter(&mut self, spec: &Arc<NamespaceSpec>, epoch: u32) -> Option<NamespaceId> {
        self.closed.retain(|closed| *closed != spec.root());
        self.put(spec, epoch)
    }

    /// Like [`Self::enter`] for a known namespace. A closed one stays closed.
    pub(super) fn follow(&mut self, spec: &Arc<NamespaceSpec>, epoch: u32) -> Option<NamespaceId> {
        self.get(spec.root()).is_some().then(|| self.put(spec, epoch)).flatten()
    }

    fn put(&mut self, spec: &Arc<NamespaceSpec>, epoch: u32) -> Option<NamespaceId> {
        let is_open = !self.closed.contains(&spec.root());
        self.served.enter(spec, epoch, is_open)
    }

    /// Begins a reset, which `servers` owe. A closed namespace stays closed. Returns the same as [`Self::enter`].
    pub(super) fn begin_reset(
        &mut self,
        spec: &Arc<NamespaceSpec>,
        epoch: u32,
        servers: ServerSet,
    ) -> Option<NamespaceId> {
        let old = self.advance(spec, epoch, servers, false);
        self.begun += 1;
        let last = self.begun;
        if let Some(resets) = self.resets(spec.root()) {
            (resets.behind, resets.last) = (0, last);
            resets.unsure.clear();
        }
        old
    }

    /// Moves a reset that has begun to a later epoch, which `servers` owe. Returns the same as [`Self::begin_reset`].
    pub(super) fn advance(
        &mut self,
        spec: &Arc<NamespaceSpec>,
        epoch: u32,
        servers: ServerSet,
        is_ordered: bool,
    ) -> Option<NamespaceId> {
        let old = self.put(spec, epoch);
        if let Some(resets) = self.resets(spec.root()) {
            (resets.owed, resets.is_ordered) = (servers, is_ordered);
        }
        old
    }

    /// Records servers that were before the namespace's epoch when they were asked, while `reset` was the last one.
    pub(super) fn were_behind(&mut self, root: NamespaceId, reset: u64, servers: ServerSet) {
        if let Some(resets) = self.resets(root).filter(|resets| resets.last == reset) {
            resets.behind |= servers;
        }
    }

    /// Records servers that are in the namespace's epoch or a later one. Those that were behind it have taken the
    /// reset; the others that owe it may have been moved before it began. Returns those that owed it and have taken it.
    pub(super) fn are_there(&mut self, root: NamespaceId, servers: ServerSet) -> ServerSet {
        let Some(resets) = self.resets(root) else { return 0 };
        let taken = resets.owed & servers & resets.behind;
        resets.owed &= !taken;
        self.forget_if_over(root);
        taken
    }

    /// Records that a server is in this epoch. Returns whether that shows that it has taken the reset; see
    /// [`Self::are_there`].
    pub(super) fn is_there(&mut self, root: NamespaceId, epoch: u32, server: usize) -> bool {
        self.get(root).is_some_and(|space| space.epoch <= epoch) && self.are_there(root, bit(server)) != 0
    }

    /// Records that this tier has moved a server to an epoch: the server no longer owes any reset that began up to
    /// then.
    fn took(&mut self, root: NamespaceId, epoch: u32, server: usize) {
        let Some(space) = self.served.get_mut(root).filter(|space| space.epoch == epoch) else { return };
        space.own.owed &= !bit(server);
        space.own.unsure.retain(|(unsure, _)| *unsure != server);
        self.forget_if_over(root);
    }

    /// Records that a server is being asked to move, until [`Self::answered`].
    pub(super) fn asks(&mut self, root: NamespaceId, server: usize) {
        if let Some(resets) = self.resets(root) {
            resets.asking |= bit(server);
        }
    }

    /// Records the answer of a server that was asked to move to an epoch. If it refused, another client has moved it,
    /// and got the answer whether it stored the epoch.
    pub(super) fn answered(&mut self, root: NamespaceId, epoch: u32, server: usize, answer: &Result<()>) {
        let Some(resets) = self.resets(root) else { return };
        resets.asking &= !bit(server);
        match answer {
            Ok(()) => self.took(root, epoch, server),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => {
                resets.unsure.retain(|(unsure, _)| *unsure != server);
                resets.unsure.push((server, error.clone()));
            }
        }
    }

    /// Returns whether a server that has taken the reset is being asked to: it may still answer that it could not store
    /// it.
    pub(super) fn is_unanswered(&self, root: NamespaceId) -> bool {
        self.get(root).is_some_and(|space| space.own.asking & !space.own.owed != 0)
    }

    /// Returns a server that has taken the reset but may not have stored it, and its answer.
    pub(super) fn doubt(&self, root: NamespaceId) -> Option<&(usize, Error)> {
        let resets = &self.get(root)?.own;
        resets.unsure.iter().find(|(server, _)| resets.owed & bit(*server) == 0)
    }

    /// Forgets the namespace if it is not open and no server owes its reset.
    fn forget_if_over(&mut self, root: NamespaceId) {
        if self.get(root).is_some_and(|space| space.own.owed == 0) && self.closed.contains(&root) {
            self.closed.retain(|closed| *closed != root);
            self.served.forget(root);
        }
    }

    /// Returns the namespaces whose reset a server owes.
    pub(super) fn owed_by(&self, server: usize) -> Vec<Space> {
        self.served.all().filter(|space| space.own.owed & bit(server) != 0).cloned().collect()
    }

    /// Closes a namespace. Returns the id that its keys carried. It is remembered while a server owes its reset, up to
    /// a limit. For namespaces beyond the limit a later opening uses the servers' answers, as after a restart of the
    /// depot.
    pub(super) fn close(&mut self, root: NamespaceId) -> Option<NamespaceId> {
        let id = self.served.hide(root)?;
        let is_owed = self.get(root).is_some_and(|space| space.own.owed != 0);
        if is_owed {
            self.closed.push_back(root);
            if self.closed.len() > REMOTE_OWED_CLOSED_MAX
                && let Some(oldest) = self.closed.pop_front()
            {
                tracing::warn!(
                    namespace = %oldest, namespaces_max = REMOTE_OWED_CLOSED_MAX,
                    "too many resets wait for unreachable remote servers: the oldest is no longer sent"
                );
                self.served.forget(oldest);
            }
        } else {
            self.served.forget(root);
        }
        Some(id)
    }

    pub(super) fn all(&self) -> Vec<Space> {
        self.served.all().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use kvdepot_core::{BlockHash, BlockLayout};

    use super::*;

    fn spec(n: usize) -> Arc<NamespaceSpec> {
        let facts = format!("{{\"model\":\"{n}\"}}");
        Arc::new(NamespaceSpec::new(&facts, BlockLayout::uniform(1, &[4096]).unwrap()).unwrap())
    }

    #[test]
    fn a_namespace_is_remembered_after_its_close_until_its_servers_took_the_reset() {
        let (mut spaces, spec) = (Spaces::default(), spec(0));
        spaces.enter(&spec, 1);
        spaces.begin_reset(&spec, 2, 0b11);
        let key = BlockKey { namespace: spec.id(2), hash: BlockHash([1; 16]) };
        assert_eq!(spaces.close(spec.root()), Some(spec.id(2)));
        assert!(!spaces.is_open(&key) && spaces.close(spec.root()).is_none());
        spaces.took(spec.root(), 2, 0);
        spaces.enter(&spec, 2);
        assert!(spaces.at(&key, 0).is_ok() && spaces.at(&key, 1).is_err(), "opened again: it is still owed");
        spaces.close(spec.root());
        spaces.took(spec.root(), 1, 1);
        assert!(spaces.get(spec.root()).is_some(), "an earlier epoch says nothing of this one");
        spaces.took(spec.root(), 2, 1);
        assert!(spaces.get(spec.root()).is_none() && spaces.closed.is_empty());
    }

    #[test]
    fn only_a_server_that_was_behind_a_reset_has_taken_it_when_it_is_found_there() {
        let (mut spaces, spec) = (Spaces::default(), spec(0));
        let owed = |spaces: &Spaces| spaces.get(spec.root()).unwrap().own.owed;
        spaces.begin_reset(&spec, 1, 0b111);
        spaces.were_behind(spec.root(), 1, 0b001);
        assert_eq!(spaces.are_there(spec.root(), 0b011), 0b001);
        assert_eq!(owed(&spaces), 0b110, "the second may have been there before");
        spaces.advance(&spec, 2, 0b111, false);
        assert!(!spaces.is_there(spec.root(), 1, 0), "the epoch is a later one now");
        assert_eq!(spaces.are_there(spec.root(), 0b001), 0b001);
        assert_eq!(owed(&spaces), 0b110, "it is the same reset still");
        spaces.begin_reset(&spec, 3, 0b111);
        spaces.were_behind(spec.root(), 1, 0b111);
        assert_eq!(spaces.are_there(spec.root(), 0b111), 0);
        assert_eq!(owed(&spaces), 0b111, "asked before this reset began");
    }

    #[test]
    fn a_server_that_took_a_reset_and_did_not_say_so_is_in_doubt_for_all_who_ask() {
        let (mut spaces, spec) = (Spaces::default(), spec(0));
        let root = spec.root();
        let error = Err(Error::new(ErrorKind::Io, "moved, and not told its disk"));
        spaces.begin_reset(&spec, 1, 0b11);
        spaces.were_behind(root, 1, 0b11);
        spaces.asks(root, 0);
        assert!(!spaces.is_unanswered(root), "it has not moved, as far as anybody knows");
        spaces.are_there(root, 0b01);
        assert!(spaces.is_unanswered(root), "another thread found it there, its answer is on its way");
        spaces.answered(root, 1, 0, &error);
        assert!(!spaces.is_unanswered(root) && spaces.doubt(root).is_some());
        spaces.answered(root, 1, 1, &error);
        spaces.took(root, 1, 0);
        assert!(spaces.doubt(root).is_none(), "the one has stored it, the other one owes it still");
        spaces.are_there(root, 0b10);
        assert!(spaces.doubt(root).is_some());
        spaces.begin_reset(&spec, 2, 0b11);
        assert!(spaces.doubt(root).is_none(), "nobody was asked since");
    }

    #[test]
    fn closed_namespaces_take_a_bounded_amount_of_memory() {
        let mut spaces = Spaces::default();
        for n in 0..=REMOTE_OWED_CLOSED_MAX {
            let spec = spec(n);
            spaces.begin_reset(&spec, 1, 1);
            spaces.close(spec.root());
        }
        assert_eq!(
            (spaces.served.counts(), spaces.closed.len()),
            ((REMOTE_OWED_CLOSED_MAX, 0), REMOTE_OWED_CLOSED_MAX)
        );
        assert!(spaces.get(spec(0).root()).is_none());
        assert!(spaces.get(spec(REMOTE_OWED_CLOSED_MAX).root()).is_some());
    }
}
