//! Threads that carry out tasks. Loads have their own, so that dumps do not delay them.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, TrySendError};
use kvdepot_core::{Error, ErrorKind, Result};

use crate::task_line::Operation;

/// Number of threads for each of loads and dumps: one copies while another waits for the depot.
const THREADS: usize = 2;

type Job = Box<dyn FnOnce() + Send>;

/// See the module.
pub(crate) struct Executor {
    loads: Option<Sender<Job>>,
    dumps: Option<Sender<Job>>,
    threads: Vec<JoinHandle<()>>,
    tasks: AtomicU64,
}

impl Executor {
    /// Starts the threads. At most `depth` jobs wait in each queue (P7).
    pub(crate) fn start(depth: usize) -> Result<Self> {
        let mut threads = Vec::new();
        let mut queue = |name: &str| -> Result<Sender<Job>> {
            let (sender, receiver) = crossbeam_channel::bounded::<Job>(depth);
            for index in 0..THREADS {
                threads.push(spawn(format!("kvdepot-{name}{index}"), receiver.clone())?);
            }
            Ok(sender)
        };
        let (loads, dumps) = (queue("load")?, queue("dump")?);
        Ok(Self { loads: Some(loads), dumps: Some(dumps), threads, tasks: AtomicU64::new(1) })
    }

    pub(crate) fn next_task(&self) -> u64 {
        self.tasks.fetch_add(1, Ordering::Relaxed)
    }

    /// Queues a job. `Busy` if the queue is full.
    pub(crate) fn submit(&self, operation: Operation, job: Job) -> Result<()> {
        let queue = match operation {
            Operation::Load => &self.loads,
            Operation::Dump => &self.dumps,
        };
        let closed = || Error::new(ErrorKind::Closed, "the store is closed");
        match queue.as_ref().ok_or_else(closed)?.try_send(job) {
            Ok(()) => Ok(()),
            Err(TrySendError::Full(_)) => Err(Error::new(
                ErrorKind::Busy,
                "too many tasks wait: raise waiting_queue_depth or dump less",
            )),
            Err(TrySendError::Disconnected(_)) => Err(closed()),
        }
    }
}

fn spawn(name: String, jobs: Receiver<Job>) -> Result<JoinHandle<()>> {
    let run = move || jobs.into_iter().for_each(|job| job());
    std::thread::Builder::new().name(name).spawn(run).map_err(|e| Error::io("cannot start a thread", e))
}

impl Drop for Executor {
    fn drop(&mut self) {
        self.loads = None;
        self.dumps = None;
        let this = std::thread::current().id();
        for thread in self.threads.drain(..) {
            // The last holder may be a job on one of these threads.
            if thread.thread().id() != this {
                let _ = thread.join();
            }
        }
    }
}

impl fmt::Debug for Executor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Executor({} threads)", self.threads.len())
    }
}
