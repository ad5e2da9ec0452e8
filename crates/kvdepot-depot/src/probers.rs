//! Threads for work that waits for tiers, so that no connection waits for a disk that it does not need.

use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, TrySendError};
use kvdepot_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;

/// Number of threads that wait for probes.
const THREADS: usize = 4;
/// Capacity of the queue; further jobs are refused (P7).
const QUEUE_MAX: usize = 4096;

type Job = Box<dyn FnOnce() + Send>;

#[derive(Debug)]
pub(crate) struct Probers {
    jobs: Mutex<Option<Sender<Job>>>,
    queued: Receiver<Job>,
}

impl Default for Probers {
    fn default() -> Self {
        let (jobs, queued) = crossbeam_channel::bounded(QUEUE_MAX);
        Self { jobs: Mutex::new(Some(jobs)), queued }
    }
}

impl Probers {
    /// Starts the threads. They end after [`Self::stop`], when earlier jobs are done.
    pub(crate) fn start(&self) -> Result<Vec<JoinHandle<()>>> {
        (0..THREADS)
            .map(|index| {
                let queued = self.queued.clone();
                std::thread::Builder::new()
                    .name(format!("kvdepot-probe{index}"))
                    .spawn(move || queued.iter().for_each(|job| job()))
                    .map_err(|e| Error::io("cannot start a thread", e))
            })
            .collect()
    }

    pub(crate) fn stop(&self) {
        *self.jobs.lock() = None;
    }

    /// Queues a job for a thread.
    pub(crate) fn run(&self, job: impl FnOnce() + Send + 'static) -> Result<()> {
        let jobs = self.jobs.lock();
        let Some(jobs) = jobs.as_ref() else { return Err(Error::new(ErrorKind::Closed, "the depot ends")) };
        jobs.try_send(Box::new(job)).map_err(|error| match error {
            TrySendError::Full(_) => Error::new(ErrorKind::Busy, "too many questions wait for the tiers"),
            TrySendError::Disconnected(_) => Error::new(ErrorKind::Closed, "the depot ends"),
        })
    }
}
