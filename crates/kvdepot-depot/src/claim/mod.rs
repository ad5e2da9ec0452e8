//! Claims: the longest hit of a request, brought into the pool and leased for all ranks before the engine hears of it.
//!
//! A claim is admitted only when all that it needs finds room at once. Others wait in order, so that concurrent hits
//! larger than the pool take turns instead of evicting each other; a hit that can never fit is cut, and said so.

mod admit;
mod resolve;

pub(crate) use admit::admit_queued;
pub(crate) use resolve::resolve;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use hashbrown::HashMap;
use kvdepot_core::eviction::SlotId;
use kvdepot_core::hit::{GroupShape, longest_hit, needed_blocks};
use kvdepot_core::lease::LeaseId;
use kvdepot_core::limits::CLAIMS_PER_CONNECTION_MAX;
use kvdepot_core::{BlockHash, BlockKey, Error, ErrorKind, Result};

use crate::depot::Shared;
use crate::message::{Arriving, NamespaceHandle};
use crate::resolver::{Job, Known};
use crate::state::State;
use crate::stats::Stats;

/// One KV-cache group of a claim.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    pub(crate) namespaces: Vec<NamespaceHandle>,
    pub(crate) shape: GroupShape,
}

/// Where a claim stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// A resolver asks the tiers.
    Probing,
    /// Waits for room.
    Queued,
    /// Fetches are under way.
    Filling,
    /// Final.
    Settled,
}

/// `(group, rank, block)` of a claim.
type Place = (u32, u32, u32);

#[derive(Debug)]
pub(crate) struct Claim {
    owner: u64,
    groups: Vec<Group>,
    hashes: Vec<BlockHash>,
    skip: usize,
    limit: usize,
    phase: Phase,
    known: Known,
    /// Hit aimed at while filling, final once settled; in hash units.
    hit: usize,
    leases: HashMap<Place, (LeaseId, SlotId)>,
    waiting: HashMap<SlotId, Vec<Place>>,
    fetched_blocks: usize,
    /// Blocks of the hit that is aimed at, in all groups and ranks.
    needed_blocks: usize,
    /// Whether the pool was too small for all of it.
    cut: bool,
    polled: Instant,
    deadline: Instant,
}

/// All claims, and those that wait for room, in order.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    map: HashMap<u64, Claim>,
    queue: VecDeque<u64>,
    next: u64,
}

impl Claims {
    pub(crate) fn len(&self) -> usize {
        self.map.len()
    }

    pub(crate) fn queued(&self) -> usize {
        self.queue.len()
    }
}

/// What a poll tells.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Progress {
    pub(crate) settled: bool,
    pub(crate) units: usize,
    pub(crate) units_from_tier: usize,
    pub(crate) arriving: Option<Arriving>,
}

impl Claim {
    fn key(&self, state: &State, group: usize, rank: usize, block: usize) -> Option<BlockKey> {
        let shape = self.groups[group].shape;
        let hash = *self.hashes.get((block + 1) * shape.units_per_block - 1)?;
        let namespace = state.namespaces.get(self.groups[group].namespaces[rank]).ok()?;
        Some(namespace.key(hash))
    }

    fn shapes(&self) -> Vec<GroupShape> {
        self.groups.iter().map(|group| group.shape).collect()
    }

    fn progress(&self) -> Progress {
        let settled = self.phase == Phase::Settled;
        let units = if settled { self.hit } else { self.skip };
        let units_from_tier = self.units_of(self.fetched_blocks, units);
        Progress { settled, units, units_from_tier, arriving: self.arriving() }
    }

    /// How many of the units beyond `skip`, up to `end`, so many blocks make.
    fn units_of(&self, blocks: usize, end: usize) -> usize {
        let per_unit = self.groups.iter().map(|g| g.namespaces.len()).sum::<usize>().max(1);
        (blocks / per_unit).min(end - self.skip)
    }

    /// Nothing once a block of the hit has failed: then only settling tells how long the hit is.
    fn arriving(&self) -> Option<Arriving> {
        let left: usize = self.waiting.values().map(Vec::len).sum();
        if self.phase != Phase::Filling || self.leases.len() + left < self.needed_blocks {
            return None;
        }
        let short = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        Some(Arriving {
            units: short(self.hit),
            units_from_tier: short(self.units_of(self.fetched_blocks + left, self.hit)),
            blocks_come: short(self.fetched_blocks),
            blocks_left: short(left),
        })
    }

