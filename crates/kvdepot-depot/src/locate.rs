//! Finds out where a block is. Lookups, claims, loads, values and the wire door all use it: the pool's presence index
//! first, then the tiers in order, without I/O if they can tell and by a probe if they cannot. None of it takes the
//! machine's lock.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::machine::probe::{PROBE_KEYS_MAX, ProbeStep, RunProbe};
use kvdepot_core::machine::{Location, NamespaceHandle, Owner};
use kvdepot_core::{BlockKey, Error, ErrorKind, Result};
use kvdepot_tier::{Presence as InTier, Tier};

use crate::directory::Directory;
use crate::events::Events;
use crate::message::Hashes;
use crate::misses::{Misses, Unfound};
use crate::presence::Presence;
use crate::stats::Stats;
use crate::usage::Usage;

/// Longest wait of a lookup for tiers that cannot tell without I/O.
const LOOKUP_WAIT: Duration = Duration::from_secs(2);

/// Longest wait for one probe: if a shared file system takes longer, it is a miss this time.
const PROBE_WAIT: Duration = Duration::from_secs(2);

/// The data that lookups use.
#[derive(Debug)]
pub(crate) struct Locator {
    pub(crate) tiers: Vec<Arc<dyn Tier>>,
    pub(crate) presence: Presence,
    pub(crate) directory: Directory,
    pub(crate) stats: Stats,
    pub(crate) events: Events,
    pub(crate) misses: Misses,
    pub(crate) usage: Usage,
    timeout: Duration,
}

impl Locator {
    pub(crate) fn new(tiers: Vec<Arc<dyn Tier>>, timeout: Duration, blocks_remembered: usize) -> Self {
        let (presence, directory, stats) = (Presence::new(), Directory::default(), Stats::default());
        let (misses, usage) = (Misses::new(blocks_remembered), Usage::new());
        let events = Events::new(tiers.len());
        Self { tiers, presence, directory, stats, events, misses, usage, timeout }
    }

    /// Returns the deadline of a tier's answer to a probe: a tier that hangs must leave the others their time (P2).
    pub(crate) fn probe_deadline(&self) -> Instant {
        Instant::now() + PROBE_WAIT.min(self.timeout / (self.tiers.len() as u32 + 1))
    }

    /// Returns which tier holds each block, as far as that is known without I/O.
    pub(crate) fn locate(&self, keys: &[BlockKey]) -> Vec<Location> {
        let mut locations = Vec::with_capacity(keys.len());
        // In pieces: a tier answers a batch under its own lock.
        for keys in keys.chunks(PROBE_KEYS_MAX) {
            locations.extend(self.locate_some(keys));
        }
        locations
    }

    fn locate_some(&self, keys: &[BlockKey]) -> Vec<Location> {
        let mut locations = vec![Location::Absent; keys.len()];
        let mut open: Vec<usize> = (0..keys.len()).collect();
        let (mut asked, mut answers) = (Vec::new(), Vec::new());
        for (index, tier) in self.tiers.iter().enumerate() {
            if open.is_empty() {
                break;
            }
            asked.clear();
            asked.extend(open.iter().map(|&i| keys[i]));
            tier.peek(&asked, &mut answers);
            let mut answers = answers.iter();
            open.retain(|&i| match answers.next() {
                Some(InTier::Present) => {
                    locations[i] = Location::Tier(index);
                    false
                }
                Some(InTier::Unknown) => {
                    locations[i] = Location::Unknown;
                    true
                }
                Some(InTier::Absent) | None => true,
            });
        }
        locations
    }

    /// Returns which of these blocks are in the pool, ready to be read.
    fn in_pool(&self, keys: &[BlockKey]) -> Vec<bool> {
        let mut there = self.directory.are_current(keys);
        for (there, in_pool) in there.iter_mut().zip(self.presence.contain(keys)) {
            *there = *there && in_pool;
        }
        there
    }

