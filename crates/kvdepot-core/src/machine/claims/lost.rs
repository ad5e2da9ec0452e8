//! Leases of a claim on blocks that readers may not be shown any more: they were removed or reset, or their tier lost
//! them. They are no part of its hit (P9).

use super::super::flaw::Flaw;
use super::super::rooms::Rooms;
use super::Claims;
use super::claim::Claim;
use super::known::Known;

/// Maximum number of times that one claim looks at its leases again because of single blocks, which may be removed all the
/// time. What is lost for good, such as a tier's memory, makes it look once more.
const RELOOKS_MAX: u8 = 4;

impl Claim {
    /// Makes it look at its leases again, if something in use was lost since the last time. Returns whether it must.
    pub(super) fn must_relook(&mut self, rooms: &Rooms<'_>) -> bool {
        let is_flawed = rooms.pool.flaws.has(Flaw::LostHitCounts);
        if self.losses == rooms.pool.losses() || self.leased == 0 || is_flawed {
            return false;
        }
        let lost = self.lost_for_good(rooms);
        if self.relooks == RELOOKS_MAX && self.lost == lost {
            return false;
        }
        (self.losses, self.lost, self.relook) = (rooms.pool.losses(), lost, Some(0));
        self.relooks = (self.relooks + 1).min(RELOOKS_MAX);
        // The leading ones may be among them.
        self.lead = self.skip;
        true
    }

    /// Notes what was lost before it leases anything.
    pub(super) fn note_losses(&mut self, rooms: &Rooms<'_>) {
        (self.losses, self.lost) = (rooms.pool.losses(), self.lost_for_good(rooms));
    }

    /// Counts what makes many blocks unreadable at once and never comes back: spaces of the claim that were reset, and the
    /// memory of the tier that leases blocks.
    fn lost_for_good(&self, rooms: &Rooms<'_>) -> usize {
        let left = self.all_spaces().filter(|&space| !rooms.catalog.is_live(space)).count();
        left + usize::from(rooms.pool.is_lender_lost())
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
            let found = rooms.pool.find_kept(&key).filter(|&slot| is_live && claim.may_use(rooms, slot));
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
