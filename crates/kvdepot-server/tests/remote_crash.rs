//! A pool server that crashes between receiving a reset and passing it to its own tiers: the reset was not
//! acknowledged, and still holds (P1).
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;
#[path = "common/pool.rs"]
mod pool;
#[path = "common/wire.rs"]
mod wire;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use common::{Engine, LONG, config, embedded, spec};
use kvdepot_core::NamespaceSpec;
use kvdepot_core::pipeline::PoolKind;
use kvdepot_depot::{Depot, PoolMapping};
use kvdepot_tier::conformance::{Script, ScriptedTier};
use kvdepot_tier::{Done, FakeTier, Tier};
use pool::{claim, layout, over, server, until};
use serde_json::json;
use wire::Wired;

const SERVER_POOL: u64 = 64 << 20;
const POOL: u64 = 32 << 20;
const BLOCKS: u64 = 16;

/// When stuck, stores no epoch and does not answer.
#[derive(Default)]
struct Stuck {
    is_stuck: AtomicBool,
    epochs_asked: AtomicU64,
}

impl Script for Stuck {
    fn open_namespace(
        &self,
        inner: &Arc<FakeTier>,
        spec: &Arc<NamespaceSpec>,
        at_least: u32,
        deadline: Instant,
        done: Done<u32>,
    ) {
        if at_least > 0 && self.is_stuck.load(Ordering::SeqCst) {
            self.epochs_asked.fetch_add(1, Ordering::SeqCst);
            // Like a tier whose thread is gone.
            return std::mem::forget(done);
        }
        inner.open_namespace(spec, at_least, deadline, done);
    }
}

/// Starts a pool server over the content of `disk`, which outlives it.
fn serve(disk: &Arc<FakeTier>, port: u16) -> (Arc<ScriptedTier<Stuck>>, Wired) {
    let tier = Arc::new(ScriptedTier { inner: Arc::clone(disk), script: Stuck::default() });
    let config = config(SERVER_POOL, json!({"timeout_ms": 5_000}));
    let pool = PoolMapping::create_private(SERVER_POOL).unwrap();
    let depot = Depot::with_tiers(config, PoolKind::Cache, vec![Arc::clone(&tier) as _], pool).unwrap();
    (tier, Wired::over(depot, json!({"service_port": port})))
}

#[test]
fn a_reset_that_a_pool_server_took_before_it_crashed_holds() {
    let disk = Arc::new(FakeTier::new(0));
    let (tier, first) = serve(&disk, 0);
    let at = first.at;
    let spec = spec("crash", layout());
    let depot = embedded(over(at, "Cache|Remote", POOL, &json!({"timeout_ms": 3_000}), &json!({})));
    let mut engine = Engine::new(&depot, &spec, BLOCKS as usize);
    engine.fill(1);
    let names: Vec<u64> = (0..BLOCKS).collect();
    until("the server's disk has all blocks", || {
        let dumped = engine.dump(&names, &engine.all_pages()).is_empty();
        dumped && depot.drain(LONG).unwrap() && disk.usage().blocks == BLOCKS
    });
    tier.script.is_stuck.store(true, Ordering::SeqCst);
    // On a busy machine the server may count as gone just now.
    until("the server took it", || {
        depot.reset(&[Arc::clone(&spec)]).expect_err("no server has stored it");
        tier.script.epochs_asked.load(Ordering::SeqCst) > 0
    });
    assert_eq!(claim(&depot, &spec, BLOCKS).1, 0);
    drop(first);
    assert_eq!(disk.usage().blocks, BLOCKS, "the disk was not told");
    let (_, second) = serve(&disk, at.port());
    until("the server is there again", || server(&depot)["up"] == true);
    // Later openers find it in the epoch of the reset.
    let other = embedded(over(second.at, "Cache|Remote", POOL, &json!({}), &json!({})));
    other.register(&spec).unwrap();
    assert_eq!(claim(&other, &spec, BLOCKS).1, 0, "blocks from before the reset (P1)");
    assert_eq!(claim(&depot, &spec, BLOCKS).1, 0);
    engine.fill(2);
    until("the server is used again", || {
        let dumped = engine.dump(&names, &engine.all_pages()).is_empty();
        dumped && depot.drain(LONG).unwrap() && disk.usage().blocks == BLOCKS
    });
    let mut reader = Engine::new(&other, &spec, BLOCKS as usize);
    until("the other depot finds what was dumped since", || {
        reader.clear();
        reader.load(&names, &reader.all_pages()).is_empty()
    });
    assert!((0..BLOCKS as usize).all(|page| reader.holds(page, page, 2)));
}
