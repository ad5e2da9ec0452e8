//! The block file, byte by byte as drawn in `docs/format.md`: header pages, then the payload in whole pages.
//!
//! Nothing of a file counts as a block before its checksums were compared (P1). They are those of the plain block, so an
//! encoded payload is decoded first, into memory of a known length. The header has the complete key (P8).

use std::time::{SystemTime, UNIX_EPOCH};

use kvdepot_core::limits::{BLOCK_ALIGN_BYTES, BLOCK_BYTES_MAX, SHARDS_MAX};
use kvdepot_core::{BlockKey, BlockLayout, Error, ErrorKind, Result};
use kvdepot_io::checksum::{crc64, crc64_slot, is_zero};
use kvdepot_io::{AlignedBuf, IoBuf, SlotBuf};

use crate::encoding::{self, Encoding};

/// First bytes of every block file.
pub const MAGIC: [u8; 8] = *b"KVDBLOCK";
/// Version of the format that this build writes and reads.
pub const FORMAT_VERSION: u32 = 2;
/// Encoding of a payload that is the block itself. [`Encoding`] has the others.
pub const PLAIN: u32 = 0;
/// Bytes of the fixed part of the header; the shards' checksums follow.
pub const FIXED_BYTES: usize = 144;
/// Maximum length of the writer's host name; longer ones are truncated.
pub const HOST_BYTES_MAX: usize = 32;

const AT_VERSION: usize = 8;
const AT_HEADER_BYTES: usize = 12;
const AT_FLAGS: usize = 16;
const AT_SHARDS: usize = 20;
const AT_KEY: usize = 24;
const AT_BLOCK_BYTES: usize = 56;
const AT_SLOT_BYTES: usize = 64;
const AT_CREATED: usize = 72;
const AT_PID: usize = 80;
const AT_RESERVED: usize = 84;
const AT_HOST: usize = 88;
const AT_STORED_BYTES: usize = 120;
const AT_ENCODING: usize = 128;
const AT_RESERVED_2: usize = 132;
const AT_CHECKSUM: usize = 136;

const _: () = assert!(AT_HOST + HOST_BYTES_MAX == AT_STORED_BYTES && AT_CHECKSUM + 8 == FIXED_BYTES);

/// The writer of a file, and the time of writing: information for people.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Writer {
    /// Host name, at most `HOST_BYTES_MAX` bytes.
    pub host: String,
    /// Process id on that host.
    pub pid: u32,
    /// Seconds since 1970.
    pub created_unix_s: u64,
}

impl Writer {
    /// Returns a description of this process, now.
    pub fn now(host: &str) -> Self {
        let created_unix_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Self { host: host.to_owned(), pid: std::process::id(), created_unix_s }
    }
}

/// A parsed header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockHeader {
    /// Key of the block (P8).
    pub key: BlockKey,
    /// Bytes of the block.
    pub block_bytes: u64,
    /// Bytes of the block's slot in a pool: the block, padded with zeros to whole pages.
    pub slot_bytes: u64,
    /// Bytes of payload in the file, without the padding to whole pages: those of the block itself if it is [`PLAIN`].
    pub stored_bytes: u64,
    /// Encoding of the payload: [`PLAIN`], or the number of an [`Encoding`].
    pub encoding: u32,
    /// CRC-64/NVME of each shard's bytes, in shard order.
    pub shard_checksums: Vec<u64>,
    /// The writer.
    pub writer: Writer,
}

/// Returns the bytes of header pages for a number of shards.
pub const fn header_bytes(shard_count: usize) -> usize {
    (FIXED_BYTES + 8 * shard_count).next_multiple_of(BLOCK_ALIGN_BYTES as usize)
}

/// Returns the bytes of a block's file, which count against a cap (P5).
pub fn file_bytes(layout: &BlockLayout) -> u64 {
    header_bytes(layout.shard_count()) as u64 + layout.slot_bytes()
}

