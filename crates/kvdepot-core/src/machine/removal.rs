//! Removals that wait for tiers.

use super::event::Reply;

/// A removal that tiers have not completed.
#[derive(Debug)]
pub(super) struct Removal {
    pub(super) was_there: Vec<bool>,
    pub(super) left: usize,
    pub(super) failed: usize,
}

impl Removal {
    /// Returns the reply with what is known now.
    pub(super) fn reply(self) -> Reply {
        Reply::Removed { was_there: self.was_there, left: self.left + self.failed }
    }
}