    /// Returns which blocks exist, if that is known without waiting for all of them; otherwise `None`.
    pub(crate) fn exist_now(&self, keys: &[BlockKey]) -> Option<Vec<bool>> {
        let mut there = self.in_pool(keys);
        if self.tiers.is_empty() || there.iter().all(|there| *there) {
            self.count_found(&there);
            return Some(there);
        }
        let absent: Vec<usize> = (0..keys.len()).filter(|&i| !there[i]).collect();
        let asked: Vec<BlockKey> = absent.iter().map(|&i| keys[i]).collect();
        for (&i, location) in absent.iter().zip(self.locate(&asked)) {
            match location {
                Location::Tier(_) => there[i] = true,
                // Whoever asks for all of it counts then.
                Location::Unknown => return None,
                Location::Absent => {}
            }
        }
        self.count_found(&there);
        Some(there)
    }

    /// Counts a lookup of single blocks.
    fn count_found(&self, there: &[bool]) {
        self.count_lookup(there.len(), there.iter().filter(|there| **there).count());
    }

    fn count_lookup(&self, asked: usize, found: usize) {
        Stats::add(&self.stats.lookup_blocks, asked);
        Stats::add(&self.stats.lookup_hit_blocks, found);
    }

    /// Returns which blocks exist. Waits for tiers that cannot tell without I/O, within limits.
    pub(crate) fn exist(&self, keys: &[BlockKey]) -> Vec<bool> {
        self.exist_told(keys, &mut Vec::new())
    }

    /// As [`Self::exist`]. `untold` gets the blocks that a tier did not answer about and none has.
    fn exist_told(&self, keys: &[BlockKey], untold: &mut Vec<usize>) -> Vec<bool> {
        let there = self.find_each(keys, untold);
        self.count_found(&there);
        there
    }

    fn find_each(&self, keys: &[BlockKey], untold: &mut Vec<usize>) -> Vec<bool> {
        let mut there = self.in_pool(keys);
        let absent: Vec<usize> = (0..keys.len()).filter(|&i| !there[i]).collect();
        if absent.is_empty() || self.tiers.is_empty() {
            return there;
        }
        let asked: Vec<BlockKey> = absent.iter().map(|&i| keys[i]).collect();
        let mut unknown = Vec::new();
        for (&i, location) in absent.iter().zip(self.locate(&asked)) {
            match location {
                Location::Tier(_) => there[i] = true,
                Location::Unknown => unknown.push(i),
                Location::Absent => {}
            }
        }
        untold.extend(self.probe_each(keys, &unknown, &mut there));
        there
    }

    /// Finds out by I/O which of some blocks tiers hold. Waits, within bounds. Returns those among `unknown` that a tier did
    /// not answer about and none has.
    pub(crate) fn probe_each(&self, keys: &[BlockKey], unknown: &[usize], there: &mut [bool]) -> Vec<usize> {
        let (sender, receiver) = crossbeam_channel::unbounded();
        let deadline = Instant::now() + LOOKUP_WAIT;
        for &i in unknown {
            for tier in &self.tiers {
                let sender = sender.clone();
                let done = move |count: Result<usize>| {
                    let _ = sender.send((i, count.map(|n| n == 1)));
                };
                tier.probe(vec![keys[i]], deadline, Box::new(done));
            }
        }
        let mut answers = vec![0; keys.len()];
        for _ in 0..unknown.len() * self.tiers.len() {
            match receiver.recv_deadline(deadline) {
                Ok((i, Ok(found))) => {
                    there[i] |= found;
                    answers[i] += 1;
                }
                Ok((_, Err(_))) => {}
                Err(_) => break,
            }
        }
        let untold = |&i: &usize| !there[i] && answers[i] < self.tiers.len();
        unknown.iter().copied().filter(untold).collect()
    }

