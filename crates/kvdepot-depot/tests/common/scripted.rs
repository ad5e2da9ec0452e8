//! A tier in memory whose reads and writes do what a test says.
#![allow(dead_code, clippy::unwrap_used, reason = "each test uses its part, and fails where it cannot go on")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;
use kvdepot_core::{Error, ErrorKind};
use kvdepot_tier::conformance::{Script, ScriptedTier};
use kvdepot_tier::{FakeTier, ReadItem, Tier, WriteItem};

/// What an operation does.
#[derive(Clone, Debug)]
pub(crate) enum Act {
    Pass,
    Fail,
    Panic,
    /// Waits for the test; for writes only.
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
    read: Act,
    write: Act,
}

impl Scripted {
    pub(crate) fn tier(read: Act, write: Act) -> Arc<dyn Tier> {
        Arc::new(ScriptedTier::new(Self { read, write }))
    }
}

fn refused() -> Error {
    Error::new(ErrorKind::NoSpace, "the test refuses it")
}

impl Script for Scripted {
    fn read(&self, inner: &Arc<FakeTier>, reads: Vec<ReadItem>, deadline: Instant) {
        match self.read {
            Act::Panic => panic!("a read panics because the test says so"),
            Act::Fail => reads.into_iter().for_each(|read| read.end(Err(refused()))),
            Act::Pass | Act::Hold(_) => inner.read(reads, deadline),
        }
    }

    fn write(&self, inner: &Arc<FakeTier>, writes: Vec<WriteItem>, deadline: Instant) {
        match &self.write {
            Act::Pass => inner.write(writes, deadline),
            Act::Fail => writes.into_iter().for_each(|write| write.end(Err(refused()))),
            Act::Panic => panic!("a write panics because the test says so"),
            Act::Hold(held) => {
                for write in writes {
                    held.send(Held { tier: Arc::clone(inner), write }).unwrap();
                }
            }
        }
    }
}
