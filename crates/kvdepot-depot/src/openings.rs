//! Namespaces that tiers are being told of, so that a tier closes one only when nobody opens it.

use std::sync::Arc;

use hashbrown::HashMap;
use kvdepot_core::NamespaceId;
use parking_lot::Mutex;

use crate::locate::Locator;

/// How many threads tell the tiers of each namespace.
#[derive(Debug, Default)]
pub(crate) struct Openings(Mutex<HashMap<NamespaceId, usize>>);

/// While this lives, tiers do not close the namespace.
#[derive(Debug)]
pub(crate) struct Opening<'a> {
    openings: &'a Openings,
    locator: &'a Arc<Locator>,
    root: NamespaceId,
}

impl Openings {
    /// Tiers are about to be told of a namespace.
    pub(crate) fn begin<'a>(&'a self, locator: &'a Arc<Locator>, root: NamespaceId) -> Opening<'a> {
        *self.0.lock().entry(root).or_default() += 1;
        Opening { openings: self, locator, root }
    }

    /// Has the tiers close a namespace that the depot does not know, unless somebody opens it.
    pub(crate) fn close_if_unknown(&self, locator: &Locator, root: NamespaceId) {
        // Held while tiers are told, which they answer at once: who opens it now tells them after this.
        let openings = self.0.lock();
        if !openings.contains_key(&root) && !locator.directory.knows(root) {
            locator.tiers.iter().for_each(|tier| tier.close_namespace(root));
        }
    }
}

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        let mut openings = self.openings.0.lock();
        if let Some(count) = openings.get_mut(&self.root) {
            *count -= 1;
            if *count == 0 {
                openings.remove(&self.root);
            }
        }
        drop(openings);
        // What was opened in tiers, and refused here or forgotten meanwhile.
        self.openings.close_if_unknown(self.locator, self.root);
    }
}
