//! Host memory that can be registered, for tests and measurements.

/// The unit of registration.
pub(crate) const PAGE: usize = 4096;

/// Host memory of whole pages at a fixed address. Copies write it without the compiler's knowledge, so it is only
/// accessed through its address.
#[derive(Debug)]
pub(crate) struct Pages {
    address: *mut u8,
    len: usize,
}

// SAFETY: an allocation without owner in any thread.
unsafe impl Send for Pages {}
// SAFETY: as for Send; readers and writers are ordered by the tests.
unsafe impl Sync for Pages {}

impl Pages {
    fn layout(len: usize) -> std::alloc::Layout {
        std::alloc::Layout::from_size_align(len, PAGE).expect("a small size")
    }

    pub(crate) fn new(bytes: &[u8]) -> Self {
        let len = bytes.len().next_multiple_of(PAGE).max(PAGE);
        // SAFETY: the length is not zero.
        let address = unsafe { std::alloc::alloc_zeroed(Self::layout(len)) };
        assert!(!address.is_null(), "no memory for {len} bytes");
        let pages = Self { address, len };
        // SAFETY: `len` is at least that of `bytes`.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address, bytes.len()) };
        pages
    }

    pub(crate) fn address(&self) -> *mut u8 {
        self.address
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Returns a part of the current content.
    pub(crate) fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= self.len, "{offset} and {len} of {}", self.len);
        let mut bytes = vec![0; len];
        // SAFETY: inside of the allocation.
        unsafe { std::ptr::copy_nonoverlapping(self.address.add(offset), bytes.as_mut_ptr(), len) };
        bytes
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` with this layout.
        unsafe { std::alloc::dealloc(self.address, Self::layout(self.len)) };
    }
}
