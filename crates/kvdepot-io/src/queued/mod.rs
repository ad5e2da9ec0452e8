//! The engine on queues of the kernel: a thread keeps many reads in flight and waits for all of them together.
//!
//! Operations that wait for the device go through the queue: transfers that bypass the page cache, syncs, and with
//! io_uring reads that may hit the cache. A thread makes everything else by plain calls: opening, checksums, renames,
//! buffered writes, files without a descriptor.

mod flight;
mod shared;
mod thread;

use std::io;
use std::sync::Arc;
use std::time::Instant;

use kvdepot_core::{Error, ErrorKind, Result};

use crate::engine::{Class, EngineStats, IoEngine, Request};
use crate::faults::{FaultQueue, Faults};
use crate::kernel::{AioQueue, KernelQueue, MakeQueue, UringQueue};
use crate::psync::PsyncConfig;
use shared::Shared;

/// Sizes of an engine on queues. They are those of psync, but each thread serves one class, with `IO_FLIGHTS_MAX` reads
/// or one write at a time.
pub(crate) type QueuedConfig = PsyncConfig;

/// `read_threads` threads for reads and `write_threads` for writes, each with its own queue; see `shared` for the
/// rules.
#[derive(Debug)]
pub struct QueuedEngine {
    shared: Arc<Shared>,
}

impl QueuedEngine {
    /// Starts the engine `aio`; `Unsupported` where the system lacks it.
    pub fn aio(config: PsyncConfig, faults: Option<Faults>) -> Result<Self> {
        let make = |operations| Ok(Box::new(AioQueue::new(operations)?) as Box<dyn KernelQueue>);
        Self::with("aio", config, faults, make)
    }

    /// Starts the engine `io_uring`; `Unsupported` where the system lacks or forbids it.
    pub fn io_uring(config: PsyncConfig, faults: Option<Faults>) -> Result<Self> {
        let make = |operations| Ok(Box::new(UringQueue::new(operations)?) as Box<dyn KernelQueue>);
        Self::with("io_uring", config, faults, make)
    }

    /// Starts an engine on the caller's queues. They are subject to the faults left to queues
    /// ([`Faults::strike_in_queue`]).
    pub fn with(
        name: &'static str,
        config: PsyncConfig,
        faults: Option<Faults>,
        make: impl Fn(usize) -> io::Result<Box<dyn KernelQueue>> + Send + Sync + 'static,
    ) -> Result<Self> {
        config.check()?;
        let make: Box<MakeQueue> = match faults {
            None => Box::new(make),
            Some(faults) => Box::new(move |operations| {
                let queue = make(operations)?;
                Ok(Box::new(FaultQueue::new(queue, faults.clone())) as Box<dyn KernelQueue>)
            }),
        };
        let classes = [(Class::Read, config.read_threads), (Class::Write, config.write_threads)];
        // From here on a failure drops `engine`, which stops the threads that did start.
        let engine = Self { shared: Arc::new(Shared::new(name, config, make)) };
        crate::watchdog::start(&engine.shared)?;
        let missing = |e: Error| {
            Error::new(ErrorKind::Unsupported, "this system has no such I/O engine")
                .with("engine", name)
                .with_source(e)
        };
        let mut told = Vec::new();
        for (class, threads) in classes {
            for _ in 0..threads {
                // If the limits of the process leave no descriptors for it, plain calls need none.
                told.push(thread::start(&engine.shared, class).map_err(missing)?);
            }
        }
        for told in told {
            told.recv().unwrap_or_else(|_| Err(Request::closed())).map_err(missing)?;
        }
        Ok(engine)
    }
}

impl IoEngine for QueuedEngine {
    fn name(&self) -> &'static str {
        self.shared.name
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

impl Drop for QueuedEngine {
    /// Threads keep waiting for operations that the kernel holds longer.
    fn drop(&mut self) {
        self.shared.close();
    }
}
