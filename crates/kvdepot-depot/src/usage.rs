//! What is read of a namespace: counted where loads and lookups are answered, outside of the machine's lock. Each namespace has its
//! own counters, in the directory's entry, so that no lookup waits for one of another namespace or for who reads the counts.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use kvdepot_core::machine::NamespaceHandle;
use parking_lot::Mutex;

/// Namespaces that are told of, at most.
const TOP: usize = 20;
/// Parts of an hour.
const PARTS: usize = 12;
const PART_S: u64 = 3600 / PARTS as u64;
/// A time that has not come.
const NEVER: u64 = u64::MAX;

/// What was counted of one namespace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Used {
    /// Blocks leased for loading.
    pub(crate) load_blocks: u64,
    /// Blocks asked for by loads that were not to be had.
    pub(crate) load_blocks_missed: u64,
    /// Bytes of the leased blocks.
    pub(crate) load_bytes: u64,
    /// Those of them of the last hour.
    pub(crate) load_bytes_hour: u64,
    /// Blocks asked for by lookups, and by claims whose hit is final.
    pub(crate) lookup_blocks: u64,
    /// Those of them that were hits.
    pub(crate) lookup_hit_blocks: u64,
    /// Claims and lookups that ended at a block of it.
    pub(crate) misses: u64,
    /// How long ago it was stored to, loaded or looked for, in seconds.
    pub(crate) used_s: u64,
}

/// Bytes loaded in the last hour.
#[derive(Debug, Default)]
struct Hour {
    /// Those of each part of it, by the part's number.
    parts: [u64; PARTS],
    /// The newest of these parts.
    part: u64,
}

impl Hour {
    /// Forgets the parts that are an hour old.
    fn turn(&mut self, now_s: u64) {
        let part = now_s / PART_S;
        for passed in (self.part + 1..=part).take(PARTS) {
            self.parts[passed as usize % PARTS] = 0;
        }
        self.part = self.part.max(part);
    }
}

/// Counts of one namespace. Times are seconds since it began.
#[derive(Debug)]
pub(crate) struct Tally {
    began: Instant,
    used_at_s: AtomicU64,
    load_blocks: AtomicU64,
    load_blocks_missed: AtomicU64,
    load_bytes: AtomicU64,
    lookup_blocks: AtomicU64,
    lookup_hit_blocks: AtomicU64,
    misses: AtomicU64,
    /// Only loads of this namespace wait for it.
    hour: Mutex<Hour>,
}

impl Default for Tally {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            used_at_s: AtomicU64::new(NEVER),
            load_blocks: AtomicU64::default(),
            load_blocks_missed: AtomicU64::default(),
            load_bytes: AtomicU64::default(),
            lookup_blocks: AtomicU64::default(),
            lookup_hit_blocks: AtomicU64::default(),
            misses: AtomicU64::default(),
            hour: Mutex::default(),
        }
    }
}

fn add(counter: &AtomicU64, count: u64) {
    counter.fetch_add(count, Ordering::Relaxed);
}

impl Tally {
    fn now_s(&self) -> u64 {
        self.began.elapsed().as_secs()
    }

    fn used_at(&self, now_s: u64) {
        self.used_at_s.store(now_s, Ordering::Relaxed);
    }

    /// A load was answered.
    pub(crate) fn loaded(&self, blocks: u64, bytes: u64, missed: u64) {
        self.loaded_at(self.now_s(), blocks, bytes, missed);
    }

    fn loaded_at(&self, now_s: u64, blocks: u64, bytes: u64, missed: u64) {
        add(&self.load_blocks, blocks);
        add(&self.load_blocks_missed, missed);
        add(&self.load_bytes, bytes);
        let mut hour = self.hour.lock();
        hour.turn(now_s);
        let part = hour.part as usize % PARTS;
        hour.parts[part] += bytes;
        drop(hour);
        self.used_at(now_s);
    }

    /// A lookup or claim asked for so many of its blocks, of which so many were hits.
    pub(crate) fn looked_up(&self, asked: usize, hit: usize) {
        add(&self.lookup_blocks, asked as u64);
        add(&self.lookup_hit_blocks, hit as u64);
        self.used_at(self.now_s());
    }

