//! Times and bytes of blocks that move between the pool and a tier.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// Upper bounds of the buckets, in microseconds. Another bucket is for longer times.
const BOUNDS_US: [u64; 15] = [
    250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000,
    5_000_000, 30_000_000,
];

/// One direction of one tier: blocks that moved, from the call of the tier to its end.
#[derive(Debug, Default)]
pub(crate) struct Hop {
    buckets: [AtomicU64; BOUNDS_US.len() + 1],
    bytes: AtomicU64,
    sum_us: AtomicU64,
}

impl Hop {
    /// Counts a block that took the time since `begun`.
    pub(crate) fn moved(&self, begun: Instant, bytes: u64) {
        self.took(begun.elapsed(), bytes);
    }

    fn took(&self, time: Duration, bytes: u64) {
        let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.buckets[BOUNDS_US.partition_point(|&bound| bound < us)].fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.sum_us.fetch_add(us, Ordering::Relaxed);
    }

    /// Returns the numbers. `buckets` has pairs: an upper bound in microseconds, `null` for the longest times, and the
    /// blocks above the bound before it.
    fn to_json(&self) -> Value {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counts: Vec<u64> = self.buckets.iter().map(count).collect();
        let bounds = BOUNDS_US.into_iter().map(Some).chain([None]);
        let buckets: Vec<(Option<u64>, u64)> = bounds.zip(counts.iter().copied()).collect();
        json!({
            "blocks": counts.iter().sum::<u64>(),
            "bytes": count(&self.bytes),
            "sum_us": count(&self.sum_us),
            "buckets": buckets,
        })
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
        [("reads", self.reads.to_json()), ("writes", self.writes.to_json())]
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
        let told = hop.to_json();
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
}
