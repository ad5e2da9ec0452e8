//! Clients: the slots that they hold and fill.

use kvdepot_core::machine::{ClaimId, NamespaceHandle, Nanos, Owner};
use kvdepot_core::runs::Runs;
use kvdepot_core::{BlockHash, BlockKey, LeaseId};

use crate::specs;

/// Leases of a client of the old depot have no number at the new one.
pub(crate) const NO_LEASE: LeaseId = LeaseId(u64::MAX);
/// A number that no namespace has.
pub(crate) const NO_HANDLE: NamespaceHandle = NamespaceHandle::MAX;

/// The hold on the pool for clients of a crashed depot.
#[derive(Debug)]
pub(crate) struct Hold {
    /// Owner of the leases.
    pub(crate) owner: Owner,
    /// Clients that may still copy.
    pub(crate) clients: Vec<Owner>,
}

/// A slot that a client is filling.
#[derive(Clone, Debug)]
pub(crate) struct Fill {
    pub(crate) lease: LeaseId,
    pub(crate) runs: Runs,
    pub(crate) key: BlockKey,
    pub(crate) version: usize,
    /// Shards that are in the slot and committed.
    pub(crate) committed: Vec<bool>,
    pub(crate) value: bool,
}

/// A slot that a client is reading.
#[derive(Clone, Debug)]
pub(crate) struct Reading {
    pub(crate) lease: LeaseId,
    pub(crate) runs: Runs,
    pub(crate) key: BlockKey,
    pub(crate) tags: Vec<u64>,
}

/// One group of a claim.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClaimedGroup {
    /// Index into [`specs::GROUPS`].
    pub(crate) ranks: usize,
    pub(crate) window: usize,
    pub(crate) units: usize,
}

/// The request of a claim.
#[derive(Clone, Debug)]
pub(crate) struct Wish {
    pub(crate) groups: Vec<ClaimedGroup>,
    pub(crate) hashes: Vec<BlockHash>,
    pub(crate) skip: usize,
    pub(crate) limit: usize,
    pub(crate) tiers: kvdepot_core::machine::TierSet,
    /// Namespaces that the keys of each group and rank carried when it was opened.
    pub(crate) spaces: Vec<Vec<kvdepot_core::NamespaceId>>,
    pub(crate) opened_at: usize,
    pub(crate) opened: Nanos,
    /// Time by which it settles.
    pub(crate) deadline: Nanos,
    pub(crate) patience: Nanos,
}

impl Wish {
    /// Returns the blocks that a hit needs by definition: with full attention all that the engine does not have, with a
    /// window those that it looks back to.
    pub(crate) fn needed(&self, hit: usize) -> Vec<BlockKey> {
        let mut keys = Vec::new();
        if hit <= self.skip {
            return keys;
        }
        for (number, group) in self.groups.iter().enumerate() {
            let (first, end) = (self.skip / group.units, hit / group.units);
            for block in first..end {
                if group.window > 0 && block + group.window < end {
                    continue;
                }
                let hash = self.hashes[block * group.units + group.units - 1];
                keys.extend(self.spaces[number].iter().map(|&namespace| BlockKey { namespace, hash }));
            }
        }
        keys
    }

    /// Returns the blocks that any hit may need.
    pub(crate) fn needed_all(&self) -> Vec<BlockKey> {
        let mut keys: Vec<BlockKey> = (self.skip + 1..=self.limit).flat_map(|hit| self.needed(hit)).collect();
        keys.sort_unstable();
        keys.dedup();
        keys
    }

    /// Returns the longest hit of the blocks that are present.
    pub(crate) fn hit(&self, there: impl Fn(&BlockKey) -> bool) -> usize {
        let whole = |hit: usize| self.groups.iter().all(|group| hit.is_multiple_of(group.units));
        let fits = |hit: &usize| whole(*hit) && self.needed(*hit).iter().all(&there);
        (self.skip + 1..=self.limit).rev().find(fits).unwrap_or(self.skip)
    }

    /// Returns the namespaces of all ranks, as indexes into the world's list.
    pub(crate) fn ranks(&self) -> Vec<usize> {
        let mut ranks: Vec<usize> =
            self.groups.iter().flat_map(|group| specs::GROUPS[group.ranks]).copied().collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// Returns the number of pages of a hit.
    pub(crate) fn pages(&self, hit: usize) -> usize {
        let mut pages = 0;
        for (number, group) in self.groups.iter().enumerate() {
            let one =
                Self { groups: vec![*group], spaces: vec![self.spaces[number].clone()], ..self.clone() };
            let each: usize = specs::GROUPS[group.ranks]
                .iter()
                .map(|&space| specs::all()[space].layout().shard_count())
                .sum();
            pages += one.needed(hit).len() / self.spaces[number].len() * each;
        }
        pages
    }
}

/// A claim that a client knows.
#[derive(Clone, Debug)]
pub(crate) struct Claimed {
    pub(crate) id: ClaimId,
    pub(crate) wish: Wish,
    pub(crate) settled: Option<usize>,
    pub(crate) polled: Nanos,
}

/// A client: an owner of leases.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    pub(crate) owner: Owner,
    /// False once it was killed; its copies may continue until the depot learns of its end.
    pub(crate) alive: bool,
    pub(crate) fills: Vec<Fill>,
    pub(crate) readings: Vec<Reading>,
    pub(crate) claims: Vec<Claimed>,
    /// Namespaces that it has opened, as indexes into the world's list.
    pub(crate) uses: std::collections::BTreeSet<usize>,
    /// Its preferred region, as far as the depot was told.
    pub(crate) near: Option<kvdepot_core::RegionIndex>,
}

impl Client {
    pub(crate) const fn new(owner: Owner) -> Self {
        Self {
            owner,
            alive: true,
            fills: Vec::new(),
            readings: Vec::new(),
            claims: Vec::new(),
            uses: std::collections::BTreeSet::new(),
            near: None,
        }
    }
}
