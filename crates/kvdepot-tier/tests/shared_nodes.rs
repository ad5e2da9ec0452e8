//! Two nodes with one directory: no wrong byte, no torn block, no lost reset and nothing left behind, whichever of them
//! dies (P1, P2, P4).
//!
//! `make test-nfs` runs these tests on two mounts of one NFS server, in a virtual machine. Without that, both nodes use
//! the same local directory.
#![allow(clippy::unwrap_used)] // a failing test panics

mod common;
#[path = "common/nodes.rs"]
mod nodes;

use std::collections::HashSet;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Stdio};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant, SystemTime};

use common::{config, disk_bytes, files_with, on_every_engine, open, open_faulty};
use kvdepot_core::ErrorKind;
use kvdepot_io::EngineKind;
use kvdepot_io::faults::{Fault, FaultOp, Faults};
use kvdepot_tier::conformance::{Bench, Waiting};
use kvdepot_tier::{PosixConfig, Tier, Written};
use nodes::Shared;

/// Set where the mounts do not remember which names were missing (`lookupcache=positive`).
const FRESH: &str = "KVDEPOT_TEST_NODES_FRESH";
const CHILD: &str = "KVDEPOT_TEST_SHARED_DIR";
const CHILD_NODE: &str = "KVDEPOT_TEST_SHARED_NODE";
const KILLS: &str = "KVDEPOT_TEST_KILLS";

const FILE_BYTES: u64 = 16_384;
const CAP_BLOCKS: u64 = 24;
/// Three times what the cap holds.
const WORKING_SET: u64 = 72;
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

/// A read of either node is the block or a miss.
fn hits(bench: &Bench, n: u64) -> bool {
    match bench.read(n) {
        Ok(bytes) => {
            assert_eq!(bytes, bench.bytes(n), "block {n} came back with other bytes (P1)");
            true
        }
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::NotFound, "block {n}: {error:?}");
            false
        }
    }
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

fn capped(dir: &Path, kind: EngineKind) -> PosixConfig {
    PosixConfig { capacity_bytes: CAP_BLOCKS * FILE_BYTES, shared: true, engine: kind, ..config(dir) }
}

/// Not a test itself: a process of one of the nodes, which the storm kills. It reads and writes for ever.
#[test]
fn child() {
    let Ok(dir) = std::env::var(CHILD) else { return };
    let node: u64 = std::env::var(CHILD_NODE).unwrap().parse().unwrap();
    let mut random = Instant::now().elapsed().as_nanos() as u64 ^ u64::from(std::process::id()) ^ node << 32;
    let engines = [EngineKind::Psync, EngineKind::Aio, EngineKind::IoUring];
    let bench = Bench::new(open(capped(dir.as_ref(), engines[std::process::id() as usize % 3])));
    let (mut found, mut wrote) = (0, 0);
    for turn in 1_u64.. {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let n = (random >> 33) % WORKING_SET;
        match bench.read(n) {
            Ok(bytes) if bytes == bench.bytes(n) => found += 1,
            Ok(_) => println!("wrong block {n}"),
            Err(error) if error.kind() == ErrorKind::NotFound => match bench.write(n) {
                Ok(_) => wrote += 1,
                Err(error) => println!("write {:?} {error}", error.kind()),
            },
            Err(error) => println!("read {:?} {error}", error.kind()),
        }
        if turn % 8 == 0 {
            println!("turn {turn} {found} {wrote}");
        }
    }
}

/// A child and what it has said so far.
struct Worker {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
    found: u64,
    wrote: u64,
    complaints: Vec<String>,
}

