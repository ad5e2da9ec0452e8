//! The epochs of namespaces as a medium stores them. Pure: what is to be written is returned, and its end reported.
//!
//! Each namespace has two copies of 64 bytes; the higher epoch counts, and the other copy is written next. A copy that is
//! torn or damaged may have been the higher one, so the namespace is taken to have moved on (fail closed): none of its blocks
//! is taken in, and its next epoch is one that no block can have.

use hashbrown::{HashMap, HashSet};
use kvdepot_core::{Error, ErrorKind, NamespaceId, Result};

use super::layout::{EPOCH_BYTES, Entry, EpochRecord, Geometry};

#[derive(Clone, Copy, Debug)]
struct Stored {
    place: u32,
    /// The copy that is written next.
    next: u32,
    epoch: u32,
    /// None if the namespace moved on and nobody has opened it since.
    id: Option<NamespaceId>,
}

/// A copy that is to be written.
#[derive(Clone, Copy, Debug)]
pub(super) struct Change {
    pub(super) at: u64,
    pub(super) bytes: [u8; EPOCH_BYTES],
    record: EpochRecord,
    place: u32,
    copy: u32,
}

/// All of them.
#[derive(Debug)]
pub(super) struct Epochs {
    geometry: Geometry,
    roots: HashMap<NamespaceId, Stored>,
    free: Vec<u32>,
}

impl Epochs {
    /// Reads the table's bytes.
    pub(super) fn parse(table: &[u8], geometry: Geometry) -> Self {
        let mut epochs = Self { geometry, roots: HashMap::new(), free: Vec::new() };
        let (lines, _) = table.as_chunks::<EPOCH_BYTES>();
        for (place, pair) in (0..geometry.epochs).zip(lines.chunks_exact(2)) {
            let copies = [0, 1].map(|copy| EpochRecord::parse(&pair[copy], &geometry));
            let good = |copy: usize| match copies[copy] {
                Entry::Good(record) => Some((record, copy as u32)),
                _ => None,
            };
            let newest = good(0).into_iter().chain(good(1)).max_by_key(|(record, _)| record.epoch);
            let Some((record, copy)) = newest else {
                // Nothing tells whose it was. Blocks of it are named by no record, so they are not taken in.
                epochs.free.push(place);
                continue;
            };
            let moved_on = copies.contains(&Entry::Bad);
            let stored = Stored {
                place,
                next: 1 - copy,
                epoch: record.epoch.saturating_add(u32::from(moved_on)),
                id: (!moved_on).then_some(record.id),
            };
            match epochs.roots.get(&record.root) {
                Some(other) if other.epoch >= stored.epoch => {}
                _ => drop(epochs.roots.insert(record.root, stored)),
            }
        }
        epochs.free.reverse();
        epochs
    }

    /// The ids whose blocks may be taken in.
    pub(super) fn current(&self) -> HashSet<NamespaceId> {
        self.roots.values().filter_map(|stored| stored.id).collect()
    }

    /// The epoch of a namespace, if it is stored, and whether blocks of it are taken in.
    pub(super) fn get(&self, root: NamespaceId) -> Option<(u32, bool)> {
        self.roots.get(&root).map(|stored| (stored.epoch, stored.id.is_some()))
    }

    /// What is to be written for a namespace to be in this epoch.
    pub(super) fn change(&self, record: EpochRecord) -> Result<Change> {
        let (place, copy) = match self.roots.get(&record.root) {
            Some(stored) => (stored.place, stored.next),
            None => {
                let full = || {
                    Error::new(
                        ErrorKind::NoSpace,
                        "a medium holds too many namespaces: zero its first MiB to have it formatted anew",
                    )
                    .with("namespaces_max", self.geometry.epochs)
                };
                (*self.free.last().ok_or_else(full)?, 0)
            }
        };
        let at = self.geometry.epochs_at() + (u64::from(place) * 2 + u64::from(copy)) * EPOCH_BYTES as u64;
        Ok(Change { at, bytes: record.encode(&self.geometry), record, place, copy })
    }

    /// A change is on the medium.
    pub(super) fn stored(&mut self, change: &Change) {
        self.free.retain(|place| *place != change.place);
        let stored = Stored {
            place: change.place,
            next: 1 - change.copy,
            epoch: change.record.epoch,
            id: Some(change.record.id),
        };
        self.roots.insert(change.record.root, stored);
    }
}
