//! A load without a wait still begins what it asks for: nothing else must happen before the tier has the reads. P2.
#![allow(clippy::unwrap_used, reason = "a test fails where it cannot go on")]

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::unbounded;
use kvdepot_core::pipeline::PoolKind;
use kvdepot_core::{BlockLayout, NamespaceSpec};
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
