//! Finds out where a block is. Lookups, claims, loads, values and the wire door all use it: the pool's presence index
//! first, then the tiers in order, without I/O if they can tell and by a probe if they cannot. None of it takes the
//! machine's lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvdepot_core::machine::probe::{PROBE_KEYS_MAX, ProbeStep, RunProbe};
use kvdepot_core::machine::{Location, NamespaceHandle, Owner, Settled, TierIndex, TierSet};
use kvdepot_core::{BlockKey, Error, ErrorKind, Result};
use kvdepot_tier::{Presence as InTier, Tier};
use smallvec::SmallVec;

use crate::directory::{Directory, Run};
use crate::events::Events;
use crate::hops::Flows;
use crate::message::Hashes;
use crate::misses::{Misses, Unfound};
use crate::presence::Presence;
use crate::stats::Stats;
use crate::usage::Tally;

/// Longest wait of a lookup for tiers that cannot tell without I/O.
const LOOKUP_WAIT: Duration = Duration::from_secs(2);

/// Longest wait for one probe: if a shared file system takes longer, it is a miss this time.
const PROBE_WAIT: Duration = Duration::from_secs(2);

/// The leading blocks of some that exist.
struct PrefixFound {
    prefix: usize,
    /// Those that are not in the pool, and their tiers.
    tiers: Vec<(usize, TierIndex)>,
    /// Whether a tier did not answer about the next block.
    untold: bool,
}

/// What tiers answered about blocks that only I/O can tell of.
pub(crate) struct Probed {
    /// For each of the blocks, the first tier that has it.
    pub(crate) tiers: Vec<Option<TierIndex>>,
    /// Those that a tier did not answer about and none has.
    pub(crate) untold: Vec<usize>,
}

/// The data that lookups use.
#[derive(Debug)]
pub(crate) struct Locator {
    pub(crate) tiers: Vec<Arc<dyn Tier>>,
    pub(crate) presence: Presence,
    pub(crate) directory: Directory,
    pub(crate) stats: Stats,
    pub(crate) events: Events,
    pub(crate) misses: Misses,
    pub(crate) flows: Flows,
    timeout: Duration,
    /// Blocks that lookups found in each tier.
    tier_hits: Vec<AtomicU64>,
}

/// What a lookup of single blocks found.
struct Found {
    there: Vec<bool>,
    runs: SmallVec<[Run; 1]>,
    in_tiers: InTiers,
}

impl Found {
    fn add(&mut self, block: usize, tier: TierIndex) {
        self.there[block] = true;
        self.in_tiers.add(tier);
    }
}

/// How many blocks a lookup found in each tier.
#[derive(Default)]
struct InTiers(SmallVec<[usize; 4]>);

impl InTiers {
    fn add(&mut self, tier: TierIndex) {
        if self.0.len() <= tier {
            self.0.resize(tier + 1, 0);
        }
        self.0[tier] += 1;
    }
}

impl Locator {
    pub(crate) fn new(tiers: Vec<Arc<dyn Tier>>, timeout: Duration, blocks_remembered: usize) -> Self {
        let (presence, directory, stats) = (Presence::new(), Directory::default(), Stats::default());
        let misses = Misses::new(blocks_remembered);
        let events = Events::new(tiers.len());
        let tier_hits = tiers.iter().map(|_| AtomicU64::new(0)).collect();
        let flows = Flows::default();
        Self { tiers, presence, directory, stats, events, misses, flows, timeout, tier_hits }
    }

    /// Returns how many blocks lookups found in a tier. Those of claims are not among them.
    pub(crate) fn tier_hits(&self, tier: TierIndex) -> u64 {
        self.tier_hits[tier].load(Ordering::Relaxed)
    }

    /// Returns the deadline of a tier's answer to a probe: a tier that hangs must leave the others their time (P2).
    pub(crate) fn probe_deadline(&self) -> Instant {
        Instant::now() + PROBE_WAIT.min(self.timeout / (self.tiers.len() as u32 + 1))
    }

