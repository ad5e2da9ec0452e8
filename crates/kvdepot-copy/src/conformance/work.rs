//! Random batches, by the offsets of their bytes on both sides.

use crate::batch::{CopyBatch, CopyOp, Direction};
use crate::conformance::draw::Draw;
use crate::pages::{PAGE, Pages};

/// Lengths at the edges: bytes, vectors, tiles of the kernel and longer.
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
    /// Draws groups of a few copies each, in any order. Some groups are empty, and some copies are adjacent on both
    /// sides. No byte is in two copies.
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
        // Never empty, and with bytes after the last copy that must stay untouched.
        work.device_len += 16;
        work.host_len = (work.host_len + 16).next_multiple_of(PAGE);
        work
    }

    /// Returns the batch for memory at these addresses.
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

    /// Applies all copies to `to`, which then has the expected content of the target.
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
