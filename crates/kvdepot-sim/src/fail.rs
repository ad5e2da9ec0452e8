//! How a run fails: which promise was broken, and how it showed.

use std::fmt;

/// A promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rule {
    /// P1: bytes are those that were dumped, or absent.
    Bytes,
    /// What was removed, replaced or reset is not served again.
    Stale,
    /// P2: every request has one reply.
    Replies,
    /// P4: nobody touches a slot that another has.
    Owners,
    /// P4: what was given back is free.
    Leaks,
    /// P5: nothing is larger than its cap.
    Caps,
    /// A claim's hit is the longest, and what it says it holds is there.
    Claims,
    /// What waits goes on when there is room.
    Progress,
    /// Lookups see what the pool holds.
    Presence,
    /// A tier is given a block only as its placement has it.
    Placement,
    /// Only a namespace that nobody uses is forgotten, and nothing of it is lost but what the pool holds.
    Forgetting,
    /// A block lies in the region that was wished for it, while that has room.
    Regions,
    /// What is told of blocks that went, and of claims that missed some, is so.
    Misses,
    /// The machine's own totals.
    Totals,
    /// The machine or the simulation panicked.
    Panic,
}

/// A broken promise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fail {
    /// Which one.
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
