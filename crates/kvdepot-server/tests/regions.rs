//! A pool with a region on each of two NUMA nodes: blocks are near the device that requests them, even after a
//! take-over and a crash. The nodes are simulated; their memory is the machine's.
//!
//! Roles run in child processes: this test binary, started again with `KVDEPOT_TEST_ROLE`.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use std::path::Path;
use std::sync::Arc;

use common::roles::{ROLE, ROLE_MAIN, Role, attach, log, own_role, proven, socket, stat, until};
use common::{Engine, LONG, config, embedded, hash, spec};
use kvdepot_copy::{CopyBatch, CopyEngine, GroupSink, HostEngine};
use kvdepot_core::{BlockLayout, NamespaceSpec, Result};
use kvdepot_depot::DepotConfig;
use kvdepot_depot::client::{Attachment, Claim, ClaimGroupSpec};
use kvdepot_server::{Serving, keeper, logging};
use serde_json::{Value, json};

const POOL: u64 = 16 << 20;
const BLOCK: u64 = 128 << 10;
const PAGES: usize = 8;

fn namespace() -> Arc<NamespaceSpec> {
    spec("near", BlockLayout::uniform(2, &[64 << 10]).unwrap())
}

/// Makes the configuration of a depot on a machine with two nodes.
fn on_two_nodes(more: Value) -> DepotConfig {
    let mut all = json!({"numa_nodes": [0, 1]});
    all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    config(POOL, all)
}

/// The code of the child processes. It does nothing when run as a test.
#[test]
fn role_main() {
    let Some((role, directory)) = own_role() else { return };
    if role == "keeper" {
        std::fs::write(directory.join("keeper"), "").unwrap();
        let _ = keeper::run();
        return;
    }
    let socket = socket(&directory);
    logging::init("info", Some(&directory.join("log"))).unwrap();
    let exe = std::env::current_exe().unwrap();
    let mut keeper = vec!["env".to_owned(), format!("{ROLE}=keeper"), exe.to_str().unwrap().to_owned()];
    keeper.extend(ROLE_MAIN.map(str::to_owned));
    let kept = || on_two_nodes(json!({"pool_keep_ms": 600_000, "pool_keeper": keeper}));
    let mut keep_on = || !directory.join("end").exists();
    match role.as_str() {
        "depot" => Serving::new(on_two_nodes(json!({})), &socket).serve(&mut keep_on),
        // This machine's own nodes differ from those of the pool that it takes over.
        "heir" => Serving::new(config(POOL, json!({})), &socket).serve_taking_over(&mut keep_on),
        "kept depot" => Serving::new(kept(), &socket).serve(&mut keep_on),
        other => panic!("no such role: {other}"),
    }
    .unwrap();
}

/// The host engine, as if for a device at a node.
#[derive(Debug)]
struct At(u32, HostEngine);

impl CopyEngine for At {
    fn name(&self) -> &'static str {
        "at a node"
    }

    unsafe fn run(&self, batch: CopyBatch, sink: Arc<dyn GroupSink>) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.1.run(batch, sink) }
    }

    fn numa_node(&self) -> Option<u32> {
        Some(self.0)
    }
}

fn engine_at(node: u32, attachment: &Arc<Attachment>) -> Engine {
    let engine = At(node, HostEngine::new(2).unwrap());
    Engine::copied_by(Arc::new(engine), attachment, &namespace(), PAGES, LONG)
}

/// Returns node and blocks of each region.
fn regions(attachment: &Arc<Attachment>) -> Vec<(u64, u64)> {
    let mut shown = Value::Null;
    until("the depot says how it is", || {
        shown = attachment.stats()["depot"]["pool_regions"].clone();
        shown.is_array()
    });
    let of = |region: &Value| {
        assert_eq!((&region["kind"], &region["bytes"]), (&json!("memory"), &json!(POOL / 2)));
        let used = region["bytes"].as_u64().unwrap() - region["free_bytes"].as_u64().unwrap();
        (region["node"].as_u64().unwrap(), used / BLOCK)
    };
    shown.as_array().unwrap().iter().map(of).collect()
}

fn dump(engine: &mut Engine, first: u64, seed: u8) {
    engine.fill(seed);
    let names: Vec<u64> = (first..first + PAGES as u64).collect();
    assert!(engine.dump(&names, &engine.all_pages()).is_empty());
}

fn holds(engine: &mut Engine, first: u64, seed: u8) {
    engine.clear();
    let names: Vec<u64> = (first..first + PAGES as u64).collect();
    assert!(engine.load(&names, &engine.all_pages()).is_empty());
    assert!((0..PAGES).all(|page| engine.holds(page, page, seed)));
}

