//! The tier's medium for a process that only reads it.
//!
//! A running depot clears the header of a block before it uses the block's place for anything else, and each header has a
//! generation of its own. So a block that does not match its header is damaged if the header is still there after the
//! block was read.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;
use kvdepot_core::{Error, ErrorKind, NamespaceId, Result};
use kvdepot_io::checksum::crc64;
use kvdepot_io::mapped::Medium;

use super::epochs::Epochs;
use super::format::{each_header, look};
use super::layout::{ANY_ROOT, EPOCH_BYTES, Entry, Geometry, HEADER_BYTES, Header, MAGIC, PAGE_BYTES};
use super::leases::wrong_checksum;
use super::recover::recover;
use crate::stored::{Damaged, InUse, Source, Stored, StoredBlock, StoredNamespace};

/// How often the epochs are read while one of them looks damaged: a depot may be writing it.
const TRIES_MAX: usize = 16;
const TRY_PAUSE: Duration = Duration::from_millis(10);

const LOST_EPOCH: &str =
    "a copy of its epoch is damaged, so the next start of a depot begins a new one, and drops its blocks";
const LOST_PLACE: &str =
    "the epochs of at least one namespace are damaged, so the next start of a depot drops its blocks";
const LOST_HEADER: &str = "the header of a block is damaged, so the next start of a depot drops the block";

/// A medium of the tier, read only.
pub(crate) struct DaxSource {
    medium: Arc<dyn Medium>,
    geometry: Geometry,
    in_use: InUse,
}

impl std::fmt::Debug for DaxSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DaxSource")
            .field("medium", &self.medium)
            .field("geometry", &self.geometry)
            .finish_non_exhaustive()
    }
}

impl DaxSource {
    /// Recognises a medium of the tier; `None` if it holds something else, or was not formatted to the end.
    pub(crate) fn open(medium: Arc<dyn Medium>, in_use: InUse) -> Result<Option<Self>> {
        let mut first = [0; MAGIC.len()];
        if medium.bytes() < PAGE_BYTES {
            return Ok(None);
        }
        medium.read(0, &mut first)?;
        if first != MAGIC {
            return Ok(None);
        }
        Ok(look(&*medium)?.map(|geometry| Self { medium, geometry, in_use }))
    }

    /// Reads the epochs, again while a copy looks damaged.
    fn epochs(&self, named: &[(NamespaceId, u32)]) -> Result<Epochs> {
        let mut table = vec![0; self.geometry.epochs as usize * 2 * EPOCH_BYTES];
        let mut tries = 0;
        loop {
            self.medium.read(self.geometry.epochs_at(), &mut table)?;
            let epochs = Epochs::parse(&table, self.geometry, named);
            tries += 1;
            if !epochs.is_damaged() || tries == TRIES_MAX {
                return Ok(epochs);
            }
            // The writer may have lost its processor between two lines.
            std::thread::sleep(TRY_PAUSE);
        }
    }

    fn line(&self, unit: u32) -> Result<[u8; HEADER_BYTES]> {
        let mut line = [0; HEADER_BYTES];
        self.medium.read(self.geometry.header_at(unit), &mut line)?;
        Ok(line)
    }

    /// Returns the unit of a block, which was listed.
    fn unit(&self, block: &StoredBlock) -> Result<u32> {
        self.geometry.unit_at(block.offset_bytes).ok_or_else(|| {
            Error::new(ErrorKind::Config, "no block begins there").with("offset_bytes", block.offset_bytes)
        })
    }
}

impl Source for DaxSource {
    fn tier(&self) -> &'static str {
        "Dax"
    }

    fn path(&self) -> &Path {
        self.medium.path()
    }

    fn list(&self) -> Result<Stored> {
        let (mut entries, mut bad) = (Vec::new(), Vec::new());
        each_header(&*self.medium, &self.geometry, |unit, line| {
            match Header::parse(line, unit, &self.geometry) {
                Entry::Empty => {}
                Entry::Bad => bad.push((unit, *line)),
                good @ Entry::Good(_) => entries.push((unit, good)),
            }
        })?;
        let good = entries.iter().filter_map(|(_, entry)| entry.good());
        let named: Vec<(NamespaceId, u32)> =
            good.map(|header| (header.key.namespace, header.epoch)).collect();
        let epochs = self.epochs(&named)?;
        let namespaces: Vec<(StoredNamespace, Option<NamespaceId>)> = epochs
            .all()
            .filter(|known| known.root != ANY_ROOT)
            .map(|known| {
                let problem = known.is_damaged.then_some(LOST_EPOCH);
                let (root, epoch) = (known.root, known.epoch);
                (StoredNamespace { root, epoch, blocks: 0, bytes: 0, problem }, known.id)
            })
            .collect();
        let roots: HashMap<NamespaceId, NamespaceId> =
            namespaces.iter().filter_map(|(namespace, id)| Some(((*id)?, namespace.root))).collect();
        let root_of = |id: NamespaceId| roots.get(&id).copied();
        let recovered = recover(entries, &epochs.current(), &self.geometry, self.geometry.units);
        let block = |(unit, header): (u32, Header)| {
            Some(StoredBlock {
                root: root_of(header.key.namespace)?,
                key: header.key,
                offset_bytes: self.geometry.payload_at(unit),
                bytes: header.bytes.into(),
                order: header.generation,
                tag: header.checksum,
                is_settled: true,
            })
        };
        let blocks = recovered.slots.live().filter_map(block).collect();
        let damaged = bad.into_iter().map(|(unit, line)| Damaged {
            // Nothing vouches for it, but most damage is elsewhere.
            root: root_of(Header::namespace_of(&line)),
            offset_bytes: self.geometry.header_at(unit),
            checksum: crc64(&line),
            reason: LOST_HEADER,
        });
        let damaged = damaged.collect();
        let problem = epochs.has_lost_places().then_some(LOST_PLACE);
        let namespaces = namespaces.into_iter().map(|(namespace, _)| namespace).collect();
        Ok(Stored { damaged, problem, ..Stored::new(namespaces, blocks) })
    }

    fn check(&self, block: &StoredBlock) -> Result<()> {
        let bytes = usize::try_from(block.bytes).expect("a block fits an address");
        if self.medium.checksum(block.offset_bytes, bytes)? == block.tag {
            return Ok(());
        }
        Err(wrong_checksum(self.unit(block)?).with("key", block.key))
    }

    fn is_there(&self, block: &StoredBlock) -> Result<bool> {
        let unit = self.unit(block)?;
        let now = Header::parse(&self.line(unit)?, unit, &self.geometry).good();
        Ok(now.is_some_and(|now| {
            (now.key, now.generation, now.checksum) == (block.key, block.order, block.tag)
        }))
    }

    fn is_in_use(&self) -> Result<bool> {
        (self.in_use)()
    }
}
