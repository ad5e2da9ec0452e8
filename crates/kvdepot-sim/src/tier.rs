//! A simulated tier: its stored blocks, and its faults.

use std::collections::{BTreeMap, BTreeSet};

use kvdepot_core::machine::{Fetched, Location, Stored};
use kvdepot_core::{BlockKey, Error, ErrorKind, NamespaceId, Result};

use crate::plan::TierShape;
use crate::rng::Rng;

/// A block in a tier.
#[derive(Clone, Debug)]
struct Held {
    tags: Vec<u64>,
    /// Whether the tier knows without I/O that it has the block.
    known: bool,
    corrupt: bool,
}

/// What a tier knows about a block without I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Presence {
    Present,
    Absent,
    Unknown,
}

/// Outcome of a write or a removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Luck {
    Good,
    /// It fails without effect.
    Fails,
    /// It fails, but took effect: the answer was lost.
    FailsStored,
    Busy,
}

/// One tier. It outlives the depot.
#[derive(Debug)]
pub(crate) struct SimTier {
    shape: TierShape,
    blocks: BTreeMap<BlockKey, Held>,
    used_pages: usize,
    /// Keys whose removal has begun but not completed.
    leaving: BTreeSet<BlockKey>,
    epochs: BTreeMap<NamespaceId, u32>,
    /// Nothing can be stored, not even an epoch.
    pub(crate) full: bool,
    /// The mistake: an epoch that cannot be stored is acknowledged.
    pub(crate) loses_epochs: bool,
    /// Number of writes that it has stored.
    pub(crate) stored: u64,
}

impl SimTier {
    pub(crate) const fn new(shape: TierShape) -> Self {
        Self {
            shape,
            blocks: BTreeMap::new(),
            used_pages: 0,
            leaving: BTreeSet::new(),
            epochs: BTreeMap::new(),
            full: false,
            loses_epochs: false,
            stored: 0,
        }
    }

    pub(crate) fn peek(&self, key: &BlockKey) -> Presence {
        match self.blocks.get(key) {
            _ if self.leaving.contains(key) => Presence::Absent,
            Some(held) if held.known => Presence::Present,
            _ if self.shape.shy => Presence::Unknown,
            Some(_) => Presence::Present,
            None => Presence::Absent,
        }
    }

    /// Returns whether a read of the block would succeed.
    pub(crate) fn holds(&self, key: &BlockKey) -> bool {
        !self.leaving.contains(key) && self.blocks.get(key).is_some_and(|held| !held.corrupt)
    }

    /// Returns whether a read would find the block damaged.
    pub(crate) fn is_damaged(&self, key: &BlockKey) -> bool {
        self.blocks.get(key).is_some_and(|held| held.corrupt)
    }

    /// Returns the content of a block that is present and not damaged.
    pub(crate) fn content(&self, key: &BlockKey) -> Option<Vec<u64>> {
        self.holds(key).then(|| self.blocks[key].tags.clone())
    }

    /// Returns the content of every durable block, without damaged ones.
    pub(crate) fn kept(&self) -> impl Iterator<Item = (&BlockKey, &[u64])> {
        self.blocks.iter().filter(|(_, held)| !held.corrupt).map(|(key, held)| (key, &held.tags[..]))
    }

    /// Returns the durable content under a key.
    pub(crate) fn kept_under(&self, key: &BlockKey) -> Option<&[u64]> {
        self.blocks.get(key).filter(|held| !held.corrupt).map(|held| &held.tags[..])
    }

    /// Returns the result of a read that saw `begun` when it began: the block's content, or the failure.
    pub(crate) fn read(
        &mut self,
        key: &BlockKey,
        begun: Option<Vec<u64>>,
        rng: &mut Rng,
    ) -> (Result<Fetched>, Option<Vec<u64>>) {
        if self.blocks.get(key).is_some_and(|held| held.corrupt) {
            self.drop_block(key);
            return (Err(Error::new(ErrorKind::Corrupt, "a damaged block")), None);
        }
        let found = if rng.chance(50) { begun.or_else(|| self.content(key)) } else { self.content(key) };
        if let Some(held) = self.blocks.get_mut(key) {
            held.known = true;
        }
        let outcome = if found.is_some() { Fetched::Whole } else { Fetched::Miss };
        (Ok(outcome), found)
    }

