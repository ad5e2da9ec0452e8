//! The epochs of namespaces as a medium stores them. Pure: returns what must be written, and is notified when that is
//! done.
//!
//! Each namespace has two copies of 64 bytes; both are written, the second once the first has been persisted. A copy
//! that is damaged or zero may have been the higher one, so the namespace is assumed to have moved on (fail closed):
//! none of its blocks is taken in. Its next epoch is above every one named by an intact copy or an intact slot header,
//! since the lost copy may have skipped numbers. That number is stored before those headers are cleared.
//!
//! When all places are taken, a namespace without blocks is forgotten: its place is given to the record that covers all
//! namespaces without a place ([`ANY_ROOT`]), with an epoch above the forgotten one, and the place where that record was
//! before becomes free.

use hashbrown::{HashMap, HashSet};
use kvdepot_core::{Error, ErrorKind, NamespaceId, Result, next_epoch};

use super::layout::{ANY_ROOT, EPOCH_BYTES, Entry, EpochRecord, Geometry, NO_ID};

#[derive(Clone, Copy, Debug)]
struct Stored {
    place: u32,
    /// The copy to write next.
    next: u32,
    epoch: u32,
    /// `None` if the namespace moved on and nobody has opened it since.
    id: Option<NamespaceId>,
}

/// A pending write: one copy, or both.
#[derive(Clone, Debug)]
pub(super) struct Change {
    pub(super) at: u64,
    pub(super) bytes: Vec<u8>,
    record: EpochRecord,
    place: u32,
    copy: u32,
    has_other: bool,
}

impl Change {
    /// Returns what must be written once this change is on the medium: the other copy.
    pub(super) fn other(&self, epochs: &Epochs) -> Option<Self> {
        let other = epochs.at(self.place, Some(1 - self.copy), self.record);
        self.has_other.then_some(Self { has_other: false, ..other })
    }
}

/// The epochs of all namespaces.
#[derive(Debug)]
pub(super) struct Epochs {
    geometry: Geometry,
    roots: HashMap<NamespaceId, Stored>,
    /// Unused places; the lowest last.
    free: Vec<u32>,
    /// Places of records for [`ANY_ROOT`] that another one replaces, and the copy of each to write next.
    spare: Vec<(u32, u32)>,
    repairs: Vec<Change>,
    /// Places of which no copy was intact.
    lost: usize,
}

/// A namespace in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Known {
    pub(super) root: NamespaceId,
    pub(super) epoch: u32,
    /// `None` if its blocks are not taken in.
    pub(super) id: Option<NamespaceId>,
    /// Whether a copy was damaged, and is to be repaired.
    pub(super) is_damaged: bool,
}

impl Epochs {
    /// Reads the table's bytes. `named` are the namespace ids and epochs of all intact slot headers.
    pub(super) fn parse(table: &[u8], geometry: Geometry, named: &[(NamespaceId, u32)]) -> Self {
        let mut epochs = Self {
            geometry,
            roots: HashMap::new(),
            free: Vec::new(),
            spare: Vec::new(),
            repairs: Vec::new(),
            lost: 0,
        };
        let (lines, _) = table.as_chunks::<EPOCH_BYTES>();
        let pairs: Vec<[Entry<EpochRecord>; 2]> = lines
            .chunks_exact(2)
            .take(geometry.epochs as usize)
            .map(|pair| [0, 1].map(|copy| EpochRecord::parse(&pair[copy], &geometry)))
            .collect();
        let whole = || pairs.iter().flatten().filter_map(|copy| copy.good());
        let used = whole().map(|record| record.epoch).chain(named.iter().map(|(_, epoch)| *epoch)).max();
        let beyond = used.map_or(0, |epoch| epoch.saturating_add(1));
        // Places are assigned in order, and never become empty again.
        let end = pairs.iter().rposition(|pair| *pair != [Entry::Empty; 2]).map_or(0, |last| last + 1);
        let mut lost = Vec::new();
        for (place, pair) in (0..).zip(&pairs) {
            let good = |copy: usize| pair[copy].good().map(|record| (record, copy as u32));
            // Of two copies with the same epoch, the one without an id comes from a repair, and the other was written
            // later.
            let age = |(record, _): &(EpochRecord, u32)| (record.epoch, record.id != NO_ID);
            let newest = good(0).into_iter().chain(good(1)).max_by_key(age);
            let Some((record, copy)) = newest else {
                // Nothing tells whose it was. No record names its blocks, so they are not taken in.
                if (place as usize) < end {
                    lost.push(place)
                } else {
                    epochs.free.push(place)
                }
                continue;
            };
            let moved_on = pair[1 - copy as usize].good().is_none();
            let stored = Stored {
                place,
                next: 1 - copy,
                epoch: if moved_on { beyond } else { record.epoch },
                id: (!moved_on && record.id != NO_ID).then_some(record.id),
            };
            if moved_on {
                let record = EpochRecord { root: record.root, epoch: beyond, id: NO_ID };
                let change = epochs.at(place, Some(1 - copy), record);
                epochs.repairs.push(change);
            }
            let older = match epochs.roots.get(&record.root) {
                Some(other) if other.epoch >= stored.epoch => Some(stored),
                _ => epochs.roots.insert(record.root, stored),
            };
            if let Some(older) = older.filter(|_| record.root == ANY_ROOT) {
                epochs.spare.push((older.place, older.next));
            }
        }
        epochs.free.reverse();
        epochs.lost = lost.len();
        let ids: HashSet<NamespaceId> = whole().map(|record| record.id).collect();
        if !lost.is_empty() || named.iter().any(|(id, _)| !ids.contains(id)) {
            epochs.begin_beyond(beyond, &lost);
        }
        epochs
    }

