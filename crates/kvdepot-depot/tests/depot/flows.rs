//! What is counted of claims and of clients' copies, whoever the client is.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use kvdepot_core::pipeline::PoolKind;
use kvdepot_core::{BlockLayout, NamespaceSpec};
use kvdepot_depot::message::{ClaimGroup, Grant, Hashes, Request, Response, Shards};
use kvdepot_depot::{Depot, DepotConfig, PoolMapping};
use serde_json::Value;

const SHARDS: usize = 2;
const BLOCK_BYTES: u64 = 2 * 4096;

fn hashes(count: u8) -> Hashes<'static> {
    Hashes((0..count).flat_map(|number| [number; 16]).collect::<Vec<u8>>().into())
}

fn leases(response: Response) -> Vec<u64> {
    let Response::Grants(grants) = response else { panic!("{response:?}") };
    let leased = grants.into_iter().filter_map(|grant| match grant {
        Grant::Leased { lease, .. } => Some(lease),
        _ => None,
    });
    leased.collect()
}

#[test]
fn claims_copies_and_hits_of_a_namespace_are_counted() {
    let config = serde_json::json!({"pipeline": "Cache", "pool_bytes": 8 << 20});
    let config = DepotConfig::from_json(&config.to_string()).unwrap();
    let pool = PoolMapping::create_private(config.mapped_bytes()).unwrap();
    let depot = Depot::with_tiers(config, PoolKind::Cache, Vec::new(), pool).unwrap();
    let session = depot.session();
    let layout = BlockLayout::uniform(SHARDS, &[4096]).unwrap();
    let spec = NamespaceSpec::new("{\"model\":\"flows\"}", layout).unwrap();
    let opened = session.handle(Request::OpenNamespace { canonical: spec.canonical().into() });
    let Response::Namespace { handle: namespace, .. } = opened else { panic!("{opened:?}") };
    let stats = || depot.direct().stats();
    let counted = |stats: &Value, operation: &str| {
        let of = &stats["copies"][operation];
        (of["batches"].as_u64().unwrap(), of["bytes"].as_u64().unwrap())
    };

    let stored = leases(session.handle(Request::Reserve { namespace, hashes: hashes(3) }));
    for shard in [0, 1] {
        assert_eq!(counted(&stats(), "dump"), (0, 0), "blocks are not whole before shard {shard}");
        let shards = Shards::Some(vec![shard]);
        let sealed = session.handle(Request::Commit { leases: stored.clone(), shards });
        assert!(matches!(sealed, Response::Ok), "{sealed:?}");
    }
    assert_eq!(counted(&stats(), "dump"), (1, 3 * BLOCK_BYTES));

    let acquire = Request::Acquire { namespace, hashes: hashes(3), wait_ms: 0, last: true, in_place: false };
    let read = leases(session.handle(acquire));
    assert_eq!(counted(&stats(), "load"), (0, 0), "the client may still copy");
    session.handle(Request::Release { leases: read });
    assert_eq!(counted(&stats(), "load"), (1, 3 * BLOCK_BYTES));

    let group = ClaimGroup { namespaces: vec![namespace], window_blocks: 0, hashes_per_block: 1 };
    let claim =
        Request::ClaimOpen { groups: vec![group], hashes: hashes(5), skip: 0, limit: 5, label: "".into() };
    let claimed = session.handle(claim);
    assert!(matches!(claimed, Response::Claim { settled: true, units: 3, .. }), "{claimed:?}");
    let found = session.handle(Request::LookupPrefix { namespaces: vec![namespace], hashes: hashes(2) });
    assert!(matches!(found, Response::Prefix(2)), "{found:?}");
    let looked_up = session.handle(Request::Lookup { namespace, hashes: hashes(4) });
    assert!(matches!(&looked_up, Response::Present(there) if there[..] == [1, 1, 1, 0]), "{looked_up:?}");

    let stats = stats();
    for time in ["admitted", "settled"] {
        assert_eq!(stats["claim_times"][time]["count"], 1, "{time}");
    }
    let top = &stats["top_namespaces"][0];
    assert_eq!((&top["lookup_blocks"], &top["lookup_hit_blocks"]), (&11.into(), &8.into()));
    assert_eq!((&stats["lookup_blocks"], &stats["lookup_hit_blocks"]), (&11.into(), &8.into()));
}
