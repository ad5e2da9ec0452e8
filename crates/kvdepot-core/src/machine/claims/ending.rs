//! Ends of claims: one that its client releases or that expires, and all claims of a connection that ended.
//!
//! A connection may have 65,536 claims. All of them count as ended in the step in which their connection ends: from
//! then on they get no answer, no lease and no turn, whatever still arrives for them. Their leases and their entries
//! in the tables go in pieces, in steps to come.

use super::super::event::{ClaimId, Discarded, Effects, Job, Owner};
use super::super::flaw::Flaw;
use super::super::pace::Pace;
use super::super::pool::Pool;
use super::super::rooms::Rooms;
use super::claim::{Claim, Phase};
use super::known::Known;
use super::{Claims, no_such_claim};
use crate::error::Result;

/// Work that is left to a step that releases claims.
#[derive(Clone, Copy, Debug)]
struct Left {
    leases: usize,
    looks: usize,
}

impl Left {
    const fn of(pace: Pace) -> Self {
        Self { leases: pace.claim_leases, looks: pace.weigh_places }
    }
}

impl Claims {
    /// Ends a claim. Its leases end now, or piece by piece if they are many.
    pub(crate) fn release(
        &mut self,
        rooms: &mut Rooms<'_>,
        owner: Owner,
        id: ClaimId,
        out: &mut Effects,
    ) -> Result<()> {
        let claim = self.take(owner, id)?;
        self.let_go(rooms, claim, true, out);
        Ok(())
    }

    /// Ends a claim; its first leases end `now`, or all of them in steps to come.
    pub(super) fn let_go(
        &mut self,
        rooms: &mut Rooms<'_>,
        mut claim: Box<Claim>,
        now: bool,
        out: &mut Effects,
    ) {
        self.begin_to_release(&mut claim, out);
        if now {
            self.give_back_some(rooms, claim, out);
        } else {
            out.again.push(Job::Claim(claim.id));
            self.map.insert(claim.id, claim);
        }
    }

    fn begin_to_release(&mut self, claim: &mut Claim, out: &mut Effects) {
        self.give_up_promise(claim);
        self.turn_came |= claim.queued;
        self.answer_waiters(claim, out, |claim| Err(no_such_claim(claim.id)));
        claim.phase = Phase::Releasing;
        claim.cursor = 0;
    }

    /// Gives back the next leases of a claim that is being released.
    pub(super) fn give_back_some(&mut self, rooms: &mut Rooms<'_>, mut claim: Box<Claim>, out: &mut Effects) {
        if give_back(rooms, &mut claim, &mut Left::of(self.pace)) {
            out.again.push(Job::Claim(claim.id));
            self.map.insert(claim.id, claim);
        } else {
            self.discard(rooms.pool, claim, out);
        }
    }

    /// Forgets a claim without leases. A large one is not freed under the lock.
    fn discard(&mut self, pool: &mut Pool, claim: Box<Claim>, out: &mut Effects) {
        self.forget(pool, &claim);
        out.discarded.push(Discarded::new(claim));
    }

    fn forget(&mut self, pool: &mut Pool, claim: &Claim) {
        claim.all_spaces().for_each(|space| pool.uses.let_go(space));
        self.due.remove(&(claim.look_at, claim.id));
        self.promised -= claim.promised;
        if let Some(claims) = self.owners.get_mut(&claim.owner) {
            claims.remove(&claim.id);
            if claims.is_empty() {
                self.owners.remove(&claim.owner);
                self.ended.remove(&claim.owner);
            }
        }
        for token in &claim.waiters {
            self.waiters.remove(token);
        }
    }

    /// Returns whether a claim counts as ended, because its connection has ended.
    pub(super) fn has_ended(&self, claim: &Claim) -> bool {
        self.ended.contains(&claim.owner) && !self.flaws.has(Flaw::EndedClaimGoesOn)
    }

    /// Ends the claims of an owner that ended. Returns whether there were any.
    pub(crate) fn end_owner(&mut self, rooms: &mut Rooms<'_>, owner: Owner, out: &mut Effects) -> bool {
        let has_claims = self.owners.contains_key(&owner);
        if has_claims && self.ended.insert(owner) {
            // One of them may be at the head of the queue for room.
            self.turn_came = true;
            self.release_ended(rooms, owner, out);
        }
        has_claims
    }

    /// Releases the next claims of an owner that ended, as many as one step may.
    pub(crate) fn release_ended(&mut self, rooms: &mut Rooms<'_>, owner: Owner, out: &mut Effects) {
        let mut left = Left::of(self.pace);
        for _ in 0..self.pace.owner_claims {
            let next = self.owners.get(&owner).filter(|_| self.ended.contains(&owner));
            let Some(id) = next.and_then(|claims| claims.first().copied()) else { return };
            let Some(mut claim) = self.map.remove(&id) else {
                debug_assert!(false, "a connection's claims are in the table");
                return;
            };
            if claim.phase != Phase::Releasing {
                self.begin_to_release(&mut claim, out);
            }
            if give_back(rooms, &mut claim, &mut left) {
                self.map.insert(id, claim);
                break;
            }
            self.discard(rooms.pool, claim, out);
        }
        if self.ended.contains(&owner) {
            out.again.push(Job::EndClaims(owner));
        }
    }
}

/// Gives back leases of a claim. Returns whether there are more.
fn give_back(rooms: &mut Rooms<'_>, claim: &mut Claim, left: &mut Left) -> bool {
    while claim.leased > 0 && claim.cursor < claim.places() {
        if left.leases == 0 || left.looks == 0 {
            return true;
        }
        let place = claim.cursor;
        claim.cursor += 1;
        left.looks -= 1;
        if claim.known(place) == Known::LEASED {
            claim.unlease(rooms.pool, place);
            left.leases -= 1;
        }
    }
    false
}
