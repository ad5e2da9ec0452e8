//! Two nodes with one directory, killed over and over: no wrong byte, no torn block, nothing left behind, and with
//! `capacity_shared` never more bytes than the cap (P1, P4, P5).
//!
//! `make test-nfs` runs these tests on two mounts of one NFS server, in a virtual machine, and measures the bytes at the server.
//! Without that, both nodes use the same local directory.
#![allow(clippy::unwrap_used)] // a failing test panics

mod common;
#[path = "common/nodes.rs"]
mod nodes;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use common::{config, disk_bytes, files_with, open};
use kvdepot_core::{BlockLayout, ErrorKind};
use kvdepot_io::EngineKind;
use kvdepot_tier::conformance::{Bench, spec, until};
use kvdepot_tier::{PosixConfig, Tier};
use nodes::{Shared, hits};

const CHILD: &str = "KVDEPOT_TEST_STORM_DIR";
const CHILD_NODE: &str = "KVDEPOT_TEST_STORM_NODE";
const CHILD_SHARES: &str = "KVDEPOT_TEST_STORM_SHARES_CAP";
const SAMPLED: &str = "KVDEPOT_TEST_STORM_SAMPLED";
const KILLS: &str = "KVDEPOT_TEST_KILLS";

const FILE_BYTES: u64 = 65_536;
const CAP_BLOCKS: u64 = 48;
const CAP: u64 = CAP_BLOCKS * FILE_BYTES;
const WORKING_SET: u64 = 10 * CAP_BLOCKS;
/// Every second block is one of these, so that blocks are also found.
const HOT: u64 = CAP_BLOCKS / 2;
/// Reads and writes of a process at a time.
const THREADS: u64 = 3;
/// Short, so that what a killed process was granted returns during the storm.
const LEASE: Duration = Duration::from_secs(10);
const SAMPLE_EVERY: Duration = Duration::from_millis(100);
/// Reached only by a hang: attributes are cached for a minute, and a virtual machine is slow.
const LONG: Duration = Duration::from_secs(180);

fn capped(dir: &Path, capacity_shared: bool, engine: EngineKind) -> PosixConfig {
    PosixConfig {
        capacity_bytes: CAP,
        shared: true,
        capacity_shared,
        ledger_lease: LEASE,
        engine,
        // The ledger keeps room for what a dead process of the other node may still have under way: two blocks.
        write_threads: 1,
        // One directory, so that a listing takes little time.
        shard_directories: false,
        ..config(dir)
    }
}

fn bench_on(tier: Arc<dyn Tier>) -> Bench {
    Bench::with(tier, spec("storm", BlockLayout::new(vec![vec![60_000]]).unwrap()))
}

/// Not a test itself: a process of one of the nodes, which the storm kills. It reads and writes for ever.
#[test]
fn child() {
    let Ok(dir) = std::env::var(CHILD) else { return };
    let node: u64 = std::env::var(CHILD_NODE).unwrap().parse().unwrap();
    let engines = [EngineKind::Psync, EngineKind::Aio, EngineKind::IoUring];
    let engine = engines[std::process::id() as usize % engines.len()];
    let bench = bench_on(open(capped(dir.as_ref(), std::env::var_os(CHILD_SHARES).is_some(), engine)));
    // The test's name is on this line.
    println!();
    let (found, wrote) = (AtomicU64::new(0), AtomicU64::new(0));
    let work = |thread: u64| {
        let mut random = u64::from(std::process::id()) << 8 ^ node << 4 ^ thread;
        loop {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let n = (random >> 33) % if random >> 63 == 0 { HOT } else { WORKING_SET };
            // Relaxed: counts.
            match bench.read(n) {
                Ok(bytes) if bytes == bench.bytes(n) => _ = found.fetch_add(1, Ordering::Relaxed),
                Ok(_) => println!("wrong block {n}"),
                Err(error) if error.kind() == ErrorKind::NotFound => match bench.write(n) {
                    Ok(_) => _ = wrote.fetch_add(1, Ordering::Relaxed),
                    Err(error) => println!("write {:?} {error}", error.kind()),
                },
                Err(error) => println!("read {:?} {error}", error.kind()),
            }
            println!("done {} {}", found.load(Ordering::Relaxed), wrote.load(Ordering::Relaxed));
        }
    };
    std::thread::scope(|scope| {
        (0..THREADS).for_each(|thread| _ = scope.spawn(move || work(thread)));
    });
}

/// Not a test itself: samples a directory for another program, until that closes its standard input.
#[test]
fn sampler() {
    let Ok(dir) = std::env::var(SAMPLED) else { return };
    let done = AtomicBool::new(false);
    let sampled = std::thread::scope(|scope| {
        let sampler = scope.spawn(|| sample(dir.as_ref(), true, &done));
        std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).unwrap();
        done.store(true, Ordering::Release);
        sampler.join().unwrap()
    });
    // The test's name is on this line.
    println!("\nsampled {} {} {}", sampled.samples, sampled.most, sampled.most_taken);
}

