//! A tier in memory whose reads and writes do what a test says.
#![allow(dead_code, clippy::unwrap_used, reason = "each test uses its part, and fails where it cannot go on")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId, NamespaceSpec, Result};
use kvdepot_io::SlotBuf;
use kvdepot_tier::{Done, FakeTier, Presence, Tier, TierUsage, Written};

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
    key: BlockKey,
    src: SlotBuf,
    done: Done<Written>,
}

impl Held {
    pub(crate) fn finish(self) {
        self.tier.write(self.key, self.src, Instant::now() + Duration::from_secs(3600), self.done);
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
    fn open_namespace(&self, spec: &NamespaceSpec, at_least: u32) -> Result<u32> {
        self.inner.open_namespace(spec, at_least)
    }
    fn advance_epoch(&self, spec: &NamespaceSpec, at_least: u32) -> Result<u32> {
        self.inner.advance_epoch(spec, at_least)
    }
    fn peek(&self, keys: &[BlockKey], out: &mut Vec<Presence>) {
        self.inner.peek(keys, out);
    }
    fn probe(&self, keys: Vec<BlockKey>, deadline: Instant, done: Done<usize>) {
        self.inner.probe(keys, deadline, done);
    }
    fn read(&self, key: BlockKey, dst: SlotBuf, deadline: Instant, done: Done<()>) {
        match self.read {
            Act::Panic => panic!("a read panics because the test says so"),
            Act::Fail => done(Err(refused())),
            Act::Pass | Act::Hold(_) => self.inner.read(key, dst, deadline, done),
        }
    }
    fn write(&self, key: BlockKey, src: SlotBuf, deadline: Instant, done: Done<Written>) {
        match &self.write {
            Act::Pass => self.inner.write(key, src, deadline, done),
            Act::Fail => {
                drop(src);
                done(Err(refused()));
            }
            Act::Panic => panic!("a write panics because the test says so"),
            Act::Hold(held) => held.send(Held { tier: Arc::clone(&self.inner), key, src, done }).unwrap(),
        }
    }
    fn remove(&self, key: BlockKey) {
        self.inner.remove(key);
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
