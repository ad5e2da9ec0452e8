//! How much of a file the page cache holds.

use std::os::fd::{AsRawFd, BorrowedFd};

use crate::aligned::page_bytes;

/// The system call number of cachestat(2), the same on all architectures. Linux 6.5 and later.
const SYS_CACHESTAT: libc::c_long = 451;

#[repr(C)]
struct Range {
    offset: u64,
    len: u64,
}

/// Counts of pages.
#[repr(C)]
#[derive(Default)]
struct CacheStat {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Returns how many of a file's first `len` bytes are cached. Returns `None` where the system does not tell: an older
/// kernel, a file without write permission for this user, or a file system without a page cache.
pub(crate) fn cached_bytes(file: BorrowedFd<'_>, len: u64) -> Option<u64> {
    let range = Range { offset: 0, len };
    let mut stat = CacheStat::default();
    // SAFETY: the call reads and fills structures of its own layout, which outlive it, and touches nothing else.
    let outcome =
        unsafe { libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut stat, 0u32) };
    (outcome == 0).then(|| stat.cached.saturating_mul(page_bytes() as u64))
}