    /// Completes a write. Blocks that were evicted for it are added to `evicted`.
    pub(crate) fn write(
        &mut self,
        key: &BlockKey,
        tags: Vec<u64>,
        luck: Luck,
        rng: &mut Rng,
        evicted: &mut Vec<BlockKey>,
    ) -> Result<Stored> {
        let failed = || Err(Error::new(ErrorKind::Io, "a write failed"));
        if self.leaving.contains(key) || luck == Luck::Busy {
            return Err(Error::new(ErrorKind::Busy, "the block is leaving"));
        }
        if luck == Luck::Fails {
            return failed();
        }
        if self.blocks.contains_key(key) {
            return Ok(Stored::AlreadyThere);
        }
        if self.full || tags.len() > self.shape.pages {
            return Err(Error::new(ErrorKind::NoSpace, "the disk is full"));
        }
        while self.used_pages + tags.len() > self.shape.pages {
            let Some(&victim) = self.blocks.keys().nth(rng.below(self.blocks.len())) else { break };
            self.drop_block(&victim);
            evicted.push(victim);
        }
        self.stored += 1;
        self.used_pages += tags.len();
        self.blocks.insert(*key, Held { tags, known: rng.chance(70), corrupt: false });
        if luck == Luck::FailsStored { failed() } else { Ok(Stored::New) }
    }

    pub(crate) fn begin_removal(&mut self, key: BlockKey) {
        self.leaving.insert(key);
    }

    pub(crate) fn end_removal(&mut self, key: &BlockKey, luck: Luck) -> Result<()> {
        self.leaving.remove(key);
        if luck != Luck::Fails {
            self.drop_block(key);
        }
        if luck == Luck::Good { Ok(()) } else { Err(Error::new(ErrorKind::Unavailable, "a removal failed")) }
    }

    fn drop_block(&mut self, key: &BlockKey) {
        if let Some(held) = self.blocks.remove(key) {
            self.used_pages -= held.tags.len();
        }
    }

    /// Returns how many leading keys it has.
    pub(crate) fn probe(&mut self, keys: &[BlockKey]) -> usize {
        let count = keys.iter().take_while(|key| self.holds(key)).count();
        for key in &keys[..count] {
            if let Some(held) = self.blocks.get_mut(key) {
                held.known = true;
            }
        }
        count
    }

    /// Loses a block, if it has any.
    pub(crate) fn lose(&mut self, rng: &mut Rng) -> Option<BlockKey> {
        let key = *self.blocks.keys().nth(rng.below(self.blocks.len()))?;
        self.drop_block(&key);
        Some(key)
    }

    /// Damages a block, if it has any.
    pub(crate) fn damage(&mut self, rng: &mut Rng) -> Option<BlockKey> {
        let key = *self.blocks.keys().nth(rng.below(self.blocks.len()))?;
        self.damage_block(&key);
        Some(key)
    }

    /// Damages this block, if the tier has it.
    pub(crate) fn damage_block(&mut self, key: &BlockKey) {
        if let Some(held) = self.blocks.get_mut(key) {
            held.corrupt = true;
        }
    }

    pub(crate) fn epoch(&self, root: NamespaceId) -> u32 {
        self.epochs.get(&root).copied().unwrap_or(0)
    }

    /// Stores an epoch. Returns whether the tier acknowledges it.
    pub(crate) fn set_epoch(&mut self, root: NamespaceId, epoch: u32) -> bool {
        if self.full {
            return self.loses_epochs;
        }
        self.epochs.insert(root, epoch);
        true
    }

    /// Handles the depot's death: removals that had begun may or may not have completed, and what it knew without I/O
    /// is forgotten.
    pub(crate) fn crash(&mut self, rng: &mut Rng) {
        for key in std::mem::take(&mut self.leaving) {
            if rng.chance(50) {
                self.drop_block(&key);
            }
        }
        for held in self.blocks.values_mut() {
            held.known = rng.chance(50);
        }
    }
}

/// Returns the location of a block in the first tier that knows of it.
pub(crate) fn locate(tiers: &[SimTier], key: &BlockKey, answers: impl Fn(usize) -> bool) -> Location {
    let mut unknown = false;
    for (number, tier) in tiers.iter().enumerate().filter(|(number, _)| answers(*number)) {
        match tier.peek(key) {
            Presence::Present => return Location::Tier(number),
            Presence::Absent => {}
            Presence::Unknown => unknown = true,
        }
    }
    if unknown { Location::Unknown } else { Location::Absent }
}