    /// Longest hit, when a block counts that is in the pool, on its way into it, or known to be in a tier.
    fn reachable(&self, state: &State, limit: usize) -> usize {
        longest_hit(&self.shapes(), self.skip, limit, &mut |group, block| {
            (0..self.groups[group].namespaces.len()).all(|rank| {
                self.key(state, group, rank, block).is_some_and(|key| {
                    match state.index.get(&key).map(|&id| &state.slot(id).block) {
                        Some(block) => {
                            block.is_readable() || block.phase() == kvdepot_core::block::Phase::Fetching
                        }
                        None => self.known.tier_of(&key).is_some(),
                    }
                })
            })
        })
    }

    /// Every block that a hit needs, front to back, so that a cut loses the end.
    fn needed(&self, hit: usize) -> Vec<Place> {
        let mut places = Vec::new();
        for (group, entry) in self.groups.iter().enumerate() {
            for block in needed_blocks(&entry.shape, self.skip, hit) {
                for rank in 0..entry.namespaces.len() {
                    places.push((group as u32, rank as u32, block as u32));
                }
            }
        }
        places.sort_by_key(|&(group, _, block)| {
            block as usize * self.groups[group as usize].shape.units_per_block
        });
        places
    }
}

/// Opens a claim. It may be settled when this returns.
pub(crate) fn open(
    shared: &Arc<Shared>,
    owner: u64,
    groups: Vec<Group>,
    hashes: Vec<BlockHash>,
    skip: usize,
    limit: usize,
) -> Result<u64> {
    Stats::add(&shared.stats.claims, 1);
    Stats::add(&shared.stats.lookup_blocks, limit - skip);
    let now = Instant::now();
    let mut claim = Claim {
        owner,
        groups,
        hashes,
        skip,
        limit,
        phase: Phase::Probing,
        known: Known::default(),
        hit: skip,
        leases: HashMap::new(),
        waiting: HashMap::new(),
        fetched_blocks: 0,
        needed_blocks: 0,
        cut: false,
        polled: now,
        deadline: shared.config.deadline(),
    };
    let missing = {
        let state = shared.state.lock();
        if state.claims.len() >= CLAIMS_PER_CONNECTION_MAX {
            return Err(Error::new(ErrorKind::Busy, "too many claims are open"));
        }
        for group in &claim.groups {
            for &handle in &group.namespaces {
                state.namespaces.get(handle)?;
            }
        }
        keys_not_in_pool(&claim, &state)
    };
    claim.known = Known::peek(shared, missing.iter().copied());
    let mut state = shared.state.lock();
    let must_ask = resolve::must_ask(&claim, &state);
    let id = state.claims.next;
    state.claims.next += 1;
    state.claims.map.insert(id, claim);
    if must_ask {
        let _ = shared.jobs.send(Job::Claim(id));
    } else {
        admit::admit_or_queue(shared, &mut state, id);
        drop(state);
        shared.kick();
    }
    Ok(id)
}

fn keys_not_in_pool(claim: &Claim, state: &State) -> Vec<BlockKey> {
    claim
        .needed_everywhere()
        .filter_map(|(group, rank, block)| claim.key(state, group as usize, rank as usize, block as usize))
        .filter(|key| !state.index.contains_key(key))
        .collect()
}

impl Claim {
    /// Every block of every group up to the limit.
    fn needed_everywhere(&self) -> impl Iterator<Item = Place> + '_ {
        self.groups.iter().enumerate().flat_map(move |(group, entry)| {
            let units = entry.shape.units_per_block;
            (self.skip / units..self.limit / units).flat_map(move |block| {
                (0..entry.namespaces.len()).map(move |rank| (group as u32, rank as u32, block as u32))
            })
        })
    }
}

