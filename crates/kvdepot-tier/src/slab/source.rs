//! The tier's medium for a process that only reads it.
//!
//! A running depot appends, and overwrites the oldest segment as a whole. It begins with that after the segment before
//! has begun its next life, and nothing of the oldest one counts from then on. So a record that does not match is damaged
//! if, after it was read, neither its segment nor the one before has begun another life.

use std::path::Path;
use std::sync::Arc;

use hashbrown::HashMap;
use kvdepot_core::limits::{BLOCK_BYTES_MAX, SHARDS_MAX};
use kvdepot_core::{BlockLayout, Error, ErrorKind, NamespaceId, Result};
use kvdepot_io::{SlotBuf, Volume};
use parking_lot::Mutex;

use super::codec::{PAGE, size};
use super::index::Place;
use super::medium::{Medium, check_length, read};
use super::record;
use super::recover::{Replayed, Unproven};
use super::superblock::{Found, Superblock, decide};
use crate::encoding::{self, Encoding};
use crate::format::{self, BlockHeader, file_bytes, header_bytes};
use crate::stored::{InUse, Source, Stored, StoredBlock, StoredNamespace, divide};

/// How often the tables of namespaces are read while none of them is complete.
const TRIES_MAX: usize = 3;

/// A medium of the tier, read only.
pub(crate) struct SlabSource {
    medium: Medium,
    in_use: InUse,
    /// The layouts of namespaces of which a complete block was read.
    layouts: Mutex<HashMap<NamespaceId, Arc<BlockLayout>>>,
}

impl std::fmt::Debug for SlabSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SlabSource").field("medium", &self.medium).finish_non_exhaustive()
    }
}

impl SlabSource {
    /// Recognises a medium of the tier; `None` if the volume holds something else, or was not formatted to the end.
    pub(crate) fn open(volume: Arc<dyn Volume>, in_use: InUse) -> Result<Option<Self>> {
        if volume.bytes() < 2 * PAGE {
            return Ok(None);
        }
        let head = read(&*volume, 0, 2 * PAGE)?;
        let (first, second) = head.split_at(size(PAGE));
        let found = (Superblock::find(first), Superblock::find(second));
        if matches!(found, (Found::Blank | Found::Foreign, Found::Blank | Found::Foreign)) {
            return Ok(None);
        }
        let at = |error: Error| error.with("path", volume.path().display());
        let Some(Superblock { id, shape }) = decide(found.0, found.1).map_err(at)? else { return Ok(None) };
        check_length(&*volume, &shape).map_err(at)?;
        let medium = Medium::new(volume, id, shape);
        Ok(Some(Self { medium, in_use, layouts: Mutex::new(HashMap::new()) }))
    }

    /// Pages of a segment.
    fn segment_pages(&self) -> u64 {
        self.medium.shape.segment_bytes / PAGE
    }

    fn place(&self, block: &StoredBlock) -> Place {
        let shape = &self.medium.shape;
        let (life, page) = (block.order / self.segment_pages(), block.order % self.segment_pages());
        Place {
            segment: shape.segment_of(life),
            page: page as u32,
            pages: (block.bytes / PAGE) as u32,
            tag: block.tag as u32,
        }
    }

