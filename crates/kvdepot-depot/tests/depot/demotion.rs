//! Demotion with real tiers: what a small, fast tier evicts is found in the large one below.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use std::path::Path;

use kvdepot_core::{BlockHash, BlockKey, BlockLayout, NamespaceSpec};
use kvdepot_depot::direct::{Direct, OpenNamespace};
use kvdepot_depot::message::{Request, Response};
use kvdepot_depot::{Depot, DepotConfig};
use kvdepot_tier::conformance::until;

use crate::blocks::HANG;

const BLOCK: usize = 64 << 10;
/// Blocks stored before the test waits for the tiers.
const TURN: u64 = 4;
const BLOCKS: u64 = 320;

/// A pool and an upper tier with space for about 100 blocks each, over a directory without a cap.
fn start(dir: &Path, upper: &str) -> Depot {
    let mut config = serde_json::json!({
        "pipeline": format!("Cache|{upper}|Posix"),
        "pool_bytes": 6 << 20,
        "placement": {"Posix": {"write": "on_demotion"}},
        "slab": {"path": dir.join("slab"), "capacity_bytes": 8 << 20, "segment_mb": 1},
        "dax": {"device_path": dir.join("dax"), "max_bytes": 8 << 20},
        "posix": {"directories": [dir.join("posix")], "free_floor_percent": 0},
    });
    let other = if upper == "Slab" { "dax" } else { "slab" };
    config.as_object_mut().unwrap().remove(other);
    Depot::start_private(DepotConfig::from_json(&config.to_string()).unwrap()).unwrap()
}

fn bytes(n: u64) -> Vec<u8> {
    (0..BLOCK as u64).map(|at| (n * 31 + at / 512) as u8).collect()
}

fn hash(n: u64) -> BlockHash {
    let mut hash = [3; 16];
    hash[..8].copy_from_slice(&n.to_le_bytes());
    BlockHash(hash)
}

fn stat(depot: &Depot, name: &str) -> u64 {
    depot.direct().stats()[name].as_u64().unwrap()
}

fn store(depot: &Depot, direct: &Direct, namespace: OpenNamespace, n: u64) {
    let mut slot = direct.reserve(namespace, hash(n)).unwrap().unwrap();
    slot.write_at(0, &bytes(n)).unwrap();
    slot.seal(None).unwrap();
    if (n + 1).is_multiple_of(TURN) {
        let drained = depot.session().handle(Request::Drain { wait_ms: 60_000 });
        assert!(matches!(drained, Response::Drained(true)), "{drained:?}");
        until("everything is demoted", || {
            let stats = depot.direct().stats();
            let upper = &stats["tiers"][0];
            let number = |value: &serde_json::Value| value.as_u64().unwrap();
            // A tier may tell of what it has evicted after its writes have ended.
            number(&upper["blocks"]) + number(&upper["evict_blocks"]) == n + 1
                && number(&stats["demotions_queued"]) + number(&stats["writes_queued"]) == 0
        });
    }
}

fn check(upper: &str) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("posix")).unwrap();
    std::fs::File::create(dir.path().join("dax")).unwrap().set_len(8 << 20).unwrap();
    let depot = start(dir.path(), upper);
    let layout = BlockLayout::uniform(1, &[BLOCK as u64]).unwrap();
    let spec = NamespaceSpec::new("{\"model\":\"demoted\"}", layout).unwrap();
    let direct = depot.direct();
    let namespace = direct.open_namespace(spec.canonical()).unwrap();
    (0..BLOCKS).for_each(|n| store(&depot, &direct, namespace, n));
    let (demoted, dropped) = (stat(&depot, "demote_blocks"), stat(&depot, "demote_blocks_dropped"));
    assert!(
        demoted > BLOCKS / 2 && demoted < BLOCKS,
        "{upper}: {demoted} blocks, and not every one, were demoted"
    );
    let keys: Vec<BlockKey> =
        (0..BLOCKS).map(|n| BlockKey { namespace: namespace.id, hash: hash(n) }).collect();
    direct.evict_to_percent(0.0);
    let lost: Vec<usize> =
        direct.exist(&keys).iter().enumerate().filter(|(_, is)| !**is).map(|(n, _)| n).collect();
    // A tier of slots reports its next victims with the first eviction, which it does not foresee.
    assert!(lost.len() <= 8, "{upper}: lost {lost:?}, {dropped} dropped");
    for n in (0..BLOCKS).filter(|n| !lost.contains(&(*n as usize))) {
        let found = direct.read(namespace.handle, namespace.id, &[hash(n)], HANG).unwrap();
        let slot = found.into_iter().next().unwrap().unwrap();
        assert_eq!(slot.slices(0, BLOCK).concat(), bytes(n), "{upper}: block {n}");
    }
}

#[test]
fn what_a_slab_evicts_is_found_in_the_tier_below() {
    check("Slab");
}

#[test]
fn what_a_dax_medium_evicts_is_found_in_the_tier_below() {
    check("Dax");
}

#[test]
fn a_tier_without_one_above_cannot_wait_for_its_evictions() {
    let config = serde_json::json!({
        "pipeline": "Cache|Fake", "pool_bytes": 8 << 20, "placement": {"Fake": {"write": "on_demotion"}}
    });
    let error = Depot::start_private(DepotConfig::from_json(&config.to_string()).unwrap()).unwrap_err();
    assert!(error.to_string().contains("no tier is above"), "{error}");
}
