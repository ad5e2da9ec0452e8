//! Room that was promised to claims when they were admitted.

use std::ops::{AddAssign, SubAssign};

/// Bytes that were promised and are not pinned yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Promised {
    /// Of the pool.
    pub(super) pool: u64,
    /// Of the memory of the tier that leases blocks.
    pub(super) in_place: u64,
}

impl Promised {
    /// Returns what keeping a promise of so many bytes takes from this one. A block may need more than was promised.
    pub(super) fn part(self, wanted: Self) -> Self {
        Self { pool: wanted.pool.min(self.pool), in_place: wanted.in_place.min(self.in_place) }
    }

    pub(super) fn is_none(self) -> bool {
        self == Self::default()
    }
}

impl AddAssign for Promised {
    fn add_assign(&mut self, other: Self) {
        self.pool += other.pool;
        self.in_place += other.in_place;
    }
}

impl SubAssign for Promised {
    fn sub_assign(&mut self, other: Self) {
        self.pool -= other.pool;
        self.in_place -= other.in_place;
    }
}
