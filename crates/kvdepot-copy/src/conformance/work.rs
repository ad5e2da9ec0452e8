//! Random batches: where their bytes lie on both sides.

use crate::batch::{CopyBatch, CopyOp, Direction};
use crate::conformance::draw::Draw;

/// Page size, for memory that can be registered.
pub(crate) const PAGE: usize = 4096;
/// Lengths that hit the edges: bytes, vectors, tiles of the kernel and beyond.
const LENGTHS: [usize; 12] = [1, 7, 16, 64, 100, 512, 4096, 4097, 5000, 16_384, 16_400, 40_000];

/// One copy, by offsets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) device: usize,
    pub(crate) host: usize,
    pub(crate) len: usize,
}

/// A batch by offsets.
#[derive(Debug)]
pub(crate) struct Work {
    pub(crate) groups: Vec<Vec<Place>>,
    pub(crate) device_len: usize,
    pub(crate) host_len: usize,
}

impl Work {
    /// Groups of a few copies each, some empty, some copies neighbours on both sides, in any order. No byte is in two.
    pub(crate) fn draw(draw: &mut Draw, groups: usize, ops_max: usize) -> Self {
        let mut work = Self { groups: Vec::new(), device_len: 0, host_len: 0 };
        for _ in 0..groups {
            let mut group = Vec::new();
            for _ in 0..draw.below(ops_max + 1) {
                let len = draw.pick(&LENGTHS);
                if draw.one_in(2) {
                    work.device_len += draw.below(3) * 16 + draw.below(4) / 3;
                    work.host_len += draw.below(40);
                }
                if draw.one_in(4) {
                    work.host_len = work.host_len.next_multiple_of(PAGE);
                }
                group.push(Place { device: work.device_len, host: work.host_len, len });
                work.device_len += len;
                work.host_len += len;
            }
            if draw.one_in(2) {
                for index in (1..group.len()).rev() {
                    group.swap(index, draw.below(index + 1));
                }
            }
            work.groups.push(group);
        }
        // Never empty, and bytes beside the last copy that nothing may touch.
        work.device_len += 16;
        work.host_len = (work.host_len + 16).next_multiple_of(PAGE);
        work
    }

    /// The batch for memory at these addresses.
    pub(crate) fn batch(&self, direction: Direction, device: u64, host: &Pages) -> CopyBatch {
        let mut batch = CopyBatch::new(direction);
        for group in &self.groups {
            for place in group {
                // SAFETY: every place lies inside of `host_len`, the length of the pages.
                let host = unsafe { host.address().add(place.host) };
                batch.ops.push(CopyOp { device: device + place.device as u64, host, len: place.len });
            }
            batch.end_group();
        }
        batch
    }

    /// What one side must be when the groups in `done` have gone from `from` to `to`, by `(from, to, len)` of a place.
    pub(crate) fn expect(&self, to: &mut [u8], from: &[u8], direction: Direction) {
        for place in self.groups.iter().flatten() {
            let (source, target) = match direction {
                Direction::ToHost => (place.device, place.host),
                Direction::ToDevice => (place.host, place.device),
            };
            to[target..target + place.len].copy_from_slice(&from[source..source + place.len]);
        }
    }
}

/// Host memory of whole pages, at a fixed address. Copies write it behind the compiler's back, so it is only reached
/// through its address.
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

    /// A part of what is there now.
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
