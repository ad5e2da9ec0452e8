//! Clients' operations with claims.

use kvdepot_core::machine::{ClaimGroup, Request, TierSet};
use kvdepot_core::{GroupShape, NamespaceId};

use crate::asked::Asked;
use crate::client::{Claimed, ClaimedGroup, Wish};
use crate::fail::{Fail, Rule, fail};
use crate::plan::Feature;
use crate::specs;
use crate::world::World;

impl World {
    pub(crate) fn claim(&mut self) -> Result<(), Fail> {
        let client = self.someone();
        self.claim_as(client)
    }

    /// A client opens a claim.
    pub(crate) fn claim_as(&mut self, client: usize) -> Result<(), Fail> {
        let wish = self.wish();
        for space in wish.ranks() {
            if !self.spaces[space].known {
                // Not as a user: a claim may span more namespaces than one client may use.
                self.open(None, space)?;
            }
        }
        // Opening the last one may have made the depot forget the first.
        if wish.ranks().iter().any(|&space| !self.spaces[space].known) {
            return Ok(());
        }
        // An id may have changed in the meantime.
        let wish = Wish { spaces: self.ids_of(&wish.groups), ..wish };
        self.open_claim(client, wish)
    }

    /// Several clients open claims before any of their blocks arrives. `chance` decides how many.
    pub(crate) fn claim_together(&mut self, chance: usize) -> Result<(), Fail> {
        if !self.has(Feature::Claims) || !self.has(Feature::Crowds) {
            return Ok(());
        }
        self.reached.insert("claimed together");
        for _ in 0..2 + chance % 3 {
            self.claim()?;
        }
        Ok(())
    }

    /// Returns a request for a claim.
    pub(crate) fn wish(&mut self) -> Wish {
        let (prompts, units) = (self.plan.shape.prompts, self.plan.shape.prompt_units);
        let prompt = self.rng.below(prompts);
        let mut groups = Vec::new();
        for ranks in 0..specs::GROUPS.len() {
            if ranks != 0 && self.rng.chance(60) || groups.len() == 2 {
                continue;
            }
            let window = if ranks == 0 || self.rng.chance(30) { 0 } else { self.rng.between(1, 3) };
            let units = if self.rng.chance(75) { 1 } else { self.rng.between(2, 3) };
            groups.push(ClaimedGroup { ranks, window, units });
        }
        // Rank 0 alone is another group with the same blocks.
        groups.retain(|group| group.ranks != 2 || self.rng.chance(50));
        let skip = if self.rng.chance(70) { 0 } else { self.rng.below(units) };
        let spaces = self.ids_of(&groups);
        Wish {
            groups,
            hashes: (0..units).map(|unit| specs::hash(prompt, unit)).collect(),
            skip,
            limit: self.rng.between(skip, units),
            tiers: self.drawn_tiers(),
            spaces,
            opened_at: self.at,
            opened: self.now,
            deadline: self.now + self.rng.between(1, 20) as u64 * 1_000_000_000,
            patience: self.rng.between(2, 60) as u64 * 1_000_000_000,
        }
    }

    /// Returns the ids that keys of each group's ranks carry now.
    pub(crate) fn ids_of(&self, groups: &[ClaimedGroup]) -> Vec<Vec<NamespaceId>> {
        let ids = |group: &ClaimedGroup| {
            specs::GROUPS[group.ranks].iter().map(|&space| self.spaces[space].id).collect()
        };
        groups.iter().map(ids).collect()
    }

    pub(crate) fn open_claim(&mut self, client: usize, wish: Wish) -> Result<(), Fail> {
        let group = |group: &ClaimedGroup| ClaimGroup {
            namespaces: specs::GROUPS[group.ranks].iter().map(|&space| self.spaces[space].handle).collect(),
            shape: GroupShape { window_blocks: group.window, units_per_block: group.units },
        };
        let request = Request::ClaimOpen {
            groups: wish.groups.iter().map(group).collect(),
            hashes: wish.hashes.clone(),
            skip: wish.skip,
            limit: wish.limit,
            tiers: wish.tiers,
            deadline: wish.deadline,
            patience: wish.patience,
            label: None,
        };
        let claims = self.clients[client].claims.len();
        self.request_of(Some(client), request, Asked::Claim(wish))?;
        match self.clients[client].claims.get(claims) {
            Some(Claimed { wish, settled: Some(units), .. }) => self.load_hit(client, &wish.clone(), *units),
            _ => Ok(()),
        }
    }

