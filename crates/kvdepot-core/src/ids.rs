//! Numbers that the machine and the accounts beside it have in common.

/// A tier's position in the pipeline.
pub type TierIndex = usize;
/// Owner of leases: a connection.
pub type Owner = u64;
