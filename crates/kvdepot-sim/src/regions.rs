//! Regions of the pool: clients prefer a region for their blocks, and get blocks there while it has space.

use kvdepot_core::RegionIndex;
use kvdepot_core::limits::BLOCK_ALIGN_BYTES;
use kvdepot_core::machine::Request;

use crate::asked::Asked;
use crate::fail::{Fail, Rule, fail};
use crate::plan::{Feature, REGIONS_MAX};
use crate::rng::Rng;
use crate::world::World;

impl World {
    /// Sends the depot a client's preference, or changes it.
    pub(crate) fn tell_wish(&mut self, client: usize) -> Result<(), Fail> {
        if !self.has(Feature::Wishes) {
            return Ok(());
        }
        let mut rng = Rng::new(self.plan.seed ^ (self.clients[client].owner << 20) ^ self.at as u64);
        if self.clients[client].near.is_some() && rng.chance(80) {
            return Ok(());
        }
        // One number in four names no region.
        let region = rng.below(REGIONS_MAX + 1) as RegionIndex;
        self.request_of(Some(client), Request::Near { region: Some(region) }, Asked::Done)?;
        self.clients[client].near = Some(region);
        Ok(())
    }

    /// Returns the slot that a client should get first for its next reservation of blocks of `pages` pages.
    pub(crate) fn wished(&self, client: usize, pages: usize) -> Wished {
        let shape = &self.plan.shape;
        // In a pool that grows, the region may have memory that must not be used yet.
        let is_whole = shape.pool_pages == shape.pool_pages_max;
        let near = self.clients[client].near.filter(|_| is_whole);
        let has_room = |near: &RegionIndex| {
            let gauge = self.machine.regions().get(usize::from(*near)).copied();
            gauge.is_some_and(|gauge| gauge.free_bytes >= pages as u64 * BLOCK_ALIGN_BYTES)
        };
        Wished { client, first: self.clients[client].fills.len(), region: near.filter(has_room) }
    }

    /// Checks that the first block of a client is in its preferred region.
    pub(crate) fn check_wish(&mut self, wished: &Wished) -> Result<(), Fail> {
        let fill = self.clients[wished.client].fills.get(wished.first);
        let (Some(number), Some(fill)) = (wished.region, fill) else { return Ok(()) };
        let regions = &self.plan.shape.regions;
        let start: usize = regions[..usize::from(number)].iter().sum();
        let region = start..start + regions[usize::from(number)];
        let pages = crate::memory::pages(&fill.runs);
        if let Some(page) = pages.iter().find(|page| !region.contains(page)) {
            return fail(
                Rule::Regions,
                format!("page {page} is given where region {number} had room: {region:?}"),
            );
        }
        if regions.len() > 1 {
            self.reached.insert("in the wished region");
        }
        Ok(())
    }
}

/// See [`World::wished`].
#[derive(Debug)]
pub(crate) struct Wished {
    client: usize,
    /// Index of the first slot that it gets.
    first: usize,
    /// The required region; `None` if the depot may choose.
    region: Option<RegionIndex>,
}
