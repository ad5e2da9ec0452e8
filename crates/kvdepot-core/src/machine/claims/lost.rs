//! Leases of a claim on blocks that readers may not be shown any more: they were removed or reset, or their tier lost
//! them. They are no part of its hit (P9).

use super::super::flaw::Flaw;
use super::super::pool::Pool;
use super::super::rooms::Rooms;
use super::Claims;
use super::claim::Claim;
use super::known::Known;

/// Maximum number of times that one claim looks at its leases again: blocks may be removed all the time.
const RELOOKS_MAX: u8 = 4;

impl Claim {
    /// Makes it look at its leases again, if something in use was lost since the last time. Returns whether it must.
    pub(super) fn must_relook(&mut self, pool: &Pool) -> bool {
        let is_flawed = pool.flaws.has(Flaw::LostHitCounts);
        if self.losses == pool.losses() || self.relooks == RELOOKS_MAX || is_flawed {
            return false;
        }
        (self.losses, self.relook) = (pool.losses(), Some(0));
        self.relooks += 1;
        // The leading ones may be among them.
        self.lead = self.skip;
        true
    }
}

impl Claims {
    /// Looks at the next leases again, if the claim must: whether there are more. A block that is there again is leased
    /// again: a copy in the pool takes the place of one that a tier had leased in its memory.
    pub(super) fn relook(&self, rooms: &mut Rooms<'_>, claim: &mut Claim) -> bool {
        let Some(from) = claim.relook else { return false };
        let end = claim.places().min(from + self.pace.survey_places);
        for place in from..end {
            if claim.known(place) != Known::LEASED {
                continue;
            }
            let key = claim.key(claim.spot(place));
            // A reset is answered before the sweep has reached all blocks.
            let is_live = rooms.catalog.is_live(key.space);
            if is_live && rooms.pool.is_shown(claim.places.slot(place)) {
                continue;
            }
            claim.unlease(rooms.pool, place);
            let found = rooms.pool.find_kept(&key).filter(|_| is_live);
            if let Some(slot) = found.filter(|&slot| rooms.pool.is_shown(slot)) {
                rooms.pool.pin(slot);
                claim.places.set_leased(place, slot);
                claim.leased += 1;
            }
        }
        claim.relook = Some(end).filter(|&end| end < claim.places());
        claim.relook.is_some()
    }
}