    /// Returns which tier holds each block, as far as that is known without I/O.
    pub(crate) fn locate(&self, keys: &[BlockKey]) -> Vec<Location> {
        self.locate_among(keys, TierSet::ALL)
    }

    /// As [`Self::locate`], of these tiers. The others are not asked.
    pub(crate) fn locate_among(&self, keys: &[BlockKey], among: TierSet) -> Vec<Location> {
        let mut locations = Vec::with_capacity(keys.len());
        // In pieces: a tier answers a batch under its own lock.
        for keys in keys.chunks(PROBE_KEYS_MAX) {
            locations.extend(self.locate_some(keys, among));
        }
        locations
    }

    fn locate_some(&self, keys: &[BlockKey], among: TierSet) -> Vec<Location> {
        let mut locations = vec![Location::Absent; keys.len()];
        let mut open: Vec<usize> = (0..keys.len()).collect();
        let (mut asked, mut answers) = (Vec::new(), Vec::new());
        for (index, tier) in self.tiers.iter().enumerate().filter(|&(index, _)| among.has(index)) {
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

    /// Returns which of these blocks are in the pool, ready to be read. `runs` are those of the keys.
    fn in_pool(&self, keys: &[BlockKey], runs: &[Run]) -> Vec<bool> {
        let current = runs.iter().flat_map(|run| std::iter::repeat_n(run.tally.is_some(), run.keys));
        current.zip(self.presence.contain(keys)).map(|(current, in_pool)| current && in_pool).collect()
    }

    /// Returns which blocks exist, if that is known without waiting for all of them; otherwise `None`.
    pub(crate) fn exist_now(&self, keys: &[BlockKey]) -> Option<Vec<bool>> {
        let mut found = self.found_in_pool(keys);
        if self.tiers.is_empty() || found.there.iter().all(|there| *there) {
            return Some(self.counted(found));
        }
        let absent: Vec<usize> = (0..keys.len()).filter(|&i| !found.there[i]).collect();
        let asked: Vec<BlockKey> = absent.iter().map(|&i| keys[i]).collect();
        for (&i, location) in absent.iter().zip(self.locate(&asked)) {
            match location {
                Location::Tier(tier) => found.add(i, tier),
                // Whoever asks for all of it counts then.
                Location::Unknown => return None,
                Location::Absent => {}
            }
        }
        Some(self.counted(found))
    }

    fn found_in_pool(&self, keys: &[BlockKey]) -> Found {
        let runs = self.directory.runs(keys);
        Found { there: self.in_pool(keys, &runs), runs, in_tiers: InTiers::default() }
    }

    /// Counts a lookup of single blocks. Returns which of them exist.
    fn counted(&self, found: Found) -> Vec<bool> {
        let Found { there, runs, in_tiers } = found;
        let (mut rest, mut hits) = (there.as_slice(), 0);
        for run in runs {
            let (of_run, others) = rest.split_at(run.keys);
            let hit = of_run.iter().filter(|there| **there).count();
            if let Some(tally) = run.tally {
                tally.looked_up(run.keys, hit);
            }
            (rest, hits) = (others, hits + hit);
        }
        self.count_lookup(there.len(), hits, &in_tiers);
        there
    }

    fn count_lookup(&self, asked: usize, found: usize, in_tiers: &InTiers) {
        Stats::add(&self.stats.lookup_blocks, asked);
        Stats::add(&self.stats.lookup_hit_blocks, found);
        for (counter, &found) in self.tier_hits.iter().zip(&in_tiers.0) {
            Stats::add(counter, found);
        }
    }

    /// Counts a claim whose hit is final.
    pub(crate) fn claim_settled(&self, settled: &Settled) {
        let Settled { namespaces, asked, hit, admitted_after, took } = settled;
        self.directory.count_claim(namespaces, *asked, *hit);
        self.flows.claims.took(Duration::from_nanos(*took));
        admitted_after.iter().for_each(|&after| self.flows.admissions.took(Duration::from_nanos(after)));
    }

    /// Returns which blocks exist. Waits for tiers that cannot tell without I/O, within limits and no longer than `by`.
    pub(crate) fn exist(&self, keys: &[BlockKey], by: Option<Instant>) -> Vec<bool> {
        self.exist_told(keys, &mut Vec::new(), by)
    }

    /// As [`Self::exist`]. `untold` gets the blocks that a tier did not answer about and none has.
    fn exist_told(&self, keys: &[BlockKey], untold: &mut Vec<usize>, by: Option<Instant>) -> Vec<bool> {
        let found = self.find_each(keys, untold, by);
        self.counted(found)
    }

    fn find_each(&self, keys: &[BlockKey], untold: &mut Vec<usize>, by: Option<Instant>) -> Found {
        let mut found = self.found_in_pool(keys);
        let absent: Vec<usize> = (0..keys.len()).filter(|&i| !found.there[i]).collect();
        if absent.is_empty() || self.tiers.is_empty() {
            return found;
        }
        let asked: Vec<BlockKey> = absent.iter().map(|&i| keys[i]).collect();
        let mut unknown = Vec::new();
        for (&i, location) in absent.iter().zip(self.locate(&asked)) {
            match location {
                Location::Tier(tier) => found.add(i, tier),
                Location::Unknown => unknown.push(i),
                Location::Absent => {}
            }
        }
        let probed = self.probe_each(keys, &unknown, by);
        for (&i, tier) in unknown.iter().zip(probed.tiers) {
            if let Some(tier) = tier {
                found.add(i, tier);
            }
        }
        untold.extend(probed.untold);
        found
    }

    /// Finds out by I/O which tier holds each of some blocks. Waits, within bounds and no longer than `by`.
    pub(crate) fn probe_each(&self, keys: &[BlockKey], unknown: &[usize], by: Option<Instant>) -> Probed {
        let (sender, receiver) = crossbeam_channel::unbounded();
        let deadline = no_later(Instant::now() + LOOKUP_WAIT, by);
        for (at, &i) in unknown.iter().enumerate() {
            for (index, tier) in self.tiers.iter().enumerate() {
                let sender = sender.clone();
                let done = move |count: Result<usize>| {
                    let _ = sender.send((at, index, count.map(|n| n == 1)));
                };
                tier.probe(vec![keys[i]], deadline, Box::new(done));
            }
        }
        let mut tiers: Vec<Option<TierIndex>> = vec![None; unknown.len()];
        let mut answers = vec![0; unknown.len()];
        for _ in 0..unknown.len() * self.tiers.len() {
            match receiver.recv_deadline(deadline) {
                Ok((at, tier, Ok(found))) => {
                    if found {
                        // The one that a load asks first.
                        tiers[at] = Some(tiers[at].map_or(tier, |other| other.min(tier)));
                    }
                    answers[at] += 1;
                }
                Ok((.., Err(_))) => {}
                Err(_) => break,
            }
        }
        let is_untold = |&at: &usize| tiers[at].is_none() && answers[at] < self.tiers.len();
        let untold = (0..unknown.len()).filter(is_untold).map(|at| unknown[at]).collect();
        Probed { tiers, untold }
    }

    /// As [`Self::exist`], for a lookup of one namespace by `owner`.
    pub(crate) fn look_up(&self, owner: Owner, keys: &[BlockKey]) -> Vec<bool> {
        let mut untold = Vec::new();
        let there = self.exist_told(keys, &mut untold, None);
        if let Some(hit) = there.iter().position(|there| !there) {
            let (key, asked, untold) = (keys[hit], keys.len(), untold.contains(&hit));
            self.lookup_missed(&Unfound { owner, key, namespaces: &[key.namespace], asked, hit, untold });
        }
        there
    }

    /// Returns how many leading blocks exist in all of the namespaces. `owner` is the connection that asks. Waits no longer
    /// than `by`.
    pub(crate) fn prefix(
        &self,
        owner: Owner,
        namespaces: &[NamespaceHandle],
        hashes: &Hashes<'_>,
        by: Option<Instant>,
    ) -> Result<usize> {
        let asked = hashes.count()?;
        let (mut prefix, mut missing) = (asked, None);
        let mut tiers_of = Vec::new();
        let mut tallies: SmallVec<[Arc<Tally>; 1]> = SmallVec::with_capacity(namespaces.len());
        for &namespace in namespaces {
            let (namespace, tally) = self.directory.counted(namespace)?;
            tallies.push(tally);
            let keys: Vec<_> = hashes.iter().take(prefix).map(|hash| BlockKey { namespace, hash }).collect();
            let in_pool = self.presence.prefix(&keys);
            let (mut in_tiers, mut untold) = (0, false);
            if in_pool < keys.len() && !self.tiers.is_empty() {
                let found = self.prefix_with_tiers(&keys[in_pool..], by);
                (in_tiers, untold) = (found.prefix, found.untold);
                tiers_of.extend(found.tiers.into_iter().map(|(i, tier)| (in_pool + i, tier)));
            }
            prefix = in_pool + in_tiers;
            missing = keys.get(prefix).map(|&key| (key, untold)).or(missing);
        }
        let mut in_tiers = InTiers::default();
        tiers_of.into_iter().filter(|&(i, _)| i < prefix).for_each(|(_, tier)| in_tiers.add(tier));
        self.count_lookup(asked * namespaces.len(), prefix * namespaces.len(), &in_tiers);
        tallies.iter().for_each(|tally| tally.looked_up(asked, prefix));
        if let Some((key, untold)) = missing {
            let namespaces = self.directory.ids(namespaces.iter().copied());
            self.lookup_missed(&Unfound { owner, key, namespaces: &namespaces, asked, hit: prefix, untold });
        }
        Ok(prefix)
    }

    /// Returns how many leading blocks exist.
    fn prefix_with_tiers(&self, keys: &[BlockKey], by: Option<Instant>) -> PrefixFound {
        let in_pool = self.in_pool(keys, &self.directory.runs(keys));
        let outside: Vec<usize> = (0..keys.len()).filter(|&i| !in_pool[i]).collect();
        let asked: Vec<BlockKey> = outside.iter().map(|&i| keys[i]).collect();
        let mut locations = self.locate(&asked);
        let untold = self.probe_run(&asked, &mut locations, by);
        let end = locations.iter().position(|location| !matches!(location, Location::Tier(_)));
        let tier_of = |(&i, location): (&usize, &Location)| match location {
            Location::Tier(tier) => Some((i, *tier)),
            Location::Absent | Location::Unknown => None,
        };
        let tiers =
            outside.iter().zip(&locations).take(end.unwrap_or(usize::MAX)).filter_map(tier_of).collect();
        PrefixFound { prefix: end.map_or(keys.len(), |end| outside[end]), tiers, untold }
    }

    /// Finds out by I/O how long a run of existing blocks is. Waits, within limits and no longer than `by`. Returns whether a
    /// tier did not answer about the block that ends it.
    pub(crate) fn probe_run(
        &self,
        keys: &[BlockKey],
        locations: &mut [Location],
        by: Option<Instant>,
    ) -> bool {
        let mut probe = RunProbe::new(self.tiers.len(), TierSet::ALL);
        while let ProbeStep::Ask { tier, from, end } = probe.next(locations) {
            let unknown = (from..end).filter(|&i| !matches!(locations[i], Location::Tier(_)));
            let asked: Vec<BlockKey> = unknown.map(|i| keys[i]).collect();
            let count = self.ask_tier(&*self.tiers[tier], asked, by);
            probe.answered(locations, count);
        }
        probe.ends_untold()
    }

    /// Returns how many leading blocks a tier holds; `None` if it does not answer in time.
    fn ask_tier(&self, tier: &dyn Tier, keys: Vec<BlockKey>, by: Option<Instant>) -> Option<usize> {
        let (sender, receiver) = crossbeam_channel::bounded(1);
        let (asked, deadline) = (keys.len(), no_later(self.probe_deadline(), by));
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

fn no_later(deadline: Instant, by: Option<Instant>) -> Instant {
    by.map_or(deadline, |by| deadline.min(by))
}

/// Returns the error of a passed deadline.
pub(crate) fn timed_out(what: &str) -> Error {
    Error::new(ErrorKind::Timeout, what.to_owned())
}
