//! A load without a wait still begins what it asks for: nothing else must happen before the tier has the reads. P2.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::unbounded;
use kvdepot_core::pipeline::PoolKind;
use kvdepot_core::{BlockHash, BlockKey, BlockLayout, NamespaceSpec};
use kvdepot_depot::message::{Hashes, Request, Response};
use kvdepot_depot::{Depot, DepotConfig, PoolMapping};
use kvdepot_tier::{Fetched, Presence, Tier};

use crate::held_reads::HeldReads;

/// Reached only by a hang.
const HANG: Duration = Duration::from_secs(60);

#[test]
fn reads_are_with_the_tier_when_a_question_without_a_wait_is_answered() {
    let config = serde_json::json!({"pipeline": "Cache|Fake", "pool_bytes": 8 << 20});
    let config = DepotConfig::from_json(&config.to_string()).unwrap();
    let pool = PoolMapping::create_private(config.mapped_bytes()).unwrap();
    let (begun, reads) = unbounded();
    let tiers: Vec<Arc<dyn Tier>> = vec![Arc::new(HeldReads { presence: Presence::Unknown, reads: begun })];
    let depot = Depot::with_tiers(config, PoolKind::Cache, tiers, pool).unwrap();
    let session = depot.session();
    let layout = BlockLayout::uniform(1, &[64 << 10]).unwrap();
    let spec = NamespaceSpec::new("{\"model\":\"questions\"}", layout).unwrap();
    let opened = session.handle(Request::OpenNamespace { canonical: spec.canonical().into() });
    let Response::Namespace { handle: namespace, .. } = opened else { panic!("{opened:?}") };
    let mut ended = Vec::new();
    for round in 0..10u8 {
        let bytes: Vec<u8> = (0..8u8).flat_map(|block| [[round; 15].as_slice(), &[block]].concat()).collect();
        let request = Request::Acquire {
            namespace,
            hashes: Hashes(bytes.into()),
            wait_ms: 0,
            last: true,
            in_place: false,
        };
        assert!(matches!(session.handle(request), Response::Grants(_)));
        // Another thread may still be handing them over when this one already has its answer.
        let next = |_| reads.recv_timeout(HANG).unwrap_or_else(|_| panic!("round {round}: no read"));
        ended.extend((0..8).map(next));
    }
    ended.into_iter().for_each(|read| read.end(Ok(Fetched::Whole)));
}

/// Two tiers that only know by I/O what they have, and both have everything: the first one counts, and is named.
#[test]
fn a_block_that_only_io_finds_counts_for_the_first_tier_that_has_it() {
    let config = serde_json::json!({"pipeline": "Cache|Fake", "pool_bytes": 8 << 20});
    let config = DepotConfig::from_json(&config.to_string()).unwrap();
    let pool = PoolMapping::create_private(config.mapped_bytes()).unwrap();
    let (begun, _reads) = unbounded();
    let tier = |presence| Arc::new(HeldReads { presence, reads: begun.clone() }) as Arc<dyn Tier>;
    let tiers = vec![tier(Presence::Absent), tier(Presence::Unknown), tier(Presence::Unknown)];
    let depot = Depot::with_tiers(config, PoolKind::Cache, tiers, pool).unwrap();
    let direct = depot.direct();
    let layout = BlockLayout::uniform(1, &[64 << 10]).unwrap();
    let spec = NamespaceSpec::new("{\"model\":\"questions\"}", layout).unwrap();
    let namespace = direct.open_namespace(spec.canonical()).unwrap();
    let hits = || -> Vec<u64> {
        let tiers = direct.stats()["tiers"].as_array().unwrap().clone();
        tiers.iter().map(|tier| tier["hit_blocks"].as_u64().unwrap()).collect()
    };
    let key = |n| BlockKey { namespace: namespace.id, hash: BlockHash([n; 16]) };
    let keys = [key(1), key(2), key(3)];
    assert_eq!(direct.exist_now(&keys), None, "I/O is needed");
    assert_eq!(hits(), [0, 0, 0]);
    // A probe finds what a look denies.
    assert_eq!((direct.exist(&keys), hits()), (vec![true; 3], vec![3, 0, 0]));
    let bytes: Vec<u8> = keys.iter().flat_map(|key| key.hash.0).collect();
    assert_eq!(direct.prefix(namespace.handle, &bytes).unwrap(), 3);
    assert_eq!(hits().iter().sum::<u64>(), 6);
    let told = direct.explain("", &["01".repeat(16).as_str()]).unwrap();
    assert_eq!(told["blocks"][0]["at"], "HeldReads");
}

/// A status page, `kvdepot top` and any number of scrapers see the same maximum.
#[test]
fn whoever_reads_the_longest_hold_of_the_lock_leaves_it_for_the_others() {
    let config = serde_json::json!({"pipeline": "Cache", "pool_bytes": 8 << 20});
    let config = DepotConfig::from_json(&config.to_string()).unwrap();
    let pool = PoolMapping::create_private(config.mapped_bytes()).unwrap();
    let depot = Depot::with_tiers(config, PoolKind::Cache, Vec::new(), pool).unwrap();
    let (page, scraper) = (depot.direct(), depot.direct());
    let layout = BlockLayout::uniform(1, &[64 << 10]).unwrap();
    let spec = NamespaceSpec::new("{\"model\":\"holds\"}", layout).unwrap();
    page.open_namespace(spec.canonical()).unwrap();
    let us = |stats: &serde_json::Value, name: &str| stats[name].as_u64().unwrap();
    // Reading holds the lock, too, so the second one may have seen a longer hold.
    let (first, second) = (page.stats(), scraper.stats());
    for name in ["lock_hold_max_us", "lock_hold_cpu_max_us"] {
        assert!(us(&second, name) >= us(&first, name), "{name}: {first} {second}");
    }
    depot.direct().forget_holds();
}
