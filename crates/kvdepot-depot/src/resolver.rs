//! Answers that need I/O, found out on threads of their own, so that no connection and no engine waits on a disk.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use hashbrown::HashMap;
use kvdepot_core::{BlockKey, Result};
use kvdepot_tier::{Presence, Tier};

use crate::depot::Shared;
use crate::message::NamespaceHandle;
use crate::{claim, ops};

/// Threads that wait for probes.
pub(crate) const THREADS: usize = 4;
/// Longest wait for one probe: a shared file system that takes longer is a miss this time.
const PROBE_WAIT: Duration = Duration::from_secs(2);

/// Work for a resolver.
#[derive(Debug)]
pub(crate) enum Job {
    /// A claim with blocks that only I/O can tell of.
    Claim(u64),
    /// Blocks to bring into the pool.
    Prefetch(NamespaceHandle, Vec<BlockKey>),
    /// End of the thread.
    Stop,
}

pub(crate) fn spawn(shared: &Arc<Shared>, jobs: &Receiver<Job>) -> Result<Vec<JoinHandle<()>>> {
    (0..THREADS)
        .map(|index| {
            let (shared, jobs) = (Arc::clone(shared), jobs.clone());
            std::thread::Builder::new()
                .name(format!("kvdepot-probe{index}"))
                .spawn(move || run(&shared, &jobs))
                .map_err(|e| kvdepot_core::Error::io("cannot start a thread", e))
        })
        .collect()
}

fn run(shared: &Arc<Shared>, jobs: &Receiver<Job>) {
    for job in jobs {
        match job {
            Job::Claim(id) => claim::resolve(shared, id),
            Job::Prefetch(namespace, keys) => {
                let mut known = Known::peek(shared, keys.iter().copied());
                known.probe(shared, &keys);
                let there: Vec<(BlockKey, usize)> =
                    keys.iter().map_while(|key| known.tier_of(key).map(|tier| (*key, tier))).collect();
                ops::fetch_all(shared, namespace, &there);
            }
            Job::Stop => return,
        }
    }
}

/// Which tier holds which block, as far as it is known.
#[derive(Debug, Default)]
pub(crate) struct Known {
    tiers: HashMap<BlockKey, usize>,
    /// Blocks of which at least one tier could not tell without I/O.
    unknown: HashMap<BlockKey, ()>,
}

impl Known {
    /// Asks the tiers in order, without I/O.
    pub(crate) fn peek(shared: &Shared, keys: impl Iterator<Item = BlockKey>) -> Self {
        let mut known = Self::default();
        let mut asked: Vec<BlockKey> = keys.collect();
        let mut answers = Vec::new();
        for (index, tier) in shared.tiers.iter().enumerate() {
            tier.peek(&asked, &mut answers);
            let mut rest = Vec::new();
            for (key, answer) in asked.iter().zip(&answers) {
                match answer {
                    Presence::Present => {
                        known.tiers.insert(*key, index);
                        known.unknown.remove(key);
                        continue;
                    }
                    Presence::Absent => {}
                    Presence::Unknown => {
                        known.unknown.insert(*key, ());
                    }
                }
                rest.push(*key);
            }
            asked = rest;
        }
        known
    }

    /// Asks once more about blocks that no tier was known to hold.
    pub(crate) fn peek_again(&mut self, shared: &Shared, keys: impl Iterator<Item = BlockKey>) {
        let unknown: Vec<BlockKey> = keys.filter(|key| self.tier_of(key).is_none()).collect();
        self.tiers.extend(Self::peek(shared, unknown.into_iter()).tiers);
    }

    /// The first tier that holds the block.
    pub(crate) fn tier_of(&self, key: &BlockKey) -> Option<usize> {
        self.tiers.get(key).copied()
    }

    /// Whether only I/O can tell.
    pub(crate) fn is_unknown(&self, key: &BlockKey) -> bool {
        self.unknown.contains_key(key)
    }

    /// Finds out by I/O how many leading ones of `keys` are held. The one that ends the run counts as absent from then
    /// on, whether a tier said so or did not answer.
    pub(crate) fn probe(&mut self, shared: &Shared, keys: &[BlockKey]) {
        loop {
            let Some(first) = self.next_unknown(keys) else { return };
            let mut found = false;
            for (index, tier) in shared.tiers.iter().enumerate() {
                // Tiers hold parts of a run by turns: each goes on where the one before had to stop.
                let Some(from) = self.next_unknown(keys) else { return };
                for key in &keys[from..][..ask(shared, &**tier, &keys[from..])] {
                    self.tiers.insert(*key, index);
                    self.unknown.remove(key);
                    found = true;
                }
            }
            if !found {
                self.unknown.remove(&keys[first]);
                return;
            }
        }
    }

    /// Where the run of blocks that a tier is known to hold ends, if only I/O can tell of the block there.
    fn next_unknown(&self, keys: &[BlockKey]) -> Option<usize> {
        let first = keys.iter().position(|key| self.tier_of(key).is_none())?;
        self.is_unknown(&keys[first]).then_some(first)
    }
}

/// How many leading blocks a tier holds; none when it does not answer in time.
fn ask(shared: &Shared, tier: &dyn Tier, keys: &[BlockKey]) -> usize {
    let (sender, receiver) = crossbeam_channel::bounded(1);
    // A tier that hangs must leave the others their time (P2).
    let share = Duration::from_millis(shared.config.timeout_ms) / (shared.tiers.len() as u32 + 1);
    let deadline = Instant::now() + PROBE_WAIT.min(share);
    let done = move |outcome: Result<usize>| {
        let _ = sender.send(outcome);
    };
    tier.probe(keys.to_vec(), deadline, Box::new(done));
    match receiver.recv_deadline(deadline) {
        Ok(Ok(count)) => count.min(keys.len()),
        Ok(Err(error)) => {
            shared.stats.failed("probe", &error);
            0
        }
        Err(_) => {
            shared.stats.failed("probe", &crate::io_queue::timed_out("a tier did not answer"));
            0
        }
    }
}
