//! A tier in memory whose reads and writes do what a test says.
#![allow(dead_code, clippy::unwrap_used, reason = "each test uses its part, and fails where it cannot go on")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId, NamespaceSpec};
use kvdepot_tier::{Done, FakeTier, Presence, ReadItem, Tier, TierUsage, WriteItem};

/// What an operation does.
#[derive(Clone, Debug)]
pub(crate) enum Act {
    Pass,
    Fail,
    Panic,
    /// Waits for the test; for writes.
    Hold(Sender<Held>),
}

/// A write that waits for the test.
pub(crate) struct Held {
    tier: Arc<FakeTier>,
    write: WriteItem,
}

impl Held {
    pub(crate) fn finish(self) {
        self.tier.write(vec![self.write], Instant::now() + Duration::from_secs(3600));
    }
}

#[derive(Debug)]
pub(crate) struct Scripted {
    inner: Arc<FakeTier>,
    read: Act,
    write: Act,
}

impl Scripted {
    pub(crate) fn tier(read: Act, write: Act) -> Arc<dyn Tier> {
        Arc::new(Self { inner: Arc::new(FakeTier::new(0)), read, write })
    }
}

fn refused() -> Error {
    Error::new(ErrorKind::NoSpace, "the test refuses it")
}

impl Tier for Scripted {
    fn name(&self) -> &str {
        "fake"
    }
    fn open_namespace(&self, spec: &Arc<NamespaceSpec>, at_least: u32, deadline: Instant, done: Done<u32>) {
        self.inner.open_namespace(spec, at_least, deadline, done);
    }
    fn advance_epoch(&self, spec: &Arc<NamespaceSpec>, at_least: u32, deadline: Instant, done: Done<u32>) {
        self.inner.advance_epoch(spec, at_least, deadline, done);
    }
    fn peek(&self, keys: &[BlockKey], out: &mut Vec<Presence>) {
        self.inner.peek(keys, out);
    }
    fn probe(&self, keys: Vec<BlockKey>, deadline: Instant, done: Done<usize>) {
        self.inner.probe(keys, deadline, done);
    }
    fn read(&self, reads: Vec<ReadItem>, deadline: Instant) {
        match self.read {
            Act::Panic => panic!("a read panics because the test says so"),
            Act::Fail => reads.into_iter().for_each(|read| read.end(Err(refused()))),
            Act::Pass | Act::Hold(_) => self.inner.read(reads, deadline),
        }
    }
    fn write(&self, writes: Vec<WriteItem>, deadline: Instant) {
        match &self.write {
            Act::Pass => self.inner.write(writes, deadline),
            Act::Fail => writes.into_iter().for_each(|write| write.end(Err(refused()))),
            Act::Panic => panic!("a write panics because the test says so"),
            Act::Hold(held) => {
                for write in writes {
                    held.send(Held { tier: Arc::clone(&self.inner), write }).unwrap();
                }
            }
        }
    }
    fn remove(&self, keys: Vec<BlockKey>, done: Done<()>) {
        self.inner.remove(keys, done);
    }
    fn touch(&self, keys: &[BlockKey]) {
        self.inner.touch(keys);
    }
    fn usage(&self) -> TierUsage {
        self.inner.usage()
    }
    fn keys(&self, namespace: NamespaceId) -> Vec<BlockKey> {
        self.inner.keys(namespace)
    }
    fn drain(&self, deadline: Instant) -> bool {
        self.inner.drain(deadline)
    }
}