fn corrupt(what: &str) -> Error {
    Error::new(ErrorKind::Corrupt, what)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

impl BlockHeader {
    /// Returns the length of the file.
    pub fn file_bytes(&self) -> u64 {
        let payload = self.stored_bytes.next_multiple_of(BLOCK_ALIGN_BYTES);
        header_bytes(self.shard_checksums.len()) as u64 + payload
    }

    /// Returns the header's pages.
    pub fn encode(&self) -> AlignedBuf {
        let mut out = AlignedBuf::zeroed(header_bytes(self.shard_checksums.len()));
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        let shards =
            u32::try_from(self.shard_checksums.len()).expect("a layout has at most SHARDS_MAX shards");
        let pages_bytes = u32::try_from(header_bytes(self.shard_checksums.len())).expect("a few pages");
        put(0, &MAGIC);
        put(AT_VERSION, &FORMAT_VERSION.to_le_bytes());
        put(AT_HEADER_BYTES, &pages_bytes.to_le_bytes());
        put(AT_SHARDS, &shards.to_le_bytes());
        put(AT_KEY, &self.key.to_bytes());
        put(AT_BLOCK_BYTES, &self.block_bytes.to_le_bytes());
        put(AT_SLOT_BYTES, &self.slot_bytes.to_le_bytes());
        put(AT_CREATED, &self.writer.created_unix_s.to_le_bytes());
        put(AT_PID, &self.writer.pid.to_le_bytes());
        put(AT_HOST, cut(&self.writer.host).as_bytes());
        put(AT_STORED_BYTES, &self.stored_bytes.to_le_bytes());
        put(AT_ENCODING, &self.encoding.to_le_bytes());
        for (shard, checksum) in self.shard_checksums.iter().enumerate() {
            put(FIXED_BYTES + 8 * shard, &checksum.to_le_bytes());
        }
        let checksum = crc64(&out);
        out[AT_CHECKSUM..FIXED_BYTES].copy_from_slice(&checksum.to_le_bytes());
        out
    }

    /// Parses header pages and ignores the bytes after them. It never panics, and allocates memory for at most
    /// `SHARDS_MAX` shards.
    ///
    /// # Errors
    ///
    /// `Unsupported` for a valid header with an encoding that this build does not read; otherwise `Corrupt`.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let short = || corrupt("a block header ends early").with("bytes", bytes.len());
        if bytes.get(..8).ok_or_else(short)? != MAGIC {
            return Err(corrupt("not a block file: the magic is another"));
        }
        let version = u32_at(bytes, AT_VERSION).ok_or_else(short)?;
        if version != FORMAT_VERSION {
            return Err(corrupt("a block file of another format version").with("version", version));
        }
        let shards = u32_at(bytes, AT_SHARDS).ok_or_else(short)? as usize;
        let length = u32_at(bytes, AT_HEADER_BYTES).ok_or_else(short)? as usize;
        if shards == 0 || shards > SHARDS_MAX || length != header_bytes(shards) {
            return Err(corrupt("a block header's lengths do not fit")
                .with("shards", shards)
                .with("bytes", length));
        }
        let pages = bytes.get(..length).ok_or_else(short)?;
        let expected = u64_at(pages, AT_CHECKSUM).ok_or_else(short)?;
        if header_checksum(pages) != expected {
            return Err(corrupt("a block header's checksum does not match"));
        }
        Self::fields(pages, shards).ok_or_else(short)?.checked(pages)
    }

    fn fields(pages: &[u8], shards: usize) -> Option<Self> {
        let host = pages.get(AT_HOST..AT_STORED_BYTES)?;
        let host = &host[..host.iter().position(|&byte| byte == 0).unwrap_or(HOST_BYTES_MAX)];
        Some(Self {
            key: BlockKey::from_bytes(pages.get(AT_KEY..AT_BLOCK_BYTES)?.try_into().ok()?),
            block_bytes: u64_at(pages, AT_BLOCK_BYTES)?,
            slot_bytes: u64_at(pages, AT_SLOT_BYTES)?,
            stored_bytes: u64_at(pages, AT_STORED_BYTES)?,
            encoding: u32_at(pages, AT_ENCODING)?,
            shard_checksums: (0..shards)
                .map(|s| u64_at(pages, FIXED_BYTES + 8 * s))
                .collect::<Option<_>>()?,
            writer: Writer {
                host: String::from_utf8_lossy(host).into_owned(),
                pid: u32_at(pages, AT_PID)?,
                created_unix_s: u64_at(pages, AT_CREATED)?,
            },
        })
    }

    /// Checks that there are no flags and that the reserved bytes are zero, as in version 2, and that the lengths are
    /// consistent.
    fn checked(self, pages: &[u8]) -> Result<Self> {
        let zeros = [AT_FLAGS, AT_RESERVED, AT_RESERVED_2].iter().all(|&at| u32_at(pages, at) == Some(0));
        let lengths = (1..=BLOCK_BYTES_MAX).contains(&self.block_bytes)
            && self.slot_bytes == self.block_bytes.next_multiple_of(BLOCK_ALIGN_BYTES)
            && (1..=BLOCK_BYTES_MAX).contains(&self.stored_bytes)
            && match Encoding::of(self.encoding) {
                Some(_) => self.stored_bytes.next_multiple_of(BLOCK_ALIGN_BYTES) < self.slot_bytes,
                None => self.encoding != PLAIN || self.stored_bytes == self.block_bytes,
            };
        if !zeros || !lengths {
            return Err(corrupt("a block header is not valid in version 2")
                .with("block_bytes", self.block_bytes)
                .with("slot_bytes", self.slot_bytes)
                .with("stored_bytes", self.stored_bytes));
        }
        if self.encoding != PLAIN && Encoding::of(self.encoding).is_none() {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "a block file's payload is encoded in a way that this build does not read",
            )
            .with("encoding", self.encoding));
        }
        Ok(self)
    }
}

