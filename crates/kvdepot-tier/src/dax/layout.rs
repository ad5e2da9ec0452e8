//! The bytes of a DAX medium, as shown in `docs/format.md`: superblock, epochs, slot headers, payload.
//!
//! P1: nothing is trusted before its checksum has been compared. The word that makes a medium ours, and each header
//! that makes a block visible, are written last.

use kvdepot_core::limits::{BLOCK_BYTES_MAX, NAMESPACES_STORED_MAX};
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId, Result};
use kvdepot_io::checksum::crc64;

/// First word of a medium that is being formatted. The next depot that opens it formats it anew.
pub const FORMATTING: [u8; 8] = *b"KVDDAXfm";
/// First word of a medium of ours.
pub const MAGIC: [u8; 8] = *b"KVDEPDAX";
/// Version of the format that this build writes and reads.
pub const VERSION: u32 = 1;
/// Bytes of the superblock's page.
pub const PAGE_BYTES: u64 = 4096;
/// Bytes of the superblock that carry information.
pub const SUPERBLOCK_BYTES: usize = 88;
/// Offset of the word that names who has opened the medium.
pub const OWNER_AT: u64 = 128;
/// Length of that word.
pub const OWNER_BYTES: usize = 16;
/// Bytes of a slot header: a cache line.
pub const HEADER_BYTES: usize = 64;
/// Bytes of one copy of a namespace's epoch; there are two of each.
pub const EPOCH_BYTES: usize = 64;

/// The most slot headers: 256 MiB of them.
const UNITS_MAX: u64 = 1 << 22;
/// Bytes of medium for each namespace that the table has a place for.
const EPOCH_SHARE_BYTES: u64 = 64 << 10;
const EPOCHS_MIN: u64 = 64;
/// The fewest units with which a medium is useful.
const UNITS_MIN: u64 = 8;

const HEADER_MARK: u32 = u32::from_le_bytes(*b"KVDX");
const EPOCH_MARK: u32 = u32::from_le_bytes(*b"KVNS");

/// The layout of a medium. Fixed when it is formatted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes that are used, from the start.
    pub medium_bytes: u64,
    /// The unit in which space is allocated.
    pub unit_bytes: u64,
    /// Number of units, each with a header.
    pub units: u32,
    /// Number of namespaces that have a place for their epoch.
    pub epochs: u32,
    /// Distinguishes media, and exposes a slot header that was copied from one to another.
    pub id: [u8; 16],
}

impl Geometry {
    /// Divides a medium of this size.
    pub fn of(medium_bytes: u64, id: [u8; 16]) -> Result<Self> {
        let unit_bytes = (medium_bytes / UNITS_MAX).next_power_of_two().max(PAGE_BYTES);
        let epochs =
            (medium_bytes / EPOCH_SHARE_BYTES).clamp(EPOCHS_MIN, NAMESPACES_STORED_MAX as u64) as u32;
        let mut geometry = Self { medium_bytes, unit_bytes, units: 0, epochs, id };
        let room = medium_bytes.saturating_sub(geometry.headers_at());
        let mut units = room / (unit_bytes + HEADER_BYTES as u64);
        while units >= UNITS_MIN {
            geometry.units = u32::try_from(units).unwrap_or(u32::MAX);
            let payload_bytes = u64::from(geometry.units).checked_mul(unit_bytes);
            let end = payload_bytes.and_then(|bytes| geometry.data_at().checked_add(bytes));
            if end.is_some_and(|end| end <= medium_bytes) {
                return Ok(geometry);
            }
            units -= 1;
        }
        Err(Error::new(ErrorKind::Config, "a medium is too small to hold blocks")
            .with("medium_bytes", medium_bytes))
    }

    /// Offset of the epochs.
    pub const fn epochs_at(&self) -> u64 {
        PAGE_BYTES
    }

    /// Offset of the slot headers.
    pub const fn headers_at(&self) -> u64 {
        let end = self.epochs_at() + self.epochs as u64 * 2 * EPOCH_BYTES as u64;
        end.next_multiple_of(PAGE_BYTES)
    }

    /// Offset of the payload.
    pub const fn data_at(&self) -> u64 {
        let end = self.headers_at() + self.units as u64 * HEADER_BYTES as u64;
        end.next_multiple_of(self.unit_bytes)
    }

