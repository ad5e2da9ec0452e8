//! How long things take in the ledger.

/// For how long a member may be silent.
pub(in crate::posix) const LEASE_MS: u64 = 120_000;
/// How often a member renews.
const RENEW_MS: u64 = 10_000;
/// For how long the writes of a dead member on another host may still arrive.
const ARRIVAL_MS: u64 = 3_600_000;
/// How often the directories are surveyed without a reason.
const ROUND_MS: u64 = 600_000;
/// How long a collector waits after a survey that failed.
const RETRY_MS: u64 = 5_000;

/// How long things take; shorter in tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Times {
    pub(super) lease_ms: u64,
    pub(super) renew_ms: u64,
    pub(super) arrival_ms: u64,
    pub(super) round_ms: u64,
    pub(super) retry_ms: u64,
}

impl Times {
    /// Those of a lease.
    pub(super) fn of(lease_ms: u64) -> Self {
        let part = |ms: u64| ms.saturating_mul(lease_ms) / LEASE_MS;
        Self {
            lease_ms,
            renew_ms: part(RENEW_MS),
            arrival_ms: part(ARRIVAL_MS),
            round_ms: part(ROUND_MS),
            retry_ms: part(RETRY_MS),
        }
    }
}
