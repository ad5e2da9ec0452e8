//! Registered memory owned by the program: messages, and anything without a better place.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::sync::Arc;

use kvdepot_core::{Error, ErrorKind, Result};

use crate::context::Pd;
use crate::region::{Access, Mr};

const PAGE_BYTES: usize = 4096;

/// Page-aligned zeroed memory, registered as one region. Bytes are only copied in and out, never referenced, because a
/// device may write at any time.
#[derive(Debug)]
pub struct Buffer {
    mr: Mr,
    memory: Arc<Pages>,
}

#[derive(Debug)]
struct Pages {
    start: *mut u8,
    layout: Layout,
}

// SAFETY: the pages are accessed by raw copies only, which the callers order.
unsafe impl Send for Pages {}
// SAFETY: as for Send.
unsafe impl Sync for Pages {}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, freed once.
        unsafe { dealloc(self.start, self.layout) };
    }
}

impl Buffer {
    /// Allocates and registers `len` bytes, rounded up to pages.
    pub fn new(pd: &Pd, len: usize, access: Access) -> Result<Self> {
        let layout = len
            .max(1)
            .checked_next_multiple_of(PAGE_BYTES)
            .and_then(|len| Layout::from_size_align(len, PAGE_BYTES).ok())
            .ok_or_else(|| {
                Error::new(ErrorKind::Config, "a buffer of this size cannot be").with("len_bytes", len)
            })?;
        // SAFETY: the layout is not empty.
        let start = unsafe { alloc_zeroed(layout) };
        if start.is_null() {
            handle_alloc_error(layout);
        }
        let memory = Arc::new(Pages { start, layout });
        // SAFETY: the pages live as long as the region that owns them, and no references into them are made.
        let mr = unsafe { Mr::register_owned(pd, start, layout.size(), access, Arc::clone(&memory) as _)? };
        Ok(Self { mr, memory })
    }

    /// Returns the region.
    pub fn mr(&self) -> &Mr {
        &self.mr
    }

    /// Copies `bytes` into the buffer at `offset`.
    ///
    /// # Panics
    /// When they do not fit.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        self.check(offset, bytes.len());
        // SAFETY: inside of the pages, as checked; a device that writes there at the same time only garbles the bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.memory.start.add(offset), bytes.len()) };
    }

    /// Copies bytes at `offset` out of the buffer.
    ///
    /// # Panics
    /// When the range is not inside.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) {
        self.check(offset, bytes.len());
        // SAFETY: as for `write`.
        unsafe {
            std::ptr::copy_nonoverlapping(self.memory.start.add(offset), bytes.as_mut_ptr(), bytes.len())
        };
    }

    fn check(&self, offset: usize, len: usize) {
        let size = self.memory.layout.size();
        assert!(offset <= size && len <= size - offset, "{len} bytes at {offset} of a buffer of {size}");
    }
}
