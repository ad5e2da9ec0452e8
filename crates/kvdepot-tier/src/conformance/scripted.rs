//! A tier in memory whose behaviour a test scripts.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use kvdepot_core::{BlockKey, NamespaceId, NamespaceSpec};

use crate::{Done, FakeTier, Presence, ReadItem, Tier, TierUsage, WriteItem};

/// A test's script for a tier's calls. Calls that it does not handle go to the tier in memory.
#[expect(missing_docs, reason = "as those of `Tier`")]
pub trait Script: Send + Sync {
    fn open_namespace(
        &self,
        inner: &Arc<FakeTier>,
        spec: &Arc<NamespaceSpec>,
        at_least: u32,
        deadline: Instant,
        done: Done<u32>,
    ) {
        inner.open_namespace(spec, at_least, deadline, done);
    }

    fn advance_epoch(
        &self,
        inner: &Arc<FakeTier>,
        spec: &Arc<NamespaceSpec>,
        at_least: u32,
        deadline: Instant,
        done: Done<u32>,
    ) {
        inner.advance_epoch(spec, at_least, deadline, done);
    }

    fn peek(&self, inner: &Arc<FakeTier>, keys: &[BlockKey], out: &mut Vec<Presence>) {
        inner.peek(keys, out);
    }

    fn read(&self, inner: &Arc<FakeTier>, reads: Vec<ReadItem>, deadline: Instant) {
        inner.read(reads, deadline);
    }

    fn write(&self, inner: &Arc<FakeTier>, writes: Vec<WriteItem>, deadline: Instant) {
        inner.write(writes, deadline);
    }

    fn remove(&self, inner: &Arc<FakeTier>, keys: Vec<BlockKey>, done: Done<()>) {
        inner.remove(keys, done);
    }

    fn part(&self, key: &BlockKey) -> usize {
        let _ = key;
        0
    }
}

/// A tier in memory, and a test's script for it.
pub struct ScriptedTier<S> {
    /// The tier in memory; it has no cap.
    pub inner: Arc<FakeTier>,
    /// The script, which is called first.
    pub script: S,
}

impl<S: Script> ScriptedTier<S> {
    /// Makes an empty tier.
    pub fn new(script: S) -> Self {
        Self { inner: Arc::new(FakeTier::new(0)), script }
    }
}

impl<S> fmt::Debug for ScriptedTier<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ScriptedTier")
    }
}

impl<S: Script> Tier for ScriptedTier<S> {
    fn name(&self) -> &'static str {
        "scripted"
    }

    fn open_namespace(&self, spec: &Arc<NamespaceSpec>, at_least: u32, deadline: Instant, done: Done<u32>) {
        self.script.open_namespace(&self.inner, spec, at_least, deadline, done);
    }

    fn advance_epoch(&self, spec: &Arc<NamespaceSpec>, at_least: u32, deadline: Instant, done: Done<u32>) {
        self.script.advance_epoch(&self.inner, spec, at_least, deadline, done);
    }

    fn close_namespace(&self, root: NamespaceId) {
        self.inner.close_namespace(root);
    }

    fn peek(&self, keys: &[BlockKey], out: &mut Vec<Presence>) {
        self.script.peek(&self.inner, keys, out);
    }

    fn probe(&self, keys: Vec<BlockKey>, deadline: Instant, done: Done<usize>) {
        self.inner.probe(keys, deadline, done);
    }

    fn read(&self, reads: Vec<ReadItem>, deadline: Instant) {
        self.script.read(&self.inner, reads, deadline);
    }

    fn write(&self, writes: Vec<WriteItem>, deadline: Instant) {
        self.script.write(&self.inner, writes, deadline);
    }

    fn remove(&self, keys: Vec<BlockKey>, done: Done<()>) {
        self.script.remove(&self.inner, keys, done);
    }

    fn part(&self, key: &BlockKey) -> usize {
        self.script.part(key)
    }

    fn touch(&self, keys: &[BlockKey]) {
        self.inner.touch(keys);
    }

    fn usage(&self) -> TierUsage {
        self.inner.usage()
    }

    fn keys_from(&self, namespace: NamespaceId, from: u64) -> (Vec<BlockKey>, Option<u64>) {
        self.inner.keys_from(namespace, from)
    }

    fn drain(&self, deadline: Instant) -> bool {
        self.inner.drain(deadline)
    }
}
