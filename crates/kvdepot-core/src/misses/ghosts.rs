//! Blocks that left, by fingerprints: a table of fixed size, in which a new entry takes the place of the oldest of eight.

use std::hash::BuildHasher;

use foldhash::quality::FixedState;
use smallvec::SmallVec;

use super::gone::{Fate, Gone};
use crate::ids::TierIndex;
use crate::key::BlockKey;

/// Memory of one remembered block.
pub const GHOST_BYTES: usize = size_of::<Entry>();
/// Entries that one key may have its place among.
const WAYS: usize = 8;
/// How long a block was kept is not known.
const UNKNOWN: u16 = u16::MAX;
/// Below, seconds; from here on, minutes beyond those.
const MINUTES_FROM: u16 = 1 << 15;

/// Fingerprint of the key, never 0 where there is an entry; then from the highest byte: when (seconds), how long it was kept,
/// what became of it, and where.
type Entry = [u64; 2];

/// A key's fingerprint, and the first entry of its group.
type Place = (u64, usize);

/// Number of blocks whose groups are read before the first of them is added.
const AT_A_TIME: usize = 64;

/// What is remembered of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ghost {
    /// What became of it.
    pub fate: Fate,
    /// The tier that it is gone from; None: the pool.
    pub tier: Option<TierIndex>,
    /// How long ago, in seconds.
    pub ago_s: u32,
    /// How long it had been in the pool, in seconds, about.
    pub kept_s: Option<u32>,
}

/// Remembered blocks. Two keys almost never share a 64-bit fingerprint. If they do, a miss is given a wrong reason.
#[derive(Debug)]
pub struct Ghosts {
    entries: Vec<Entry>,
    hasher: FixedState,
}

impl Ghosts {
    /// Remembers as many blocks, rounded up to whole groups of eight; 0 = none. `seed` makes places unknown to who chooses keys.
    /// The memory is touched as it is used.
    pub fn new(blocks: usize, seed: u64) -> Self {
        let entries = vec![Entry::default(); blocks.next_multiple_of(WAYS)];
        Self { entries, hasher: FixedState::with_seed(seed) }
    }

    /// Blocks that it has room for.
    pub const fn capacity(&self) -> usize {
        self.entries.len()
    }

    fn place(&self, key: &BlockKey) -> Place {
        let print = self.hasher.hash_one(key).max(1);
        let groups = self.entries.len() / WAYS;
        let group = ((u128::from(print) * groups as u128) >> 64) as usize;
        (print, group * WAYS)
    }

    /// Adds blocks that went at this second.
    pub fn note_all(&mut self, now_s: u32, gone: &[Gone]) {
        if self.entries.is_empty() {
            return;
        }
        for gone in gone.chunks(AT_A_TIME) {
            let places: SmallVec<[Place; AT_A_TIME]> =
                gone.iter().map(|gone| self.place(&gone.key)).collect();
            // Brings the groups into the processor's caches: these reads do not wait for each other.
            let ends =
                places.iter().map(|&(_, first)| self.entries[first][0] ^ self.entries[first + WAYS - 1][0]);
            std::hint::black_box(ends.fold(0, |sum, prints| sum ^ prints));
            gone.iter().zip(places).for_each(|(gone, place)| self.note_at(place, now_s, gone));
        }
    }

    /// Adds a block that went at this second. What is known about it already may be more specific.
    pub fn note(&mut self, now_s: u32, gone: &Gone) {
        if !self.entries.is_empty() {
            self.note_at(self.place(&gone.key), now_s, gone);
        }
    }

    fn note_at(&mut self, (print, first): Place, now_s: u32, gone: &Gone) {
        let entry = [print, packed(now_s, gone)];
        let group = &mut self.entries[first..first + WAYS];
        if let Some(known) = group.iter_mut().find(|known| known[0] == print) {
            let before = Fate::from_byte((known[1] >> 8) as u8);
            let after_s = now_s.saturating_sub((known[1] >> 32) as u32);
            if !before.is_some_and(|before| before.outlives(gone.fate, gone.tier.is_none(), after_s)) {
                *known = entry;
            }
            return;
        }
        // An empty entry is older than any.
        let oldest = group.iter_mut().min_by_key(|known| (known[0] != 0, known[1] >> 32));
        oldest.into_iter().for_each(|oldest| *oldest = entry);
    }

    /// What became of a block, as far as that is remembered.
    pub fn find(&self, now_s: u32, key: &BlockKey) -> Option<Ghost> {
        if self.entries.is_empty() {
            return None;
        }
        let (print, first) = self.place(key);
        let &[_, word] = self.entries[first..first + WAYS].iter().find(|entry| entry[0] == print)?;
        let ago_s = now_s.saturating_sub((word >> 32) as u32);
        let tier = usize::from(word as u8).checked_sub(1);
        Some(Ghost {
            fate: Fate::from_byte((word >> 8) as u8)?,
            tier,
            ago_s,
            kept_s: kept((word >> 16) as u16),
        })
    }
}

fn packed(now_s: u32, gone: &Gone) -> u64 {
    let kept = gone.kept_s.map_or(UNKNOWN, |seconds| match u16::try_from(seconds) {
        Ok(seconds) if seconds < MINUTES_FROM => seconds,
        _ => {
            let minutes = (seconds - u32::from(MINUTES_FROM)) / 60 + u32::from(MINUTES_FROM);
            u16::try_from(minutes).unwrap_or(UNKNOWN - 1).min(UNKNOWN - 1)
        }
    });
    let place = gone.tier.map_or(0, |tier| u8::try_from(tier + 1).unwrap_or(u8::MAX));
    u64::from(now_s) << 32 | u64::from(kept) << 16 | u64::from(gone.fate as u8) << 8 | u64::from(place)
}

