//! What a connection needs to work on its requests.

use std::time::Duration;

use kvdepot_verbs::SendList;

use super::regions::Regions;
use crate::wire::counters::Counters;

/// The resources of a connection, lent by its poller.
#[derive(Debug)]
pub(super) struct Means<'a> {
    pub(super) regions: &'a Regions,
    pub(super) counters: &'a Counters,
    pub(super) list: &'a mut SendList,
    pub(super) put_wait: Duration,
    pub(super) sges_max: usize,
    pub(super) bytes_max: usize,
    /// Number of work requests that may be added, within the limits of connection and poller.
    pub(super) room: u32,
    /// Number of the last work request that was added.
    pub(super) last_id: u64,
}

impl Means<'_> {
    /// Returns the number for a work request that is added now. There must be capacity.
    pub(super) fn next_id(&mut self) -> u64 {
        self.room -= 1;
        self.last_id += 1;
        self.last_id
    }
}
