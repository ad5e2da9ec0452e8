//! The state that a step passes to claims and loads beside their own.

use super::catalog::Catalog;
use super::counters::Counters;
use super::flow::Flow;
use super::names::PoolKey;
use super::pool::Pool;

/// The other modules' state that claims and loads need.
pub(crate) struct Rooms<'a> {
    pub(crate) catalog: &'a Catalog,
    pub(crate) pool: &'a mut Pool,
    pub(crate) flow: &'a mut Flow,
    pub(crate) counters: &'a mut Counters,
}

impl Rooms<'_> {
    /// Returns whether a block that is not in the pool may be in a tier, and tiers may be asked about it.
    pub(crate) fn may_be_in_tiers(&self, key: &PoolKey) -> bool {
        self.flow.has_tiers()
            && !self.flow.is_leaving(key)
            && self.catalog.is_live(key.space)
            && !self.catalog.is_provisional(key.space)
    }
}
