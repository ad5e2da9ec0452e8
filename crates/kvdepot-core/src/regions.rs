//! Regions of the pool: parts of its address range in different memory, such as that of a NUMA node.
//!
//! A region is a range of the pool's offsets, so the offset of a [`Run`] determines its region, and regions cost no
//! memory per run. No run crosses a region. A preferred region is tried first, but it is no partition: if it is full,
//! the others provide space, and as a last resort one block may be spread over several.

use crate::limits::{POOL_EXTENT_BYTES, SLOT_RUNS_MAX};
use crate::runs::{Run, RunAllocator, Runs};

/// A region's number, in the order of the pool's offsets.
pub type RegionIndex = u8;

/// Gauges of a region, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionGauge {
    /// Its size.
    pub bytes: u64,
    /// Bytes that hold no block, including memory that was never in use.
    pub free_bytes: u64,
}

#[derive(Debug)]
struct Region {
    start: u64,
    /// End of the memory in use.
    grown: u64,
    end: u64,
    alloc: RunAllocator,
}

/// Allocator of the bytes of all regions.
#[derive(Debug)]
pub struct Regions {
    each: Vec<Region>,
    grown_bytes: u64,
}

impl Regions {
    /// Makes regions of these sizes, one after another, none of them in use yet.
    ///
    /// # Panics
    ///
    /// If there is no region, or more than a [`RegionIndex`] can name.
    pub fn new(sizes: &[u64]) -> Self {
        assert!(!sizes.is_empty() && sizes.len() <= usize::from(RegionIndex::MAX), "1 to 255 regions");
        let mut start = 0;
        let each = sizes.iter().map(|&bytes| {
            let region = Region {
                start,
                grown: start,
                end: start + bytes,
                alloc: RunAllocator::new(POOL_EXTENT_BYTES),
            };
            start = region.end;
            region
        });
        Self { each: each.collect(), grown_bytes: 0 }
    }

    /// Returns the number of regions.
    pub const fn count(&self) -> usize {
        self.each.len()
    }

    /// Returns the region of a byte; `None` after the last one.
    pub fn of(&self, offset: u64) -> Option<RegionIndex> {
        let index = self.each.partition_point(|region| region.end <= offset);
        (index < self.each.len()).then_some(index as RegionIndex)
    }

    /// Returns the number of bytes that were taken into use.
    pub const fn grown_bytes(&self) -> u64 {
        self.grown_bytes
    }

    /// Returns the number of free bytes in use.
    pub fn free_bytes(&self) -> u64 {
        self.each.iter().map(|region| region.alloc.free_bytes()).sum()
    }

    /// Returns the gauges of each region.
    pub fn gauges(&self) -> Vec<RegionGauge> {
        let gauge = |region: &Region| RegionGauge {
            bytes: region.end - region.start,
            free_bytes: region.alloc.free_bytes() + region.end - region.grown,
        };
        self.each.iter().map(gauge).collect()
    }

    /// Returns the region with the most bytes that hold no block.
    pub fn emptiest(&self) -> RegionIndex {
        let free = |region: &Region| region.alloc.free_bytes() + (region.end - region.grown);
        let mut emptiest = 0;
        for index in 1..self.each.len() {
            if free(&self.each[index]) > free(&self.each[emptiest]) {
                emptiest = index;
            }
        }
        emptiest as RegionIndex
    }

    /// Takes up to `bytes` more of a region into use. Returns how many.
    pub fn grow(&mut self, region: RegionIndex, bytes: u64) -> u64 {
        let region = &mut self.each[usize::from(region)];
        let more = bytes.min(region.end - region.grown);
        region.alloc.add_extent(region.grown, more);
        region.grown += more;
        self.grown_bytes += more;
        more
    }

    /// Takes the unused memory before a byte of the pool into use, at most `bytes` of it. Returns how many.
    pub fn grow_upto(&mut self, upto: u64, bytes: u64) -> u64 {
        let mut grown = 0;
        for index in 0..self.each.len() {
            let behind = upto.saturating_sub(self.each[index].grown);
            grown += self.grow(index as RegionIndex, behind.min(bytes - grown));
        }
        grown
    }

    /// Returns the number of bytes of the run's region, before the run's end, that are not in use yet. `None` if the
    /// run crosses regions.
    pub fn missing(&self, run: Run) -> Option<u64> {
        let region = &self.each[usize::from(self.of(run.offset)?)];
        let end = run.offset.checked_add(run.len).filter(|&end| end <= region.end)?;
        Some(end.saturating_sub(region.grown))
    }

    /// Allocates `len` bytes of one region, as [`RunAllocator::alloc`] does.
    pub fn alloc_in(&mut self, region: RegionIndex, len: u64) -> Option<Runs> {
        self.each[usize::from(region)].alloc.alloc(len)
    }

    /// Allocates `len` bytes of several regions: the longest free runs of all. Returns `None`, and takes nothing, as
    /// described at [`RunAllocator::alloc`].
    pub fn alloc_across(&mut self, len: u64) -> Option<Runs> {
        if self.each.len() == 1 || len > self.free_bytes() {
            return None;
        }
        let mut runs = Runs::new();
        let mut rest = len;
        while rest > 0 && runs.len() < SLOT_RUNS_MAX {
            let longest = self.each.iter_mut().max_by_key(|region| region.alloc.largest_run_bytes())?;
            let piece = longest.alloc.largest_run_bytes().min(rest);
            // It is one run, since a run of this length is free.
            let Some(piece) = (piece > 0).then(|| longest.alloc.alloc(piece)).flatten() else { break };
            rest -= piece.iter().map(|run| run.len).sum::<u64>();
            runs.extend(piece);
        }
        if rest > 0 {
            self.free(&runs);
            return None;
        }
        Some(runs)
    }

