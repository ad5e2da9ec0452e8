//! Namespaces and their epochs. An epoch counts once the medium has stored it; a namespace whose epoch must still be
//! stored is closed until then (P1), whatever happens to the medium.

use std::sync::Arc;

use hashbrown::HashMap;
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId, NamespaceSpec, Result, next_epoch};

use super::codec::size;
use super::table::Row;
use crate::format::{file_bytes, header_bytes};

/// One epoch of an open namespace.
#[derive(Debug)]
pub(super) struct Space {
    pub(super) spec: Arc<NamespaceSpec>,
    pub(super) header_bytes: usize,
    pub(super) slot_bytes: usize,
    /// Bytes of a block's record.
    pub(super) record_bytes: u64,
}

impl Space {
    fn new(spec: Arc<NamespaceSpec>) -> Self {
        let layout = spec.layout();
        Self {
            header_bytes: header_bytes(layout.shard_count()),
            slot_bytes: size(layout.slot_bytes()),
            record_bytes: file_bytes(layout),
            spec,
        }
    }
}

#[derive(Debug)]
struct Namespace {
    /// The row that the medium stores; `None` = nothing yet.
    stored: Option<Row>,
    /// The row that it shall store, and the namespace to whose id that belongs.
    wanted: Option<(Row, Arc<NamespaceSpec>)>,
    /// Whether to open it once that is stored.
    opens: bool,
}

/// All namespaces of a medium.
#[derive(Debug)]
pub(super) struct Spaces {
    all: HashMap<NamespaceId, Namespace>,
    open: HashMap<NamespaceId, Arc<Space>>,
    rows_max: usize,
    /// Ids of past epochs whose blocks must be forgotten.
    over: Vec<NamespaceId>,
}

/// The work needed to open a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Opening {
    /// Nothing: it is open in this epoch.
    Open(u32),
    /// Its epoch must be stored first.
    Store(u32),
}

impl Spaces {
    pub(super) fn new(rows: &[Row], rows_max: usize) -> Self {
        let known = |row: &Row| (row.root, Namespace { stored: Some(*row), wanted: None, opens: false });
        Self { all: rows.iter().map(known).collect(), open: HashMap::new(), rows_max, over: Vec::new() }
    }

    /// Returns the space in which a key's namespace is open.
    pub(super) fn get(&self, key: &BlockKey) -> Option<&Arc<Space>> {
        self.open.get(&key.namespace)
    }

    /// Returns whether this epoch of a namespace is open.
    pub(super) fn is_open(&self, namespace: NamespaceId) -> bool {
        self.open.contains_key(&namespace)
    }

    fn admit(&mut self, root: NamespaceId) -> Result<&mut Namespace> {
        if self.all.len() >= self.rows_max && !self.all.contains_key(&root) {
            let error = Error::new(
                ErrorKind::NoSpace,
                "a Slab tier's medium knows too many namespaces: format a new one, or reset those of models that are not \
                 served any more there",
            );
            return Err(error.with("namespaces_max", self.rows_max));
        }
        let new = Namespace { stored: None, wanted: None, opens: true };
        Ok(self.all.entry(root).or_insert(new))
    }

    /// See [`crate::Tier::open_namespace`].
    pub(super) fn open(&mut self, spec: &Arc<NamespaceSpec>, at_least: u32) -> Result<Opening> {
        let namespace = self.admit(spec.root())?;
        namespace.opens = true;
        if let Some((wanted, _)) = &namespace.wanted {
            let epoch = wanted.epoch.max(at_least);
            self.want(spec, epoch);
            return Ok(Opening::Store(epoch));
        }
        match namespace.stored {
            Some(stored) if stored.epoch >= at_least => {
                self.open.entry(stored.id).or_insert_with(|| Arc::new(Space::new(Arc::clone(spec))));
                Ok(Opening::Open(stored.epoch))
            }
            _ => {
                self.want(spec, at_least);
                Ok(Opening::Store(at_least))
            }
        }
    }

    /// See [`crate::Tier::advance_epoch`]. Returns the new epoch, which must still be stored.
    pub(super) fn advance(&mut self, spec: &Arc<NamespaceSpec>, at_least: u32) -> Result<u32> {
        let namespace = self.admit(spec.root())?;
        namespace.opens = true;
        let newest = namespace.wanted.as_ref().map(|(row, _)| row).or(namespace.stored.as_ref());
        let epoch = next_epoch(newest.map_or(0, |row| row.epoch), at_least)?;
        self.want(spec, epoch);
        Ok(epoch)
    }

