//! Removals: blocks are unreachable at once, and a removal is done when no header on the medium names them any more.

use std::sync::Arc;

use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId};
use kvdepot_io::IoEngine;

use super::later::{Removal, later};
use super::state::Shared;
use crate::Done;

/// Blocks handled in one step.
const PIECE: usize = 256;

impl Shared {
    /// Makes blocks unreachable, and has their headers cleared.
    pub(super) fn remove(self: &Arc<Self>, engine: &dyn IoEngine, keys: &[BlockKey], done: Done<()>) {
        let removal = Removal::new(done);
        if self.owner.is_lost() {
            removal.fail(Error::new(
                ErrorKind::Io,
                "another depot has taken the medium: nothing of it is removed",
            ));
            return;
        }
        let (mut units, mut is_named) = (Vec::new(), false);
        for keys in keys.chunks(PIECE) {
            let mut state = self.lock();
            for key in keys {
                units.extend(state.slots.take_out(key));
                // This includes earlier blocks whose header is still there or is being cleared.
                is_named |= state.wait_cleared(key, &removal);
                if let Some(write) = state.writing.get_mut(key) {
                    write.cancelled = true;
                    write.removals.push(Arc::clone(&removal));
                }
            }
        }
        if !is_named {
            return;
        }
        let shared = Arc::clone(self);
        later(engine, move |begun| {
            match begun {
                Ok(()) => {
                    shared.clear_slots(&units);
                    shared.clear_left_over();
                }
                Err(error) => {
                    units.extend(shared.lock().slots.take_uncleared());
                    shared.put_off(&units, &error);
                }
            }
            shared.deliver_events();
        });
    }

    /// Frees the space of a past epoch, piece by piece, until the tier is closed.
    pub(super) fn retire(self: &Arc<Self>, engine: &Arc<dyn IoEngine>, id: NamespaceId) {
        let (shared, next) = (Arc::clone(self), Arc::downgrade(engine));
        later(&**engine, move |begun| {
            // What stays is unreachable, makes space when it is the coldest, and is not taken in after a restart.
            if begun.is_err() {
                return;
            }
            let units: Vec<u32> = {
                let mut state = shared.lock();
                if state.is_stopping {
                    return;
                }
                let keys = state.slots.keys(id, PIECE);
                keys.iter().filter_map(|key| state.slots.take_out(key)).collect()
            };
            if units.is_empty() {
                return;
            }
            shared.clear_slots(&units);
            shared.deliver_events();
            if let Some(engine) = next.upgrade() {
                shared.retire(&engine, id);
            }
        });
    }
}