    pub(crate) fn poll(&mut self) -> Result<(), Fail> {
        let client = self.someone();
        let claims = self.clients[client].claims.len();
        if claims == 0 {
            return Ok(());
        }
        let chosen = self.rng.below(claims);
        let settle = self.rng.chance(30);
        self.poll_claim(client, chosen, settle)
    }

    /// Polls one of a client's claims. What it has just settled for is loaded.
    pub(crate) fn poll_claim(&mut self, client: usize, chosen: usize, settle: bool) -> Result<(), Fail> {
        let Claimed { id: claim, settled: before, .. } = self.clients[client].claims[chosen];
        self.request_of(Some(client), Request::ClaimPoll { claim, settle }, Asked::Poll(claim, self.now))?;
        match self.clients[client].claims.iter().find(|other| other.id == claim) {
            Some(Claimed { wish, settled: Some(units), .. }) if before.is_none() => {
                self.load_hit(client, &wish.clone(), *units)
            }
            _ => Ok(()),
        }
    }

    /// A block goes that a claim wants, and may have leased already, before the claim settles. `chance` decides which.
    pub(crate) fn remove_claimed(&mut self, chance: usize) -> Result<(), Fail> {
        let open_claim = |client: usize| {
            let claims = &self.clients[client].claims;
            Some((client, claims.iter().position(|claim| claim.settled.is_none())?))
        };
        let mut alive = (0..self.clients.len()).filter(|&client| self.clients[client].alive);
        let open = alive.find_map(open_claim).filter(|_| self.has(Feature::Removals));
        let Some((client, chosen)) = open else { return Ok(()) };
        let wish = &self.clients[client].claims[chosen].wish;
        let mut keys = wish.needed(wish.limit);
        keys.retain(|key| self.known_space(key).is_some());
        if keys.is_empty() {
            return Ok(());
        }
        self.remove_keys(client, vec![keys[chance % keys.len()]])?;
        if chosen < self.clients[client].claims.len() {
            self.poll_claim(client, chosen, true)?;
        }
        Ok(())
    }

    /// Polls a claim, and does all work that is left: it may look again whether what it has leased is still there.
    pub(crate) fn poll_to_the_end(&mut self, client: usize, claim: u64) -> Result<(), Fail> {
        let request = Request::ClaimPoll { claim, settle: false };
        self.request_of(Some(client), request, Asked::Poll(claim, self.now))?;
        while !self.jobs.is_empty() {
            self.go_on()?;
        }
        Ok(())
    }

    pub(crate) fn release_claim(&mut self) -> Result<(), Fail> {
        let client = self.someone();
        let claims = self.clients[client].claims.len();
        if claims == 0 {
            return Ok(());
        }
        let chosen = self.rng.below(claims);
        self.end_claim(client, chosen)
    }

    /// Ends one of a client's claims.
    pub(crate) fn end_claim(&mut self, client: usize, claim: usize) -> Result<(), Fail> {
        // A claim may have expired: then it does not exist any more, and a poll reports that.
        let id = self.clients[client].claims[claim].id;
        self.request_of(
            Some(client),
            Request::ClaimPoll { claim: id, settle: false },
            Asked::Poll(id, self.now),
        )?;
        let claims = &mut self.clients[client].claims;
        let Some(at) = claims.iter().position(|claim| claim.id == id) else { return Ok(()) };
        let claim = claims.remove(at);
        if let Some(units) = claim.settled {
            self.check_held(&claim.wish, units)?;
        }
        if claim.wish.tiers != TierSet::ALL {
            let times = Request::ClaimTimes { claim: id };
            self.request_of(Some(client), times, Asked::Times(claim.wish.tiers))?;
        }
        self.request_of(Some(client), Request::ClaimRelease { claim: id }, Asked::Done)?;
        Ok(())
    }

    /// Checks that a claim whose deadline has passed is settled, or has expired because it was not polled (P2).
    pub(crate) fn check_deadlines(&mut self) -> Result<(), Fail> {
        // The rest of its work is cut into pieces, like that of others.
        while !self.jobs.is_empty() {
            self.go_on()?;
        }
        let now = self.now;
        for client in 0..self.clients.len() {
            let claims = self.clients[client].claims.iter();
            let due: Vec<u64> =
                claims.filter(|claim| claim.wish.deadline <= now).map(|claim| claim.id).collect();
            for claim in due {
                self.poll_to_the_end(client, claim)?;
                let claims = &self.clients[client].claims;
                if claims.iter().any(|other| other.id == claim && other.settled.is_none()) {
                    return fail(Rule::Progress, format!("claim {claim} is not settled by its deadline"));
                }
            }
        }
        Ok(())
    }
}
