//! What is read of each namespace: counted where loads are answered, outside of the machine's lock.

use std::time::Instant;

use hashbrown::HashMap;
use kvdepot_core::machine::NamespaceHandle;
use parking_lot::Mutex;

/// Namespaces that are told of, at most.
const TOP: usize = 20;
/// Parts of an hour.
const PARTS: usize = 12;
const PART_S: u64 = 3600 / PARTS as u64;

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

#[derive(Debug, Default)]
struct Tally {
    used: Used,
    used_at_s: u64,
    /// Bytes loaded in each part of an hour, by the part's number.
    parts: [u64; PARTS],
    /// The newest of these parts.
    part: u64,
}

impl Tally {
    /// Forgets the parts that are an hour old.
    fn turn(&mut self, now_s: u64) {
        let part = now_s / PART_S;
        for passed in (self.part + 1..=part).take(PARTS) {
            self.parts[passed as usize % PARTS] = 0;
        }
        self.part = self.part.max(part);
    }
}

/// What is read of each namespace.
#[derive(Debug)]
pub(crate) struct Usage {
    began: Instant,
    tallies: Mutex<HashMap<NamespaceHandle, Tally>>,
}

impl Usage {
    pub(crate) fn new() -> Self {
        Self { began: Instant::now(), tallies: Mutex::default() }
    }

    fn now_s(&self) -> u64 {
        self.began.elapsed().as_secs()
    }

    fn count(&self, namespace: NamespaceHandle, now_s: u64, count: impl FnOnce(&mut Tally)) {
        let mut tallies = self.tallies.lock();
        let tally = tallies.entry(namespace).or_default();
        tally.used_at_s = now_s;
        count(tally);
    }

    /// A load was answered.
    pub(crate) fn loaded(&self, namespace: NamespaceHandle, blocks: u64, bytes: u64, missed: u64) {
        self.loaded_at(self.now_s(), namespace, blocks, bytes, missed);
    }

    fn loaded_at(&self, now_s: u64, namespace: NamespaceHandle, blocks: u64, bytes: u64, missed: u64) {
        self.count(namespace, now_s, |tally| {
            tally.turn(now_s);
            tally.used.load_blocks += blocks;
            tally.used.load_blocks_missed += missed;
            tally.used.load_bytes += bytes;
            tally.parts[tally.part as usize % PARTS] += bytes;
        });
    }

    /// Lookups or a claim asked for blocks of namespaces: so many of each, of which so many were hits.
    pub(crate) fn looked_up(&self, of: impl IntoIterator<Item = (NamespaceHandle, usize, usize)>) {
        let now_s = self.now_s();
        let mut tallies = self.tallies.lock();
        for (namespace, asked, hit) in of {
            let tally = tallies.entry(namespace).or_default();
            tally.used_at_s = now_s;
            tally.used.lookup_blocks += asked as u64;
            tally.used.lookup_hit_blocks += hit as u64;
        }
    }

    /// A claim or lookup ended at one of its blocks.
    pub(crate) fn missed(&self, namespace: NamespaceHandle) {
        self.count(namespace, self.now_s(), |tally| tally.used.misses += 1);
    }

    /// Blocks were stored.
    pub(crate) fn stored(&self, namespace: NamespaceHandle) {
        self.count(namespace, self.now_s(), |_| {});
    }

    /// Returns how long ago the namespace was stored to, loaded or looked for, in seconds; `None` if it never was.
    pub(crate) fn used_s(&self, namespace: NamespaceHandle) -> Option<u64> {
        let tallies = self.tallies.lock();
        tallies.get(&namespace).map(|tally| self.now_s().saturating_sub(tally.used_at_s))
    }

    /// The namespace is not known any more. Numbers are never used again.
    pub(crate) fn forget(&self, namespace: NamespaceHandle) {
        self.tallies.lock().remove(&namespace);
    }

    /// Those of which most bytes were read in the last hour, then those used last. What `is_known` denies is forgotten.
    pub(crate) fn top(&self, is_known: impl Fn(NamespaceHandle) -> bool) -> Vec<(NamespaceHandle, Used)> {
        self.top_at(self.now_s(), is_known)
    }

    fn top_at(&self, now_s: u64, is_known: impl Fn(NamespaceHandle) -> bool) -> Vec<(NamespaceHandle, Used)> {
        // Loads wait for the lock: `is_known` is called without it. Numbers are never used again, so an unknown one stays so.
        let mut unknown: Vec<NamespaceHandle> = self.tallies.lock().keys().copied().collect();
        unknown.retain(|&handle| !is_known(handle));
        let mut tallies = self.tallies.lock();
        for handle in unknown {
            tallies.remove(&handle);
        }
        let mut all: Vec<(NamespaceHandle, Used)> = tallies
            .iter_mut()
            .map(|(&handle, tally)| {
                tally.turn(now_s);
                let used_s = now_s.saturating_sub(tally.used_at_s);
                (handle, Used { load_bytes_hour: tally.parts.iter().sum(), used_s, ..tally.used })
            })
            .collect();
        drop(tallies);
        all.sort_unstable_by_key(|(handle, used)| {
            (std::cmp::Reverse(used.load_bytes_hour), used.used_s, *handle)
        });
        all.truncate(TOP);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hours(usage: &Usage, now_s: u64) -> Vec<(u64, u64)> {
        usage.top_at(now_s, |_| true).iter().map(|(handle, used)| (*handle, used.load_bytes_hour)).collect()
    }

    #[test]
    fn bytes_of_the_last_hour_decide_and_pass() {
        let usage = Usage::new();
        usage.loaded_at(10, 1, 2, 200, 1);
        usage.loaded_at(2000, 2, 1, 100, 0);
        assert_eq!(hours(&usage, 2001), [(1, 200), (2, 100)]);
        assert_eq!(hours(&usage, 3700), [(2, 100), (1, 0)]);
        usage.loaded_at(3800, 1, 1, 50, 0);
        assert_eq!(hours(&usage, 1_000_000), [(1, 0), (2, 0)]);
        let (_, used) = usage.top_at(3900, |handle| handle == 1)[0];
        assert_eq!(
            (used.load_blocks, used.load_blocks_missed, used.load_bytes, used.used_s),
            (3, 1, 250, 100)
        );
    }

    #[test]
    fn blocks_asked_for_and_hit_are_counted_for_each_namespace() {
        let usage = Usage::new();
        usage.looked_up([(1, 10, 4), (2, 10, 0)]);
        usage.looked_up([(1, 5, 5)]);
        let told = |handle| {
            let (_, used) = usage.top(|one| one == handle)[0];
            (used.lookup_blocks, used.lookup_hit_blocks)
        };
        assert_eq!(told(1), (15, 9));
        usage.looked_up([(2, 1, 1)]);
        assert_eq!(told(2), (1, 1), "what is not known is forgotten");
    }

    #[test]
    fn twenty_are_told_and_what_is_not_known_is_forgotten() {
        let usage = Usage::new();
        (0..100).for_each(|handle| usage.loaded_at(5, handle, 1, handle, 0));
        let top: Vec<u64> = hours(&usage, 6).into_iter().map(|(handle, _)| handle).collect();
        assert_eq!(top, (80..100).rev().collect::<Vec<_>>());
        usage.forget(99);
        usage.top_at(6, |handle| {
            assert!(usage.tallies.try_lock().is_some(), "loads would wait");
            handle < 3
        });
        assert_eq!(usage.tallies.lock().len(), 3);
    }
}
