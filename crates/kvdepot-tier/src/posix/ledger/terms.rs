//! The terms on which a tier takes part in a ledger, from its configuration.

use super::purse::Purse;
use super::times::Times;
use crate::posix::config::PosixConfig;

/// The account of a tier whose cap covers what other depots write, too; `None` if its cap is its own.
pub(in crate::posix) fn open_purse(config: &PosixConfig, cap: u64) -> Option<Purse> {
    let is_capped = config.capacity_bytes > 0 || config.capacity_percent > 0;
    let is_for_all = config.capacity_shared && config.shared && is_capped;
    let patience_ms = times(config).lease_ms / 2;
    is_for_all.then(|| Purse::new(cap, writes_max(config), patience_ms))
}

/// Most writes under way at a time: those of all threads, and of as many more whose files do not answer and that were
/// replaced.
fn writes_max(config: &PosixConfig) -> u64 {
    2 * config.write_threads as u64
}

/// How long things take for a tier.
pub(super) fn times(config: &PosixConfig) -> Times {
    Times::of(u64::try_from(config.ledger_lease.as_millis()).unwrap_or(u64::MAX).max(12))
}
