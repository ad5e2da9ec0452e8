//! The levels of one node in a replay: its pool and the tiers below it, with the depot's placement.

use std::cell::RefCell;
use std::rc::Rc;

use hashbrown::HashMap;

use super::level::{Level, LevelReport};
use super::servers::{Servers, Unreachable};
use super::simulated::SimulatedCache;
use crate::error::Result;
use crate::machine::Nanos;
use crate::machine::budget::Budgets;
use crate::machine::placement::{Placement, Placements};
use crate::machine::tiers::{TierMask, bit};

/// Where a level keeps its blocks.
pub(super) enum Store {
    /// In memory or on a disk of this node.
    Own(SimulatedCache),
    /// On the pool servers that all nodes share.
    Shared(Rc<RefCell<Servers>>),
    /// Nowhere: a pool that keeps nothing.
    Nowhere,
}

impl Store {
    /// Makes an empty store of this node.
    pub(super) fn own(level: &Level) -> Result<Self> {
        Ok(Self::Own(SimulatedCache::new(&level.policy, level.capacity)?))
    }

    /// Makes an empty pool of this node.
    pub(super) fn pool(level: &Level) -> Result<Self> {
        if level.capacity == 0 { Ok(Self::Nowhere) } else { Self::own(level) }
    }

    fn begin_request(&mut self) {
        match self {
            Self::Own(cache) => cache.begin_request(),
            Self::Shared(servers) => servers.borrow_mut().begin_request(),
            Self::Nowhere => {}
        }
    }

    fn contains(&self, block: u64) -> bool {
        match self {
            Self::Own(cache) => cache.contains(block),
            Self::Shared(servers) => servers.borrow().contains(block),
            Self::Nowhere => false,
        }
    }

    fn touch(&mut self, block: u64) -> bool {
        match self {
            Self::Own(cache) => cache.touch(block),
            Self::Shared(servers) => servers.borrow_mut().touch(block),
            Self::Nowhere => false,
        }
    }

    /// Stores a block that is not present. Returns the block that was evicted for it; `Err` if it could not be stored.
    fn insert(&mut self, block: u64) -> std::result::Result<Option<u64>, Unreachable> {
        match self {
            Self::Own(cache) => Ok(cache.insert(block)),
            Self::Shared(servers) => servers.borrow_mut().insert(block),
            Self::Nowhere => Ok(None),
        }
    }
}

/// The levels of one node.
pub(super) struct Levels {
    stores: Vec<Store>,
    reports: Vec<LevelReport>,
    placements: Placements,
    budgets: Budgets,
    /// Tiers that should have got a block of the pool when it was stored, and were out of budget.
    refused: HashMap<u64, TierMask>,
    now: Nanos,
}

impl Levels {
    /// Makes a node of these stores, the pool first.
    pub(super) fn new(stores: Vec<Store>, levels: &[Level]) -> Self {
        let tiers: Vec<Placement> = levels[1..].iter().map(|level| level.placement).collect();
        let reports = vec![LevelReport::default(); stores.len()];
        let budgets: Vec<u64> = levels[1..].iter().map(|level| level.writes_per_day).collect();
        let keeps = !matches!(stores.first(), Some(Store::Nowhere));
        Self {
            stores,
            reports,
            placements: Placements::new(&tiers, keeps),
            // A block counts as a byte.
            budgets: Budgets::new(&budgets),
            refused: HashMap::new(),
            now: 0,
        }
    }

    pub(super) fn reports(&self) -> &[LevelReport] {
        &self.reports
    }

    /// Replaces a level's store, for example by an empty one.
    pub(super) fn replace(&mut self, level: usize, store: Store) {
        self.stores[level] = store;
    }

    /// Removes the blocks of a past epoch from the stores of this node.
    pub(super) fn remove(&mut self, is_past: &impl Fn(u64) -> bool) {
        for store in &mut self.stores {
            if let Store::Own(cache) = store {
                cache.remove(is_past);
            }
        }
        self.refused.retain(|&block, _| !is_past(block));
    }

    /// Returns how many leading blocks the stores of this node have.
    pub(super) fn own_prefix(&self, blocks: &[u64]) -> usize {
        let own = |block: &u64| {
            self.stores.iter().any(|store| matches!(store, Store::Own(cache) if cache.contains(*block)))
        };
        blocks.iter().take_while(|block| own(block)).count()
    }

    /// Returns the nearest level that has the block.
    fn find(&self, block: u64) -> Option<usize> {
        self.stores.iter().position(|store| store.contains(block))
    }

    fn insert(&mut self, level: usize, block: u64) -> Option<u64> {
        if level > 0 && !self.budgets.spend(level - 1, self.now, 1, false) {
            self.reports[level].over_budget += 1;
            if !matches!(self.stores[0], Store::Nowhere) {
                *self.refused.entry(block).or_default() |= bit(level - 1);
            }
            return None;
        }
        let Ok(evicted) = self.stores[level].insert(block) else {
            if level > 0 {
                self.budgets.refund(level - 1, 1);
            }
            return None;
        };
        self.reports[level].written += 1;
        self.reports[level].evicted += u64::from(evicted.is_some());
        if let Some(evicted) = evicted.filter(|_| level > 0) {
            self.demote(level, evicted);
        }
        evicted
    }

    /// Stores what a tier has evicted in the next one that gets such blocks.
    fn demote(&mut self, level: usize, evicted: u64) {
        let to = self.placements.demotes_to(level - 1).map(|tier| tier + 1);
        if let Some(to) = to.filter(|&to| !self.stores[to].contains(evicted)) {
            self.insert(to, evicted);
        }
    }

    /// Uses the block in the tiers that have it, and stores it in those of `mask` that do not.
    fn tiers(&mut self, block: u64, mask: TierMask) {
        for level in 1..self.stores.len() {
            if !self.stores[level].touch(block) && mask & bit(level - 1) != 0 {
                self.insert(level, block);
            }
        }
    }

    fn store_in_pool(&mut self, block: u64) {
        if matches!(self.stores[0], Store::Nowhere) {
            return;
        }
        let Some(evicted) = self.insert(0, block) else { return };
        for level in 1..self.stores.len() {
            if self.placements.cold & bit(level - 1) != 0 && !self.stores[level].contains(evicted) {
                self.insert(level, evicted);
            }
        }
        self.refused.remove(&evicted);
    }

    /// Serves a request: uses the blocks of its hit, and stores the others.
    pub(super) fn request(&mut self, timestamp_ms: u64, blocks: &[u64]) {
        self.now = self.now.max(timestamp_ms.saturating_mul(1_000_000));
        self.stores.iter_mut().for_each(Store::begin_request);
        let mut hits = 0;
        while let Some(level) = blocks.get(hits).and_then(|&block| self.find(block)) {
            self.reports[level].hits += 1;
            hits += 1;
        }
        for (index, &block) in blocks.iter().enumerate() {
            if self.stores[0].contains(block) {
                // Beyond the end of the hit it is not a use: a dump of a stored block changes nothing.
                if index < hits && self.stores[0].touch(block) {
                    let again = self.refused.remove(&block).unwrap_or(0) & self.placements.through;
                    self.tiers(block, self.placements.second_use | again);
                }
            } else if let Some(level) = self.find(block).filter(|_| index < hits) {
                // A load from tier `level - 1`: the tiers above it that promote get the block.
                self.tiers(block, self.placements.promote & (bit(level - 1) - 1));
                self.store_in_pool(block);
            } else {
                self.tiers(block, self.placements.through);
                self.store_in_pool(block);
            }
        }
    }
}
