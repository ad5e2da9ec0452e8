//! Page-aligned memory for headers and last pages of block files.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use kvdepot_core::limits::BLOCK_ALIGN_BYTES;

/// Bytes whose first address is a multiple of 4 KiB, as O_DIRECT requires. They begin as zeros.
pub struct AlignedBuf {
    ptr: NonNull<u8>,
    len: usize,
    /// Allocated bytes; more than `len` after [`AlignedBuf::truncate`].
    capacity: usize,
}

impl AlignedBuf {
    /// Allocates `len` zero bytes.
    pub fn zeroed(len: usize) -> Self {
        if len == 0 {
            return Self { ptr: NonNull::dangling(), len, capacity: len };
        }
        let layout = Self::layout(len);
        // SAFETY: the layout has a size of at least one byte.
        let ptr = unsafe { alloc_zeroed(layout) };
        let Some(ptr) = NonNull::new(ptr) else { handle_alloc_error(layout) };
        Self { ptr, len, capacity: len }
    }

    /// Drops the bytes from `len` on. The memory stays allocated. A larger `len` has no effect.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Releases what `truncate` has left allocated if that is over a quarter: the bytes are copied.
    #[must_use]
    pub fn compact(self) -> Self {
        if self.len >= self.capacity - self.capacity / 4 {
            return self;
        }
        let mut exact = Self::zeroed(self.len);
        exact.copy_from_slice(&self);
        exact
    }

    /// Returns the number of allocated bytes.
    pub const fn capacity(&self) -> usize {
        self.capacity
    }

    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len, BLOCK_ALIGN_BYTES as usize).expect("a length that fits an address")
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `ptr` is valid for `len` initialised bytes (or dangling with `len` 0), borrowed as `self` is.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `&mut self` makes the borrow exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        if self.capacity > 0 {
            // SAFETY: allocated by `zeroed` with this very layout, and freed once.
            unsafe { dealloc(self.ptr.as_ptr(), Self::layout(self.capacity)) };
        }
    }
}

impl fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AlignedBuf({} bytes)", self.len)
    }
}

// SAFETY: owned plain memory without thread affinity.
unsafe impl Send for AlignedBuf {}
// SAFETY: shared access only reads.
unsafe impl Sync for AlignedBuf {}

/// Returns the size of the system's pages.
pub fn page_bytes() -> usize {
    // SAFETY: asks for a number, touches no memory.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}