#[test]
fn blocks_lie_near_the_device_that_dumps_them() {
    let check = |attachment: &Arc<Attachment>| {
        let (mut first, mut second) = (engine_at(1, attachment), engine_at(0, attachment));
        dump(&mut first, 0, 1);
        assert_eq!(regions(attachment), [(0, 0), (1, 8)]);
        // On a lane that the other engine has used.
        dump(&mut second, 100, 2);
        dump(&mut second, 200, 3);
        dump(&mut first, 300, 4);
        assert_eq!(regions(attachment), [(0, 16), (1, 16)]);
        for (first, seed) in [(0, 1), (100, 2), (200, 3), (300, 4)] {
            holds(&mut second, first, seed);
        }
    };
    check(&embedded(on_two_nodes(json!({}))));
    let directory = tempfile::tempdir().unwrap();
    let depot = Role::start("depot", directory.path());
    check(&attach(directory.path()));
    depot.end(directory.path());
}

#[test]
fn the_whole_pool_is_used_although_all_blocks_are_wished_in_one_region() {
    let attachment = embedded(on_two_nodes(json!({})));
    let mut engine = engine_at(1, &attachment);
    let all = POOL / BLOCK;
    for round in 0..all / PAGES as u64 {
        dump(&mut engine, round * 100, round as u8);
    }
    assert_eq!(regions(&attachment), [(0, all / 2), (1, all / 2)]);
    assert_eq!(stat(&attachment, "evict_blocks"), 0);
    for round in 0..all / PAGES as u64 {
        holds(&mut engine, round * 100, round as u8);
    }
}

#[test]
fn what_a_scheduler_has_fetched_lies_near_the_worker_s_device() {
    let directory = tempfile::tempdir().unwrap();
    let on_disk = || {
        let posix = json!({"directories": [directory.path()], "io_direct": false});
        embedded(on_two_nodes(json!({"pipeline": "Cache|Posix", "posix": posix})))
    };
    let attachment = on_disk();
    dump(&mut engine_at(1, &attachment), 0, 1);
    // A thread of the store may be the last to let go of the depot, after the next one has started.
    assert!(attachment.drain(LONG).unwrap());
    drop(attachment);
    let attachment = on_disk();
    let mut engine = engine_at(1, &attachment);
    dump(&mut engine, 100, 2);
    let group = ClaimGroupSpec { namespaces: vec![namespace()], window_blocks: 0, hashes_per_block: 1 };
    let wanted: Vec<_> = (0..PAGES as u64).map(hash).collect();
    let mut claim = Claim::open(&attachment, &[group], &wanted, 0, PAGES as u32, "").unwrap();
    assert_eq!(claim.wait(LONG).1, PAGES as u32);
    assert_eq!(regions(&attachment), [(0, 0), (1, 16)]);
    holds(&mut engine, 0, 1);
}

/// Dumps blocks at both nodes.
fn dump_at_both(attachment: &Arc<Attachment>) {
    dump(&mut engine_at(0, attachment), 0, 1);
    dump(&mut engine_at(1, attachment), 100, 2);
    dump(&mut engine_at(1, attachment), 200, 3);
    assert_eq!(regions(attachment), [(0, 8), (1, 16)]);
}

/// Checks that the next depot has the regions of the earlier one and continues with them.
fn goes_on(attachment: &Arc<Attachment>) {
    // After a crash no slot is given out before this client has said that its copies have ended.
    until("the regions hold what they held", || regions(attachment) == [(0, 8), (1, 16)]);
    let mut engine = engine_at(1, attachment);
    for (first, seed) in [(0, 1), (100, 2), (200, 3)] {
        holds(&mut engine, first, seed);
    }
    dump(&mut engine, 300, 4);
    assert_eq!(regions(attachment), [(0, 8), (1, 24)]);
}

fn is_attached_to(attachment: &Arc<Attachment>, depot: &Role, directory: &Path) {
    until(&format!("attached to the new depot: {}", log(directory)), || {
        attachment.attached() && attachment.stats()["depot"]["pid"].as_u64() == Some(u64::from(depot.0.id()))
    });
}

#[test]
fn a_pool_that_is_taken_over_has_the_regions_that_it_had() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let mut depot = Role::start("depot", directory);
    let attachment = attach(directory);
    dump_at_both(&attachment);
    let heir = Role::start("heir", directory);
    assert!(depot.ends(), "{}", log(directory));
    is_attached_to(&attachment, &heir, directory);
    goes_on(&attachment);
    heir.end(directory);
}

#[test]
fn a_pool_that_outlives_a_crash_has_the_regions_that_it_had() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let depot = Role::start("kept depot", directory);
    let attachment = attach(directory);
    until("the keeper runs", || directory.join("keeper").exists());
    dump_at_both(&attachment);
    proven(&attachment);
    depot.kill();
    let depot = Role::start("kept depot", directory);
    is_attached_to(&attachment, &depot, directory);
    goes_on(&attachment);
    // The keeper ends with it.
    depot.end(directory);
}
