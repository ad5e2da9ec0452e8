//! The memory of a block for I/O: a few contiguous runs of pool memory, kept alive by their lender.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;

/// A contiguous piece of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemRun {
    /// Address of the first byte.
    pub ptr: *mut u8,
    /// Length in bytes.
    pub len: usize,
}

/// The memory of one slot, in order. Readable and writable for as long as this value or a clone of it lives.
///
/// The runs together hold the `slot_bytes` of the block's layout (complete pages). The block itself is the first
/// `block_bytes` of them.
#[derive(Clone)]
pub struct SlotBuf {
    runs: SmallVec<[MemRun; 2]>,
    keep: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the pointers are plain memory, valid on every thread while `keep` lives; `SlotBuf::new`'s contract gives
// the holder the right to access it, and the depot's block states (P1) make sure that there is one writer or many readers.
unsafe impl Send for SlotBuf {}
// SAFETY: as for Send; a shared SlotBuf only hands out addresses.
unsafe impl Sync for SlotBuf {}

impl SlotBuf {
    /// Lends memory to a new `SlotBuf`.
    ///
    /// # Safety
    /// Every run must stay mapped, readable and writable while `keep` lives, and no one may write it while a holder
    /// reads, nor touch it while a holder writes.
    pub unsafe fn new(runs: impl IntoIterator<Item = MemRun>, keep: Arc<dyn Any + Send + Sync>) -> Self {
        Self { runs: runs.into_iter().collect(), keep }
    }

    /// Allocates zeroed memory, aligned to 4 KiB, for tests, tools and tiers that need scratch space.
    pub fn anonymous(len: usize) -> Self {
        let owner = AlignedMemory::zeroed(len);
        let run = MemRun { ptr: owner.ptr, len };
        // SAFETY: `owner` keeps the allocation for as long as any clone lives; nobody else knows its address.
        unsafe { Self::new([run], Arc::new(owner)) }
    }

    /// Returns the contiguous pieces, in order.
    pub fn runs(&self) -> &[MemRun] {
        &self.runs
    }

    /// Returns the total length in bytes.
    pub fn len(&self) -> usize {
        self.runs.iter().map(|run| run.len).sum()
    }

    /// Returns whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the pieces that hold bytes `start..end` of the slot, in order. The range is cut at the slot's end.
    pub fn slice(&self, start: usize, end: usize) -> SmallVec<[MemRun; 2]> {
        let mut out = SmallVec::new();
        let mut at = 0;
        for run in &self.runs {
            let (from, to) = (start.max(at), end.min(at + run.len));
            if from < to {
                // SAFETY: `from - at < run.len`, so the address stays inside the run.
                let ptr = unsafe { run.ptr.add(from - at) };
                out.push(MemRun { ptr, len: to - from });
            }
            at += run.len;
        }
        out
    }

    /// Copies bytes from `start` on into `out`. For tests and tools.
    pub fn read_at(&self, start: usize, out: &mut [u8]) {
        let mut done = 0;
        for run in self.slice(start, start + out.len()) {
            // SAFETY: `run` is readable by the contract of `new`; `out[done..]` holds at least `run.len` bytes.
            unsafe { std::ptr::copy_nonoverlapping(run.ptr, out[done..].as_mut_ptr(), run.len) };
            done += run.len;
        }
        assert_eq!(done, out.len(), "read past the end of a slot");
    }

    /// Copies `bytes` into the slot from `start` on. For tests and tools.
    pub fn write_at(&self, start: usize, bytes: &[u8]) {
        let mut done = 0;
        for run in self.slice(start, start + bytes.len()) {
            // SAFETY: `run` is writable by the contract of `new`; `bytes[done..]` holds at least `run.len` bytes.
            unsafe { std::ptr::copy_nonoverlapping(bytes[done..].as_ptr(), run.ptr, run.len) };
            done += run.len;
        }
        assert_eq!(done, bytes.len(), "write past the end of a slot");
    }
}

impl fmt::Debug for SlotBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "SlotBuf({} bytes in {} runs, {} holders)",
            self.len(),
            self.runs.len(),
            Arc::strong_count(&self.keep)
        )
    }
}

struct AlignedMemory {
    ptr: *mut u8,
    layout: std::alloc::Layout,
}

impl AlignedMemory {
    fn zeroed(len: usize) -> Self {
        let layout =
            std::alloc::Layout::from_size_align(len.max(1), 4096).expect("a length that fits an address");
        // SAFETY: the layout has a size of at least one byte.
        let ptr = unsafe { std::alloc::alloc_zeroed(layout) };
        if ptr.is_null() {
            std::alloc::handle_alloc_error(layout);
        }
        Self { ptr, layout }
    }
}

impl Drop for AlignedMemory {
    fn drop(&mut self) {
        // SAFETY: allocated by `zeroed` with this very layout, and freed once.
        unsafe { std::alloc::dealloc(self.ptr, self.layout) };
    }
}

// SAFETY: plain memory without thread affinity.
unsafe impl Send for AlignedMemory {}
// SAFETY: as for Send; access goes through SlotBuf's contract.
unsafe impl Sync for AlignedMemory {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_cross_runs() {
        let whole = SlotBuf::anonymous(8192);
        let base = whole.runs()[0].ptr;
        // SAFETY: both runs lie in `whole`, which is kept.
        let two = unsafe {
            SlotBuf::new(
                [MemRun { ptr: base.add(4096), len: 4096 }, MemRun { ptr: base, len: 4096 }],
                Arc::new(whole.clone()),
            )
        };
        two.write_at(4090, b"0123456789");
        let mut out = [0; 10];
        two.read_at(4090, &mut out);
        assert_eq!(&out, b"0123456789");
        assert_eq!(two.slice(4090, 4100).len(), 2);
        whole.read_at(0, &mut out[..4]);
        assert_eq!(&out[..4], b"6789");
    }
}
