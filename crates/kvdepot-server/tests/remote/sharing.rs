//! A pool server that several nodes share: what one of them does, or its tier's disk, takes it away from no other.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::common::{LONG, config};
use crate::gate::Gate;
use crate::pool::{over, until};
use crate::wire::Wired;
use kvdepot_core::BlockLayout;
use kvdepot_core::limits::NAMESPACES_MAX;
use kvdepot_tier::conformance::{Bench, Waiting, spec};
use kvdepot_tier::{RemoteConfig, RemoteTier, Tier, TierServer, Written};
use serde_json::json;

const POOL: u64 = 64 << 20;

fn tier(server: SocketAddr, timeout: Duration, connections: usize) -> Arc<dyn Tier> {
    let config = RemoteConfig { timeout, connections, ..RemoteConfig::new([server.to_string()]) };
    Arc::new(RemoteTier::open(config).unwrap())
}

fn server(tier: &Arc<dyn Tier>) -> TierServer {
    tier.servers().remove(0)
}

fn model(tier: &Arc<dyn Tier>, name: &str) -> Bench {
    Bench::with(Arc::clone(tier), spec(name, BlockLayout::uniform(1, &[4096]).unwrap()))
}

/// P12: by InfiniStore's protocol, which it speaks as well, it would be a second store.
#[test]
fn a_server_that_was_silent_at_first_is_used_in_our_own_protocol() {
    let wired = Wired::open(config(POOL, json!({})), json!({}));
    let gate = Gate::holding_first(wired.at);
    let first = tier(gate.at, Duration::from_secs(2), 1);
    until("the silence is over", || server(&first).failures > 0);
    let mut bench = model(&first, "shared");
    until("a block is written", || bench.write(0).is_ok());
    let other = model(&tier(wired.at, LONG, 1), "shared");
    assert!(other.read_is_right(0), "another node finds it");
    bench.epoch = bench.tier.advance_and_wait(&bench.spec, 0).unwrap();
    let later = model(&tier(wired.at, LONG, 1), "shared");
    assert_eq!(later.epoch, bench.epoch, "another node knows of the reset");
    assert!(!later.read_is_right(0));
}

/// The connections live for months, and the server's places for namespaces are everyone's.
#[test]
fn namespaces_that_a_node_has_closed_leave_their_places_to_others() {
    let wired = Wired::open(config(POOL, json!({})), json!({}));
    let busy = tier(wired.at, LONG, 1);
    for n in 0..NAMESPACES_MAX + 100 {
        let closed = model(&busy, &format!("model {n}"));
        assert_eq!(closed.epoch, 0);
        busy.close_namespace(closed.spec.root());
    }
    let bench = model(&busy, "the last");
    assert_eq!(bench.write(0).unwrap(), Written::New);
    assert!(model(&tier(wired.at, LONG, 1), "the last").read_is_right(0));
    assert_eq!(server(&busy).failures, 0);
}

/// The pool server's own tier hangs, its pool does not.
#[test]
fn a_tier_that_hangs_behind_a_pool_server_does_not_take_its_pool_away() {
    let behind = Wired::open(config(POOL, json!({})), json!({}));
    let gate = Gate::before(behind.at);
    let patient = json!({"timeout_ms": 3_600_000});
    let depot = over(gate.at, "Cache|Remote", POOL, &patient, &json!({}));
    let wired = Wired::open(depot, json!({"answer_wait_ms": 100}));
    let node = tier(wired.at, Duration::from_secs(3), 4);
    until("all are connected", || server(&node).connections == 4);
    let first = model(&node, "first");
    first.write_all(8);
    until("its tier has them", || wired.stat("writes_queued") == 0 && wired.stat("dirty_blocks") == 0);
    gate.set_shut(true);
    let second = model(&node, "second");
    assert!(first.probe(first.keys(16)).unwrap() >= 8);
    assert!(first.remove(7).is_err(), "it is owed");
    assert!((0..7).all(|n| first.read_is_right(n)));
    assert_eq!(second.write(0).unwrap(), Written::New, "in the pool");
    let moved = node.advance_and_wait(&second.spec, 0);
    assert!(moved.is_err(), "its tier has not stored it: {moved:?}");
    assert!((0..7).all(|n| first.read_is_right(n)));
    let state = server(&node);
    assert_eq!((state.up, state.failures), (true, 0), "{state:?}");
    gate.set_shut(false);
}
