//! The engine of plain calls on a bounded pool of threads. It works on every kernel, container and file system.

mod queue;
mod worker;

use std::sync::Arc;
use std::time::Instant;

use kvdepot_core::limits::{IO_QUEUE_MAX, IO_THREADS_MAX};
use kvdepot_core::{Error, ErrorKind, Result};

use crate::engine::{EngineStats, IoEngine, Request};
use queue::Shared;

/// Sizes of a psync engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PsyncConfig {
    /// Number of threads that are never busy with writes.
    pub read_threads: usize,
    /// Largest number of threads busy with writes at a time.
    pub write_threads: usize,
    /// Capacity of each of the two queues.
    pub queue_depth: usize,
    /// Prefix of thread names.
    pub name: String,
    /// Whether the memory of requests outlives this process, in the hands of another one. Then no engine is used whose
    /// transfers can continue after a killed process counts as gone (P4).
    pub memory_outlives: bool,
}

impl Default for PsyncConfig {
    fn default() -> Self {
        let (read_threads, write_threads, queue_depth) = (8, 4, 4096);
        let (name, memory_outlives) = ("kvd-io".to_owned(), false);
        Self { read_threads, write_threads, queue_depth, name, memory_outlives }
    }
}

impl PsyncConfig {
    /// Refuses sizes that cannot work.
    pub(crate) fn check(&self) -> Result<()> {
        let threads = |name: &'static str, value: usize| {
            (1..=IO_THREADS_MAX).contains(&value).then_some(()).ok_or_else(|| {
                Error::new(ErrorKind::Config, "an I/O engine needs 1 to 512 threads of each kind")
                    .with(name, value)
            })
        };
        threads("read_threads", self.read_threads)?;
        threads("write_threads", self.write_threads)?;
        if !(1..=IO_QUEUE_MAX).contains(&self.queue_depth) {
            return Err(Error::new(ErrorKind::Config, "an I/O queue holds 1 to 65536 requests")
                .with("queue_depth", self.queue_depth));
        }
        Ok(())
    }
}

/// `read_threads + write_threads` threads over two queues, reads first; see `queue` for the rules.
#[derive(Debug)]
pub struct PsyncEngine {
    shared: Arc<Shared>,
}

impl PsyncEngine {
    /// Starts the threads.
    pub fn new(config: PsyncConfig) -> Result<Self> {
        config.check()?;
        let count = config.read_threads + config.write_threads;
        let shared = Arc::new(Shared::new(config));
        // From here on a failure drops `engine`, which stops the threads that did start.
        let engine = Self { shared };
        crate::watchdog::start(&engine.shared)?;
        for _ in 0..count {
            worker::start(&engine.shared)?;
        }
        Ok(engine)
    }
}

impl IoEngine for PsyncEngine {
    fn name(&self) -> &'static str {
        "psync"
    }

    fn submit(&self, batch: Vec<Request>) {
        self.shared.submit(batch);
    }

    fn drain(&self, deadline: Instant) -> bool {
        self.shared.intake.drain(deadline)
    }

    fn stats(&self) -> EngineStats {
        self.shared.intake.stats()
    }
}

impl Drop for PsyncEngine {
    fn drop(&mut self) {
        self.shared.close();
    }
}
