//! Whether a medium that a tier would format holds something of somebody else. File systems, partition tables and labels of
//! other programs are found at its ends: some have their only description behind everything else, such as a member of a
//! RAID array with metadata 0.90 or 1.0, or a partition table of which only the backup is left.

use std::ops::Range;

use kvdepot_core::Result;

/// Bytes at each end that must be free. Some file systems leave the first pages unused.
const END_BYTES: u64 = 1 << 20;
const PAGE_BYTES: u64 = 4096;

/// Returns what is looked at of a medium with this many bytes. Both begin at a whole page.
fn ends(bytes: u64) -> [Range<u64>; 2] {
    let last = bytes.saturating_sub(END_BYTES) / PAGE_BYTES * PAGE_BYTES;
    [0..bytes.min(END_BYTES), last..bytes]
}

/// Returns whether both ends of a medium are free. `read` fills a page, or what there is of it at the medium's end;
/// `is_free` tells whether the page at an offset counts as free.
pub(crate) fn is_blank(
    bytes: u64,
    mut read: impl FnMut(u64, &mut [u8]) -> Result<()>,
    is_free: impl Fn(u64, &[u8]) -> bool,
) -> Result<bool> {
    let mut page = [0; PAGE_BYTES as usize];
    for end in ends(bytes) {
        let mut at = end.start;
        while at < end.end {
            let page = &mut page[..PAGE_BYTES.min(end.end - at) as usize];
            read(at, page)?;
            if !is_free(at, page) {
                return Ok(false);
            }
            at += PAGE_BYTES;
        }
    }
    Ok(true)
}

/// Returns whether all bytes are zero.
pub(crate) fn is_zero(page: &[u8]) -> bool {
    page.iter().all(|&byte| byte == 0)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // a failing test panics

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn both_ends_are_looked_at() {
        for (bytes, expected) in [
            (0, [0..0, 0..0]),
            (5000, [0..5000, 0..5000]),
            (MIB, [0..MIB, 0..MIB]),
            (MIB + 512, [0..MIB, 0..MIB + 512]),
            (9 * MIB, [0..MIB, 8 * MIB..9 * MIB]),
            (9 * MIB + 512, [0..MIB, 8 * MIB..9 * MIB + 512]),
        ] {
            assert_eq!(ends(bytes), expected, "{bytes}");
        }
    }

    #[test]
    fn one_byte_is_enough() {
        let bytes = 3 * MIB + 700;
        for (at, expected) in [
            (0, false),
            (MIB - 1, false),
            (MIB, true),
            (2 * MIB - 1, true),
            (2 * MIB, false),
            (3 * MIB, false),
            (bytes - 1, false),
        ] {
            let mut medium = vec![0; bytes as usize];
            medium[at as usize] = 1;
            let read = |from: u64, page: &mut [u8]| {
                page.copy_from_slice(&medium[from as usize..from as usize + page.len()]);
                Ok(())
            };
            assert_eq!(is_blank(bytes, read, |_, page| is_zero(page)).unwrap(), expected, "{at}");
            assert!(is_blank(bytes, read, |from, page| is_zero(page) || from == at / 4096 * 4096).unwrap());
        }
    }
}
