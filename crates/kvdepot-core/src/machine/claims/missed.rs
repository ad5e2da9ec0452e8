//! What kept a settled claim's hit from being longer, for who counts misses.

use std::sync::Arc;

use super::super::catalog::Catalog;
use super::super::pool::Pool;
use super::super::tiers::TierSet;
use super::claim::{Claim, Phase, Spot};
use super::known::Known;
use crate::misses::{Missed, Short};

/// Blocks of each group that are looked at beyond the hit: groups of other block sizes than the first may miss a later one.
const BLOCKS_BEYOND_MAX: usize = 64;

impl Claim {
    /// To be called when it begins to settle, before its phase says so.
    pub(super) fn note_end(&mut self) {
        self.short_of = match self.phase {
            Phase::Filling if self.waiting == 0 => None,
            Phase::Queued => Some(Short::NoRoom),
            _ if self.declined => Some(Short::NotWorthIt),
            _ => Some(Short::TooSlow),
        };
    }

    /// Returns the report about a claim whose known hit is shorter than requested.
    pub(super) fn missed(&mut self, pool: &Pool, catalog: &Catalog) -> Option<Missed> {
        if self.hit >= self.limit || self.groups.is_empty() {
            return None;
        }
        let (spot, known) = self.first_missing();
        let key = self.key(spot);
        // What came when the claim had looked was being stored then.
        let unless_stored = |short: Short| match pool.find(&key) {
            Some(slot) if pool.slot(slot).is_from_tier() && self.tiers != TierSet::ALL => Short::Excluded,
            Some(_) => Short::BeingStored,
            None => short,
        };
        let absent = || unless_stored(Short::Absent);
        let short = match known {
            Known::ABSENT => absent(),
            Known::EXCLUDED => Short::Excluded,
            Known::UNTOLD => unless_stored(Short::TooSlow),
            // Its fetch was in flight: that the claim was cut is not what ended the hit here.
            Known::WAITING if self.short_of.is_some() => self.short_of.unwrap_or_else(absent),
            _ if self.cut => Short::NoRoom,
            // A tier has it: the pool could not take it.
            _ if known.tier().is_some() => self.short_of.unwrap_or(Short::NoRoom),
            _ => self.short_of.unwrap_or_else(absent),
        };
        Some(Missed {
            owner: self.owner,
            label: self.label.take(),
            key: catalog.block_key(&key),
            namespaces: Arc::clone(&self.ids),
            asked: self.limit - self.skip,
            hit: self.hit - self.skip,
            short,
            tiers: self.tiers,
        })
    }

    /// The first block beyond the hit that was missing, of groups that need all blocks; else, of windows, one that the longest
    /// hit needs.
    fn first_missing(&self) -> (Spot, Known) {
        let mut first: Option<(usize, Spot, Known)> = None;
        for (index, group) in
            self.groups.iter().enumerate().filter(|(_, group)| group.shape.window_blocks == 0)
        {
            let units = group.shape.units_per_block;
            let from = (self.hit / units).max(group.blocks.start);
            for block in from..group.blocks.end.min(from + BLOCKS_BEYOND_MAX) {
                if first.is_some_and(|(unit, ..)| unit <= block * units) {
                    break;
                }
                if let Some((spot, known)) = self.missing(index, block) {
                    first = Some((block * units, spot, known));
                }
            }
        }
        let windows = || {
            let windows = self.groups.iter().enumerate().filter(|(_, group)| group.shape.window_blocks > 0);
            let blocks = windows.flat_map(|(index, _)| {
                self.needed_range(index, self.limit).take(BLOCKS_BEYOND_MAX).map(move |block| (index, block))
            });
            blocks.into_iter().find_map(|(index, block)| self.missing(index, block))
        };
        let anywhere = || {
            let group = &self.groups[0];
            let last = group.blocks.end.saturating_sub(1);
            let block = (self.hit / group.shape.units_per_block).clamp(group.blocks.start.min(last), last);
            (Spot { group: 0, block, rank: 0 }, Known::ABSENT)
        };
        first.map(|(_, spot, known)| (spot, known)).or_else(windows).unwrap_or_else(anywhere)
    }

    /// Of a block that is missing, a rank that misses it. One within reach was not needed, if all that was needed could come.
    fn missing(&self, group: usize, block: usize) -> Option<(Spot, Known)> {
        let all_could_come = !self.cut && self.short_of.is_none();
        let is_missing =
            |known: Known| known != Known::LEASED && !(all_could_come && known.is_within_reach());
        let mut spots = (0..self.groups[group].spaces.len()).map(|rank| Spot { group, block, rank });
        let known = |spot: Spot| self.known(self.place(spot.group, spot.block, spot.rank));
        spots.find(|&spot| is_missing(known(spot))).map(|spot| (spot, known(spot)))
    }
}
