//! An engine that moves no bytes, to measure the overhead around I/O.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::engine::{EngineStats, FileWritten, IoEngine, Op, Request};

/// Completes every request successfully and immediately on the caller's thread: reads leave the buffer unchanged,
/// writes prepare their bytes and drop them, calls run.
#[derive(Debug, Default)]
pub struct NoopEngine {
    ended: AtomicU64,
}

impl NoopEngine {
    /// Makes an engine.
    pub fn new() -> Self {
        Self::default()
    }
}

impl IoEngine for NoopEngine {
    fn name(&self) -> &'static str {
        "noop"
    }

    fn submit(&self, batch: Vec<Request>) {
        for request in batch {
            match request.op {
                Op::Read(read) => (read.done)(Ok(read.buf)),
                Op::Write(write) => (write.done)((write.prepare)().map(|_| FileWritten::Published)),
                Op::Call(call) => (call.run)(Ok(())),
            }
            // Relaxed: a counter that orders nothing.
            self.ended.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn drain(&self, _deadline: Instant) -> bool {
        true
    }

    fn stats(&self) -> EngineStats {
        EngineStats { ended: self.ended.load(Ordering::Relaxed), ..EngineStats::default() }
    }
}
