//! A tier that completes no read before the test ends it.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use std::sync::Arc;
use std::time::Instant;

use crossbeam_channel::Sender;
use kvdepot_core::{BlockKey, NamespaceId, NamespaceSpec};
use kvdepot_tier::{Done, Presence, ReadItem, Tier, TierUsage, WriteItem, Written};

/// The tier. It reports the same presence of every block, and finds all of them when it is probed.
#[derive(Debug)]
pub(crate) struct HeldReads {
    pub(crate) presence: Presence,
    /// Where its reads go.
    pub(crate) reads: Sender<ReadItem>,
}

impl Tier for HeldReads {
    fn name(&self) -> &'static str {
        "HeldReads"
    }

    fn open_namespace(&self, _: &Arc<NamespaceSpec>, at_least: u32, _: Instant, done: Done<u32>) {
        done(Ok(at_least));
    }

    fn advance_epoch(&self, _: &Arc<NamespaceSpec>, at_least: u32, _: Instant, done: Done<u32>) {
        done(Ok(at_least));
    }

    fn peek(&self, keys: &[BlockKey], out: &mut Vec<Presence>) {
        out.clear();
        out.extend(keys.iter().map(|_| self.presence));
    }

    fn probe(&self, keys: Vec<BlockKey>, _: Instant, done: Done<usize>) {
        done(Ok(keys.len()));
    }

    fn read(&self, reads: Vec<ReadItem>, _: Instant) {
        reads.into_iter().for_each(|read| self.reads.send(read).unwrap());
    }

    fn write(&self, writes: Vec<WriteItem>, _: Instant) {
        writes.into_iter().for_each(|write| write.end(Ok(Written::AlreadyThere)));
    }

    fn remove(&self, _: Vec<BlockKey>, done: Done<()>) {
        done(Ok(()));
    }

    fn touch(&self, _: &[BlockKey]) {}

    fn usage(&self) -> TierUsage {
        TierUsage::default()
    }

    fn keys_from(&self, _: NamespaceId, _: u64) -> (Vec<BlockKey>, Option<u64>) {
        (Vec::new(), None)
    }

    fn drain(&self, _: Instant) -> bool {
        true
    }
}