    /// Makes namespaces that are not stored begin at this epoch: one of them may have been stored, in a lower epoch.
    fn begin_beyond(&mut self, epoch: u32, lost: &[u32]) {
        let record = EpochRecord { root: ANY_ROOT, epoch, id: NO_ID };
        let changes = if lost.is_empty() {
            self.change(record).into_iter().collect()
        } else {
            lost.iter().map(|place| self.at(*place, None, record)).collect::<Vec<_>>()
        };
        changes.iter().for_each(|change| self.stored(change));
        self.repairs.extend(changes);
    }

    /// Takes what must be written before anything else, so that a later opening finds the same.
    pub(super) fn take_repairs(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.repairs)
    }

    /// All namespaces in the table, as it was read; [`ANY_ROOT`] among them.
    pub(super) fn all(&self) -> impl Iterator<Item = Known> + '_ {
        self.roots.iter().map(|(root, stored)| {
            let is_damaged =
                *root != ANY_ROOT && self.repairs.iter().any(|change| change.record.root == *root);
            Known { root: *root, epoch: stored.epoch, id: stored.id, is_damaged }
        })
    }

    /// Returns whether there are places of which no copy was intact.
    pub(super) const fn has_lost_places(&self) -> bool {
        self.lost > 0
    }

    /// Returns whether a copy was damaged.
    pub(super) fn is_damaged(&self) -> bool {
        self.has_lost_places() || self.repairs.iter().any(|change| change.record.root != ANY_ROOT)
    }

    /// The ids whose blocks may be taken in.
    pub(super) fn current(&self) -> HashSet<NamespaceId> {
        self.roots.values().filter_map(|stored| stored.id).collect()
    }

    /// The epoch of a namespace, if it is stored, and whether its blocks are taken in.
    pub(super) fn get(&self, root: NamespaceId) -> Option<(u32, bool)> {
        self.roots.get(&root).map(|stored| (stored.epoch, stored.id.is_some()))
    }

    /// The lowest epoch for a namespace that is not stored.
    pub(super) fn least(&self) -> u32 {
        self.roots.get(&ANY_ROOT).map_or(0, |stored| stored.epoch)
    }

    /// Returns what must be written to put a namespace into this epoch.
    pub(super) fn change(&self, record: EpochRecord) -> Result<Change> {
        if let Some(stored) = self.roots.get(&record.root) {
            return Ok(self.at(stored.place, Some(stored.next), record));
        }
        if let Some(place) = self.free.last() {
            return Ok(self.at(*place, None, record));
        }
        // What was there has an epoch no higher than this one, since a namespace begins with `least`.
        if let Some((place, copy)) = self.spare.last() {
            return Ok(self.at(*place, Some(*copy), record));
        }
        Err(Error::new(
            ErrorKind::NoSpace,
            "a medium holds too many namespaces that are open or have blocks: zero its first and last MiB to have it \
             formatted again",
        )
        .with("namespaces_max", self.geometry.epochs))
    }

    /// Returns whether a new namespace has no place.
    pub(super) fn is_full(&self) -> bool {
        self.free.is_empty() && self.spare.is_empty()
    }

    /// Returns what must be written to forget a namespace for which `is_used`, given its root and the id of its blocks, is
    /// false; `None` if there is none. The first one to be forgotten leaves no place free.
    pub(super) fn forget(
        &self,
        is_used: impl Fn(NamespaceId, Option<NamespaceId>) -> bool,
    ) -> Result<Option<Change>> {
        let unused = self
            .roots
            .iter()
            .filter(|(root, stored)| **root != ANY_ROOT && !is_used(**root, stored.id))
            // Unknown namespaces begin no higher than they must.
            .min_by_key(|(_, stored)| (stored.epoch, stored.place));
        let Some((_, stored)) = unused else { return Ok(None) };
        let epoch = next_epoch(stored.epoch, self.least())?;
        let record = EpochRecord { root: ANY_ROOT, epoch, id: NO_ID };
        Ok(Some(self.at(stored.place, Some(stored.next), record)))
    }

    /// One copy of a place, or both.
    fn at(&self, place: u32, copy: Option<u32>, record: EpochRecord) -> Change {
        let line = record.encode(&self.geometry);
        let has_other = copy.is_some();
        let bytes = line.repeat(if has_other { 1 } else { 2 });
        let copy = copy.unwrap_or(0);
        let at = self.geometry.epochs_at() + (u64::from(place) * 2 + u64::from(copy)) * EPOCH_BYTES as u64;
        Change { at, bytes, record, place, copy, has_other }
    }

    /// Notes that a change is on the medium.
    pub(super) fn stored(&mut self, change: &Change) {
        self.free.retain(|place| *place != change.place);
        self.spare.retain(|(place, _)| *place != change.place);
        self.roots.retain(|root, other| *root == change.record.root || other.place != change.place);
        let stored = Stored {
            place: change.place,
            next: 1 - change.copy,
            epoch: change.record.epoch,
            id: Some(change.record.id).filter(|id| *id != NO_ID),
        };
        if let Some(older) = self.roots.insert(change.record.root, stored).filter(|o| o.place != change.place)
        {
            self.spare.push((older.place, older.next));
        }
    }
}
