//! What is counted of claims and of clients' copies, whoever the client is.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::unbounded;
use kvdepot_core::pipeline::PoolKind;
use kvdepot_core::{BlockLayout, NamespaceSpec, Priority};
use kvdepot_depot::message::{ClaimGroup, Grant, Hashes, Request, Response, Shards};
use kvdepot_depot::{Depot, DepotConfig, PoolMapping};
use kvdepot_tier::{Fetched, Presence, Tier};
use serde_json::Value;

use crate::held_reads::HeldReads;

/// Reached only by a hang.
const HANG: Duration = Duration::from_secs(60);
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

    let stored =
        leases(session.handle(Request::Reserve { namespace, hashes: hashes(3), priority: Priority::Normal }));
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
    let claim = Request::ClaimOpen {
        groups: vec![group],
        hashes: hashes(5),
        skip: 0,
        limit: 5,
        tiers: None,
        label: "".into(),
    };
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

/// The totals of the depot and of its only namespace agree, whatever happens while a claim is open.
#[test]
fn a_claim_that_is_final_after_a_reset_counts_for_its_namespace() {
    let config = serde_json::json!({"pipeline": "Cache|Fake", "pool_bytes": 8 << 20});
    let config = DepotConfig::from_json(&config.to_string()).unwrap();
    let pool = PoolMapping::create_private(config.mapped_bytes()).unwrap();
    let (begun, reads) = unbounded();
    let tiers: Vec<Arc<dyn Tier>> = vec![Arc::new(HeldReads { presence: Presence::Present, reads: begun })];
    let depot = Depot::with_tiers(config, PoolKind::Cache, tiers, pool).unwrap();
    let session = depot.session();
    let layout = BlockLayout::uniform(1, &[4096]).unwrap();
    let spec = NamespaceSpec::new("{\"model\":\"reset\"}", layout).unwrap();
    let opened = session.handle(Request::OpenNamespace { canonical: spec.canonical().into() });
    let Response::Namespace { handle: namespace, .. } = opened else { panic!("{opened:?}") };
    let group = ClaimGroup { namespaces: vec![namespace], window_blocks: 0, hashes_per_block: 1 };
    let claim = Request::ClaimOpen {
        groups: vec![group],
        hashes: hashes(3),
        skip: 0,
        limit: 3,
        tiers: None,
        label: "".into(),
    };
    let opened = session.handle(claim);
    let Response::Claim { claim, settled: false, .. } = opened else { panic!("{opened:?}") };
    let held: Vec<_> = (0..3).map(|_| reads.recv_timeout(HANG).unwrap()).collect();
    let reset = session.handle(Request::Reset { namespaces: vec![namespace] });
    assert!(matches!(reset, Response::Epochs(_)), "{reset:?}");
    held.into_iter().for_each(|read| read.end(Ok(Fetched::Whole)));
    let over = session.handle(Request::ClaimPoll { claim, settle: true });
    assert!(matches!(over, Response::Claim { settled: true, .. }), "{over:?}");
    let stats = depot.direct().stats();
    let top = &stats["top_namespaces"][0];
    assert_eq!((&stats["lookup_blocks"], &top["lookup_blocks"]), (&3.into(), &3.into()));
    assert_eq!(stats["lookup_hit_blocks"], top["lookup_hit_blocks"]);
}
