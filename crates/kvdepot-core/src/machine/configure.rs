//! What a machine is told before its first event.

use super::Machine;
use super::budget::Budgets;
use super::event::Nanos;
#[cfg(any(test, feature = "model"))]
use super::flaw::{Flaw, Flaws};
use super::owed::{PartOf, Parts};
#[cfg(any(test, feature = "model"))]
use super::pace::Pace;
use super::placement::{Placement, Placements};

impl Machine {
    /// Limits the machine to `namespaces_max` known namespaces at a time, and half of them for one owner. Call it
    /// before the first event.
    #[must_use]
    pub fn with_namespaces_max(mut self, namespaces_max: usize) -> Self {
        self.namespaces_max = namespaces_max;
        self
    }

    /// Makes failed removals count for each part of a tier, such as a server; by default a tier is one part. Call it
    /// before the first event.
    #[must_use]
    pub fn with_parts(mut self, part_of: PartOf) -> Self {
        self.flow.parts = Parts(Some(part_of));
        self
    }

    /// Divides the pool into regions of these sizes, one after another: multiples of `BLOCK_ALIGN_BYTES`, in total the
    /// maximum size of the pool. Call it before the first event.
    #[must_use]
    pub fn with_regions(mut self, sizes: &[u64]) -> Self {
        self.pool.divide(sizes);
        self
    }

    /// Sets which tiers get a block, and when: one placement for each tier. The default is write-through for all. Call
    /// it before the first event.
    #[must_use]
    pub fn with_placements(mut self, tiers: &[Placement]) -> Self {
        debug_assert_eq!(tiers.len(), self.flow.tier_count(), "one placement for each tier");
        let placements = Placements::new(tiers, self.pool.keeps());
        self.flow.placements = placements;
        self.pool.set_placements(placements.cold, placements.second_use);
        self
    }

    /// Limits the bytes that each tier is given a day; 0 = no limit. Call it before the first event.
    ///
    /// Values, which can be replaced, are given to tiers nevertheless, because a tier without the new value could return
    /// the earlier one (P1). They count.
    #[must_use]
    pub fn with_write_budgets(mut self, bytes_per_day: &[u64]) -> Self {
        debug_assert_eq!(bytes_per_day.len(), self.flow.tier_count(), "one budget for each tier");
        self.flow.budgets = Budgets::new(bytes_per_day);
        self.flow.budgets.flaws = self.flow.flaws;
        self
    }

    /// Lets more than the usual number of writes be in flight at a tier, as long as their blocks have fewer bytes than
    /// this; 0 = the usual number. Call it before the first event.
    #[must_use]
    pub fn with_write_windows(mut self, bytes: &[u64]) -> Self {
        debug_assert_eq!(bytes.len(), self.flow.tier_count(), "one window for each tier");
        self.flow.set_write_windows(bytes);
        self
    }

    /// Counts a write as failed if it has not ended after so long: it has hung. The default is never. Call it before the
    /// first event.
    #[must_use]
    pub const fn with_write_patience(mut self, patience: Nanos) -> Self {
        self.flow.write_patience = patience;
        self
    }

    /// Cuts work into smaller pieces, so that a simulation sees what happens between them.
    #[cfg(any(test, feature = "model"))]
    pub const fn set_pace(&mut self, pace: Pace) {
        self.pace = pace;
        self.flow.pace = pace;
        self.claims.pace = pace;
        self.loads.pace = pace;
    }

    /// Plants a mistake.
    #[cfg(any(test, feature = "model"))]
    pub const fn set_flaw(&mut self, flaw: Flaw) {
        self.flaws = Flaws::of(flaw);
        self.flow.flaws = self.flaws;
        self.flow.budgets.flaws = self.flaws;
        self.claims.flaws = self.flaws;
        self.loads.flaws = self.flaws;
        self.pool.flaws = self.flaws;
        self.catalog.flaws = self.flaws;
    }
}
