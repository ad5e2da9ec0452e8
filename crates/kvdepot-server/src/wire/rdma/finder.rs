//! Threads that read values from tiers, so that pollers never wait.

use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender};
use kvdepot_core::{BlockHash, Error, Result};
use kvdepot_depot::values::Values;

use super::mailbox::{Command, Mailbox};
use crate::wire::config::GET_WAIT;
use crate::wire::counters::Counters;

/// Number of values read at a time.
const THREADS: usize = 8;

/// A request for a value in a tier.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) values: Values,
    pub(super) hash: BlockHash,
    pub(super) link: u64,
    pub(super) request: u64,
    pub(super) index: usize,
    pub(super) answer_to: Arc<Mailbox>,
}

/// Starts the threads. They end when all senders are dropped.
pub(super) fn start(counters: &Arc<Counters>) -> Result<Sender<Job>> {
    let (sender, receiver) = crossbeam_channel::unbounded::<Job>();
    for _ in 0..THREADS {
        let (receiver, counters) = (receiver.clone(), Arc::clone(counters));
        std::thread::Builder::new()
            .name("kvdepot-rdma-find".to_owned())
            .spawn(move || find(&receiver, &counters))
            .map_err(|e| Error::io("cannot start a thread", e))?;
    }
    Ok(sender)
}

fn find(jobs: &Receiver<Job>, counters: &Counters) {
    for Job { values, hash, link, request, index, answer_to } in jobs {
        // P2: a failing tier is a miss.
        let value = values.get(hash, GET_WAIT).unwrap_or_else(|error| {
            counters.failed(error.kind());
            tracing::debug!("a value could not be read: {error}");
            None
        });
        // A poller that has ended needs no answer.
        let _ = answer_to.tell(Command::Found { link, request, index, value });
    }
}
