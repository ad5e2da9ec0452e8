//! A tier's placement, from the configuration to what the tier is given.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use kvdepot_core::{BlockHash, BlockKey, BlockLayout, ErrorKind, NamespaceSpec};
use kvdepot_depot::direct::Now;
use kvdepot_depot::message::{Request, Response};
use kvdepot_depot::{Depot, DepotConfig};

fn start(pipeline: &str, placement: serde_json::Value) -> kvdepot_core::Result<Depot> {
    let config = serde_json::json!({"pipeline": pipeline, "pool_bytes": 8 << 20, "placement": placement});
    Depot::start_private(DepotConfig::from_json(&config.to_string())?)
}

fn counter(depot: &Depot, name: &str) -> u64 {
    let Response::Stats(text) = depot.session().handle(Request::Stats) else { panic!("no stat") };
    let stat: serde_json::Value = serde_json::from_str(&text).unwrap();
    stat[name].as_u64().unwrap_or_else(|| panic!("no {name} in {stat}"))
}

fn drain(depot: &Depot) {
    let drained = depot.session().handle(Request::Drain { wait_ms: 60_000 });
    assert!(matches!(drained, Response::Drained(true)), "{drained:?}");
}

#[test]
fn a_tier_is_given_blocks_when_its_placement_says() {
    let depot = start("Cache|Fake", serde_json::json!({"Fake": {"write": "on_second_use"}})).unwrap();
    let layout = BlockLayout::uniform(1, &[64 << 10]).unwrap();
    let spec = NamespaceSpec::new("{\"model\":\"placed\"}", layout).unwrap();
    let direct = depot.direct();
    let namespace = direct.open_namespace(spec.canonical()).unwrap();
    let hash = BlockHash([1; 16]);
    direct.reserve(namespace, hash).unwrap().unwrap().seal(None).unwrap();
    drain(&depot);
    assert_eq!((counter(&depot, "write_blocks"), counter(&depot, "dirty_blocks")), (0, 0));
    let key = BlockKey { namespace: namespace.id, hash };
    assert!(matches!(direct.read_now(&[key])[..], [Now::Here(_)]));
    drain(&depot);
    assert_eq!((counter(&depot, "write_blocks"), counter(&depot, "late_write_blocks")), (1, 1));
}

#[test]
fn a_tier_is_given_no_more_than_its_budget_of_written_bytes() {
    let hour = 2 * (64 << 10);
    let depot = start("Cache|Fake", serde_json::json!({"Fake": {"write_bytes_per_day": hour * 24}})).unwrap();
    let layout = BlockLayout::uniform(1, &[64 << 10]).unwrap();
    let spec = NamespaceSpec::new("{\"model\":\"budget\"}", layout).unwrap();
    let direct = depot.direct();
    let namespace = direct.open_namespace(spec.canonical()).unwrap();
    for n in 1..=20 {
        direct.reserve(namespace, BlockHash([n; 16])).unwrap().unwrap().seal(None).unwrap();
    }
    drain(&depot);
    // A machine that stands still for half an hour earns one more block.
    let (written, left_out) = (counter(&depot, "write_blocks"), counter(&depot, "over_budget_blocks"));
    assert!((2..10).contains(&written) && written + left_out == 20, "{written}, {left_out}");
    assert_eq!((counter(&depot, "dirty_blocks"), counter(&depot, "write_blocks_dropped")), (0, 0));
    let keys: Vec<_> =
        (1..=20).map(|n| BlockKey { namespace: namespace.id, hash: BlockHash([n; 16]) }).collect();
    assert!(direct.read_now(&keys).iter().all(|now| matches!(now, Now::Here(_))), "the pool has all");
}

