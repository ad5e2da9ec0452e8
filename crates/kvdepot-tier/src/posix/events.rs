//! Events for the depot above: files that were evicted, and files found to be missing or corrupt.

use kvdepot_core::BlockKey;
use kvdepot_core::limits::TIER_EVENTS_MAX;

use crate::cooling::Cooling;

/// Events waiting to be delivered; nothing is collected before a listener is attached.
#[derive(Debug, Default)]
pub(super) struct Events {
    pub(super) attached: bool,
    evicted: Vec<BlockKey>,
    lost: Vec<BlockKey>,
    /// If the depot asks which blocks are evicted next.
    pub(super) cooling: Option<Cooling>,
}

impl Events {
    pub(super) fn evicted(&mut self, key: BlockKey) {
        if self.attached && self.evicted.len() < TIER_EVENTS_MAX {
            self.evicted.push(key);
        }
    }

    pub(super) fn lost(&mut self, key: BlockKey) {
        if self.attached && self.lost.len() < TIER_EVENTS_MAX {
            self.lost.push(key);
        }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.evicted.is_empty() && self.lost.is_empty()
    }

    pub(super) fn take(&mut self) -> (Vec<BlockKey>, Vec<BlockKey>) {
        (std::mem::take(&mut self.evicted), std::mem::take(&mut self.lost))
    }
}