    /// Takes exactly these runs, as [`RunAllocator::take`] does. Returns false, and takes nothing, also if one crosses
    /// a region.
    pub fn take(&mut self, runs: &[Run]) -> bool {
        for (taken, run) in runs.iter().enumerate() {
            let is_taken = self.missing(*run) == Some(0)
                && self.of(run.offset).is_some_and(|region| {
                    self.each[usize::from(region)].alloc.take(std::slice::from_ref(run))
                });
            if !is_taken {
                self.free(&runs[..taken]);
                return false;
            }
        }
        true
    }

    /// Frees runs in their regions, as [`RunAllocator::free`] does.
    ///
    /// # Panics
    ///
    /// If a byte is freed twice or was never allocated: it would be given to two blocks (P1).
    pub fn free(&mut self, runs: &[Run]) {
        for run in runs {
            let region = self.of(run.offset).expect("a run of this pool");
            self.each[usize::from(region)].alloc.free(std::slice::from_ref(run));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = crate::limits::BLOCK_ALIGN_BYTES;

    fn of_pages(sizes: &[u64]) -> Regions {
        let sizes: Vec<u64> = sizes.iter().map(|pages| pages * PAGE).collect();
        let mut regions = Regions::new(&sizes);
        for index in 0..sizes.len() {
            regions.grow(index as RegionIndex, u64::MAX);
        }
        regions
    }

    fn regions_of(regions: &Regions, runs: &Runs) -> Vec<RegionIndex> {
        runs.iter().filter_map(|run| regions.of(run.offset)).collect()
    }

    #[test]
    fn an_offset_names_its_region() {
        let regions = of_pages(&[2, 3]);
        assert_eq!(regions.of(0), Some(0));
        assert_eq!(regions.of(2 * PAGE - 1), Some(0));
        assert_eq!(regions.of(2 * PAGE), Some(1));
        assert_eq!(regions.of(5 * PAGE), None);
    }

    #[test]
    fn a_run_lies_in_one_region_although_free_bytes_touch_across_the_border() {
        let mut regions = of_pages(&[2, 2]);
        assert!(regions.alloc_in(0, 3 * PAGE).is_none() && regions.alloc_in(1, 3 * PAGE).is_none());
        let runs = regions.alloc_across(3 * PAGE).unwrap();
        assert_eq!(runs.iter().map(|run| run.len).sum::<u64>(), 3 * PAGE);
        let mut of = regions_of(&regions, &runs);
        of.sort_unstable();
        assert_eq!(of, [0, 1]);
        regions.free(&runs);
        assert_eq!(regions.gauges().iter().map(|gauge| gauge.free_bytes).sum::<u64>(), 4 * PAGE);
        assert!(regions.alloc_in(0, 2 * PAGE).is_some() && regions.alloc_in(1, 2 * PAGE).is_some());
    }

    #[test]
    fn what_cannot_be_taken_whole_is_not_taken() {
        let mut regions = of_pages(&[2, 2]);
        let across = Run { offset: PAGE, len: 2 * PAGE };
        assert_eq!(regions.missing(across), None);
        assert!(!regions.take(&[Run { offset: 0, len: PAGE }, across]));
        assert!(regions.alloc_across(5 * PAGE).is_none());
        assert_eq!(regions.free_bytes(), 4 * PAGE);
        assert!(regions.take(&[Run { offset: 0, len: 2 * PAGE }, Run { offset: 2 * PAGE, len: PAGE }]));
        assert_eq!(regions.free_bytes(), PAGE);
    }

    #[test]
    fn a_block_in_too_many_pieces_is_refused_and_leaves_all_free() {
        let pages = 2 * SLOT_RUNS_MAX as u64 + 2;
        let mut regions = of_pages(&[pages, pages]);
        for region in [0, 1] {
            let slots: Vec<Runs> = (0..pages).map(|_| regions.alloc_in(region, PAGE).unwrap()).collect();
            slots.iter().step_by(2).for_each(|slot| regions.free(slot));
        }
        let free = regions.free_bytes();
        assert!(regions.alloc_across((SLOT_RUNS_MAX as u64 + 1) * PAGE).is_none());
        assert_eq!(regions.free_bytes(), free);
        assert_eq!(regions.alloc_across(SLOT_RUNS_MAX as u64 * PAGE).unwrap().len(), SLOT_RUNS_MAX);
    }

    #[test]
    fn regions_are_taken_in_use_apart_from_each_other() {
        let mut regions = Regions::new(&[4 * PAGE, 4 * PAGE]);
        assert_eq!(regions.grow(1, PAGE), PAGE);
        assert_eq!(regions.alloc_in(1, PAGE).unwrap()[0].offset, 4 * PAGE);
        assert_eq!(regions.emptiest(), 0);
        assert_eq!(regions.grow_upto(6 * PAGE, u64::MAX), 5 * PAGE);
        assert_eq!(regions.grown_bytes(), 6 * PAGE);
        assert_eq!(regions.missing(Run { offset: 5 * PAGE, len: 2 * PAGE }), Some(PAGE));
        assert_eq!(regions.grow_upto(u64::MAX, PAGE), PAGE);
    }
}