/// A fetch that claims wait for has ended.
pub(crate) fn fetch_ended(shared: &Shared, state: &mut State, slot: SlotId, waiters: Vec<u64>, ok: bool) {
    // A namespace may have been reset while its blocks were on their way.
    let ok = ok && state.slot(slot).block.is_readable();
    let mut claims: Vec<(u64, Claim)> =
        waiters.into_iter().filter_map(|id| Some((id, state.claims.map.remove(&id)?))).collect();
    // All have their leases before any of them settles: one that gives its lease back may free the slot (P4).
    for (_, claim) in &mut claims {
        for place in claim.waiting.remove(&slot).unwrap_or_default() {
            if ok && claim.phase == Phase::Filling {
                match state.lease(claim.owner, slot) {
                    Ok(lease) => {
                        claim.leases.insert(place, (lease, slot));
                        claim.fetched_blocks += 1;
                    }
                    Err(error) => shared.stats.failed("claim", &error),
                }
            }
        }
    }
    for (id, mut claim) in claims {
        if claim.waiting.is_empty() && claim.phase == Phase::Filling {
            settle(state, &mut claim);
        }
        state.claims.map.insert(id, claim);
    }
}

/// Final: the longest hit whose blocks are all leased; other leases end.
fn settle(state: &mut State, claim: &mut Claim) {
    claim.phase = Phase::Settled;
    claim.waiting.clear();
    let leases = &claim.leases;
    let groups = &claim.groups;
    claim.hit = longest_hit(&claim.shapes(), claim.skip, claim.hit, &mut |group, block| {
        (0..groups[group].namespaces.len())
            .all(|rank| leases.contains_key(&(group as u32, rank as u32, block as u32)))
    });
    let keep: hashbrown::HashSet<Place> = claim.needed(claim.hit).into_iter().collect();
    let over: Vec<(LeaseId, SlotId)> =
        claim.leases.extract_if(|place, _| !keep.contains(place)).map(|(_, l)| l).collect();
    end_leases(state, claim.owner, over);
}

fn end_leases(state: &mut State, owner: u64, leases: impl IntoIterator<Item = (LeaseId, SlotId)>) {
    for (lease, slot) in leases {
        // An owner that ended has no leases any more: they were all given back then.
        if state.leases.release(owner, lease).is_ok() {
            state.lease_ended(slot);
        }
    }
}

/// Whether tiers are being asked about the claim's blocks.
pub(crate) fn is_probing(state: &State, id: u64) -> bool {
    state.claims.map.get(&id).is_some_and(|claim| claim.phase == Phase::Probing)
}

/// How far a claim is. `settle_now` takes what has come.
pub(crate) fn poll(state: &mut State, owner: u64, id: u64, settle_now: bool) -> Result<Progress> {
    let mut claim = take(state, owner, id)?;
    claim.polled = Instant::now();
    if settle_now && claim.phase != Phase::Settled {
        settle(state, &mut claim);
    }
    let progress = claim.progress();
    state.claims.map.insert(id, claim);
    Ok(progress)
}

/// Ends a claim and its leases.
pub(crate) fn release(state: &mut State, owner: u64, id: u64) -> Result<()> {
    let claim = take(state, owner, id)?;
    end_leases(state, owner, claim.leases.into_values());
    Ok(())
}

fn take(state: &mut State, owner: u64, id: u64) -> Result<Claim> {
    match state.claims.map.remove(&id) {
        Some(claim) if claim.owner == owner => Ok(claim),
        other => {
            if let Some(claim) = other {
                state.claims.map.insert(id, claim);
            }
            Err(Error::new(ErrorKind::NotFound, "no such claim on this connection").with("claim", id))
        }
    }
}

/// Forgets the claims of an owner that ended; its leases end with the owner.
pub(crate) fn end_owner(state: &mut State, owner: u64) {
    state.claims.map.retain(|_, claim| claim.owner != owner);
}

/// Ends claims that nobody polls, and settles those whose time is over (P2, P4).
pub(crate) fn expire(shared: &Arc<Shared>, state: &mut State, now: Instant) {
    let patience = std::time::Duration::from_millis(shared.config.timeout_ms);
    let late: Vec<(u64, u64, bool)> = state
        .claims
        .map
        .iter()
        .filter_map(|(&id, claim)| {
            let forgotten = now.saturating_duration_since(claim.polled) > patience;
            let overdue = claim.phase != Phase::Settled && now > claim.deadline;
            (forgotten || overdue).then_some((id, claim.owner, forgotten))
        })
        .collect();
    for (id, owner, forgotten) in late {
        if forgotten {
            Stats::add(&shared.stats.claims_expired, 1);
            let _ = release(state, owner, id);
        } else if let Some(mut claim) = state.claims.map.remove(&id) {
            settle(state, &mut claim);
            state.claims.map.insert(id, claim);
        }
    }
    admit_queued(shared, state);
}