impl Worker {
    fn start(shared: &Shared, node: usize) -> Self {
        let mut command = shared.command(node);
        let mut child = command
            .args(["child", "--exact", "--nocapture", "--test-threads=1"])
            .env(CHILD, &shared.dirs[node])
            .env(CHILD_NODE, node.to_string())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines, found: 0, wrote: 0, complaints: Vec::new() }
    }

    /// Lets it work until its blocks found and written are so many.
    fn work(&mut self, turns: u64) {
        for line in self.lines.by_ref() {
            let line = line.unwrap();
            let words: Vec<&str> = line.split(' ').collect();
            match words[..] {
                ["turn", turn, found, wrote] => {
                    (self.found, self.wrote) = (found.parse().unwrap(), wrote.parse().unwrap());
                    if turn.parse::<u64>().unwrap() >= turns {
                        return;
                    }
                }
                ["wrong" | "write" | "read", ..] => self.complaints.push(line),
                _ => {}
            }
        }
        panic!("a process of the storm ended by itself: {:?}", self.child.wait());
    }

    fn kill(mut self) -> (u64, u64, Vec<String>) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        (self.found, self.wrote, self.complaints)
    }
}

#[test]
fn both_nodes_are_killed_over_and_over() {
    let kills: u64 = std::env::var(KILLS).map_or(8, |kills| kills.parse().unwrap());
    let shared = Shared::new();
    let mut workers = [0, 1].map(|node| Some(Worker::start(&shared, node)));
    let (mut found, mut wrote, mut complaints) = (0, 0, Vec::new());
    for kill in 0..kills {
        // One goes on while the other one is killed, in the middle of its work, and starts again.
        let node = (kill % 2) as usize;
        let mut worker = workers[node].take().unwrap();
        worker.work(16 + 8 * (kill % 5));
        let told = worker.kill();
        (found, wrote) = (found + told.0, wrote + told.1);
        complaints.extend(told.2);
        workers[node] = Some(Worker::start(&shared, node));
    }
    for worker in workers.into_iter().flatten() {
        complaints.extend(worker.kill().2);
    }
    let (refused, mut broken): (Vec<String>, Vec<String>) =
        complaints.into_iter().partition(|line| line.starts_with("write"));
    println!(
        "{kills} kills, {found} blocks found, {wrote} written, {} not written {refused:?}",
        refused.len()
    );
    // On a local disk a file may be overwritten while the other process reads it: no torn block, but not always a miss.
    broken.retain(|line| shared.is_mounted_twice() || !line.starts_with("read Corrupt"));
    assert!(broken.is_empty(), "{broken:#?}");
    assert!(found > 0 && wrote > refused.len() as u64, "{found} {wrote}");

    // What the dead left is removed by any node once it is old.
    let [at_one, at_two] = shared.dirs.each_ref();
    let left = leftovers(at_one);
    let old = SystemTime::now() - Duration::from_secs(7200);
    for path in &left {
        std::fs::File::options().write(true).open(path).unwrap().set_modified(old).unwrap();
    }
    println!("left behind: {}", left.len());
    eventually("the other node sees what was left", || leftovers(at_two).len() == left.len());
    let tier = open(capped(at_two, EngineKind::Psync));
    tier.sweep(Instant::now() + LONG);
    let two = Bench::new(Arc::clone(&tier) as _);
    assert_eq!(leftovers(at_two), Vec::<PathBuf>::new());
    assert!(disk_bytes(at_two) <= CAP_BLOCKS * FILE_BYTES, "{} bytes", disk_bytes(at_two));
    let listed = tier.usage().blocks;
    let right = (0..WORKING_SET).filter(|&n| hits(&two, n)).count() as u64;
    assert_eq!(right, listed, "every block that is listed reads right");
    if shared.is_mounted_twice() {
        assert_eq!(tier.quarantined(&two.spec), 0, "no torn block was visible");
    }
    assert!(right > 0);
    let one = bench_of(&shared, 0);
    let right = (0..WORKING_SET).filter(|&n| hits(&one, n)).count() as u64;
    assert!(right > 0, "the other node finds them, too");
}

/// Files that no depot serves or needs: temporary files, probes, and what an NFS client renames because it is still open.
fn leftovers(dir: &Path) -> Vec<PathBuf> {
    [".tmp-", ".probe-", ".nfs"].iter().flat_map(|part| files_with(dir, part)).collect()
}