/// Returns the low half of the checksum in a header, which distinguishes one file of a block from another.
pub fn header_tag(head: &[u8]) -> Option<u32> {
    u32_at(head, AT_CHECKSUM)
}

/// Returns the CRC-64/NVME of the header's pages with the checksum's own eight bytes zero.
fn header_checksum(pages: &[u8]) -> u64 {
    let mut copy = pages.to_vec();
    copy[AT_CHECKSUM..FIXED_BYTES].fill(0);
    crc64(&copy)
}

/// Returns the longest prefix of `host` that fits, cut between characters.
fn cut(host: &str) -> &str {
    let mut end = host.len().min(HOST_BYTES_MAX);
    while !host.is_char_boundary(end) {
        end -= 1;
    }
    &host[..end]
}

fn usize_of(bytes: u64) -> usize {
    usize::try_from(bytes).expect("BLOCK_BYTES_MAX fits an address")
}

/// Makes a block's file from its slot: checksums, header, padding. Returns `Config` if the slot is too small.
pub fn seal(key: BlockKey, layout: &BlockLayout, src: &SlotBuf, writer: Writer) -> Result<IoBuf> {
    seal_as(key, layout, src, writer, || None)
}

/// A payload to store instead of the block, zeros to a whole page after it.
pub(crate) struct Encoded {
    pub(crate) encoding: Encoding,
    pub(crate) stored_bytes: usize,
    pub(crate) pages: AlignedBuf,
}

/// Like `seal`, with the payload that `encode` makes, if it makes one.
pub(crate) fn seal_as(
    key: BlockKey,
    layout: &BlockLayout,
    src: &SlotBuf,
    writer: Writer,
    encode: impl FnOnce() -> Option<Encoded>,
) -> Result<IoBuf> {
    let small = || {
        Error::new(ErrorKind::Config, "a slot is smaller than its block")
            .with("slot_bytes", src.len())
            .with("block_bytes", layout.block_bytes())
    };
    let shard_checksums = shard_checksums(layout, src).ok_or_else(small)?;
    let (block_bytes, slot_bytes) = (layout.block_bytes(), layout.slot_bytes());
    let encoded = encode();
    let (stored_bytes, encoding) = encoded
        .as_ref()
        .map_or((block_bytes, PLAIN), |encoded| (encoded.stored_bytes as u64, encoded.encoding.number()));
    let header =
        BlockHeader { key, block_bytes, slot_bytes, stored_bytes, encoding, shard_checksums, writer };
    match encoded {
        Some(encoded) => Ok(IoBuf::for_write_owned(header.encode(), encoded.pages)),
        None => IoBuf::for_write(header.encode(), src.clone(), usize_of(block_bytes)).ok_or_else(small),
    }
}

