//! Which units of a medium are free: extents; the smallest one that fits is used first.

use std::collections::{BTreeMap, BTreeSet};

/// Free extents.
#[derive(Debug, Default)]
pub(super) struct Space {
    /// Length by start.
    free: BTreeMap<u32, u32>,
    /// The same extents, by length.
    by_length: BTreeSet<(u32, u32)>,
    units: u32,
}

impl Space {
    pub(super) fn new(units: u32) -> Self {
        let mut space = Self::default();
        space.insert(0, units);
        space
    }

    /// Number of free units.
    pub(super) const fn units(&self) -> u32 {
        self.units
    }

    fn insert(&mut self, start: u32, length: u32) {
        if length > 0 {
            self.free.insert(start, length);
            self.by_length.insert((length, start));
            self.units += length;
        }
    }

    fn delete(&mut self, start: u32, length: u32) {
        self.free.remove(&start);
        self.by_length.remove(&(length, start));
        self.units -= length;
    }

    /// Takes `length` contiguous units.
    pub(super) fn take(&mut self, length: u32) -> Option<u32> {
        let (found, start) = *self.by_length.range((length, 0)..).next()?;
        self.delete(start, found);
        self.insert(start + length, found - length);
        Some(start)
    }

    /// Takes these units if all of them are free.
    pub(super) fn take_at(&mut self, start: u32, length: u32) -> bool {
        let Some((&first, &found)) = self.free.range(..=start).next_back() else { return false };
        if first + found < start + length {
            return false;
        }
        self.delete(first, found);
        self.insert(first, start - first);
        self.insert(start + length, first + found - start - length);
        true
    }

    /// Gives units back.
    pub(super) fn give(&mut self, start: u32, length: u32) {
        let (mut from, mut to) = (start, start + length);
        if let Some((before, units)) = self.ending_at(start) {
            self.delete(before, units);
            from = before;
        }
        if let Some(units) = self.starting_at(to) {
            self.delete(to, units);
            to += units;
        }
        self.insert(from, to - from);
    }

    /// Start and length of the free extent that ends just before this unit.
    pub(super) fn ending_at(&self, unit: u32) -> Option<(u32, u32)> {
        let (&start, &length) = self.free.range(..unit).next_back()?;
        (start + length == unit).then_some((start, length))
    }

    /// Length of the free extent that starts with this unit.
    pub(super) fn starting_at(&self, unit: u32) -> Option<u32> {
        self.free.get(&unit).copied()
    }
}