/// What processes have said.
#[derive(Default)]
struct Told {
    found: u64,
    wrote: u64,
    refused: BTreeMap<String, u64>,
    broken: Vec<String>,
}

impl Told {
    fn add(&mut self, other: Self) {
        self.found += other.found;
        self.wrote += other.wrote;
        for (why, count) in other.refused {
            *self.refused.entry(why).or_default() += count;
        }
        self.broken.extend(other.broken);
    }
}

/// A child and what it has said so far.
struct Worker {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
    told: Told,
}

impl Worker {
    fn start(shared: &Shared, node: usize, capacity_shared: bool) -> Self {
        let mut command = shared.command(node);
        if capacity_shared {
            command.env(CHILD_SHARES, "1");
        }
        let mut child = command
            .args(["child", "--exact", "--nocapture", "--test-threads=1"])
            .env(CHILD, &shared.dirs[node])
            .env(CHILD_NODE, node.to_string())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines, told: Told::default() }
    }

    /// Listens until it has done so much; `false` if it has ended before.
    fn listen(&mut self, is_enough: impl Fn(&Told) -> bool) -> bool {
        for line in self.lines.by_ref() {
            let line = line.unwrap();
            let words: Vec<&str> = line.split(' ').collect();
            match words[..] {
                ["done", found, wrote] => {
                    (self.told.found, self.told.wrote) = (found.parse().unwrap(), wrote.parse().unwrap());
                    if is_enough(&self.told) {
                        return true;
                    }
                }
                ["write", ..] => {
                    let why = line.split(" [").next().unwrap_or_default();
                    *self.told.refused.entry(why.to_owned()).or_default() += 1;
                }
                ["wrong" | "read", ..] => self.told.broken.push(line),
                _ => {}
            }
        }
        false
    }

    fn work(&mut self, is_enough: impl Fn(&Told) -> bool) {
        assert!(self.listen(is_enough), "a process of the storm ended by itself: {:?}", self.child.wait());
    }

    fn kill(mut self) -> Told {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.listen(|_| false);
        self.told
    }
}

/// What lies in the directory, as the server's disk has it.
#[derive(Debug, Default)]
struct Sampled {
    samples: u64,
    /// The most bytes of files that a cap counts, under whatever name.
    most: u64,
    /// The most bytes taken on the file system, without those of directories and records; also files without a name
    /// that are still open. Only of a server with a disk of its own.
    most_taken: u64,
}

impl std::fmt::Display for Sampled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { samples, most, most_taken } = self;
        write!(f, "{samples} samples, at most {most} bytes by name and {most_taken} on the disk")
    }
}

/// Files that a cap counts, by inode: one that is being renamed is there once.
type Listing = BTreeMap<u64, (PathBuf, u64)>;

/// Lists what is there, and the bytes of everything else: directories, and files that lie in no epoch's directory.
fn list(dir: &Path, depth: usize, listing: &mut Listing, others: &mut u64) {
    let Ok(entries) = std::fs::read_dir(dir) else { return };
    for entry in entries.filter_map(Result::ok) {
        let (path, Ok(meta)) = (entry.path(), entry.metadata()) else { continue };
        let taken = meta.blocks() * 512;
        if meta.is_dir() {
            *others += taken;
            list(&path, depth + 1, listing, others);
        } else if depth < 2 {
            *others += taken;
        } else {
            listing.insert(meta.ino(), (path, taken.max(meta.len().next_multiple_of(4096))));
        }
    }
}

/// Bytes that all of a file system takes.
fn taken(dir: &Path) -> u64 {
    let stat = rustix::fs::statvfs(dir).unwrap();
    (stat.f_blocks - stat.f_bfree) * stat.f_frsize
}

/// Samples the directory until `done`, and once after that.
fn sample(dir: &Path, has_own_disk: bool, done: &AtomicBool) -> Sampled {
    let mut sampled = Sampled::default();
    let before = taken(dir);
    loop {
        // Acquire pairs with the Release of the test: the last sample comes after the last write, however long listings take.
        let is_last = done.load(Ordering::Acquire);
        let began = Instant::now();
        // A listing takes time. Two of the same kind in a row are one of a moment.
        let mut last = None;
        let (is_one, listing, others) = loop {
            let (mut listing, mut others) = (Listing::new(), 0);
            list(dir, 0, &mut listing, &mut others);
            let is_one = last.as_ref() == Some(&listing);
            if is_one || !is_last && done.load(Ordering::Acquire) {
                break (is_one, listing, others);
            }
            last = Some(listing);
        };
        if is_one {
            sampled.samples += 1;
            sampled.most = sampled.most.max(listing.values().map(|(_, bytes)| bytes).sum());
        }
        if has_own_disk {
            sampled.most_taken = sampled.most_taken.max(taken(dir).saturating_sub(before + others));
        }
        if is_last {
            return sampled;
        }
        std::thread::sleep(SAMPLE_EVERY.saturating_sub(began.elapsed()));
    }
}

