//! Counters of the machine. Failures are counted by kind, because an engine sees all of them as a miss (P2).

use crate::error::{Error, ErrorKind};
use crate::ids::TierIndex;

/// Monotonic counters since the depot started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Block hashes requested by claims.
    pub lookup_blocks: u64,
    /// Of these, those of the hits that claims ended with.
    pub lookup_hit_blocks: u64,
    /// Of these, those that came from each tier, up to the last tier that any came from.
    pub tier_hit_blocks: Vec<u64>,
    /// Blocks that dumps requested to store.
    pub dump_blocks: u64,
    /// Blocks dumped into the pool.
    pub dump_blocks_sealed: u64,
    /// Blocks of dumps that were already in the pool.
    pub dump_blocks_had: u64,
    /// Blocks whose dump was refused, mostly because the pool was full of unwritten blocks (backpressure).
    pub dump_blocks_dropped: u64,
    /// Blocks requested by loads.
    pub load_blocks: u64,
    /// Blocks requested by loads that could not be served.
    pub load_blocks_missed: u64,
    /// Blocks read from tiers into the pool.
    pub fetch_blocks: u64,
    /// Bytes read from tiers into the pool.
    pub fetch_bytes: u64,
    /// Blocks that a tier leased where they lie.
    pub in_place_blocks: u64,
    /// Bytes of these blocks.
    pub in_place_bytes: u64,
    /// Blocks written to tiers.
    pub write_blocks: u64,
    /// Bytes written to tiers.
    pub write_bytes: u64,
    /// Blocks whose writes to all tiers failed, so that only the pool has them.
    pub write_blocks_dropped: u64,
    /// Blocks written to a tier again, because it had lost or evicted them.
    pub rewrite_blocks: u64,
    /// Blocks written to a tier late: not when they were sealed, but when its placement demanded it.
    pub late_write_blocks: u64,
    /// Late writes that failed, or that were not queued because the queue was full.
    pub late_write_blocks_dropped: u64,
    /// Blocks queued for a tier because one above it was about to evict them, or did.
    pub demote_blocks: u64,
    /// Blocks that a tier was about to evict and that were not demoted: too many were waiting, a tier was down, or the
    /// block was gone before it was read.
    pub demote_blocks_dropped: u64,
    /// Writes that were not made because the tier's budget of written bytes was used up.
    pub over_budget_blocks: u64,
    /// Claims opened.
    pub claims: u64,
    /// Claims shortened because they needed more than one claim's share of the pool.
    pub claims_cut: u64,
    /// Claims that expired because no client polled them.
    pub claims_expired: u64,
    /// Unused namespaces that were forgotten to make space in the table of namespaces.
    pub namespaces_forgotten: u64,
    /// Blocks that tiers evicted to make room, by tier, up to the last tier that has evicted any.
    pub tier_evict_blocks: Vec<u64>,
    /// Connections that ended while they held leases or half-written slots (P4).
    pub owners_ended_holding: u64,
    /// Failures by operation and kind.
    pub failures: Vec<(&'static str, ErrorKind, u64)>,
}

impl Counters {
    /// Counts blocks that a tier evicted.
    pub(crate) fn tier_evicted(&mut self, tier: TierIndex, blocks: usize) {
        add_of(&mut self.tier_evict_blocks, tier, blocks);
    }

    /// Counts blocks of a hit that came from a tier.
    pub(crate) fn tier_hit(&mut self, tier: TierIndex, blocks: usize) {
        add_of(&mut self.tier_hit_blocks, tier, blocks);
    }

    /// Counts a failure by operation and kind.
    pub fn failed(&mut self, operation: &'static str, error: &Error) {
        let kind = error.kind();
        match self.failures.iter_mut().find(|(op, k, _)| *op == operation && *k == kind) {
            Some((.., count)) => *count += 1,
            None => self.failures.push((operation, kind, 1)),
        }
    }
}

/// Adds to the count of a tier.
fn add_of(counts: &mut Vec<u64>, tier: TierIndex, blocks: usize) {
    if counts.len() <= tier {
        counts.resize(tier + 1, 0);
    }
    counts[tier] += blocks as u64;
}
