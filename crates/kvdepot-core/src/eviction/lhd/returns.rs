//! Recently evicted blocks, in four bytes each, so that a block that returns is recognised.
//!
//! A fingerprint determines a set of 16 places. A collision only leads to a worse choice of a victim. Blocks are forgotten
//! in the order of their eviction rather than when their set is full. Otherwise the beginning of a prompt might be
//! forgotten before its end, and the end would seem more useful.

use crate::eviction::chunked::Chunked;

/// Number of places per set.
const PLACES: usize = 16;
/// Number of slots per set. Up to twice as many blocks as slots are remembered, which fill ten of the 16 places on
/// average, so few sets overflow.
const SLOTS_PER_SET: usize = 5;
/// Number of units of time in which as many blocks are evicted as there are slots.
const UNITS: usize = 8;
/// Age in these units at which an evicted block is forgotten.
const FORGOTTEN: u32 = 2 * UNITS as u32;
/// Age in these units at which an entry would look young again.
const UNITS_MAX: u32 = 32;
/// Bits of an entry, from the highest: 13 for the fingerprint, 3 for the class, 11 for the last use, 5 for the eviction.
const TAG_SHIFT: u32 = 19;
const CLASS_SHIFT: u32 = 16;
const USE_SHIFT: u32 = 5;
const USE_MASK: u32 = (1 << 11) - 1;
/// The last use is stored in steps of eight units of the cache's time.
const USE_STEP_SHIFT: u32 = 3;
const EMPTY: u32 = 0;

/// What is known about an evicted block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Past {
    /// Class by number of uses at its eviction.
    pub(super) class: usize,
    /// Time since its last use, in units of the cache's time.
    pub(super) age: u16,
}

/// Evicted blocks: up to two per slot, in about 13 bytes per slot.
#[derive(Debug)]
pub(super) struct Returns {
    entries: Chunked<u32>,
    sets: usize,
    /// Time in evictions.
    unit: u32,
    evictions: usize,
}

const fn tag_of(fingerprint: u32) -> u32 {
    let tag = fingerprint >> TAG_SHIFT;
    // Zero marks an empty place.
    if tag == 0 { 1 } else { tag }
}

const fn past_of(entry: u32, now: u16) -> Past {
    let used = (entry >> USE_SHIFT) & USE_MASK;
    let steps = ((now as u32) >> USE_STEP_SHIFT).wrapping_sub(used) & USE_MASK;
    Past { class: (entry >> CLASS_SHIFT) as usize & 7, age: (steps << USE_STEP_SHIFT) as u16 }
}

impl Returns {
    pub(super) const fn new() -> Self {
        Self { entries: Chunked::new(EMPTY), sets: 0, unit: 0, evictions: 0 }
    }

    /// Grows for a cache of `len` slots. A call for each new slot adds one set at most. Blocks that were evicted from a
    /// smaller cache may be forgotten.
    pub(super) fn reach(&mut self, len: usize) {
        while self.sets < len / SLOTS_PER_SET + 1 {
            self.entries.reach((self.sets * PLACES) as u32);
            self.sets += 1;
        }
    }

    fn set_of(&mut self, fingerprint: u32) -> &mut [u32] {
        // As in linear hashing, existing sets keep most of their blocks when sets are added.
        let mask = self.sets.next_power_of_two() - 1;
        let at = fingerprint as usize & mask;
        let set = if at < self.sets { at } else { at & (mask >> 1) };
        self.entries.piece_mut((set * PLACES) as u32, PLACES)
    }

    /// Remembers an evicted block of a cache with `len` slots. Calls `forgets` for each block that is forgotten instead, at
    /// most 16. `used` is the time of the block's last use.
    pub(super) fn remember(
        &mut self,
        fingerprint: u32,
        (class, used): (usize, u16),
        (len, now): (usize, u16),
        mut forgets: impl FnMut(Past),
    ) {
        self.evictions += 1;
        if self.evictions * UNITS >= len {
            (self.unit, self.evictions) = ((self.unit + 1) % UNITS_MAX, 0);
        }
        let unit = self.unit;
        let used = u32::from(used) >> USE_STEP_SHIFT;
        let entry =
            tag_of(fingerprint) << TAG_SHIFT | (class as u32) << CLASS_SHIFT | used << USE_SHIFT | unit;
        let set = self.set_of(fingerprint);
        // The newest entry is first, and empty places are last.
        for at in (0..PLACES).rev() {
            let old = set[at];
            if old != EMPTY && (at == PLACES - 1 || is_over(old, unit)) {
                forgets(past_of(old, now));
                set[at..].rotate_left(1);
                set[PLACES - 1] = EMPTY;
            }
        }
        set.rotate_right(1);
        set[0] = entry;
    }

    /// Forgets the block. Returns what was known about it.
    pub(super) fn take(&mut self, fingerprint: u32, now: u16) -> Option<Past> {
        let unit = self.unit;
        let set = self.set_of(fingerprint);
        let is = |&entry: &u32| entry >> TAG_SHIFT == tag_of(fingerprint) && !is_over(entry, unit);
        let at = set.iter().position(is)?;
        let past = past_of(set[at], now);
        set[at..].rotate_left(1);
        set[PLACES - 1] = EMPTY;
        Some(past)
    }
}

/// Returns whether it is time to forget the entry's block.
const fn is_over(entry: u32, unit: u32) -> bool {
    entry != EMPTY && unit.wrapping_sub(entry) % UNITS_MAX >= FORGOTTEN
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(n: u32) -> u32 {
        (u64::from(n + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as u32
    }

    const LEN: usize = 10_000;

    fn filled(blocks: u32) -> (Returns, usize) {
        let mut returns = Returns::new();
        (0..=LEN).for_each(|len| returns.reach(len));
        let mut forgotten = 0;
        for n in 0..blocks {
            returns.remember(hash(n), (3, 80), (LEN, 160), |past| {
                assert_eq!(past, Past { class: 3, age: 80 });
                forgotten += 1;
            });
        }
        (returns, forgotten)
    }

    #[test]
    fn a_block_is_recognised_once_with_its_class_and_age() {
        let (mut returns, _) = filled(1);
        assert_eq!(returns.take(hash(0), 1064), Some(Past { class: 3, age: 984 }));
        assert_eq!(returns.take(hash(0), 1064), None);
    }

    #[test]
    fn as_many_as_twice_the_slots_are_remembered_and_the_oldest_are_forgotten() {
        let blocks = 5 * LEN as u32;
        let (mut returns, forgotten) = filled(blocks);
        let mut known = |blocks: std::ops::Range<u32>| {
            let all = blocks.len();
            (blocks.filter(|&n| returns.take(hash(n), 160).is_some()).count() * 100).div_ceil(all)
        };
        assert!(known(0..blocks - 2 * LEN as u32 - LEN as u32 / 8) <= 1, "collisions only");
        assert!(known(blocks - 2 * LEN as u32 + LEN as u32 / 8..blocks) >= 97);
        assert!((2 * LEN..=4 * LEN).contains(&forgotten), "{forgotten}");
    }

    #[test]
    fn sets_that_are_added_later_leave_most_blocks_where_they_are() {
        let mut returns = Returns::new();
        returns.reach(1000);
        (0..1000).for_each(|n| returns.remember(hash(n), (0, 0), (1000, 0), |_| {}));
        (1000..1300).for_each(|len| returns.reach(len));
        assert!((0..1000).filter(|&n| returns.take(hash(n), 0).is_some()).count() > 700);
    }
}