    /// As [`Self::exist`], for a lookup of one namespace by `owner`.
    pub(crate) fn look_up(&self, owner: Owner, keys: &[BlockKey]) -> Vec<bool> {
        let mut untold = Vec::new();
        let there = self.exist_told(keys, &mut untold);
        if let Some(hit) = there.iter().position(|there| !there) {
            let (key, asked, untold) = (keys[hit], keys.len(), untold.contains(&hit));
            self.lookup_missed(&Unfound { owner, key, namespaces: &[key.namespace], asked, hit, untold });
        }
        there
    }

    /// Returns how many leading blocks exist in all of the namespaces. `owner` is the connection that asks.
    pub(crate) fn prefix(
        &self,
        owner: Owner,
        namespaces: &[NamespaceHandle],
        hashes: &Hashes<'_>,
    ) -> Result<usize> {
        let asked = hashes.count()?;
        let (mut prefix, mut missing) = (asked, None);
        for &namespace in namespaces {
            let keys = self.directory.keys(namespace, hashes.iter().take(prefix))?;
            let in_pool = self.presence.prefix(&keys);
            let (mut in_tiers, mut untold) = (0, false);
            if in_pool < keys.len() && !self.tiers.is_empty() {
                (in_tiers, untold) = self.prefix_with_tiers(&keys[in_pool..]);
            }
            prefix = in_pool + in_tiers;
            missing = keys.get(prefix).map(|&key| (key, untold)).or(missing);
        }
        self.count_lookup(asked * namespaces.len(), prefix * namespaces.len());
        if let Some((key, untold)) = missing {
            let namespaces = self.directory.ids(namespaces.iter().copied());
            self.lookup_missed(&Unfound { owner, key, namespaces: &namespaces, asked, hit: prefix, untold });
        }
        Ok(prefix)
    }

    /// Returns how many leading blocks exist, and whether a tier did not answer about the next one.
    fn prefix_with_tiers(&self, keys: &[BlockKey]) -> (usize, bool) {
        let in_pool = self.in_pool(keys);
        let outside: Vec<usize> = (0..keys.len()).filter(|&i| !in_pool[i]).collect();
        let asked: Vec<BlockKey> = outside.iter().map(|&i| keys[i]).collect();
        let mut locations = self.locate(&asked);
        let untold = self.probe_run(&asked, &mut locations);
        let end = locations.iter().position(|location| !matches!(location, Location::Tier(_)));
        (end.map_or(keys.len(), |end| outside[end]), untold)
    }

    /// Finds out by I/O how long a run of existing blocks is. Waits, within limits. Returns whether a tier did not answer
    /// about the block that ends it.
    pub(crate) fn probe_run(&self, keys: &[BlockKey], locations: &mut [Location]) -> bool {
        let mut probe = RunProbe::new(self.tiers.len());
        while let ProbeStep::Ask { tier, from, end } = probe.next(locations) {
            let unknown = (from..end).filter(|&i| !matches!(locations[i], Location::Tier(_)));
            let asked: Vec<BlockKey> = unknown.map(|i| keys[i]).collect();
            let count = self.ask_tier(&*self.tiers[tier], asked);
            probe.answered(locations, count);
        }
        probe.ends_untold()
    }

    /// Returns how many leading blocks a tier holds; `None` if it does not answer in time.
    fn ask_tier(&self, tier: &dyn Tier, keys: Vec<BlockKey>) -> Option<usize> {
        let (sender, receiver) = crossbeam_channel::bounded(1);
        let (asked, deadline) = (keys.len(), self.probe_deadline());
        let done = move |outcome: Result<usize>| {
            let _ = sender.send(outcome);
        };
        tier.probe(keys, deadline, Box::new(done));
        match receiver.recv_deadline(deadline).unwrap_or_else(|_| Err(timed_out("a tier did not answer"))) {
            Ok(count) => Some(count.min(asked)),
            Err(error) => {
                self.stats.failed("probe", &error);
                None
            }
        }
    }
}

/// Returns the error of a passed deadline.
pub(crate) fn timed_out(what: &str) -> Error {
    Error::new(ErrorKind::Timeout, what.to_owned())
}
