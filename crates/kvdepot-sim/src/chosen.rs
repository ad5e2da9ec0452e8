//! Claims that may be loaded from some tiers only: no other tier is asked, or reads, for them alone.

use std::collections::HashMap;

use kvdepot_core::BlockKey;
use kvdepot_core::machine::{CameFrom, Command, NamespaceHandle, Request, TierSet};

use crate::asked::Asked;
use crate::client::{ClaimedGroup, Wish};
use crate::fail::{Fail, Rule, fail};
use crate::model::name;
use crate::plan::Feature;
use crate::specs;
use crate::world::World;

/// The tiers from which requests to this depot wanted each block.
#[derive(Debug, Default)]
pub(crate) struct Wanted(HashMap<BlockKey, TierSet>);

impl Wanted {
    fn want(&mut self, key: BlockKey, tiers: TierSet) {
        let wanted = self.0.entry(key).or_insert(TierSet::NONE);
        *wanted = wanted.or(tiers);
    }

    /// Returns whether any request wanted the block from this tier. Blocks that none has named do not count.
    fn is_wanted(&self, key: &BlockKey, tier: usize) -> bool {
        self.0.get(key).is_none_or(|tiers| tiers.has(tier))
    }
}

impl World {
    /// Draws the tiers of a claim: mostly all of them.
    pub(crate) fn drawn_tiers(&mut self) -> TierSet {
        if !self.has(Feature::Choices) || self.choices.chance(20) {
            return TierSet::ALL;
        }
        let drawn = (0..self.tiers.len()).filter(|_| self.choices.chance(50));
        drawn.fold(TierSet::NONE, TierSet::with)
    }

    /// A claim wants a block that a tier has and the pool does not, from that tier and maybe others. Sometimes a claim
    /// without limits wants it, too.
    pub(crate) fn claim_from_tiers(&mut self) -> Result<(), Fail> {
        if !self.has(Feature::Choices) || !self.has(Feature::Claims) {
            return Ok(());
        }
        if self.choices.chance(30) {
            self.request_of(None, Request::EvictTo { bytes: 0 }, Asked::Done)?;
        }
        let kept = self.tiers.iter().enumerate();
        let kept = kept.flat_map(|(tier, kept)| kept.kept().map(move |(key, _)| (tier, *key)));
        let found = kept.filter_map(|(tier, key)| {
            let space = self.known_space(&key).filter(|_| !self.presence.contains(&key))?;
            let ranks = specs::GROUPS.iter().position(|group| *group == [space])?;
            Some((tier, key.hash, ranks))
        });
        let found: Vec<_> = found.collect();
        if found.is_empty() {
            return Ok(());
        }
        let (tier, hash, ranks) = found[self.choices.below(found.len())];
        let (prompt, unit) = (usize::from(hash.0[0]), usize::from(hash.0[1]));
        let groups = vec![ClaimedGroup { ranks, window: 0, units: 1 }];
        let others = (0..self.tiers.len()).filter(|_| self.choices.chance(30));
        let tiers = others.fold(TierSet::NONE.with(tier), TierSet::with);
        let wish = Wish {
            spaces: self.ids_of(&groups),
            groups,
            hashes: (0..=unit).map(|unit| specs::hash(prompt, unit)).collect(),
            skip: unit,
            limit: unit + 1,
            tiers,
            opened_at: self.at,
            opened: self.now,
            deadline: self.now + self.choices.between(1, 20) as u64 * 1_000_000_000,
            patience: self.choices.between(2, 60) as u64 * 1_000_000_000,
        };
        let client = self.someone();
        self.open_claim(client, wish.clone())?;
        if self.choices.chance(30) {
            self.open_claim(client, Wish { tiers: TierSet::ALL, ..wish })?;
        }
        Ok(())
    }

    /// Returns whether the read of a block fails that no request wants from every tier: mostly none of them fails.
    pub(crate) fn chosen_read_fails(&mut self, key: &BlockKey) -> bool {
        let is_limited = |tiers: &TierSet| !tiers.has_all(self.tiers.len());
        !self.calm && self.wanted.0.get(key).is_some_and(is_limited) && self.choices.chance(30)
    }

