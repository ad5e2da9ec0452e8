//! Counters of a depot. Failures are counted by kind, because the engine sees all of them as a miss (P2).

use std::sync::atomic::{AtomicU64, Ordering};

use kvdepot_core::machine::{Counters, EVICT_AGE_BOUNDS_S, EvictAges, Gauges};
use kvdepot_core::regions::RegionGauge;
use kvdepot_core::{Error, ErrorKind};
use parking_lot::Mutex;

/// Numbers by name, and what belongs to them.
pub(crate) type Numbers = serde_json::Map<String, serde_json::Value>;

/// A depot's numbers of one moment.
pub(crate) struct Now {
    /// Counters and gauges by the names that `stat` uses.
    pub(crate) numbers: Numbers,
    pub(crate) counters: Counters,
    pub(crate) gauges: Gauges,
    pub(crate) regions: Vec<RegionGauge>,
}

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident),+ $(,)?) => {
        /// Monotonic counters since the depot started.
        #[derive(Debug, Default)]
        pub struct Stats {
            $($(#[doc = $doc])+ pub $name: AtomicU64,)+
            /// The longest stall, in microseconds.
            pub stall_max_us: AtomicU64,
            failures: Mutex<Vec<(&'static str, ErrorKind, u64)>>,
        }

        impl Stats {
            /// The counters' names and descriptions.
            pub const HELP: &[(&str, &str)] = &[$((stringify!($name), concat!($($doc),+))),+];

            /// Returns all counters by name, failures as `{"operation": {"kind": count}}`.
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
    /// Block hashes requested by lookups and claims.
    lookup_blocks,
    /// Of these, blocks that the depot had and promised: those of a claim's final hit.
    lookup_hit_blocks,
    /// Blocks that dumps requested to store.
    dump_blocks,
    /// Blocks dumped into the pool.
    dump_blocks_sealed,
    /// Blocks of dumps that were already in the pool.
    dump_blocks_had,
    /// Blocks whose dump was refused, mostly because the pool was full of unwritten blocks (backpressure).
    dump_blocks_dropped,
    /// Blocks requested by loads.
    load_blocks,
    /// Blocks requested by loads that could not be served.
    load_blocks_missed,
    /// Blocks read from tiers into the pool.
    fetch_blocks,
    /// Bytes read from tiers into the pool.
    fetch_bytes,
    /// Blocks that the `Dax` tier leased where they lie, for readers that copy from its memory.
    in_place_blocks,
    /// Bytes of these blocks.
    in_place_bytes,
    /// Blocks written to tiers.
    write_blocks,
    /// Bytes written to tiers.
    write_bytes,
    /// Blocks whose writes to all tiers failed, so that only the pool has them.
    write_blocks_dropped,
    /// Blocks written to a tier again, because it had lost or evicted them.
    rewrite_blocks,
    /// Blocks written to a tier late: not when they were sealed, but when its placement demanded it.
    late_write_blocks,
    /// Late writes that failed, or that were not queued because the queue was full.
    late_write_blocks_dropped,
    /// Blocks queued for a tier with `…_write: on_demotion`, because a tier above it was about to evict them, or did.
    demote_blocks,
    /// Blocks that a tier was about to evict and that were not demoted: too many were waiting, a tier was down, or the block
    /// was gone before it was read.
    demote_blocks_dropped,
    /// Writes that were not made because the tier's budget of written bytes (`…_write_gb_per_day`) was used up.
    over_budget_blocks,
    /// Claims opened.
    claims,
    /// Claims shortened because they needed more than one claim's share of the pool.
    claims_cut,
    /// Claims that expired because no client polled them.
    claims_expired,
    /// Unused namespaces that were forgotten to make space in the table of namespaces.
    namespaces_forgotten,
    /// Stalls: times that the machine did not run the depot for a second or longer, while requests waited.
    stalls,
    /// Connections that ended while they held leases or half-written slots.
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

/// Adds the machine's counters to a depot's counters.
pub(crate) fn merge(map: &mut Numbers, counters: &Counters) {
    let counted = [
        ("lookup_blocks", counters.lookup_blocks),
        ("lookup_hit_blocks", counters.lookup_hit_blocks),
        ("dump_blocks", counters.dump_blocks),
        ("dump_blocks_sealed", counters.dump_blocks_sealed),
        ("dump_blocks_had", counters.dump_blocks_had),
        ("dump_blocks_dropped", counters.dump_blocks_dropped),
        ("load_blocks", counters.load_blocks),
        ("load_blocks_missed", counters.load_blocks_missed),
        ("fetch_blocks", counters.fetch_blocks),
        ("fetch_bytes", counters.fetch_bytes),
        ("in_place_blocks", counters.in_place_blocks),
        ("in_place_bytes", counters.in_place_bytes),
        ("write_blocks", counters.write_blocks),
        ("write_bytes", counters.write_bytes),
        ("write_blocks_dropped", counters.write_blocks_dropped),
        ("rewrite_blocks", counters.rewrite_blocks),
        ("late_write_blocks", counters.late_write_blocks),
        ("late_write_blocks_dropped", counters.late_write_blocks_dropped),
        ("demote_blocks", counters.demote_blocks),
        ("demote_blocks_dropped", counters.demote_blocks_dropped),
        ("over_budget_blocks", counters.over_budget_blocks),
        ("claims", counters.claims),
        ("claims_cut", counters.claims_cut),
        ("claims_expired", counters.claims_expired),
        ("namespaces_forgotten", counters.namespaces_forgotten),
        ("owners_ended_holding", counters.owners_ended_holding),
    ];
    for (name, count) in counted {
        let before = map.get(name).and_then(serde_json::Value::as_u64).unwrap_or(0);
        map.insert(name.to_owned(), (before + count).into());
    }
    for (operation, kind, count) in &counters.failures {
        let by_kind = &mut map["failures"][*operation];
        let before = by_kind[kind.as_str()].as_u64().unwrap_or(0);
        by_kind[kind.as_str()] = (before + count).into();
    }
}

/// Further numbers of `stat` besides the counters of [`Stats::HELP`], with their descriptions.
pub const GAUGES_HELP: &[(&str, &str)] = &[
    ("pool_bytes", "Memory of the pool"),
    ("pool_free_bytes", "Free memory of the pool"),
    ("pool_filling_bytes", "Memory of the pool that clients are copying into"),
    ("pool_stopped_bytes", "Quarantined memory of clients that ended during a copy, until they exit"),
    ("pool_fetching_bytes", "Memory of the pool that tiers are reading into"),
    ("pool_dirty_bytes", "Memory of the pool that holds dirty blocks, which no tier has yet"),
    ("pool_leased_bytes", "Memory of the pool that holds blocks leased by clients"),
    ("pool_pinned_bytes", "Memory of the pool that cannot be evicted at the moment"),
    ("pool_page_bytes", "Size of a page of the pool's memory"),
    ("pool_blocks", "Blocks in the pool, and those leased in the memory of the `Dax` tier"),
    ("low_priority_blocks", "Blocks of low priority in the pool that nobody has used"),
    ("high_priority_blocks", "Blocks of high priority in the pool"),
    ("dirty_blocks", "Dirty blocks, which no tier has yet"),
    ("in_place_leased_blocks", "Blocks leased in the memory of the `Dax` tier, with and without a reader"),
    ("in_place_leased_bytes", "Memory of the `Dax` tier that holds leased blocks"),
    ("in_place_idle_bytes", "Memory of the `Dax` tier that holds leased blocks without a reader"),
    ("namespaces", "Known namespaces"),
    (
        "namespaces_provisional",
        "Namespaces kept in the pool only, because a tier has not answered about them",
    ),
    ("namespace_epochs", "Known namespaces, each epoch counted separately"),
    ("claims_open", "Open claims"),
    ("claims_queued", "Claims that wait for space in the pool"),
    ("loads_open", "Loads in flight"),
    ("fetches_queued", "Blocks that wait to be read from tiers"),
    ("writes_queued", "Blocks that wait to be written to tiers"),
    ("fetches_hung", "Blocks of failed reads and leases in place that a tier has not ended"),
    ("writes_hung", "Blocks of failed writes that a tier has not ended, which keep memory of the pool"),
    (
        "demotions_queued",
        "Blocks that a tier is about to evict, which wait to be read and given to the tier below",
    ),
    ("leases", "Leases of blocks that clients hold: one for each block of a copy in flight"),
    ("removals_owed", "Removals that a tier has not completed yet"),
    ("removals_closed", "Namespaces for which a tier is closed because it owes too many removals"),
    ("ledger_unproven_blocks", "Blocks of the previous depot whose checksums are not verified yet"),
];

/// Further numbers of `stat` that only grow, with their descriptions.
pub const EVICTIONS_HELP: &[(&str, &str)] = &[
    ("evict_blocks", "Blocks evicted from the pool"),
    ("evict_blocks_unwritten", "Blocks evicted from the pool that no tier had"),
];

/// Returns the machine's gauges, by the names that `stat` and the metrics use.
pub(crate) fn gauges(gauges: &Gauges) -> [(&'static str, u64); 32] {
    [
        ("pool_bytes", gauges.pool_bytes),
        ("pool_free_bytes", gauges.pool_free_bytes),
        ("pool_filling_bytes", gauges.held.filling),
        ("pool_stopped_bytes", gauges.stopped_bytes),
        ("pool_fetching_bytes", gauges.held.fetching),
        ("pool_dirty_bytes", gauges.held.dirty),
        ("pool_leased_bytes", gauges.held.leased),
        ("pool_pinned_bytes", gauges.held.pinned),
        ("pool_blocks", gauges.pool_blocks as u64),
        ("low_priority_blocks", gauges.low_priority_blocks as u64),
        ("high_priority_blocks", gauges.high_priority_blocks as u64),
        ("dirty_blocks", gauges.dirty_blocks),
        ("in_place_leased_blocks", gauges.in_place.blocks),
        ("in_place_leased_bytes", gauges.in_place.bytes),
        ("in_place_idle_bytes", gauges.in_place.idle_bytes),
        ("namespaces", gauges.namespaces as u64),
        ("namespaces_provisional", gauges.namespaces_provisional as u64),
        ("namespace_epochs", gauges.spaces as u64),
        ("claims_open", gauges.claims_open as u64),
        ("claims_queued", gauges.claims_queued as u64),
        ("loads_open", gauges.loads_open as u64),
        ("fetches_queued", gauges.reads_queued as u64),
        ("writes_queued", gauges.writes_queued as u64),
        ("fetches_hung", gauges.reads_hung as u64),
        ("writes_hung", gauges.writes_hung as u64),
        ("demotions_queued", gauges.demotions_queued as u64),
        ("removals_owed", gauges.removals_owed as u64),
        ("removals_closed", gauges.removals_closed as u64),
        ("leases", gauges.leases),
        ("lease_age_max_s", gauges.lease_age_max_s.into()),
        ("evict_blocks", gauges.evicted),
        ("evict_blocks_unwritten", gauges.evicted_unwritten),
    ]
}

/// Returns the blocks evicted from the pool, by age. `buckets` has pairs: an upper bound in seconds, `null` for the oldest
/// blocks, and the blocks above the bound before it.
pub(crate) fn ages(ages: &EvictAges) -> serde_json::Value {
    let bounds = EVICT_AGE_BOUNDS_S.into_iter().map(Some).chain([None]);
    let buckets: Vec<(Option<u32>, u64)> = bounds.zip(ages.blocks).collect();
    serde_json::json!({"blocks": ages.blocks.iter().sum::<u64>(), "sum_s": ages.sum_s, "buckets": buckets})
}
