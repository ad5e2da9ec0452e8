//! Namespaces that are being opened in tiers: a tier closes a namespace only if it is not being opened.

use std::sync::Arc;

use hashbrown::HashMap;
use kvdepot_core::NamespaceId;
use parking_lot::Mutex;

use crate::locate::Locator;

/// Number of threads that are opening each namespace in the tiers.
#[derive(Debug, Default)]
pub(crate) struct Openings(Mutex<HashMap<NamespaceId, usize>>);

/// Keeps tiers from closing the namespace until it is dropped.
#[derive(Debug)]
pub(crate) struct Opening<'a> {
    openings: &'a Openings,
    locator: &'a Arc<Locator>,
    root: NamespaceId,
}

impl Openings {
    /// Notes that a namespace is about to be opened in tiers.
    pub(crate) fn begin<'a>(&'a self, locator: &'a Arc<Locator>, root: NamespaceId) -> Opening<'a> {
        *self.0.lock().entry(root).or_default() += 1;
        Opening { openings: self, locator, root }
    }

    /// Makes the tiers close a namespace that the depot does not know, unless it is being opened.
    pub(crate) fn close_if_unknown(&self, locator: &Locator, root: NamespaceId) {
        // Held while tiers are told, which they answer immediately: a thread that opens it now tells them after this.
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
        // Namespaces that were opened in tiers, but refused here or forgotten meanwhile.
        self.openings.close_if_unknown(self.locator, self.root);
    }
}