/// A read that must ask a tier first is one read.
#[test]
fn a_block_that_a_tier_has_to_fetch_counts_once() {
    let depot = start("Cache|Fake", serde_json::json!({})).unwrap();
    let layout = BlockLayout::uniform(1, &[64 << 10]).unwrap();
    let spec = NamespaceSpec::new("{\"model\":\"counted\"}", layout).unwrap();
    let direct = depot.direct();
    let namespace = direct.open_namespace(spec.canonical()).unwrap();
    let hash = BlockHash([1; 16]);
    direct.reserve(namespace, hash).unwrap().unwrap().seal(None).unwrap();
    drain(&depot);
    direct.evict_to_percent(0.0);
    let keys = [hash, BlockHash([2; 16])].map(|hash| BlockKey { namespace: namespace.id, hash });
    assert!(matches!(direct.read_now(&keys)[..], [Now::Ask, Now::Absent]));
    let found =
        direct.read(namespace.handle, namespace.id, &[hash], std::time::Duration::from_secs(60)).unwrap();
    assert!(matches!(found[..], [Ok(_)]));
    assert_eq!((counter(&depot, "load_blocks"), counter(&depot, "load_blocks_missed")), (2, 1));
    assert_eq!(direct.exist(&keys), [true, false]);
    assert_eq!(direct.exist_now(&keys), Some(vec![true, false]));
    assert_eq!((counter(&depot, "lookup_blocks"), counter(&depot, "lookup_hit_blocks")), (4, 2));
    assert_eq!(depot.direct().stats()["tiers"][0]["hit_blocks"], 0, "it is in the pool since it was read");
}

#[test]
fn a_placement_that_makes_no_sense_is_refused() {
    for (pipeline, placement, wants) in [
        ("Cache|Fake", serde_json::json!({"Posix": {}}), "tier=Posix"),
        ("Staging|Fake", serde_json::json!({"Fake": {"write": "when_cold"}}), "Staging"),
        ("Cache|Fake", serde_json::json!({"Fake": {"write": "later"}}), "later"),
        ("Cache|Fake", serde_json::json!({"Fake": {"promoted": true}}), "promoted"),
    ] {
        let error = start(pipeline, placement).unwrap_err();
        let causes = format!("{error} {:?}", std::error::Error::source(&error).map(ToString::to_string));
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(causes.contains(wants), "{causes}");
    }
}

/// By a look without I/O and by a count of the leading blocks, as LMCache's server and SGLang ask.
#[test]
fn a_hit_counts_for_the_tier_that_a_lookup_found_it_in() {
    let depot = start("Cache|Fake", serde_json::json!({})).unwrap();
    let layout = BlockLayout::uniform(1, &[64 << 10]).unwrap();
    let spec = NamespaceSpec::new("{\"model\":\"where\"}", layout).unwrap();
    let direct = depot.direct();
    let namespace = direct.open_namespace(spec.canonical()).unwrap();
    let hashes: Vec<BlockHash> = (1..=4).map(|n| BlockHash([n; 16])).collect();
    for &hash in &hashes[..3] {
        direct.reserve(namespace, hash).unwrap().unwrap().seal(None).unwrap();
    }
    let key = |&hash: &BlockHash| BlockKey { namespace: namespace.id, hash };
    let keys: Vec<BlockKey> = hashes.iter().map(key).collect();
    let in_tier = || depot.direct().stats()["tiers"][0]["hit_blocks"].as_u64().unwrap();
    assert_eq!((direct.exist(&keys), in_tier()), (vec![true, true, true, false], 0));
    drain(&depot);
    direct.evict_to_percent(0.0);
    assert_eq!((direct.exist(&keys), in_tier()), (vec![true, true, true, false], 3));
    assert_eq!(direct.exist_now(&keys), Some(vec![true, true, true, false]));
    assert_eq!(in_tier(), 6);
    let bytes: Vec<u8> = hashes.iter().flat_map(|hash| hash.0).collect();
    assert_eq!((direct.prefix(namespace.handle, &bytes).unwrap(), in_tier()), (3, 9));
    direct.read(namespace.handle, namespace.id, &hashes[..1], std::time::Duration::from_secs(60)).unwrap();
    assert_eq!((direct.prefix(namespace.handle, &bytes).unwrap(), in_tier()), (3, 11), "one is in the pool");
}
