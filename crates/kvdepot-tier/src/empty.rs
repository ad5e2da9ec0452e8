//! A tier that accepts everything and keeps nothing, to measure a pipeline without a store.

use std::sync::Arc;
use std::time::Instant;

use kvdepot_core::{BlockKey, NamespaceId, NamespaceSpec, Result, next_epoch};
use parking_lot::Mutex;
use serde_json::Value;

use crate::entry::TierEntry;
use crate::settings::Fields;
use crate::{Done, Fetched, Presence, ReadItem, Tier, TierUsage, WriteItem, Written};

/// The registry's entry of this tier.
pub const ENTRY: TierEntry =
    TierEntry { name: "Empty", open, guards_itself: false, settings: &[], for_users: false };

fn open(config: &Value) -> Result<Arc<dyn Tier>> {
    Fields::new(ENTRY.name, config, ENTRY.settings)?;
    Ok(Arc::new(EmptyTier::new()))
}

/// Accepts every write and never has a block.
#[derive(Debug, Default)]
pub struct EmptyTier {
    epochs: Mutex<hashbrown::HashMap<NamespaceId, u32>>,
}

impl EmptyTier {
    /// Makes a tier.
    pub fn new() -> Self {
        Self::default()
    }

    fn move_to(&self, spec: &NamespaceSpec, next: impl FnOnce(u32) -> Result<u32>) -> Result<u32> {
        let mut epochs = self.epochs.lock();
        let epoch = epochs.entry(spec.root()).or_insert(0);
        *epoch = next(*epoch)?;
        Ok(*epoch)
    }
}

impl Tier for EmptyTier {
    fn name(&self) -> &str {
        "empty"
    }

    fn open_namespace(&self, spec: &Arc<NamespaceSpec>, at_least: u32, _deadline: Instant, done: Done<u32>) {
        done(self.move_to(spec, |epoch| Ok(at_least.max(epoch))));
    }

    fn advance_epoch(&self, spec: &Arc<NamespaceSpec>, at_least: u32, _deadline: Instant, done: Done<u32>) {
        done(self.move_to(spec, |epoch| next_epoch(epoch, at_least)));
    }

    /// Only the epoch of its blocks, which it never had, must be known again.
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

    fn read(&self, reads: Vec<ReadItem>, _deadline: Instant) {
        reads.into_iter().for_each(|read| read.end(Ok(Fetched::Miss)));
    }

    fn write(&self, writes: Vec<WriteItem>, _deadline: Instant) {
        writes.into_iter().for_each(|write| write.end(Ok(Written::New)));
    }

    fn remove(&self, _keys: Vec<BlockKey>, done: Done<()>) {
        done(Ok(()));
    }

    fn touch(&self, _keys: &[BlockKey]) {}

    fn usage(&self) -> TierUsage {
        TierUsage::default()
    }

    fn keys_from(&self, _namespace: NamespaceId, _from: u64) -> (Vec<BlockKey>, Option<u64>) {
        (Vec::new(), None)
    }

    fn drain(&self, _deadline: Instant) -> bool {
        true
    }
}
