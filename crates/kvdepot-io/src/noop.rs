//! An engine that does nothing, to measure what everything around I/O costs.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::engine::{EngineStats, FileWritten, IoEngine, Op, Request};

/// Ends every request at once and well, on the caller's thread: reads leave the buffer as it is, writes prepare
/// their bytes and drop them, calls run.
#[derive(Debug, Default)]
pub struct NoopEngine {
    ended: AtomicU64,
}

impl NoopEngine {
    /// A new one.
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
            // Relaxed: a counter that nothing is ordered by.
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