fn kept(word: u16) -> Option<u32> {
    match word {
        UNKNOWN => None,
        MINUTES_FROM.. => Some(u32::from(MINUTES_FROM) + u32::from(word - MINUTES_FROM) * 60),
        _ => Some(u32::from(word)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::{BlockHash, NamespaceId};

    fn key(number: u64) -> BlockKey {
        let mut hash = [0; 16];
        hash[..8].copy_from_slice(&number.to_le_bytes());
        BlockKey { namespace: NamespaceId([1; 16]), hash: BlockHash(hash) }
    }

    fn gone(number: u64, fate: Fate, tier: Option<TierIndex>, kept_s: Option<u32>) -> Gone {
        Gone { key: key(number), fate, tier, kept_s }
    }

    #[test]
    fn what_went_is_told_with_its_place_and_its_times() {
        let mut ghosts = Ghosts::new(64, 3);
        for (number, fate) in Fate::ALL.into_iter().enumerate() {
            ghosts.note(100, &gone(number as u64, fate, (number > 2).then_some(number), Some(number as u32)));
        }
        for (number, fate) in Fate::ALL.into_iter().enumerate() {
            let (tier, kept_s) = ((number > 2).then_some(number), Some(number as u32));
            assert_eq!(ghosts.find(130, &key(number as u64)), Some(Ghost { fate, tier, ago_s: 30, kept_s }));
        }
        assert_eq!(ghosts.find(130, &key(99)), None);
    }

    #[test]
    fn long_times_are_told_in_minutes_and_very_long_ones_at_least() {
        let mut ghosts = Ghosts::new(64, 3);
        let mut kept_of = |kept_s| {
            ghosts.note(1, &gone(1, Fate::Evicted, None, kept_s));
            ghosts.find(1, &key(1)).unwrap().kept_s
        };
        assert_eq!(kept_of(None), None);
        for exact in [0, 1, 32_767, 32_768, 32_768 + 60 * 1000] {
            assert_eq!(kept_of(Some(exact)), Some(exact));
        }
        assert_eq!(kept_of(Some(32_768 + 59)), Some(32_768));
        let most = kept_of(Some(u32::MAX)).unwrap();
        assert!((20 * 86_400..=u32::MAX).contains(&most), "{most}");
    }

    #[test]
    fn its_memory_is_fixed_and_the_oldest_are_forgotten() {
        let mut ghosts = Ghosts::new(1000, 3);
        let bytes = ghosts.entries.capacity() * GHOST_BYTES;
        for number in 0..100_000 {
            ghosts.note(number as u32, &gone(number, Fate::Evicted, None, None));
        }
        assert_eq!((ghosts.entries.capacity() * GHOST_BYTES, ghosts.capacity()), (bytes, 1000));
        let known = |range: std::ops::Range<u64>| {
            range.filter(|&number| ghosts.find(100_000, &key(number)).is_some()).count()
        };
        assert_eq!(known(0..90_000), 0);
        assert_eq!(known(0..100_000), 1000);
        assert!(known(99_500..100_000) > 450, "{}", known(99_500..100_000));
    }

    #[test]
    fn none_are_remembered_where_none_are_asked_for() {
        let mut ghosts = Ghosts::new(0, 3);
        ghosts.note(1, &gone(1, Fate::Evicted, None, None));
        assert_eq!((ghosts.find(1, &key(1)), ghosts.capacity()), (None, 0));
    }

    #[test]
    fn the_newest_word_counts_unless_the_one_before_says_more() {
        let mut ghosts = Ghosts::new(64, 3);
        let mut after = |first: Fate, then: Fate, seconds: u32| {
            ghosts.note(10, &gone(1, Fate::Removed, None, None));
            ghosts.note(10, &gone(1, first, Some(0), None));
            ghosts.note(10 + seconds, &gone(1, then, None, None));
            ghosts.find(10 + seconds, &key(1)).unwrap().fate
        };
        assert_eq!(after(Fate::Evicted, Fate::Dropped, 1), Fate::Dropped);
        assert_eq!(after(Fate::WriteFailed, Fate::Evicted, 5000), Fate::WriteFailed);
        assert_eq!(after(Fate::OverBudget, Fate::Evicted, 5000), Fate::OverBudget);
        assert_eq!(after(Fate::WriteFailed, Fate::Reset, 1), Fate::Reset);
        assert_eq!(after(Fate::Checksum, Fate::Lost, 1), Fate::Checksum);
        assert_eq!(after(Fate::Checksum, Fate::Lost, 61), Fate::Lost);
        assert_eq!(after(Fate::Lost, Fate::ReadFailed, 1), Fate::ReadFailed);
    }

    #[test]
    fn a_write_that_failed_is_forgotten_when_a_tier_has_had_the_block() {
        let mut ghosts = Ghosts::new(64, 3);
        ghosts.note(10, &gone(1, Fate::WriteFailed, Some(0), None));
        ghosts.note(20, &gone(1, Fate::Evicted, Some(0), None));
        assert_eq!(ghosts.find(20, &key(1)).unwrap().fate, Fate::Evicted);
    }
}