/// Verifies a file that was read: header, key, lengths, every shard, padding (P1, P8). An encoded payload is decoded in
/// its place first. Returns the header; `Unsupported` for a file that only another build can read.
pub fn verify(key: BlockKey, layout: &BlockLayout, read: &IoBuf) -> Result<BlockHeader> {
    verify_with(key, layout, read, decode_in_place)
}

/// Like `verify`, with another caller of [`decode_in_place`].
pub(crate) fn verify_with(
    key: BlockKey,
    layout: &BlockLayout,
    read: &IoBuf,
    decode: impl FnOnce(Encoding, &BlockHeader, &SlotBuf) -> Result<()>,
) -> Result<BlockHeader> {
    let header = BlockHeader::parse(read.head())?;
    if header.key != key {
        return Err(corrupt("a block file holds another block").with("holds", header.key).with("asked", key));
    }
    if header.block_bytes != layout.block_bytes() || header.shard_checksums.len() != layout.shard_count() {
        return Err(corrupt("a block file has another layout")
            .with("block_bytes", header.block_bytes)
            .with("block_bytes_expected", layout.block_bytes()));
    }
    if (read.filled() as u64) < header.file_bytes() {
        return Err(corrupt("a block file ends early")
            .with("key", key)
            .with("bytes", read.filled())
            .with("bytes_expected", header.file_bytes()));
    }
    if let Some(encoding) = Encoding::of(header.encoding) {
        // A plain block's slot is never longer.
        if read.filled() as u64 != header.file_bytes() {
            return Err(corrupt("an encoded block's file is too long")
                .with("key", key)
                .with("bytes", read.filled())
                .with("bytes_expected", header.file_bytes()));
        }
        decode(encoding, &header, read.body())?;
    }
    for (shard, &expected) in header.shard_checksums.iter().enumerate() {
        let range = layout.shard_range(shard);
        if crc64_slot(read.body(), usize_of(range.start), usize_of(range.end)) != Some(expected) {
            return Err(corrupt("a shard's checksum does not match").with("shard", shard).with("key", key));
        }
    }
    if !is_zero(read.body(), usize_of(layout.block_bytes()), usize_of(layout.slot_bytes())) {
        return Err(corrupt("a block file's padding is not zero").with("key", key));
    }
    Ok(header)
}

/// Decodes the payload at the beginning of a slot in its place.
pub(crate) fn decode_in_place(encoding: Encoding, header: &BlockHeader, slot: &SlotBuf) -> Result<()> {
    let (block_bytes, slot_bytes) = (usize_of(header.block_bytes), usize_of(header.slot_bytes));
    let stored_bytes = usize_of(header.stored_bytes);
    if !is_zero(slot, stored_bytes, stored_bytes.next_multiple_of(BLOCK_ALIGN_BYTES as usize)) {
        return Err(corrupt("a block file's padding is not zero").with("key", header.key));
    }
    let mut payload = vec![0; stored_bytes];
    slot.read_at(0, &mut payload);
    encoding::decode(encoding, &payload, block_bytes, |at, bytes| slot.write_at(at, bytes))
        .map_err(|error| error.with("key", header.key))?;
    slot.write_at(block_bytes, &vec![0; slot_bytes - block_bytes]);
    Ok(())
}

fn shard_checksums(layout: &BlockLayout, slot: &SlotBuf) -> Option<Vec<u64>> {
    (0..layout.shard_count())
        .map(|shard| {
            let range = layout.shard_range(shard);
            crc64_slot(slot, usize_of(range.start), usize_of(range.end))
        })
        .collect()
}