    /// Closes a namespace until this epoch is stored.
    fn want(&mut self, spec: &Arc<NamespaceSpec>, epoch: u32) {
        let root = spec.root();
        let row = Row { root, id: spec.id(epoch), epoch };
        let Some(namespace) = self.all.get_mut(&root) else { return };
        namespace.wanted = Some((row, Arc::clone(spec)));
        if let Some(stored) = namespace.stored.filter(|stored| stored.id != row.id) {
            self.open.remove(&stored.id);
            self.over.push(stored.id);
        }
    }

    /// See [`crate::Tier::close_namespace`].
    pub(super) fn close(&mut self, root: NamespaceId) {
        let Some(namespace) = self.all.get_mut(&root) else { return };
        namespace.opens = false;
        if let Some(stored) = namespace.stored {
            self.open.remove(&stored.id);
        }
    }

    /// Returns what the medium shall store.
    pub(super) fn rows(&self) -> Vec<Row> {
        let newest =
            |namespace: &Namespace| namespace.wanted.as_ref().map(|(row, _)| *row).or(namespace.stored);
        self.all.values().filter_map(newest).collect()
    }

    /// Returns whether anything must be stored.
    pub(super) fn is_wanted(&self) -> bool {
        self.all.values().any(|namespace| namespace.wanted.is_some())
    }

    /// Notes that the medium has stored these rows, and opens what waited for them.
    pub(super) fn stored(&mut self, rows: &[Row]) {
        for row in rows {
            let Some(namespace) = self.all.get_mut(&row.root) else { continue };
            namespace.stored = Some(*row);
            if let Some((_, spec)) = namespace.wanted.take_if(|(wanted, _)| wanted == row)
                && namespace.opens
            {
                self.open.insert(row.id, Arc::new(Space::new(spec)));
            }
        }
    }

    /// Returns the epoch that the medium stores for a namespace.
    pub(super) fn epoch(&self, root: NamespaceId) -> Option<u32> {
        Some(self.all.get(&root)?.stored?.epoch)
    }

    /// Takes the ids of past epochs whose blocks must be forgotten.
    pub(super) fn take_over(&mut self) -> Vec<NamespaceId> {
        std::mem::take(&mut self.over)
    }
}

#[cfg(test)]
mod tests {
    use kvdepot_core::BlockLayout;

    use super::*;
    use crate::conformance::spec;

    fn named(name: &str) -> Arc<NamespaceSpec> {
        Arc::new(spec(name, BlockLayout::new(vec![vec![4096]]).unwrap()))
    }

    fn is_open(spaces: &Spaces, spec: &NamespaceSpec, epoch: u32) -> bool {
        spaces.is_open(spec.id(epoch))
    }

    #[test]
    fn nothing_is_open_before_its_epoch_is_stored() {
        let (mut spaces, one) = (Spaces::new(&[], 2), named("one"));
        assert_eq!(spaces.open(&one, 0).unwrap(), Opening::Store(0));
        assert!(!is_open(&spaces, &one, 0) && spaces.is_wanted());
        spaces.stored(&spaces.rows());
        assert!(is_open(&spaces, &one, 0) && !spaces.is_wanted());
        assert_eq!(spaces.open(&one, 0).unwrap(), Opening::Open(0));
        let first = spaces.advance(&one, 0).unwrap();
        let rows = spaces.rows();
        // A second reset before the first one is stored.
        let second = spaces.advance(&one, 0).unwrap();
        assert!((first, second) == (1, 2) && !is_open(&spaces, &one, 0));
        spaces.stored(&rows);
        assert!(!is_open(&spaces, &one, 1), "it is to move on");
        spaces.stored(&spaces.rows());
        assert!(is_open(&spaces, &one, 2) && spaces.epoch(one.root()) == Some(2));
        assert!(spaces.take_over().contains(&one.id(0)));
        assert_eq!(spaces.open(&one, 7).unwrap(), Opening::Store(7), "a medium that lags");
    }

    #[test]
    fn a_closed_namespace_keeps_its_epoch() {
        let (mut spaces, one) = (Spaces::new(&[], 1), named("one"));
        spaces.advance(&one, 3).unwrap();
        spaces.close(one.root());
        spaces.stored(&spaces.rows());
        assert!(!is_open(&spaces, &one, 3));
        let mut again = Spaces::new(&spaces.rows(), 1);
        assert_eq!(again.open(&one, 0).unwrap(), Opening::Open(3));
        assert_eq!(again.open(&named("two"), 0).unwrap_err().kind(), ErrorKind::NoSpace);
    }
}
