//! Opens and resets namespaces.

use std::sync::Arc;
use std::time::Duration;

use kvdepot_core::machine::{NamespaceHandle, Opened, Owner, Request};
use kvdepot_core::{Error, ErrorKind, NamespaceSpec, Result, epoch_moves};

use crate::epochs::{self, Unanswered};
use crate::runner::Runner;

/// Refuses a namespace whose keys carry the id of no epoch to those who need it: an advance is in flight.
fn named_by_epoch(opened: Opened, unanswered: Unanswered) -> Result<Opened> {
    if unanswered == Unanswered::Refused && !opened.has_epoch_id {
        return Err(
            Error::new(ErrorKind::Busy, "a namespace is being reset").with("namespace", opened.spec.root())
        );
    }
    Ok(opened)
}

impl Runner {
    /// Opens a namespace in the depot and its tiers, with the highest epoch that any tier knows. A known one is checked
    /// again in the background, so that the start of an engine makes the depot follow another depot's reset. `user`
    /// uses it from now on, until it ends. Tiers are waited for no longer than `most`.
    pub(crate) fn open_namespace(
        self: &Arc<Self>,
        user: Owner,
        canonical: &str,
        unanswered: Unanswered,
        most: Option<Duration>,
    ) -> Result<Opened> {
        let opened = self.open_namespaces(user, std::slice::from_ref(&canonical), unanswered, most)?;
        opened.into_iter().next().ok_or_else(|| Error::new(ErrorKind::Protocol, "no namespace was opened"))
    }

    /// Like [`Self::open_namespace`], for many at once, so that a tier that hangs costs one wait in total and not one
    /// for each (P2).
    pub(crate) fn open_namespaces<T: AsRef<str>>(
        self: &Arc<Self>,
        user: Owner,
        canonical: &[T],
        unanswered: Unanswered,
        most: Option<Duration>,
    ) -> Result<Vec<Opened>> {
        let found: Vec<(Arc<NamespaceSpec>, Option<Opened>)> = canonical
            .iter()
            .map(|text| {
                let spec = self.checked(text.as_ref())?;
                let known = self.use_known(user, &spec)?;
                // A provisional one is opened again for those who cannot use it.
                let known = known.filter(|known| unanswered == Unanswered::Provisional || known.has_epoch_id);
                Ok((Arc::new(spec), known))
            })
            .collect::<Result<_>>()?;
        let is_new =
            |(spec, known): &(Arc<NamespaceSpec>, Option<Opened>)| known.is_none().then(|| Arc::clone(spec));
        let new: Vec<_> = found.iter().filter_map(is_new).collect();
        if new.iter().any(|spec| self.locator.directory.find(spec).is_none()) {
            // Before any tier is told: a refused namespace must not leave anything behind in a tier.
            self.look(|machine| machine.may_open(user))?;
        }
        let mut opened = epochs::open(self, user, &new, unanswered, most).into_iter();
        let outcomes = found.into_iter().map(|(_, known)| match known {
            Some(known) => Some(Ok(known)),
            None => opened.next().map(|opened| opened.and_then(|opened| named_by_epoch(opened, unanswered))),
        });
        outcomes.flatten().collect()
    }

    /// Returns a namespace that is known already, which `user` uses from now on.
    fn use_known(self: &Arc<Self>, user: Owner, spec: &NamespaceSpec) -> Result<Option<Opened>> {
        let Some(known) = self.locator.directory.find(spec) else { return Ok(None) };
        match epochs::namespace(self, user, Request::UseNamespace { namespace: known.handle }) {
            Ok(known) => {
                self.looks.soon(known.handle);
                Ok(Some(known))
            }
            // Forgotten a moment ago.
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn checked(&self, canonical: &str) -> Result<NamespaceSpec> {
        let spec = NamespaceSpec::from_canonical(canonical)?;
        if spec.layout().slot_bytes() > self.pool.bytes() {
            return Err(Error::new(ErrorKind::Config, "a block of this namespace is larger than the pool")
                .with("block_bytes", spec.layout().block_bytes())
                .with("pool_bytes", self.pool.bytes()));
        }
        Ok(spec)
    }

    /// Advances namespaces to a new epoch, all of them even if one fails: no block dumped before is served again.
    pub(crate) fn reset(self: &Arc<Self>, namespaces: &[NamespaceHandle]) -> Result<Vec<[u8; 16]>> {
        let opened = epochs::advance(self, namespaces);
        opened.into_iter().map(|opened| opened.map(|opened| opened.id.0)).collect()
    }

    /// Advances one namespace to a new epoch.
    pub(crate) fn advance(self: &Arc<Self>, namespace: NamespaceHandle) -> Result<Opened> {
        let opened = epochs::advance(self, &[namespace]).pop();
        opened.unwrap_or_else(|| Err(Error::new(ErrorKind::Protocol, "no namespace was advanced")))
    }

    /// Advances a namespace to `epoch`, or leaves it there; never back. Tiers are waited for no longer than `most`.
    pub(crate) fn set_epoch(
        self: &Arc<Self>,
        handle: NamespaceHandle,
        epoch: u32,
        most: Option<Duration>,
    ) -> Result<Opened> {
        let known = self.locator.directory.get(handle)?;
        if !epoch_moves(known.epoch, epoch)? {
            return Ok(known);
        }
        epochs::raise(self, &known, epoch, most)
    }
}
