//! Checks whether memory is resident without touching it.

use kvdepot_io::aligned::page_bytes;

/// Number of bytes checked by one call.
const LOOK_BYTES: usize = 2 << 20;

/// Returns whether all pages of a range are resident; the check must not make them so. Huge pages of hugetlb that this
/// process has not touched count as missing, even if another process has touched them.
///
/// # Safety
/// The range is mapped.
pub(crate) unsafe fn is_resident(base: usize, len: usize) -> bool {
    let page = page_bytes();
    // mincore(2) requires the start of a page.
    let before = base % page;
    let (base, len) = (base - before, if len == 0 { 0 } else { before + len });
    // In untouched memory the first page decides for all of it.
    // SAFETY: the caller's contract.
    len == 0
        || unsafe { look(base, page.min(len), page) } && {
            (0..len).step_by(LOOK_BYTES).all(|at| {
                // SAFETY: a part of the range.
                unsafe { look(base + at, LOOK_BYTES.min(len - at), page) }
            })
        }
}

/// # Safety
/// As for `is_resident`; the range begins at a page and has `LOOK_BYTES` at most.
unsafe fn look(base: usize, len: usize, page: usize) -> bool {
    let mut resident = [0u8; LOOK_BYTES / 4096];
    let Some(resident) = resident.get_mut(..len.div_ceil(page)) else { return false };
    let address: *mut libc::c_void = std::ptr::with_exposed_provenance_mut(base);
    // SAFETY: the range is mapped, and there is a byte for each of its pages.
    let asked = unsafe { libc::mincore(address, len, resident.as_mut_ptr()) } == 0;
    asked && resident.iter().all(|page| page & 1 == 1)
}
