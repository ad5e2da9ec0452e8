//! Counters of a depot. Failures are counted by kind, because at an engine's face they all look like a miss (P2).

use std::sync::atomic::{AtomicU64, Ordering};

use kvdepot_core::{Error, ErrorKind};
use parking_lot::Mutex;

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident),+ $(,)?) => {
        /// Monotonic counters since the depot began.
        #[derive(Debug, Default)]
        pub struct Stats {
            $($(#[doc = $doc])+ pub $name: AtomicU64,)+
            failures: Mutex<Vec<(&'static str, ErrorKind, u64)>>,
        }

        impl Stats {
            /// All counters by name, failures as `{"operation": {"kind": count}}`.
            pub fn to_json(&self) -> serde_json::Map<String, serde_json::Value> {
                let mut map = serde_json::Map::new();
                $(map.insert(stringify!($name).to_owned(), self.$name.load(Ordering::Relaxed).into());)+
                let mut failures = serde_json::Map::new();
                for (operation, kind, count) in self.failures.lock().iter() {
                    let by_kind = failures.entry(*operation).or_insert_with(|| serde_json::json!({}));
                    by_kind[kind.as_str()] = (*count).into();
                }
                map.insert("failures".to_owned(), failures.into());
                map
            }
        }
    };
}

counters! {
    /// Block hashes asked for by lookups and claims.
    lookup_blocks,
    /// Blocks that dumps wanted to store.
    dump_blocks,
    /// Blocks dumped into the pool.
    dump_blocks_sealed,
    /// Blocks that were there already when a dump asked.
    dump_blocks_had,
    /// Blocks whose dump was refused because the pool was full of bytes not yet written (back-pressure).
    dump_blocks_dropped,
    /// Blocks leased for loading.
    load_blocks,
    /// Blocks asked for by loads that were not to be had.
    load_blocks_missed,
    /// Blocks read from tiers into the pool.
    fetch_blocks,
    /// Bytes read from tiers into the pool.
    fetch_bytes,
    /// Blocks written to tiers.
    write_blocks,
    /// Bytes written to tiers.
    write_bytes,
    /// Blocks that a tier would not take: they live in the pool only.
    write_blocks_dropped,
    /// Claims opened.
    claims,
    /// Claims cut because the pool cannot hold more of them.
    claims_cut,
    /// Claims ended because nobody asked for them any more.
    claims_expired,
    /// Connections whose end gave back leases or half-written slots (P4).
    owners_ended_holding,
}

impl Stats {
    /// Adds to a counter.
    pub fn add(counter: &AtomicU64, n: usize) {
        counter.fetch_add(n as u64, Ordering::Relaxed);
    }

    /// Counts a failure by operation and kind.
    pub fn failed(&self, operation: &'static str, error: &Error) {
        let mut failures = self.failures.lock();
        match failures.iter_mut().find(|(op, kind, _)| *op == operation && *kind == error.kind()) {
            Some((_, _, count)) => *count += 1,
            None => failures.push((operation, error.kind(), 1)),
        }
    }
}
