//! The places of a claim: what is known of each, and the slot of each that is leased.
//!
//! A claim may have two million places. Their memory is reserved when it opens and written as its first survey
//! reaches them, so no step clears more than it surveys.

use std::ops::Range;

use super::known::Known;
use crate::eviction::SlotId;

/// See the module.
#[derive(Debug)]
pub(super) struct Places {
    count: usize,
    /// What is known of the places that a survey has reached.
    known: Vec<Known>,
    /// The leased slot of each of them that is `LEASED`.
    slots: Vec<SlotId>,
}

impl Places {
    /// Reserves memory for `count` places.
    pub(super) fn new(count: usize) -> Self {
        Self { count, known: Vec::with_capacity(count), slots: Vec::with_capacity(count) }
    }

    pub(super) const fn count(&self) -> usize {
        self.count
    }

    /// Returns the number of places that were reached so far.
    #[cfg(test)]
    pub(super) const fn reached(&self) -> usize {
        self.known.len()
    }

    /// Makes the places before `end` exist.
    pub(super) fn reach(&mut self, end: usize) {
        debug_assert!(end <= self.count, "a claim has no such place");
        if self.known.len() < end {
            self.known.resize(end, Known::UNLOCATED);
            self.slots.resize(end, 0);
        }
    }

    /// Returns what is known of a place. Nothing is known of one that no survey has reached.
    pub(super) fn known(&self, place: usize) -> Known {
        self.known.get(place).copied().unwrap_or(Known::UNLOCATED)
    }

    pub(super) fn set(&mut self, place: usize, known: Known) {
        self.reach(place + 1);
        self.known[place] = known;
    }

    pub(super) fn set_leased(&mut self, place: usize, slot: SlotId) {
        self.set(place, Known::LEASED);
        self.slots[place] = slot;
    }

    /// Returns the slot of a place that is `LEASED`.
    pub(super) fn slot(&self, place: usize) -> SlotId {
        self.slots[place]
    }

    /// Iterates over the places of a range that tiers were not asked about.
    pub(super) fn unlocated(&mut self, range: Range<usize>) -> impl Iterator<Item = &mut Known> {
        let end = range.end.min(self.known.len());
        self.known[range.start.min(end)..end].iter_mut().filter(|known| **known == Known::UNLOCATED)
    }
}
