//! Two nodes with one directory: no wrong byte, no torn block and no lost reset (P1, P2). `shared_storm` kills them.
//!
//! `make test-nfs` runs these tests on two mounts of one NFS server, in a virtual machine. Without that, both nodes use
//! the same local directory.
#![allow(clippy::unwrap_used)] // a failing test panics

mod common;
#[path = "common/nodes.rs"]
mod nodes;

use std::collections::HashSet;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use common::{config, on_every_engine, open, open_faulty};
use kvdepot_core::ErrorKind;
use kvdepot_io::faults::{Fault, FaultOp, Faults};
use kvdepot_tier::Written;
use kvdepot_tier::conformance::{Bench, Waiting};
use nodes::{Shared, hits};

/// Set where the mounts do not remember which names were missing (`lookupcache=positive`).
const FRESH: &str = "KVDEPOT_TEST_NODES_FRESH";
/// Reached only by a hang: attributes are cached for a minute, and a virtual machine is slow.
const LONG: Duration = Duration::from_secs(180);

on_every_engine! {
    a_file_that_the_other_node_removes_while_it_is_read_is_whole_or_a_miss
}

fn bench_of(shared: &Shared, node: usize) -> Bench {
    Bench::new(open(config(&shared.dirs[node])))
}

/// Waits for what a node learns from another one.
fn eventually(what: &str, is: impl Fn() -> bool) -> Duration {
    let start = Instant::now();
    while !is() {
        assert!(start.elapsed() < LONG, "{what}");
        std::thread::yield_now();
    }
    start.elapsed()
}

#[test]
fn what_one_node_writes_the_other_one_reads() {
    let shared = Shared::new();
    let [one, two] = [0, 1].map(|node| bench_of(&shared, node));
    // The second node has looked for the first blocks before they were there.
    assert!((0..4).all(|n| !hits(&two, n)));
    assert_eq!(two.probe(two.keys(4)).unwrap(), 0);
    one.write_all(8);
    // An NFS client may remember for a minute that a name or a directory was missing, unless it is told not to.
    if std::env::var_os(FRESH).is_some() || !shared.is_mounted_twice() {
        assert!((0..8).all(|n| hits(&two, n)), "found at once");
    }
    let seen = eventually("blocks of the other node", || (0..8).all(|n| hits(&two, n)));
    println!("blocks that were missing before are found after {} ms", seen.as_millis());
    for n in 0..8 {
        assert_eq!(two.write(n).unwrap(), Written::AlreadyThere, "block {n}");
    }
}

#[test]
fn what_one_node_removes_is_a_miss_at_the_other_one() {
    let shared = Shared::new();
    let [one, two] = [0, 1].map(|node| bench_of(&shared, node));
    one.write_all(12);
    assert!((0..12).all(|n| hits(&two, n)));
    for n in 0..12 {
        one.remove(n).unwrap();
    }
    one.drain();
    let seen = eventually("removed blocks are misses", || !(0..12).any(|n| hits(&two, n)));
    println!("removed blocks are misses after {} ms", seen.as_millis());
    for n in 0..12 {
        two.write(n).unwrap();
        assert!(hits(&two, n));
    }
}

fn a_file_that_the_other_node_removes_while_it_is_read_is_whole_or_a_miss() {
    let shared = Shared::new();
    let two = bench_of(&shared, 1);
    two.write_all(4);
    two.drain();
    let faults = Faults::default();
    let one = Bench::new(open_faulty(config(&shared.dirs[0]), &faults));
    for n in 0..4 {
        faults.at(FaultOp::Read, 0, Fault::Hang);
        let slot = one.slot();
        let read = one.begin_read(n, slot.clone(), Bench::soon());
        assert!(faults.wait_hung(1, Bench::soon()));
        // The file is open at this moment.
        two.remove(n).unwrap();
        two.drain();
        faults.release();
        match Bench::answer(&read) {
            Ok(()) => assert_eq!(one.block_of(&slot), one.bytes(n)),
            Err(error) => assert_eq!(error.kind(), ErrorKind::NotFound, "block {n}: {error:?}"),
        }
    }
}

#[test]
fn a_reset_of_one_node_reaches_the_other_one() {
    let shared = Shared::new();
    let [mut one, mut two] = [0, 1].map(|node| bench_of(&shared, node));
    one.write_all(4);
    assert!((0..4).all(|n| hits(&two, n)));
    for epoch in 1..=2 {
        one.epoch = one.tier.advance_and_wait(&one.spec, epoch).unwrap();
        assert_eq!(one.epoch, epoch);
        one.write_all(2);
        let follows = || two.tier.open_and_wait(&two.spec, 0).is_ok_and(|followed| followed == epoch);
        let seen = eventually("the other node follows", follows);
        println!("a reset is followed after {} ms", seen.as_millis());
        // Keys of the past are misses on both nodes, blocks of the new epoch are shared.
        assert!((0..4).all(|n| !hits(&two, n)), "blocks from before a reset");
        two.epoch = epoch;
        assert!(!hits(&two, 3));
        eventually("blocks of the new epoch", || (0..2).all(|n| hits(&two, n)));
    }
}

#[test]
fn resets_of_both_nodes_at_once_have_an_epoch_each() {
    let shared = Shared::new();
    let nodes = [0, 1].map(|node| bench_of(&shared, node));
    let mut taken = HashSet::new();
    for _ in 0..5 {
        let barrier = Barrier::new(nodes.len());
        let epochs: Vec<u32> = std::thread::scope(|scope| {
            let advance = |node: &Bench| {
                barrier.wait();
                node.tier.advance_and_wait(&node.spec, 1).unwrap()
            };
            let nodes: Vec<_> = nodes.iter().map(|node| scope.spawn(move || advance(node))).collect();
            nodes.into_iter().map(|node| node.join().unwrap()).collect()
        });
        assert!(epochs.iter().all(|&epoch| taken.insert(epoch)), "{epochs:?} after {taken:?}");
    }
    let newest = *taken.iter().max().unwrap();
    for node in &nodes {
        eventually("both nodes agree", || {
            node.tier.open_and_wait(&node.spec, 0).is_ok_and(|epoch| epoch == newest)
        });
    }
}