    /// Returns the layout of a block's namespace. Until one is known, the block must have one that fits.
    fn layout(&self, block: &StoredBlock) -> Result<Arc<BlockLayout>> {
        let known = self.layouts.lock().get(&block.key.namespace).map(Arc::clone);
        if let Some(known) = known {
            return Ok(known);
        }
        if block.bytes > BLOCK_BYTES_MAX + header_bytes(SHARDS_MAX) as u64 {
            return Err(
                Error::new(ErrorKind::Corrupt, "a record is longer than any block").with("key", block.key)
            );
        }
        let bytes = read(&*self.medium.volume, block.offset_bytes, block.bytes)?;
        record::is_of(self.place(block), &bytes)?;
        let header = BlockHeader::parse(&bytes)?;
        let corrupt = |what: &str| Error::new(ErrorKind::Corrupt, what).with("key", block.key);
        if header.key != block.key {
            return Err(corrupt("a record holds another block").with("holds", header.key));
        }
        let begin = header_bytes(header.shard_checksums.len());
        let payload = bytes.get(begin..begin + size(header.stored_bytes));
        let payload = payload.ok_or_else(|| corrupt("a record has another length than its block"))?;
        let mut decoded = Vec::new();
        let plain = match Encoding::of(header.encoding) {
            None => payload,
            Some(encoding) => {
                // It grows as pieces come: a damaged header may promise more than its record holds.
                let put = |at: usize, piece: &[u8]| {
                    let end = at + piece.len();
                    decoded.resize(decoded.len().max(end), 0);
                    decoded[at..end].copy_from_slice(piece);
                };
                encoding::decode(encoding, payload, size(header.block_bytes), put)?;
                &decoded
            }
        };
        let layout = divide(plain, &header.shard_checksums)
            .ok_or_else(|| corrupt("the checksum of at least one shard does not match"))?;
        let layout = Arc::new(layout);
        self.layouts.lock().insert(block.key.namespace, Arc::clone(&layout));
        Ok(layout)
    }
}

impl Source for SlabSource {
    fn tier(&self) -> &'static str {
        "Slab"
    }

    fn path(&self) -> &Path {
        self.medium.volume.path()
    }

    fn list(&self) -> Result<Stored> {
        // A depot writes one table after the other, so one of them is complete at any time.
        let rows = (1..TRIES_MAX).find_map(|_| self.medium.look_at_rows().ok());
        let (_, rows) = rows.map_or_else(|| self.medium.look_at_rows(), Ok)?;
        let Replayed { index, lives, .. } = self.medium.replay(&rows, Unproven::All)?;
        let roots: HashMap<NamespaceId, NamespaceId> = rows.iter().map(|row| (row.id, row.root)).collect();
        let mut blocks = Vec::with_capacity(size(index.len()));
        for life in lives {
            for (key, known) in index.of_segment(self.medium.shape.segment_of(life), usize::MAX) {
                let Some(root) = roots.get(&key.namespace) else { continue };
                let place = known.place;
                blocks.push(StoredBlock {
                    root: *root,
                    key,
                    offset_bytes: self.medium.shape.record_at(place),
                    bytes: place.bytes(),
                    order: life * self.segment_pages() + u64::from(place.page),
                    tag: place.tag.into(),
                    is_settled: !known.unproven,
                });
            }
        }
        let namespace = |row: &super::table::Row| StoredNamespace {
            root: row.root,
            epoch: row.epoch,
            blocks: 0,
            bytes: 0,
            problem: None,
        };
        Ok(Stored::new(rows.iter().map(namespace).collect(), blocks))
    }

    fn check(&self, block: &StoredBlock) -> Result<()> {
        let (layout, place) = (self.layout(block)?, self.place(block));
        let header_bytes = header_bytes(layout.shard_count());
        record::check_length(place, header_bytes, file_bytes(&layout))?;
        let slot = SlotBuf::anonymous(size(layout.slot_bytes()));
        let mut buf = record::buffer(place, header_bytes, &slot).expect("it was measured");
        self.medium.volume.read_at(&mut buf, block.offset_bytes)?;
        record::is_of(place, buf.head())?;
        format::verify(block.key, &layout, &buf).map(drop)
    }

    fn is_there(&self, block: &StoredBlock) -> Result<bool> {
        let (shape, life) = (&self.medium.shape, block.order / self.segment_pages());
        let gives_it_up = life + shape.segments - 1;
        let before = self.medium.newest_life(shape.segment_of(gives_it_up).into())?;
        Ok(self.medium.newest_life(shape.segment_of(life).into())? == Some(life)
            && before != Some(gives_it_up))
    }

    fn is_in_use(&self) -> Result<bool> {
        (self.in_use)()
    }
}
