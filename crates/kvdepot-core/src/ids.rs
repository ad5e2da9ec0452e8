//! Numbers that the machine shares with the accounts outside of it.

/// A tier's position in the pipeline.
pub type TierIndex = usize;
/// Owner of leases: a connection.
pub type Owner = u64;