fn storm(capacity_shared: bool) {
    let kills: u64 = std::env::var(KILLS).map_or(8, |kills| kills.parse().unwrap());
    let shared = Shared::new();
    let done = AtomicBool::new(false);
    let mut told = Told::default();
    let sampled = std::thread::scope(|scope| {
        let sampler = scope.spawn(|| sample(shared.on_disk(), shared.has_server(), &done));
        let mut workers = [0, 1].map(|node| Worker::start(&shared, node, capacity_shared));
        // Together they store as much as the cap holds.
        workers.iter_mut().for_each(|worker| worker.work(|told| told.wrote >= CAP_BLOCKS / 2));
        for kill in 0..kills {
            // One goes on while the other one is killed, in the middle of its work, and starts again.
            let node = (kill % 2) as usize;
            workers[node].work(|told| told.found + told.wrote >= 24 + 8 * (kill % 5));
            let new = Worker::start(&shared, node, capacity_shared);
            told.add(std::mem::replace(&mut workers[node], new).kill());
        }
        workers.iter_mut().for_each(|worker| worker.work(|told| told.found > 0 && told.wrote > 0));
        workers.into_iter().for_each(|worker| told.add(worker.kill()));
        done.store(true, Ordering::Release);
        sampler.join().unwrap()
    });
    println!(
        "{kills} kills, {} blocks found, {} written, not written: {:?}",
        told.found, told.wrote, told.refused
    );
    println!("{sampled} of {CAP}");
    // On a local disk a file may be overwritten while the other process reads it: no torn block, but not always a miss.
    told.broken.retain(|line| shared.is_mounted_twice() || !line.starts_with("read Corrupt"));
    assert!(told.broken.is_empty(), "{:#?}", told.broken);
    if capacity_shared {
        assert!(sampled.most <= CAP, "{} bytes of {CAP}", sampled.most);
        assert!(sampled.most > CAP / 2, "the cap is also used: {} bytes", sampled.most);
        // A server of version 4 keeps an unlinked file for as long as the other node reads it.
        let read = 2 * THREADS;
        assert!(
            sampled.most_taken / FILE_BYTES <= CAP_BLOCKS + read,
            "{} bytes of {CAP}",
            sampled.most_taken
        );
    }
    nothing_stays_behind(&shared, capacity_shared);
}

/// What the dead left is removed by any node once it is old.
fn nothing_stays_behind(shared: &Shared, capacity_shared: bool) {
    let [at_one, at_two] = shared.dirs.each_ref();
    let left = leftovers(at_one);
    let old = SystemTime::now() - Duration::from_secs(3700);
    for path in &left {
        std::fs::File::options().write(true).open(path).unwrap().set_modified(old).unwrap();
    }
    println!("left behind: {}", left.len());
    until("the other node sees what was left", || leftovers(at_two).len() == left.len());
    let tier = open(capped(at_two, capacity_shared, EngineKind::Psync));
    tier.sweep(Instant::now() + LONG);
    let two = bench_on(Arc::clone(&tier) as _);
    assert!(disk_bytes(at_two) <= CAP, "{} bytes", disk_bytes(at_two));
    let listed = tier.usage().blocks;
    let right = (0..WORKING_SET).filter(|&n| hits(&two, n)).count() as u64;
    assert_eq!(right, listed, "every block that is listed reads right");
    if shared.is_mounted_twice() {
        assert_eq!(tier.quarantined(&two.spec), 0, "no torn block was visible");
    }
    assert!(right > 0);
    let one = bench_on(open(capped(at_one, capacity_shared, EngineKind::Psync)));
    let right = (0..WORKING_SET).filter(|&n| hits(&one, n)).count() as u64;
    assert!(right > 0, "the other node finds them, too");
    // Those of the ledger go with one of its next versions.
    until("nothing is left", || leftovers(shared.on_disk()).iter().all(|path| is_of_the_living(path)));
}

/// Returns whether this process writes the file just now.
fn is_of_the_living(path: &Path) -> bool {
    let own = kvdepot_tier::PosixTier::writer_identity();
    path.file_name().unwrap().to_str().unwrap().starts_with(&format!(".tmp-{own}-"))
}

/// Files that no depot serves or needs: temporary files, probes, and what an NFS client renames because it is still open.
fn leftovers(dir: &Path) -> Vec<PathBuf> {
    let places = [dir.to_owned(), dir.join(".kvdepot-ledger")];
    let in_place =
        |place: &PathBuf| [".tmp-", ".probe-", ".nfs"].map(|part| files_with(place, part)).concat();
    places.iter().flat_map(in_place).collect()
}

#[test]
fn both_nodes_are_killed_over_and_over() {
    storm(false);
}

/// Ten times as many blocks as the cap holds, and what lies at the server is measured ten times in a second.
#[test]
fn killed_nodes_keep_one_cap_and_leave_nothing() {
    storm(true);
}
