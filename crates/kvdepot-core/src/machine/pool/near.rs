//! Regions of the pool: their sizes, and each owner's preferred region.

use super::super::event::Owner;
use super::Pool;
use crate::regions::{RegionGauge, RegionIndex, Regions};

impl Pool {
    /// Divides the pool, which must be unused, into regions.
    pub(crate) fn divide(&mut self, sizes: &[u64]) {
        assert_eq!(sizes.iter().sum::<u64>(), self.pool_bytes_max, "the regions are the pool");
        self.regions = Regions::new(sizes);
    }

    /// Returns the gauges of each region.
    pub(crate) fn region_gauges(&self) -> Vec<RegionGauge> {
        self.regions.gauges()
    }

    /// Sets the preferred region for this owner's blocks. A region that does not exist, or is the only one, is no
    /// preference.
    pub(crate) fn set_near(&mut self, owner: Owner, region: Option<RegionIndex>) {
        let count = self.regions.count();
        match region.filter(|&region| count > 1 && usize::from(region) < count) {
            Some(region) => self.near.insert(owner, region),
            None => self.near.remove(&owner),
        };
    }

    /// Returns the preferred region for this owner's blocks.
    pub(crate) fn near(&self, owner: Owner) -> Option<RegionIndex> {
        if self.near.is_empty() { None } else { self.near.get(&owner).copied() }
    }

    /// Forgets the preference of an owner that has ended.
    pub(crate) fn forget_near(&mut self, owner: Owner) {
        self.near.remove(&owner);
    }

    /// Returns the bytes of the slots in each region, recounted. For tests.
    #[cfg(any(test, feature = "model"))]
    pub(crate) fn recount_regions(&self) -> Vec<u64> {
        let mut used = vec![0; self.regions.count()];
        for slot in (0..self.slots.numbers()).filter_map(|id| self.slots.get(id as crate::SlotId)) {
            for run in slot.runs() {
                if let Some(region) =
                    self.regions.of(run.offset).filter(|_| self.regions.missing(run) == Some(0))
                {
                    used[usize::from(region)] += run.len;
                }
            }
        }
        used
    }
}
