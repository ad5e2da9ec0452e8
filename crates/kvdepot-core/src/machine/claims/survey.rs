//! Surveys a claim's places: which blocks are in the pool, and what tiers know of the others without I/O.

use super::super::event::{Ask, Effects, Question, TierSet};
use super::super::rooms::Rooms;
use super::Claims;
use super::claim::Claim;
use super::known::Known;
use crate::block::Phase as BlockPhase;

impl Claims {
    /// Continues a survey by one piece. Returns whether there are more.
    pub(super) fn survey(&mut self, rooms: &mut Rooms<'_>, claim: &mut Claim, out: &mut Effects) -> bool {
        let (start, end) = (claim.cursor, claim.places().min(claim.cursor + self.pace.survey_places));
        claim.places.reach(end);
        if start == 0 {
            claim.note_lender(rooms.pool);
        }
        let mut keys = Vec::new();
        for place in start..end {
            let key = claim.key(claim.spot(place));
            let before = claim.known(place);
            let known = match rooms.pool.find_kept(&key) {
                Some(slot) => {
                    let block = &rooms.pool.slot(slot).block;
                    match block.phase() {
                        _ if !rooms.catalog.is_live(key.space) => Known::ABSENT,
                        _ if !claim.may_use(rooms, slot) => Known::EXCLUDED,
                        BlockPhase::Fetching | BlockPhase::Sealed
                            if rooms.pool.slot(slot).is_in_place() && !block.is_doomed() =>
                        {
                            if block.is_evictable() { Known::IN_PLACE } else { Known::PINNED_IN_PLACE }
                        }
                        BlockPhase::Fetching => Known::PINNED,
                        BlockPhase::Sealed if block.is_evictable() => Known::HERE,
                        BlockPhase::Sealed if block.is_readable() => Known::PINNED,
                        _ => Known::ABSENT,
                    }
                }
                None if claim.tiers == TierSet::NONE || !rooms.may_be_in_tiers(&key) => Known::ABSENT,
                // Earlier answers of tiers are still valid after the claim had to wait, unless the block was in the
                // pool then.
                None if claim.asks_again || before.was_found() || before == Known::UNLOCATED => {
                    keys.push(rooms.catalog.block_key(&key));
                    Known::UNLOCATED
                }
                None => before,
            };
            claim.places.set(place, known);
        }
        claim.cursor = end;
        if !keys.is_empty() {
            claim.asked += 1;
            let part = u32::try_from(start).expect("a claim's places are bounded");
            out.questions.push(Question { ask: Ask::Claim(claim.id, part), keys, tiers: claim.tiers });
        }
        if end < claim.places() {
            return true;
        }
        if claim.asked == 0 {
            Self::begin_to_weigh(claim);
        }
        claim.asked == 0
    }
}
