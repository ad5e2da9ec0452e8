//! The first two pages of a medium: what it is and how it is divided. Written when it is formatted; later only a
//! damaged copy is rewritten.

use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_io::AlignedBuf;
use kvdepot_io::checksum::crc64;

use super::codec::{MediumId, PAGE, id_at, u32_at, u64_at};
use super::shape::Shape;

const MAGIC: [u8; 8] = *b"KVDSLAB\0";
/// Version of the layout that this build writes and reads.
pub(super) const VERSION: u32 = 1;
const AT_ID: usize = 16;
const AT_SEGMENT_BYTES: usize = 32;
const AT_SEGMENTS: usize = 40;
const AT_TABLE_BYTES: usize = 48;
const AT_CHECKSUM: usize = 56;
const END: usize = 64;

/// The description of a medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Superblock {
    pub(super) id: MediumId,
    pub(super) shape: Shape,
}

/// The state of a page that should be a superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// One of ours, intact.
    Whole(Superblock),
    /// One of ours, of another version.
    Version(u32),
    /// One of ours, damaged or half written.
    Torn,
    /// Nothing but zeros.
    Blank,
    /// Something else.
    Foreign,
}

impl Superblock {
    pub(super) fn encode(&self) -> AlignedBuf {
        let mut out = AlignedBuf::zeroed(PAGE as usize);
        out[..8].copy_from_slice(&MAGIC);
        out[8..12].copy_from_slice(&VERSION.to_le_bytes());
        out[AT_ID..AT_SEGMENT_BYTES].copy_from_slice(&self.id);
        out[AT_SEGMENT_BYTES..AT_SEGMENTS].copy_from_slice(&self.shape.segment_bytes.to_le_bytes());
        out[AT_SEGMENTS..AT_TABLE_BYTES].copy_from_slice(&self.shape.segments.to_le_bytes());
        out[AT_TABLE_BYTES..AT_CHECKSUM].copy_from_slice(&self.shape.table_bytes.to_le_bytes());
        let checksum = crc64(&out[..AT_CHECKSUM]);
        out[AT_CHECKSUM..END].copy_from_slice(&checksum.to_le_bytes());
        out
    }

    pub(super) fn find(page: &[u8]) -> Found {
        if page.iter().all(|&byte| byte == 0) {
            return Found::Blank;
        }
        if page.get(..8) != Some(&MAGIC[..]) {
            return Found::Foreign;
        }
        match Self::parse(page) {
            Some(Ok(superblock)) => Found::Whole(superblock),
            Some(Err(version)) => Found::Version(version),
            None => Found::Torn,
        }
    }

    fn parse(page: &[u8]) -> Option<std::result::Result<Self, u32>> {
        if u64_at(page, AT_CHECKSUM)? != crc64(page.get(..AT_CHECKSUM)?) {
            return None;
        }
        let version = u32_at(page, 8)?;
        if version != VERSION {
            return Some(Err(version));
        }
        let shape = Shape {
            segment_bytes: u64_at(page, AT_SEGMENT_BYTES)?,
            segments: u64_at(page, AT_SEGMENTS)?,
            table_bytes: u64_at(page, AT_TABLE_BYTES)?,
        };
        shape.is_possible().then_some(Ok(Self { id: id_at(page, AT_ID)?, shape }))
    }
}

/// Decides from both pages what a medium is: `None` means it was never formatted, or not to the end.
///
/// The second page is written and synced first, so a medium whose first page is blank has no blocks.
pub(super) fn decide(first: Found, second: Found) -> Result<Option<Superblock>> {
    let refuse = |kind, what: &str| Err(Error::new(kind, what.to_owned()));
    match (first, second) {
        // One of ours next to something else: that is somebody's data, and would be overwritten.
        (Found::Whole(_), Found::Foreign) | (Found::Foreign, Found::Whole(_)) => refuse(
            ErrorKind::Config,
            "one of the first two pages of a Slab tier's file or device holds something else, which is left alone: name \
             another one, or wipe it",
        ),
        (Found::Whole(superblock), _) | (_, Found::Whole(superblock)) => Ok(Some(superblock)),
        (Found::Version(version), _) | (_, Found::Version(version)) => Err(Error::new(
            ErrorKind::Version,
            "a Slab tier's file or device was formatted by another version: name another one, or wipe it if its blocks \
             are not needed",
        )
        .with("version", version)
        .with("version_expected", VERSION)),
        (Found::Blank, Found::Blank | Found::Torn) => Ok(None),
        (Found::Torn, _) | (_, Found::Torn) => refuse(
            ErrorKind::Corrupt,
            "both superblocks of a Slab tier's file or device are damaged: remove the file or wipe the device, or name \
             another one",
        ),
        _ => refuse(
            ErrorKind::Config,
            "a Slab tier's file or device holds something else, which is left alone: name another one, or wipe it",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn superblock() -> Superblock {
        let shape = Shape { segment_bytes: 1 << 20, segments: 7, table_bytes: 65536 };
        Superblock { id: [7; 16], shape }
    }

    #[test]
    fn every_damage_is_seen() {
        let page = superblock().encode();
        assert_eq!(Superblock::find(&page), Found::Whole(superblock()));
        for byte in 0..END {
            let mut bad = page.to_vec();
            bad[byte] ^= 4;
            let found = Superblock::find(&bad);
            let expected = if byte < 8 { Found::Foreign } else { Found::Torn };
            assert_eq!(found, expected, "byte {byte}");
        }
    }

    #[test]
    fn a_medium_is_formatted_only_where_nothing_is() {
        let whole = Found::Whole(superblock());
        assert_eq!(decide(Found::Torn, whole).unwrap(), Some(superblock()));
        assert_eq!(decide(whole, Found::Blank).unwrap(), Some(superblock()));
        for second in [Found::Blank, Found::Torn] {
            assert_eq!(decide(Found::Blank, second).unwrap(), None);
        }
        let kind = |first, second| decide(first, second).unwrap_err().kind();
        assert_eq!(kind(Found::Torn, Found::Torn), ErrorKind::Corrupt);
        assert_eq!(kind(Found::Torn, Found::Blank), ErrorKind::Corrupt);
        assert_eq!(kind(Found::Version(9), Found::Blank), ErrorKind::Version);
        assert_eq!(kind(whole, Found::Foreign), ErrorKind::Config);
        assert_eq!(kind(Found::Foreign, whole), ErrorKind::Config);
        assert_eq!(kind(Found::Foreign, Found::Blank), ErrorKind::Config);
        assert_eq!(kind(Found::Blank, Found::Foreign), ErrorKind::Config);
    }
}
