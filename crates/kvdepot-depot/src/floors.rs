//! Minimum epochs of namespaces that are not open here: an earlier depot knew them, and some tier could not be told
//! yet.
//!
//! A tier that was away may hold blocks from before a reset that nothing else remembers. So its namespace is never
//! opened below the floor, and the floor stays in this depot's ledger until every tier has stored it (P1).

use std::sync::Arc;

use hashbrown::HashMap;
use kvdepot_core::machine::{NamespaceHandle, Opened};
use kvdepot_core::{NamespaceId, NamespaceSpec};
use parking_lot::Mutex;

use crate::ledger::Ledger;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Floors(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// By root.
    floors: HashMap<NamespaceId, Floor>,
    ever: u64,
}

#[derive(Clone, Copy, Debug)]
struct Floor {
    epoch: u32,
    /// Its number in the ledger, which no open namespace has.
    handle: NamespaceHandle,
}

impl Floors {
    /// Returns the minimum epoch of a namespace.
    pub(crate) fn of(&self, root: NamespaceId) -> u32 {
        self.0.lock().floors.get(&root).map_or(0, |floor| floor.epoch)
    }

    /// Sets a namespace's floor to at least this epoch.
    pub(crate) fn raise(&self, spec: &Arc<NamespaceSpec>, epoch: u32, ledger: Option<&Ledger>) {
        let mut state = self.0.lock();
        let handle = NamespaceHandle::MAX - state.ever;
        state.ever += 1;
        let floor = state.floors.entry(spec.root()).or_insert(Floor { epoch, handle });
        floor.epoch = floor.epoch.max(epoch);
        let (handle, epoch) = (floor.handle, floor.epoch);
        if let Some(ledger) = ledger {
            ledger.opened(&Opened {
                handle,
                id: spec.id(epoch),
                epoch,
                has_epoch_id: true,
                spec: Arc::clone(spec),
            });
        }
    }

    /// Removes the floor if every tier has stored this epoch of a namespace.
    pub(crate) fn stored(&self, root: NamespaceId, epoch: u32, ledger: Option<&Ledger>) {
        let mut state = self.0.lock();
        if state.floors.get(&root).is_some_and(|floor| floor.epoch <= epoch)
            && let Some(floor) = state.floors.remove(&root)
            && let Some(ledger) = ledger
        {
            ledger.forgotten(floor.handle);
        }
    }
}
