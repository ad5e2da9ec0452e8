//! What the machine counts. Failures are counted by kind, because at an engine's face they all look like a miss (P2).

use crate::error::{Error, ErrorKind};

/// Monotonic counters since the depot began.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Block hashes that claims asked for.
    pub lookup_blocks: u64,
    /// Blocks that dumps wanted to store.
    pub dump_blocks: u64,
    /// Blocks dumped into the pool.
    pub dump_blocks_sealed: u64,
    /// Blocks that were there already when a dump asked.
    pub dump_blocks_had: u64,
    /// Blocks whose dump was refused, mostly because the pool was full of bytes not yet written (back-pressure).
    pub dump_blocks_dropped: u64,
    /// Blocks requested by loads.
    pub load_blocks: u64,
    /// Blocks requested by loads that could not be served.
    pub load_blocks_missed: u64,
    /// Blocks read from tiers into the pool.
    pub fetch_blocks: u64,
    /// Bytes read from tiers into the pool.
    pub fetch_bytes: u64,
    /// Blocks written to tiers.
    pub write_blocks: u64,
    /// Bytes written to tiers.
    pub write_bytes: u64,
    /// Blocks that no tier would take: they live in the pool only.
    pub write_blocks_dropped: u64,
    /// Blocks written to a tier again, because it had lost or evicted them.
    pub rewrite_blocks: u64,
    /// Blocks written to a tier later than at their seal, as its placement has it.
    pub late_write_blocks: u64,
    /// Such writes that failed, or found too many others queued.
    pub late_write_blocks_dropped: u64,
    /// Claims opened.
    pub claims: u64,
    /// Claims cut because the pool cannot hold more of them.
    pub claims_cut: u64,
    /// Claims ended because nobody polled them any more.
    pub claims_expired: u64,
    /// Namespaces that nobody used, forgotten when others needed their place.
    pub namespaces_forgotten: u64,
    /// Connections whose end gave back leases or half-written slots (P4).
    pub owners_ended_holding: u64,
    /// Failures by operation and kind.
    pub failures: Vec<(&'static str, ErrorKind, u64)>,
}

impl Counters {
    /// Counts a failure by operation and kind.
    pub fn failed(&mut self, operation: &'static str, error: &Error) {
        let kind = error.kind();
        match self.failures.iter_mut().find(|(op, k, _)| *op == operation && *k == kind) {
            Some((.., count)) => *count += 1,
            None => self.failures.push((operation, kind, 1)),
        }
    }
}
