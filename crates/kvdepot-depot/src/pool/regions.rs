//! Regions of a pool's memory, as the depot reports them to clients, to the next depot, and in its statistics.
//!
//! Regions are consecutive in the pool's offsets. Those of host memory share one descriptor, in the same order: the
//! kernel keeps a policy for each range of a shared file, so several NUMA nodes need only one. Other media have another
//! descriptor.

use kvdepot_core::limits::{BLOCK_ALIGN_BYTES, POOL_REGIONS_MAX};
use kvdepot_core::regions::{RegionGauge, RegionIndex};
use kvdepot_core::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

/// The kind of a region's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RegionKind {
    /// Host memory made by its depot alone.
    Memory,
}

impl RegionKind {
    /// Returns the name in statistics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
        }
    }
}

/// A region of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolRegion {
    /// Size in bytes: a multiple of `BLOCK_ALIGN_BYTES`, except for the last region.
    pub bytes: u64,
    /// The region's NUMA node, if it has one.
    pub node: Option<u32>,
    /// The kind of memory.
    pub kind: RegionKind,
    /// The index of its descriptor among those that a depot passes: 0 is the pool's.
    pub descriptor: u8,
}

impl PoolRegion {
    /// Makes a region of host memory, optionally on a node.
    pub const fn memory(bytes: u64, node: Option<u32>) -> Self {
        Self { bytes, node, kind: RegionKind::Memory, descriptor: 0 }
    }
}

/// Returns the number of bytes of all regions. Refuses lists that no depot of this version sends.
pub(crate) fn total_bytes(regions: &[PoolRegion]) -> Result<u64> {
    let bad = |what: &'static str| Error::new(ErrorKind::Protocol, what).with("regions", regions.len());
    let Some((_, inner)) = regions.split_last().filter(|_| regions.len() <= POOL_REGIONS_MAX) else {
        return Err(bad("a pool has no regions, or too many").with("regions_max", POOL_REGIONS_MAX));
    };
    if inner.iter().any(|region| !region.bytes.is_multiple_of(BLOCK_ALIGN_BYTES))
        || regions.iter().any(|region| region.bytes == 0)
    {
        return Err(bad("a region of the pool is no whole number of pages"));
    }
    if let Some(region) = regions.iter().find(|region| region.descriptor != 0) {
        return Err(bad("a region of the pool lies in a descriptor that was not passed")
            .with("descriptor", region.descriptor));
    }
    let total = regions.iter().try_fold(0u64, |total, region| total.checked_add(region.bytes));
    total.ok_or_else(|| bad("the regions of the pool have too many bytes"))
}

/// Returns the sizes of the regions within the first `bytes` of the pool.
pub(crate) fn sizes(regions: &[PoolRegion], bytes: u64) -> Vec<u64> {
    let mut left = bytes;
    let cut = regions.iter().map(|region| {
        let size = region.bytes.min(left);
        left -= size;
        size
    });
    cut.filter(|&size| size > 0).collect()
}

/// Returns the region on a node, or else the nearest one by the `distances` from that node.
pub(crate) fn nearest(
    regions: &[PoolRegion],
    node: u32,
    distances: impl FnOnce() -> Vec<(u32, u32)>,
) -> Option<RegionIndex> {
    let on = |node: u32| regions.iter().position(|region| region.node == Some(node));
    let nearest = || {
        let mut known = distances();
        known.sort_by_key(|&(_, distance)| distance);
        known.into_iter().find_map(|(node, _)| on(node))
    };
    on(node).or_else(nearest).map(|index| index as RegionIndex)
}

/// Returns the part of `stat` about the regions.
pub(crate) fn describe(regions: &[PoolRegion], gauges: &[RegionGauge]) -> serde_json::Value {
    let shown = regions.iter().zip(gauges).map(|(region, gauge)| {
        serde_json::json!({
            "kind": region.kind.name(), "node": region.node, "bytes": gauge.bytes, "free_bytes": gauge.free_bytes,
        })
    });
    shown.collect::<Vec<_>>().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = BLOCK_ALIGN_BYTES;

    #[test]
    fn regions_that_no_depot_says_are_refused() {
        let good = PoolRegion::memory(PAGE, Some(1));
        assert_eq!(total_bytes(&[good, PoolRegion { bytes: 100, ..good }]).unwrap(), PAGE + 100);
        let bad: [Vec<PoolRegion>; 6] = [
            vec![],
            vec![good; POOL_REGIONS_MAX + 1],
            vec![PoolRegion { bytes: 100, ..good }, good],
            vec![good, PoolRegion { bytes: 0, ..good }],
            vec![good, PoolRegion { descriptor: 1, ..good }],
            vec![PoolRegion { bytes: 1 << 63, ..good }; 2],
        ];
        for regions in bad {
            assert_eq!(total_bytes(&regions).unwrap_err().kind(), ErrorKind::Protocol, "{regions:?}");
        }
    }

    #[test]
    fn a_pool_that_uses_less_than_its_memory_cuts_the_last_regions() {
        let regions = [PoolRegion::memory(4 * PAGE, Some(0)), PoolRegion::memory(4 * PAGE, Some(1))];
        assert_eq!(sizes(&regions, 8 * PAGE), [4 * PAGE, 4 * PAGE]);
        assert_eq!(sizes(&regions, 5 * PAGE), [4 * PAGE, PAGE]);
        assert_eq!(sizes(&regions, 4 * PAGE), [4 * PAGE]);
    }

    #[test]
    fn a_node_without_memory_is_given_the_region_at_the_smallest_distance() {
        let regions = [PoolRegion::memory(PAGE, Some(0)), PoolRegion::memory(PAGE, Some(2))];
        let asked = std::cell::Cell::new(0);
        let distances = || {
            asked.set(asked.get() + 1);
            vec![(0, 32), (1, 10), (2, 12), (3, 11)]
        };
        assert_eq!(nearest(&regions, 2, distances), Some(1));
        assert_eq!(asked.get(), 0);
        assert_eq!(nearest(&regions, 1, distances), Some(1));
        assert_eq!(nearest(&regions, 1, Vec::new), None);
        assert_eq!(nearest(&[PoolRegion::memory(PAGE, None)], 0, || vec![(0, 10)]), None);
    }
}