    /// Notes what a request wants, and from which tiers.
    pub(crate) fn note_wanted(&mut self, request: &Request) {
        let ids_of = |handle: NamespaceHandle| self.spaces.iter().find(|space| space.handle == handle);
        let key = |handle, hash| ids_of(handle).map(|space| BlockKey { namespace: space.id, hash });
        let (keys, tiers): (Vec<BlockKey>, _) = match request {
            Request::ClaimOpen { groups, hashes, tiers, .. } => {
                let handles = groups.iter().flat_map(|group| group.namespaces.iter().copied());
                let keys =
                    handles.flat_map(|handle| hashes.iter().filter_map(move |&hash| key(handle, hash)));
                (keys.collect(), *tiers)
            }
            Request::Load { namespace, hashes, .. } => {
                // What is there is not fetched, unless the reader cannot read it where it lies.
                let is_there = |key: &BlockKey| self.lender().is_none() && self.presence.contains(key);
                let keys = hashes.iter().filter_map(|&hash| key(*namespace, hash));
                (keys.filter(|key| !is_there(key)).collect(), TierSet::ALL)
            }
            Request::Prefetch { namespace, blocks, .. } => {
                (blocks.iter().filter_map(|&(hash, _)| key(*namespace, hash)).collect(), TierSet::ALL)
            }
            _ => return,
        };
        keys.into_iter().for_each(|key| self.wanted.want(key, tiers));
    }

    /// A load was answered without a block: its fetch may go on.
    pub(crate) fn load_goes_on(&mut self, key: BlockKey) {
        self.wanted.want(key, TierSet::ALL);
    }

    /// A block has come into the pool: what was wanted of it so far counts no longer, except for requests that go on.
    pub(crate) fn wanted_has_come(&mut self, key: &BlockKey) {
        if self.is_being_read(key) {
            // For a slot that was displaced or removed.
            return;
        }
        let is_of = |wish: &Wish| {
            wish.hashes.contains(&key.hash) && wish.spaces.iter().flatten().any(|id| *id == key.namespace)
        };
        let claims = self.clients.iter().flat_map(|client| &client.claims);
        let open = claims.filter(|claim| claim.settled.is_none()).map(|claim| &claim.wish);
        let waiting = self.waiting.values().map(|waiting| match &waiting.asked {
            Asked::Claim(wish) if is_of(wish) => wish.tiers,
            Asked::Load { keys } if keys.contains(key) => TierSet::ALL,
            _ => TierSet::NONE,
        });
        let tiers = open.filter(|wish| is_of(wish)).map(|wish| wish.tiers).chain(waiting);
        let tiers = tiers.fold(TierSet::NONE, TierSet::or);
        self.wanted.0.insert(*key, tiers);
    }

    /// Checks that some request wanted what a tier is told to find or to read from that tier.
    pub(crate) fn check_wanted(&self, command: &Command) -> Result<(), Fail> {
        match command {
            // What nobody asked for goes to another tier.
            Command::Read { is_use: false, .. } => Ok(()),
            Command::Read { tier, key, .. } | Command::Lease { tier, key, .. } => {
                self.check_wanted_from(*tier, std::slice::from_ref(key))
            }
            Command::Probe { tier, keys, .. } => self.check_wanted_from(*tier, keys),
            _ => Ok(()),
        }
    }

    /// Checks that a question about tiers is about those that some request wanted the blocks from.
    pub(crate) fn check_question(&self, tiers: TierSet, keys: &[BlockKey]) -> Result<(), Fail> {
        let asked = (0..self.tiers.len()).filter(|&tier| tiers.has(tier));
        asked.into_iter().try_for_each(|tier| self.check_wanted_from(tier, keys))
    }

    fn check_wanted_from(&self, tier: usize, keys: &[BlockKey]) -> Result<(), Fail> {
        let is_loaded = |key: &BlockKey| {
            let mut waiting = self.waiting.values();
            waiting.any(|waiting| matches!(&waiting.asked, Asked::Load { keys } if keys.contains(key)))
        };
        match keys.iter().find(|key| !self.wanted.is_wanted(key, tier) && !is_loaded(key)) {
            Some(key) => fail(
                Rule::Choices,
                format!("tier {tier} is asked for {}, which no request wants from it", name(key)),
            ),
            None => Ok(()),
        }
    }

    /// Checks that a claim's blocks came from its tiers.
    pub(crate) fn check_came(&mut self, tiers: TierSet, came: &[CameFrom]) -> Result<(), Fail> {
        if !came.is_empty() {
            self.reached.insert("came from chosen tiers");
        }
        match came.iter().find(|came| !tiers.has(came.tier)) {
            Some(came) => fail(Rule::Choices, format!("{came:?} came for a claim of {tiers:?}")),
            None => Ok(()),
        }
    }
}