    /// A claim or lookup ended at one of its blocks.
    pub(crate) fn missed(&self) {
        add(&self.misses, 1);
        self.used_at(self.now_s());
    }

    /// Blocks were stored.
    pub(crate) fn stored(&self) {
        self.used_at(self.now_s());
    }

    /// Returns how long ago the namespace was stored to, loaded or looked for, in seconds; `None` if it never was.
    pub(crate) fn used_s(&self) -> Option<u64> {
        self.used_s_at(self.now_s())
    }

    fn used_s_at(&self, now_s: u64) -> Option<u64> {
        let used_at_s = self.used_at_s.load(Ordering::Relaxed);
        (used_at_s != NEVER).then(|| now_s.saturating_sub(used_at_s))
    }

    /// Returns what was counted; `None` if the namespace was never used.
    pub(crate) fn told(&self) -> Option<Used> {
        self.told_at(self.now_s())
    }

    fn told_at(&self, now_s: u64) -> Option<Used> {
        let used_s = self.used_s_at(now_s)?;
        let mut hour = self.hour.lock();
        hour.turn(now_s);
        let load_bytes_hour = hour.parts.iter().sum();
        drop(hour);
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Some(Used {
            load_blocks: of(&self.load_blocks),
            load_blocks_missed: of(&self.load_blocks_missed),
            load_bytes: of(&self.load_bytes),
            load_bytes_hour,
            lookup_blocks: of(&self.lookup_blocks),
            lookup_hit_blocks: of(&self.lookup_hit_blocks),
            misses: of(&self.misses),
            used_s,
        })
    }
}

/// Returns those of which most bytes were read in the last hour, then those used last.
pub(crate) fn top(tallies: Vec<(NamespaceHandle, Arc<Tally>)>) -> Vec<(NamespaceHandle, Used)> {
    let told = tallies.into_iter().filter_map(|(handle, tally)| Some((handle, tally.told()?)));
    most_used(told.collect())
}

fn most_used(mut all: Vec<(NamespaceHandle, Used)>) -> Vec<(NamespaceHandle, Used)> {
    all.sort_unstable_by_key(|(handle, used)| {
        (std::cmp::Reverse(used.load_bytes_hour), used.used_s, *handle)
    });
    all.truncate(TOP);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_the_last_hour_pass() {
        let tally = Tally::default();
        assert_eq!((tally.told(), tally.used_s()), (None, None), "it was never used");
        tally.loaded_at(10, 2, 200, 1);
        let hour = |now_s| tally.told_at(now_s).map(|used| used.load_bytes_hour);
        assert_eq!((hour(2001), hour(3700)), (Some(200), Some(0)));
        tally.loaded_at(3800, 1, 50, 0);
        let used = tally.told_at(3900).expect("it was used");
        assert_eq!(
            (used.load_blocks, used.load_blocks_missed, used.load_bytes, used.load_bytes_hour, used.used_s),
            (3, 1, 250, 50, 100)
        );
        assert_eq!(hour(1_000_000), Some(0));
    }

    #[test]
    fn lookups_that_run_together_all_count_and_wait_for_no_load_and_no_scrape() {
        let tally = Tally::default();
        let held = tally.hour.lock();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..1000).for_each(|_| tally.looked_up(10, 4)));
            }
        });
        tally.missed();
        drop(held);
        let used = tally.told().expect("it was used");
        assert_eq!((used.lookup_blocks, used.lookup_hit_blocks, used.misses), (40_000, 16_000, 1));
    }

    #[test]
    fn the_twenty_that_were_read_most_are_told_then_those_used_last() {
        let used = |load_bytes_hour, used_s| Used { load_bytes_hour, used_s, ..Used::default() };
        let handles = |all| most_used(all).into_iter().map(|(handle, _)| handle).collect::<Vec<_>>();
        assert_eq!(handles((0..100).map(|n| (n, used(n, 0))).collect()), (80..100).rev().collect::<Vec<_>>());
        assert_eq!(
            handles(vec![(1, used(0, 9)), (2, used(0, 3)), (3, used(7, 9)), (4, used(0, 3))]),
            [3, 2, 4, 1]
        );
    }
}
