//! The last misses, for who asks.

use std::collections::VecDeque;
use std::sync::Arc;

use kvdepot_core::machine::TierIndex;
use kvdepot_core::misses::{Ghost, Reason};
use kvdepot_core::{BlockHash, NamespaceSpec};

/// Misses that are kept, at most (P7).
pub(super) const LAST_MAX: usize = 256;

/// Why a block is not there.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cause {
    pub(super) reason: Reason,
    pub(super) ghost: Option<Ghost>,
    /// The tier that is down.
    pub(super) down: Option<TierIndex>,
}

/// One request that found less than it asked for.
#[derive(Clone, Debug)]
pub(super) struct Miss {
    /// Milliseconds since 1970.
    pub(super) at_ms: u64,
    /// Its process, where that is known.
    pub(super) client: Option<u32>,
    /// What its client calls it.
    pub(super) label: Option<Box<str>>,
    /// A claim or a lookup.
    pub(super) by: &'static str,
    /// The namespace of the first block that it did not find, if that was known then.
    pub(super) namespace: Option<Arc<NamespaceSpec>>,
    /// That block.
    pub(super) hash: BlockHash,
    pub(super) asked: usize,
    pub(super) hit: usize,
    pub(super) cause: Cause,
    /// Another namespace that had the same hash.
    pub(super) elsewhere: Option<Arc<NamespaceSpec>>,
}

/// The last misses, oldest first.
#[derive(Debug, Default)]
pub(super) struct Last(VecDeque<Miss>);

impl Last {
    pub(super) fn push(&mut self, miss: Miss) {
        if self.0.len() == LAST_MAX {
            self.0.pop_front();
        }
        self.0.push_back(miss);
    }

    /// The newest ones that `wanted` names, newest first.
    pub(super) fn newest(&self, count: usize, wanted: impl Fn(&Miss) -> bool) -> Vec<Miss> {
        self.0.iter().rev().filter(|miss| wanted(miss)).take(count).cloned().collect()
    }
}
