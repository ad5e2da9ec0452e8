//! Failures of a run: the broken promise, and how it showed.

use std::fmt;

/// A promise that the simulation checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rule {
    /// Bytes are those that were dumped, or absent (P1).
    Bytes,
    /// Removed, replaced or reset blocks are not served again.
    Stale,
    /// Every request gets one reply (P2).
    Replies,
    /// Nobody accesses a slot that belongs to another client (P4).
    Owners,
    /// Released memory is free (P4).
    Leaks,
    /// Nothing exceeds its cap (P5).
    Caps,
    /// A claim's hit is the longest, and the blocks that it reports as held are present.
    Claims,
    /// Waiting requests continue when there is space.
    Progress,
    /// Lookups see what the pool holds.
    Presence,
    /// A tier gets a block only as its placement demands.
    Placement,
    /// A tier is given no more bytes than its budget has.
    Budget,
    /// Only unused namespaces are forgotten, and nothing of them is lost except what only the pool has.
    Forgetting,
    /// A block is in its preferred region while that has space.
    Regions,
    /// Reports about blocks that went, and about claims that missed some, are true.
    Misses,
    /// No tier serves a claim that may not be loaded from it.
    Choices,
    /// The machine's own totals.
    Totals,
    /// The machine or the simulation panicked.
    Panic,
}

/// A broken promise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fail {
    /// The promise.
    pub rule: Rule,
    /// How it showed.
    pub what: String,
}

impl fmt::Display for Fail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.rule, self.what)
    }
}

pub(crate) fn fail<T>(rule: Rule, what: impl Into<String>) -> Result<T, Fail> {
    Err(Fail { rule, what: what.into() })
}