    /// Offset of the header of a slot that begins with this unit.
    pub const fn header_at(&self, unit: u32) -> u64 {
        self.headers_at() + unit as u64 * HEADER_BYTES as u64
    }

    /// Offset of the payload of a slot that begins with this unit.
    pub const fn payload_at(&self, unit: u32) -> u64 {
        self.data_at() + unit as u64 * self.unit_bytes
    }

    /// The unit whose payload begins at this offset, if one does.
    pub fn unit_at(&self, payload_at: u64) -> Option<u32> {
        let behind = payload_at.checked_sub(self.data_at())?;
        let unit = u32::try_from(behind / self.unit_bytes).ok().filter(|&unit| unit < self.units)?;
        behind.is_multiple_of(self.unit_bytes).then_some(unit)
    }

    /// Number of units that this many bytes take.
    pub fn units_of(&self, bytes: u64) -> u32 {
        u32::try_from(bytes.div_ceil(self.unit_bytes)).unwrap_or(u32::MAX)
    }

    /// The superblock, including the word that makes the medium ours.
    pub fn encode(&self) -> [u8; SUPERBLOCK_BYTES] {
        let mut out = [0; SUPERBLOCK_BYTES];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &MAGIC);
        put(8, &VERSION.to_le_bytes());
        put(12, &self.units.to_le_bytes());
        put(16, &self.unit_bytes.to_le_bytes());
        put(24, &self.medium_bytes.to_le_bytes());
        put(32, &self.epochs.to_le_bytes());
        put(40, &self.id);
        let checksum = crc64(&out[8..80]);
        out[80..88].copy_from_slice(&checksum.to_le_bytes());
        out
    }

    /// Reads a superblock whose first word is [`MAGIC`]. Never panics.
    pub fn parse(bytes: &[u8; SUPERBLOCK_BYTES]) -> Result<Self> {
        let version = u32_at(bytes, 8);
        if version != VERSION {
            return Err(Error::new(
                ErrorKind::Version,
                "a medium has another version of the format: use the version of kvdepot that made it, or zero the medium's \
                 first and last MiB to have it formatted again",
            )
            .with("version", version)
            .with("version_expected", VERSION));
        }
        let damaged = || {
            Error::new(
                ErrorKind::Corrupt,
                "a medium's superblock is damaged: zero the medium's first and last MiB to have it formatted again",
            )
        };
        if crc64(&bytes[8..80]) != u64_at(bytes, 80) {
            return Err(damaged());
        }
        let mut id = [0; 16];
        id.copy_from_slice(&bytes[40..56]);
        let geometry = Self {
            medium_bytes: u64_at(bytes, 24),
            unit_bytes: u64_at(bytes, 16),
            units: u32_at(bytes, 12),
            epochs: u32_at(bytes, 32),
            id,
        };
        // What this build would have made of that size: anything else was not written by it.
        match Self::of(geometry.medium_bytes, id) {
            Ok(same) if same == geometry => Ok(geometry),
            _ => Err(damaged()),
        }
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut out = [0; 4];
    out.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(out)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut out = [0; 8];
    out.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(out)
}

fn id_at(bytes: &[u8], at: usize) -> NamespaceId {
    let mut out = [0; 16];
    out.copy_from_slice(&bytes[at..at + 16]);
    NamespaceId(out)
}

/// The content of 64 bytes of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry<T> {
    /// Nothing was written, or the entry was cleared.
    Empty,
    /// Torn or damaged.
    Bad,
    /// Intact.
    Good(T),
}

impl<T: Copy> Entry<T> {
    /// Returns the value of an intact entry.
    pub fn good(&self) -> Option<T> {
        if let Self::Good(whole) = self { Some(*whole) } else { None }
    }
}

impl<T> Entry<T> {
    fn of(bytes: &[u8], parse: impl FnOnce() -> Option<T>) -> Self {
        if bytes.iter().all(|byte| *byte == 0) {
            return Self::Empty;
        }
        parse().map_or(Self::Bad, Self::Good)
    }
}

/// The header of a slot: which block begins at its unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The block's key (P8).
    pub key: BlockKey,
    /// Grows with every written block: of two for the same key or the same place, the later one counts.
    pub generation: u64,
    /// CRC-64/NVME of the block.
    pub checksum: u64,
    /// The epoch of its namespace: records that this number was used.
    pub epoch: u32,
    /// Its length.
    pub bytes: u32,
}

