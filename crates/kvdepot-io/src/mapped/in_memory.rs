//! Which files lie in memory: nothing is below them from which other bytes could come back after an error.

use std::os::fd::AsFd;

use rustix::fs::{AtFlags, StatxAttributes, StatxFlags, fstatfs, statx};

/// File systems that keep files in memory: tmpfs, ramfs, hugetlbfs. From linux/magic.h.
const IN_MEMORY: [u32; 3] = [0x0102_1994, 0x8584_58f6, 0x9584_58f6];

/// Returns whether a file lies in memory: on a file system in memory, or on persistent memory that is used in place
/// (mounted with `dax`).
pub(super) fn holds(file: impl AsFd) -> bool {
    let file = file.as_fd();
    fstatfs(file).is_ok_and(|stat| IN_MEMORY.contains(&(stat.f_type as u32))) || is_dax(file)
}

/// Returns whether a file is used in place, on persistent memory (mounted with `dax`): it is not in the page cache.
pub(super) fn is_dax(file: impl AsFd) -> bool {
    statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::empty())
        .is_ok_and(|stat| stat.stx_attributes.contains(StatxAttributes::DAX))
}
