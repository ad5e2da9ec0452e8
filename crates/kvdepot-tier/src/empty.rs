//! A tier that takes everything and keeps nothing: what a pipeline costs without a store.

use std::time::Instant;

use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId, NamespaceSpec, Result, next_epoch};
use kvdepot_io::SlotBuf;
use parking_lot::Mutex;

use crate::{Done, Presence, Tier, TierUsage, Written};

/// Accepts every write and never has anything.
#[derive(Debug, Default)]
pub struct EmptyTier {
    epochs: Mutex<hashbrown::HashMap<NamespaceId, u32>>,
}

impl EmptyTier {
    /// A new one.
    pub fn new() -> Self {
        Self::default()
    }
}

impl Tier for EmptyTier {
    fn name(&self) -> &str {
        "empty"
    }

    fn open_namespace(&self, spec: &NamespaceSpec, at_least: u32) -> Result<u32> {
        let mut epochs = self.epochs.lock();
        let epoch = epochs.entry(spec.root()).or_insert(0);
        *epoch = at_least.max(*epoch);
        Ok(*epoch)
    }

    fn advance_epoch(&self, spec: &NamespaceSpec, at_least: u32) -> Result<u32> {
        let mut epochs = self.epochs.lock();
        let epoch = epochs.entry(spec.root()).or_insert(0);
        *epoch = next_epoch(*epoch, at_least)?;
        Ok(*epoch)
    }

    /// Of what it never had only the epoch is to be known again.
    fn close_namespace(&self, root: NamespaceId) {
        let mut epochs = self.epochs.lock();
        if epochs.get(&root) == Some(&0) {
            epochs.remove(&root);
        }
    }

    fn peek(&self, keys: &[BlockKey], out: &mut Vec<Presence>) {
        out.clear();
        out.resize(keys.len(), Presence::Absent);
    }

    fn probe(&self, _keys: Vec<BlockKey>, _deadline: Instant, done: Done<usize>) {
        done(Ok(0));
    }

    fn read(&self, key: BlockKey, _dst: SlotBuf, _deadline: Instant, done: Done<()>) {
        done(Err(Error::new(ErrorKind::NotFound, "an empty tier has nothing").with("key", key)));
    }

    fn write(&self, _key: BlockKey, _src: SlotBuf, _deadline: Instant, done: Done<Written>) {
        done(Ok(Written::New));
    }

    fn remove(&self, _key: BlockKey) {}

    fn touch(&self, _keys: &[BlockKey]) {}

    fn usage(&self) -> TierUsage {
        TierUsage::default()
    }

    fn keys(&self, _namespace: NamespaceId) -> Vec<BlockKey> {
        Vec::new()
    }

    fn drain(&self, _deadline: Instant) -> bool {
        true
    }
}