impl Header {
    /// Its cache line, at this unit of this medium.
    pub fn encode(&self, unit: u32, geometry: &Geometry) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &self.key.to_bytes());
        put(32, &self.generation.to_le_bytes());
        put(40, &self.checksum.to_le_bytes());
        put(48, &self.bytes.to_le_bytes());
        put(52, &self.epoch.to_le_bytes());
        let checksum = Self::own_checksum(&out, unit, geometry);
        out[56..].copy_from_slice(&checksum.to_le_bytes());
        out
    }

    /// Reads a cache line. Never panics; a slot that would not lie on the medium is bad.
    pub fn parse(bytes: &[u8; HEADER_BYTES], unit: u32, geometry: &Geometry) -> Entry<Self> {
        Entry::of(bytes, || {
            if u64_at(bytes, 56) != Self::own_checksum(bytes, unit, geometry) {
                return None;
            }
            let mut key = [0; 32];
            key.copy_from_slice(&bytes[..32]);
            let header = Self {
                key: BlockKey::from_bytes(&key),
                generation: u64_at(bytes, 32),
                checksum: u64_at(bytes, 40),
                bytes: u32_at(bytes, 48),
                epoch: u32_at(bytes, 52),
            };
            let length = u64::from(header.bytes);
            let fits = geometry.units_of(length) <= geometry.units.saturating_sub(unit);
            ((1..=BLOCK_BYTES_MAX).contains(&length) && fits).then_some(header)
        })
    }

    /// Returns the namespace id in a cache line, which may be damaged.
    pub fn namespace_of(bytes: &[u8; HEADER_BYTES]) -> NamespaceId {
        id_at(bytes, 0)
    }

    /// Covers the line, its place and the medium: a line at another place is not valid.
    fn own_checksum(line: &[u8; HEADER_BYTES], unit: u32, geometry: &Geometry) -> u64 {
        let mut all = [0; 56 + 4 + 16 + 4];
        all[..56].copy_from_slice(&line[..56]);
        all[56..60].copy_from_slice(&unit.to_le_bytes());
        all[60..76].copy_from_slice(&geometry.id);
        all[76..].copy_from_slice(&HEADER_MARK.to_le_bytes());
        crc64(&all)
    }
}

/// Used instead of an id: the namespace is in an epoch in which no block was written.
pub const NO_ID: NamespaceId = NamespaceId([0; 16]);
/// Used instead of a root: the epoch with which a namespace begins if no copy of it is there.
pub const ANY_ROOT: NamespaceId = NamespaceId([0; 16]);

/// One copy of a namespace's epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EpochRecord {
    /// The namespace without its epoch.
    pub root: NamespaceId,
    /// Its current epoch.
    pub epoch: u32,
    /// What keys of that epoch carry: no block of any other epoch is taken in after a restart. [`NO_ID`]: nobody has
    /// opened it.
    pub id: NamespaceId,
}

impl EpochRecord {
    /// Its cache line.
    pub fn encode(&self, geometry: &Geometry) -> [u8; EPOCH_BYTES] {
        let mut out = [0; EPOCH_BYTES];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &EPOCH_MARK.to_le_bytes());
        put(4, &self.epoch.to_le_bytes());
        put(8, &self.root.0);
        put(24, &self.id.0);
        let checksum = Self::own_checksum(&out, geometry);
        out[56..].copy_from_slice(&checksum.to_le_bytes());
        out
    }

    /// Reads a cache line. Never panics.
    pub fn parse(bytes: &[u8; EPOCH_BYTES], geometry: &Geometry) -> Entry<Self> {
        Entry::of(bytes, || {
            let whole =
                u32_at(bytes, 0) == EPOCH_MARK && u64_at(bytes, 56) == Self::own_checksum(bytes, geometry);
            whole.then(|| Self { root: id_at(bytes, 8), epoch: u32_at(bytes, 4), id: id_at(bytes, 24) })
        })
    }

    fn own_checksum(line: &[u8; EPOCH_BYTES], geometry: &Geometry) -> u64 {
        let mut all = [0; 56 + 16];
        all[..56].copy_from_slice(&line[..56]);
        all[56..].copy_from_slice(&geometry.id);
        crc64(&all)
    }
}
