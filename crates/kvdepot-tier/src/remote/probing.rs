//! Probes servers for blocks: each is asked about its own.

use std::sync::Arc;
use std::time::Instant;

use hashbrown::{HashMap, HashSet};
use kvdepot_core::{BlockKey, Error, NamespaceId, Result};
use parking_lot::Mutex;

use super::RemoteTier;
use super::job::{Job, What};
use super::removal::in_frames;
use super::shared::Shared;
use crate::{Done, Presence, Tier};

/// A probe of keys on several servers.
pub(super) struct Probe {
    shared: Arc<Shared>,
    keys: Vec<BlockKey>,
    /// Number of removals that had begun before the servers were asked.
    removals: u64,
    state: Mutex<ProbeState>,
}

struct ProbeState {
    there: HashSet<BlockKey>,
    left: usize,
    error: Option<Error>,
    done: Option<Done<usize>>,
}

impl Probe {
    pub(super) fn new(
        shared: Arc<Shared>,
        keys: Vec<BlockKey>,
        there: HashSet<BlockKey>,
        left: usize,
        done: Done<usize>,
    ) -> Self {
        let removals = shared.beliefs.removals();
        Self {
            shared,
            keys,
            removals,
            state: Mutex::new(ProbeState { there, left, error: None, done: Some(done) }),
        }
    }

    pub(super) fn answered(&self, asked: &[BlockKey], outcome: Result<Vec<bool>>) {
        let mut state = self.state.lock();
        match outcome {
            Ok(answers) => {
                let bytes: Vec<Option<u64>> = {
                    let spaces = self.shared.spaces.lock();
                    asked
                        .iter()
                        .map(|key| spaces.of(key).ok().map(|space| space.block_bytes() as u64))
                        .collect()
                };
                for ((key, there), bytes) in asked.iter().zip(answers).zip(bytes) {
                    match bytes {
                        Some(bytes) if there => {
                            self.shared.beliefs.note_present(*key, bytes, self.removals);
                            state.there.insert(*key);
                        }
                        Some(_) => self.shared.beliefs.note_absent(*key),
                        None => {}
                    }
                }
            }
            // Blocks for which no server could answer are misses.
            Err(error) => state.error = Some(error),
        }
        state.left -= 1;
        let over = state.left == 0;
        drop(state);
        if over {
            self.end();
        }
    }

    pub(super) fn end(&self) {
        let mut state = self.state.lock();
        let count = self.keys.iter().take_while(|key| state.there.contains(*key)).count();
        let outcome = match state.error.take() {
            Some(error) if count == 0 => Err(error),
            _ => Ok(count),
        };
        let done = state.done.take();
        drop(state);
        if let Some(done) = done {
            done(outcome);
        }
        self.shared.ended();
    }
}

impl RemoteTier {
    /// Asks all servers about their keys at once, and counts from the front.
    pub(super) fn begin_probe(&self, keys: Vec<BlockKey>, deadline: Instant, done: Done<usize>) {
        let mut answers = Vec::new();
        self.peek(&keys, &mut answers);
        let mut asks: HashMap<(usize, NamespaceId), Vec<BlockKey>> = HashMap::new();
        for (key, answer) in keys.iter().zip(&answers) {
            match answer {
                Presence::Present => {}
                // Keys after it do not count.
                Presence::Absent => break,
                Presence::Unknown => {
                    asks.entry((self.shared.places.of(key), key.namespace)).or_default().push(*key);
                }
            }
        }
        let asks: Vec<(usize, Vec<BlockKey>)> =
            asks.into_iter().flat_map(|((server, _), keys)| in_frames(server, keys)).collect();
        self.shared.begun();
        let there = keys.iter().zip(answers).filter(|(_, answer)| *answer == Presence::Present);
        let there = there.map(|(key, _)| *key).collect();
        let probe = Arc::new(Probe::new(Arc::clone(&self.shared), keys, there, asks.len(), done));
        if asks.is_empty() {
            return probe.end();
        }
        for (server, keys) in asks {
            let (probe, asked) = (Arc::clone(&probe), keys.clone());
            let done = move |outcome: Result<Vec<bool>>| probe.answered(&asked, outcome);
            self.servers[server].submit(Job { deadline, what: What::Exists { keys, done: Box::new(done) } });
        }
    }
}
