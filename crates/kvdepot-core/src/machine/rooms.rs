//! The state that a step passes to claims and loads beside their own.

use super::catalog::Catalog;
use super::counters::Counters;
use super::flow::Flow;
use super::pool::Pool;

/// The other modules' state that claims and loads need.
pub(crate) struct Rooms<'a> {
    pub(crate) catalog: &'a Catalog,
    pub(crate) pool: &'a mut Pool,
    pub(crate) flow: &'a mut Flow,
    pub(crate) counters: &'a mut Counters,
}
