//! Depots with a pool server: the Remote tier against the real wire door. P1, P2, P8.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::sync::Arc;

use crate::common::{Engine, LONG, config, embedded, hash, spec};
use crate::pool::{BLOCK, claim, hand_over, layout, over, server, until};
use crate::wire::Wired;
use kvdepot_depot::client::{Claim, ClaimGroupSpec};
use kvdepot_tier::{RemoteConfig, RemoteTier, Tier, conformance};
use serde_json::json;

const POOL: u64 = 32 << 20;

/// The conformance suite of all tiers against the real server, which lives as long as the suite.
#[test]
fn the_real_door_passes_the_conformance_suite() {
    let servers = std::cell::RefCell::new(Vec::new());
    let open = |server: &Wired| {
        let mut config = RemoteConfig::new([server.at.to_string()]);
        config.timeout = LONG;
        (config.absent_ttl, config.present_ttl) = (LONG * 60, LONG * 60);
        Arc::new(RemoteTier::open(config).unwrap()) as Arc<dyn Tier>
    };
    conformance::check(&|| {
        let server = Wired::open(config(128 << 20, json!({})), json!({}));
        let tier = open(&server);
        servers.borrow_mut().push(server);
        tier
    });
    let server = Wired::open(config(128 << 20, json!({})), json!({}));
    conformance::check_persistent(&|| open(&server));
}

/// Prefill and decode: blocks that one depot has dumped and written behind are found by another one, with the same
/// bytes.
#[test]
fn what_one_depot_dumped_another_one_finds() {
    let server = Wired::open(config(64 << 20, json!({})), json!({}));
    let spec = spec("handover", layout());
    let producer = embedded(over(server.at, "Cache|Remote", POOL, &json!({}), &json!({})));
    let consumer = embedded(over(server.at, "Cache|Remote", POOL, &json!({}), &json!({})));
    hand_over(&producer, &consumer, &spec);
    // Later depots know of a reset by another one.
    producer.reset(&[Arc::clone(&spec)]).unwrap();
    let third = embedded(over(server.at, "Cache|Remote", POOL, &json!({}), &json!({})));
    third.register(&spec).unwrap();
    assert_eq!(claim(&third, &spec, 32).1, 0);
}

/// A tier that is added later knows nothing of earlier resets, and is told about them.
#[test]
fn a_remote_tier_added_to_files_that_were_reset_takes_part() {
    let directory = tempfile::tempdir().unwrap();
    let server = Wired::open(config(64 << 20, json!({})), json!({}));
    let spec = spec("added", layout());
    let posix = json!({"posix": {"directories": [directory.path()]}});
    {
        let depot = embedded(over(server.at, "Cache|Posix", POOL, &json!({}), &posix));
        depot.register(&spec).unwrap();
        depot.reset(&[Arc::clone(&spec)]).unwrap();
        depot.reset(&[Arc::clone(&spec)]).unwrap();
    }
    let depot = embedded(over(server.at, "Cache|Remote|Posix", POOL, &json!({}), &posix));
    let mut engine = Engine::new(&depot, &spec, 16);
    engine.fill(1);
    let names: Vec<u64> = (0..16).collect();
    assert!(engine.dump(&names, &engine.all_pages()).is_empty());
    assert!(depot.drain(LONG).unwrap());
    assert_eq!(server.stat("pool_blocks"), 16, "{}", depot.stats());
    let other = embedded(over(server.at, "Cache|Remote", POOL, &json!({}), &json!({})));
    other.register(&spec).unwrap();
    assert_eq!(claim(&other, &spec, 16).1, 16, "{}", other.stats());
}

/// A dump goes to every tier. When the pool server is gone the files still serve, and dumps still reach them.
#[test]
fn files_below_serve_when_the_pool_server_is_gone() {
    let directory = tempfile::tempdir().unwrap();
    let mut server = Wired::open(config(64 << 20, json!({})), json!({}));
    let spec = spec("below", layout());
    let posix = json!({"posix": {"directories": [directory.path()]}});
    {
        let depot = embedded(over(server.at, "Cache|Remote|Posix", POOL, &json!({}), &posix));
        let mut engine = Engine::new(&depot, &spec, 16);
        engine.fill(1);
        let names: Vec<u64> = (0..16).collect();
        assert!(engine.dump(&names, &engine.all_pages()).is_empty());
        assert!(depot.drain(LONG).unwrap());
    }
    assert_eq!(server.stat("pool_blocks"), 16);
    server.close();
    let depot = embedded(over(server.at, "Cache|Remote|Posix", POOL, &json!({}), &posix));
    let mut engine = Engine::new(&depot, &spec, 16);
    assert_eq!(claim(&depot, &spec, 16), (true, 16, 16), "{}", depot.stats());
    engine.fill(2);
    let more: Vec<u64> = (100..116).collect();
    assert!(engine.dump(&more, &engine.all_pages()).is_empty());
    assert!(depot.drain(LONG).unwrap());
    assert_eq!(depot.stats()["depot"]["write_blocks_dropped"], 0, "the files took them");
}

/// Fetches that find no room cost their blocks at most, and no connection to the server that has them.
#[test]
fn a_full_pool_costs_no_connection() {
    let wired = Wired::open(config(64 << 20, json!({})), json!({}));
    let spec = spec("full", layout());
    let producer = embedded(over(wired.at, "Cache|Remote", POOL, &json!({}), &json!({})));
    let mut from = Engine::new(&producer, &spec, 32);
    from.fill(5);
    let names: Vec<u64> = (0..32).collect();
    assert!(from.dump(&names, &from.all_pages()).is_empty());
    assert!(producer.drain(LONG).unwrap());
    let more = json!({"timeout_ms": 5_000});
    let depot = embedded(over(wired.at, "Cache|Remote", 16 * BLOCK, &json!({}), &more));
    let mut into = Engine::new(&depot, &spec, 16);
    let group = ClaimGroupSpec { namespaces: vec![Arc::clone(&spec)], window_blocks: 0, hashes_per_block: 1 };
    let hashes: Vec<_> = (0..16).map(hash).collect();
    let mut held = Claim::open(&depot, &[group], &hashes, 0, 16, "").unwrap();
    // A claim is cut to what it may have of a pool.
    assert_eq!(held.wait(LONG), (true, 14, 14), "{}", depot.stats());
    let connections = |state: serde_json::Value| {
        (state["up"].clone(), state["connections"].clone(), state["failures"].clone())
    };
    until("all are connected", || server(&depot)["connections"] == 4);
    let before = connections(server(&depot));
    assert_eq!(before.0, true);
    // Sixteen blocks, and room for two.
    into.clear();
    let missed = into.load(&names[16..], &into.all_pages());
    assert!((0..16).all(|page| missed.contains(&page) || into.holds(page, page + 16, 5)));
    assert_eq!(connections(server(&depot)), before);
    held.release();
    into.clear();
    assert!(into.load(&names[16..], &into.all_pages()).is_empty(), "{}", depot.stats());
    assert!((0..16).all(|page| into.holds(page, page + 16, 5)));
    assert_eq!(connections(server(&depot)), before);
}
