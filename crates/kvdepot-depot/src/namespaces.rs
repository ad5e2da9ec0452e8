//! Opening and resetting namespaces.

use std::sync::Arc;

use kvdepot_core::machine::{NamespaceHandle, Opened, Owner, Request};
use kvdepot_core::{Error, ErrorKind, NamespaceSpec, Result, epoch_moves};

use crate::epochs;
use crate::runner::Runner;

impl Runner {
    /// Makes a namespace known to the depot and its tiers; its epoch is the newest that any tier knows. One that is known
    /// is looked at again in the background, so that an engine's start makes the depot follow another depot's reset. `user` uses
    /// it from now on, until it ends.
    pub(crate) fn open_namespace(self: &Arc<Self>, user: Owner, canonical: &str) -> Result<Opened> {
        let spec = NamespaceSpec::from_canonical(canonical)?;
        if spec.layout().slot_bytes() > self.pool.bytes() {
            return Err(Error::new(ErrorKind::Config, "a block of this namespace is larger than the pool")
                .with("block_bytes", spec.layout().block_bytes())
                .with("pool_bytes", self.pool.bytes()));
        }
        if let Some(known) = self.locator.directory.find(&spec) {
            match epochs::namespace(self, user, Request::UseNamespace { namespace: known.handle }) {
                Ok(known) => {
                    self.looks.soon(known.handle);
                    return Ok(known);
                }
                // Forgotten a moment ago.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        // Before any tier is told: what is refused is not to leave anything behind there.
        self.look(|machine| machine.may_open(user))?;
        epochs::open(self, user, spec)
    }

    /// As [`Self::open_namespace`], of many at once, so that a tier that hangs costs one wait and not one for each (P2).
    pub(crate) fn open_namespaces(
        self: &Arc<Self>,
        user: Owner,
        canonical: &[String],
    ) -> Result<Vec<Opened>> {
        epochs::together(canonical, |text| self.open_namespace(user, text)).into_iter().collect()
    }

    /// Moves namespaces to a new epoch: no block dumped before is served again.
    pub(crate) fn reset(self: &Arc<Self>, namespaces: &[NamespaceHandle]) -> Result<Vec<[u8; 16]>> {
        // All of them, whatever becomes of one.
        let opened = epochs::together(namespaces, |&handle| epochs::advance(self, handle));
        opened.into_iter().map(|opened| opened.map(|opened| opened.id.0)).collect()
    }

    /// Moves a namespace to `epoch` or leaves it there; never back.
    pub(crate) fn set_epoch(self: &Arc<Self>, handle: NamespaceHandle, epoch: u32) -> Result<Opened> {
        let known = self.locator.directory.get(handle)?;
        if !epoch_moves(known.epoch, epoch)? {
            return Ok(known);
        }
        epochs::raise(self, &known, epoch)
    }
}
