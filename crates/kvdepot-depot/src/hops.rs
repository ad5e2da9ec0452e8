//! Times and bytes of what moves: between the pool and a tier, and between the pool and clients; and times of claims.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Upper bounds of the buckets of times, in microseconds. The last one is for longer times.
const BOUNDS_US: [u64; 16] = [
    250,
    500,
    1_000,
    2_500,
    5_000,
    10_000,
    25_000,
    50_000,
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    30_000_000,
    u64::MAX,
];
/// Upper bounds of the buckets of sizes, in bytes: from 4 KiB to 1 GiB, and the last one for larger sizes.
const BOUNDS_BYTES: [u64; 11] =
    [1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28, 1 << 30, u64::MAX];

/// Counts of values by size.
#[derive(Debug)]
struct Histogram<const N: usize> {
    bounds: &'static [u64; N],
    counts: [AtomicU64; N],
    sum: AtomicU64,
}

impl<const N: usize> Histogram<N> {
    fn new(bounds: &'static [u64; N]) -> Self {
        Self { bounds, counts: std::array::from_fn(|_| AtomicU64::new(0)), sum: AtomicU64::new(0) }
    }

    fn add(&self, value: u64) {
        // The last bucket has everything above the others' bounds.
        let bucket = self.bounds[..N - 1].partition_point(|&bound| bound < value);
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(value, Ordering::Relaxed);
    }

    /// Returns pairs: an upper bound, `null` for the largest values, and the values above the bound before it.
    fn buckets(&self) -> Vec<(Option<u64>, u64)> {
        let bounds = self.bounds.iter().map(|&bound| (bound < u64::MAX).then_some(bound));
        bounds.zip(self.counts.iter().map(|count| count.load(Ordering::Relaxed))).collect()
    }

    fn sum(&self) -> u64 {
        self.sum.load(Ordering::Relaxed)
    }
}

/// How long something took, each time.
#[derive(Debug)]
pub(crate) struct Times(Histogram<{ BOUNDS_US.len() }>);

impl Default for Times {
    fn default() -> Self {
        Self(Histogram::new(&BOUNDS_US))
    }
}

impl Times {
    pub(crate) fn took(&self, time: Duration) {
        self.0.add(u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
    }

    fn to_json(&self) -> Value {
        let buckets = self.0.buckets();
        let count: u64 = buckets.iter().map(|bucket| bucket.1).sum();
        json!({"count": count, "sum_us": self.0.sum(), "buckets": buckets})
    }
}

/// One direction of a hop: what moved, from its beginning to its end.
#[derive(Debug)]
pub(crate) struct Hop {
    times: Times,
    sizes: Histogram<{ BOUNDS_BYTES.len() }>,
}

impl Default for Hop {
    fn default() -> Self {
        Self { times: Times::default(), sizes: Histogram::new(&BOUNDS_BYTES) }
    }
}

impl Hop {
    /// Counts a block that took the time since `begun`.
    pub(crate) fn moved(&self, begun: Instant, bytes: u64) {
        self.took(begun.elapsed(), bytes);
    }

    /// Counts bytes that moved together in this time.
    pub(crate) fn took(&self, time: Duration, bytes: u64) {
        self.times.took(time);
        self.sizes.add(bytes);
    }

    /// Returns the numbers: the count under `counted`, `buckets` of times in microseconds, and `sizes`, which are buckets of
    /// bytes. Both have pairs: an upper bound, `null` for the largest values, and the count above the bound before it.
    fn to_json(&self, counted: &str) -> Value {
        let mut told = self.times.to_json();
        if let Some(told) = told.as_object_mut() {
            let count = told.remove("count").unwrap_or_default();
            told.insert(counted.to_owned(), count);
            told.insert("bytes".to_owned(), self.sizes.sum().into());
            told.insert("sizes".to_owned(), json!(self.sizes.buckets()));
        }
        told
    }
}

/// Both directions of one tier.
#[derive(Debug, Default)]
pub(crate) struct Hops {
    /// From the tier into the pool.
    pub(crate) reads: Hop,
    /// From the pool into the tier.
    pub(crate) writes: Hop,
}

impl Hops {
    /// Returns the fields of a tier in `stat`.
    pub(crate) fn to_json(&self) -> [(&'static str, Value); 2] {
        [("reads", self.reads.to_json("blocks")), ("writes", self.writes.to_json("blocks"))]
    }
}

/// What clients do with the pool.
#[derive(Debug, Default)]
pub(crate) struct Flows {
    /// From the opening of a claim until its hit was known and had room.
    pub(crate) admissions: Times,
    /// From the opening of a claim until its hit was final.
    pub(crate) claims: Times,
    /// Copies out of the pool, in batches.
    pub(crate) loads: Hop,
    /// Copies into the pool, in batches.
    pub(crate) dumps: Hop,
}

impl Flows {
    /// Returns the fields of `stat`.
    pub(crate) fn to_json(&self) -> [(&'static str, Value); 2] {
        let claims = json!({"admitted": self.admissions.to_json(), "settled": self.claims.to_json()});
        let copies = json!({"load": self.loads.to_json("batches"), "dump": self.dumps.to_json("batches")});
        [("claim_times", claims), ("copies", copies)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_in_the_first_bucket_that_is_not_below_it() {
        let hop = Hop::default();
        for us in [0, 250, 251, 1_000, 30_000_000, 30_000_001] {
            hop.took(Duration::from_micros(us), 10);
        }
        let told = hop.to_json("blocks");
        let buckets: Vec<(Option<u64>, u64)> =
            serde_json::from_value(told["buckets"].clone()).expect("pairs");
        let filled: Vec<(Option<u64>, u64)> = buckets.into_iter().filter(|bucket| bucket.1 > 0).collect();
        assert_eq!(
            filled,
            [(Some(250), 2), (Some(500), 1), (Some(1_000), 1), (Some(30_000_000), 1), (None, 1)]
        );
        assert_eq!((&told["blocks"], &told["bytes"]), (&json!(6), &json!(60)));
        assert_eq!(told["sum_us"], 250 + 251 + 1_000 + 60_000_001);
    }

    #[test]
    fn sizes_have_buckets_too() {
        let hop = Hop::default();
        for bytes in [1, 4096, 4097, 1 << 30, (1 << 30) + 1] {
            hop.took(Duration::ZERO, bytes);
        }
        let told = hop.to_json("batches");
        let sizes: Vec<(Option<u64>, u64)> = serde_json::from_value(told["sizes"].clone()).expect("pairs");
        let filled: Vec<(Option<u64>, u64)> = sizes.into_iter().filter(|bucket| bucket.1 > 0).collect();
        assert_eq!(filled, [(Some(4096), 2), (Some(16_384), 1), (Some(1 << 30), 1), (None, 1)]);
        assert_eq!(told["batches"], 5);
    }
}
