//! P5: one cap for a directory that several depots share: all their files together never pass it, whoever dies.
#![allow(clippy::unwrap_used)] // a failing test panics

mod common;
#[path = "common/nodes.rs"]
mod nodes;

use std::collections::HashSet;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::{config, disk_bytes, files, open};
use kvdepot_core::ErrorKind;
use kvdepot_io::faults::{Fault, FaultDevice, FaultOp, Faults, Image, MemoryDevice, Mutation};
use kvdepot_io::{Device, DirDevice, DirectUse};
use kvdepot_tier::conformance::{Bench, until};
use kvdepot_tier::{PosixConfig, PosixTier, Tier};
use nodes::Shared;

/// A lease with which directories are surveyed every 20 s.
const SURVEYED_OFTEN: Duration = Duration::from_secs(4);
const FILE_BYTES: u64 = 16_384;
const CHILD: &str = "KVDEPOT_TEST_SHARED_CAP_DIR";
const CHILD_CAP: &str = "KVDEPOT_TEST_SHARED_CAP_BLOCKS";
const CHILD_FROM: &str = "KVDEPOT_TEST_SHARED_CAP_FROM";
const CHILD_UNTIL: &str = "KVDEPOT_TEST_SHARED_CAP_UNTIL";
const CHILD_LEASE_MS: &str = "KVDEPOT_TEST_SHARED_CAP_LEASE_MS";
/// Where the tests make their directories instead of in the system's temporary directory: on an NFS mount, for example.
const PLACE: &str = "KVDEPOT_TEST_DIR";

fn directory() -> tempfile::TempDir {
    let place = std::env::var_os(PLACE).map_or_else(std::env::temp_dir, PathBuf::from);
    tempfile::tempdir_in(place).unwrap()
}

fn shared(dir: &Path, blocks: u64) -> PosixConfig {
    PosixConfig { capacity_bytes: blocks * FILE_BYTES, shared: true, capacity_shared: true, ..config(dir) }
}

fn block_bytes(image: &Image) -> u64 {
    let below = image.files().filter(|(path, _)| path.components().count() > 2);
    below.map(|(_, bytes)| bytes.next_multiple_of(4096)).sum()
}

fn ledger(dir: &Path) -> PathBuf {
    dir.join(".kvdepot-ledger")
}

/// The number of the newest ledger.
fn newest(dir: &Path) -> u64 {
    let names = std::fs::read_dir(ledger(dir)).into_iter().flatten().flatten();
    names.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).max().unwrap_or(0)
}

/// Three depots write ten times the cap. Every change of the device is checked, not samples of it.
fn three_depots_on_one_device(overwrites: bool) {
    const CAP: u64 = 24;
    let (memory, faults) = (MemoryDevice::default(), Faults::default());
    if !overwrites {
        faults.forbid_overwriting();
    }
    let device: Arc<dyn Device> = Arc::new(FaultDevice::new(Arc::new(memory.clone()), faults));
    let make = || {
        let config = shared(Path::new("memory"), CAP);
        Bench::new(Arc::new(PosixTier::open_on_devices(config, vec![Arc::clone(&device)]).unwrap()))
    };
    let written = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for depot in 0..3 {
            let (make, written) = (&make, &written);
            scope.spawn(move || {
                let bench = make();
                for n in (depot * 1000..depot * 1000 + 80).step_by(4) {
                    let some: Vec<_> =
                        (n..n + 4).map(|n| bench.begin_write(n, bench.filled(n), Bench::soon())).collect();
                    let stored = some.iter().filter(|write| Bench::answer(write).is_ok()).count();
                    // Relaxed: a count, read after the threads have ended.
                    written.fetch_add(stored as u64, Ordering::Relaxed);
                }
                bench.drain();
            });
        }
    });
    let images = memory.images();
    let most = images.iter().map(block_bytes).max().unwrap();
    println!(
        "{} blocks, {} changes, at most {} blocks at a time",
        written.load(Ordering::Relaxed),
        images.len(),
        most / FILE_BYTES
    );
    assert!(most <= CAP * FILE_BYTES, "{most} bytes at one time");
    // That it holds would be easy if nobody wrote.
    assert!(written.load(Ordering::Relaxed) > 5 * CAP && most > CAP / 2 * FILE_BYTES);
}

#[test]
fn three_depots_keep_one_cap_by_overwriting() {
    three_depots_on_one_device(true);
}

#[test]
fn three_depots_keep_one_cap_by_removing() {
    three_depots_on_one_device(false);
}

/// Whoever finds the next name of the ledger taken looks whether its own temporary file has it. Two depots of one process
/// that used one name for theirs both found so, and both took what the ledger grants only one of them.
#[test]
fn depots_of_one_process_share_no_temporary_file() {
    let memory = MemoryDevice::default();
    let device: Arc<dyn Device> = Arc::new(memory.clone());
    let make = || {
        let config = shared(Path::new("memory"), 64);
        Bench::new(Arc::new(PosixTier::open_on_devices(config, vec![Arc::clone(&device)]).unwrap()))
    };
    let benches = [make(), make()];
    for n in 0..8 {
        for (bench, first) in benches.iter().zip([0, 100]) {
            until("a block is stored", || bench.write(first + n).is_ok());
        }
    }
    let images = memory.images();
    let created = images.iter().filter(|image| image.mutation == Mutation::Create);
    let names: Vec<_> = created.filter_map(|image| image.path.file_name()?.to_str()).collect();
    let temporary: Vec<_> = names.iter().filter(|name| name.starts_with(".tmp-")).collect();
    let different: HashSet<_> = temporary.iter().collect();
    assert!(temporary.len() > 20, "{names:?}");
    assert_eq!(different.len(), temporary.len(), "{temporary:?}");
}

/// Not a test itself: a depot of the tests below. It writes blocks and reports each.
#[test]
fn child() {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let (Ok(dir), Some(cap), Some(from), Some(end)) =
        (std::env::var(CHILD), number(CHILD_CAP), number(CHILD_FROM), number(CHILD_UNTIL))
    else {
        return;
    };
    let mut config = shared(dir.as_ref(), cap);
    if let Some(lease_ms) = number(CHILD_LEASE_MS) {
        config.ledger_lease = Duration::from_millis(lease_ms);
    }
    let bench = Bench::new(open(config));
    // The test's name is on this line.
    println!();
    for n in from..end {
        until("a block is stored", || bench.write(n).is_ok());
        println!("written {n}");
    }
    // Until it is killed.
    loop {
        std::thread::park();
    }
}

/// Another process, killed when it is dropped.
struct Depot {
    process: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Depot {
    /// Starts one on a node.
    fn start(shared: &Shared, node: usize, cap: u64, blocks: std::ops::Range<u64>) -> Self {
        Self::start_with(&mut shared.command(node), &shared.dirs[node], cap, blocks)
    }

    fn start_with(command: &mut Command, dir: &Path, cap: u64, blocks: std::ops::Range<u64>) -> Self {
        let mut process = command
            .args(["child", "--exact", "--nocapture", "--test-threads=1"])
            .env(CHILD, dir)
            .env(CHILD_CAP, cap.to_string())
            .env(CHILD_FROM, blocks.start.to_string())
            .env(CHILD_UNTIL, blocks.end.to_string())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        Self { process, lines }
    }

    /// Waits until it has written this many more blocks.
    fn wait_written(&mut self, count: usize) {
        let written = self.lines.by_ref().filter(|line| line.as_ref().unwrap().starts_with("written "));
        assert_eq!(written.take(count).count(), count, "the depot goes on storing blocks");
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.process);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Whether every thread has stopped.
    fn is_stopped(&self) -> bool {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.process.id())).unwrap();
        let state = |task: std::io::Result<std::fs::DirEntry>| {
            let stat = std::fs::read_to_string(task.ok()?.path().join("stat")).ok()?;
            stat.rsplit(')').next()?.trim().chars().next()
        };
        tasks.map(state).all(|state| state.is_none_or(|state| state == 'T'))
    }
}

impl Drop for Depot {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Stops all depots, so that a walk over the directory is a snapshot.
fn snapshot(dir: &Path, depots: &[Depot]) -> u64 {
    use rustix::process::Signal;
    depots.iter().for_each(|depot| depot.signal(Signal::STOP));
    until("stopped processes stop", || depots.iter().all(Depot::is_stopped));
    let bytes = disk_bytes(dir);
    depots.iter().for_each(|depot| depot.signal(Signal::CONT));
    bytes
}

#[test]
fn processes_that_are_killed_keep_one_cap() {
    const CAP: u64 = 32;
    let shared = Shared::new();
    // They write for ever: many times what the cap holds.
    let start = |n: u64| Depot::start(&shared, n as usize % 2, CAP, n * 1_000_000..(n + 1) * 1_000_000);
    let mut depots: Vec<Depot> = (0..3).map(start).collect();
    let mut most = 0;
    for round in 0..12 {
        for depot in &mut depots {
            depot.wait_written(12);
        }
        let bytes = snapshot(shared.on_disk(), &depots);
        most = most.max(bytes);
        assert!(bytes <= CAP * FILE_BYTES, "round {round}: {bytes} bytes");
        if round % 3 == 2 {
            depots.remove(0);
            let bytes = snapshot(shared.on_disk(), &depots);
            assert!(bytes <= CAP * FILE_BYTES, "round {round}, one killed: {bytes} bytes");
            depots.push(start(round));
        }
    }
    println!("at most {} of {CAP} blocks in a snapshot", most / FILE_BYTES);
    assert!(most > CAP / 2 * FILE_BYTES, "the cap is also used");
}

/// A process is stopped for longer than its lease, so that others are granted what it had, and goes on in the middle of
/// its writes.
#[test]
fn a_process_that_is_stopped_and_continued_keeps_the_cap() {
    use rustix::process::Signal;
    const CAP: u64 = 32;
    const LEASE: Duration = Duration::from_secs(2);
    let shared = Shared::new();
    let start = |n: u64| {
        let node = n as usize % 2;
        let mut command = shared.command(node);
        command.env(CHILD_LEASE_MS, LEASE.as_millis().to_string());
        Depot::start_with(&mut command, &shared.dirs[node], CAP, n * 1_000_000..(n + 1) * 1_000_000)
    };
    let mut depots = [start(0), start(1)];
    for round in 0..3 {
        depots.iter_mut().for_each(|depot| depot.wait_written(8));
        depots[0].signal(Signal::STOP);
        until("a stopped process stops", || depots[0].is_stopped());
        let stopped = Instant::now();
        while stopped.elapsed() < 2 * LEASE {
            depots[1].wait_written(4);
            let bytes = snapshot(shared.on_disk(), &depots[1..]);
            assert!(bytes <= CAP * FILE_BYTES, "round {round}, one stopped: {bytes} bytes");
        }
        depots[0].signal(Signal::CONT);
        for _ in 0..4 {
            depots.iter_mut().for_each(|depot| depot.wait_written(2));
            let bytes = snapshot(shared.on_disk(), &depots);
            assert!(bytes <= CAP * FILE_BYTES, "round {round}, continued: {bytes} bytes");
        }
    }
}

#[test]
fn the_grant_of_a_killed_process_returns() {
    const CAP: u64 = 64;
    let nodes = Shared::new();
    let mut dead = Depot::start(&nodes, 1, CAP, 0..8);
    dead.wait_written(8);
    drop(dead);
    // What is written during a survey counts twice until the next one.
    let tier = open(PosixConfig { ledger_lease: SURVEYED_OFTEN, ..shared(&nodes.dirs[0], CAP) });
    assert!(tier.wait_scanned(Bench::soon()));
    let bench = Bench::new(tier);
    let mut n = 1000;
    until("what the dead process was granted and did not use is written by another one", || {
        // Refused while this process got no processor for longer than its lease lasts.
        n += u64::from(bench.write(n).is_ok());
        let bytes = disk_bytes(nodes.on_disk());
        assert!(bytes <= CAP * FILE_BYTES, "{bytes} bytes");
        bytes == CAP * FILE_BYTES
    });
}

#[test]
fn a_depot_that_ends_gives_back_its_grant() {
    const CAP: u64 = 40;
    let dir = directory();
    let config = || PosixConfig { ledger_lease: SURVEYED_OFTEN, ..shared(dir.path(), CAP) };
    let first = Bench::new(open(config()));
    let second = Bench::new(open(config()));
    for n in 0..4 {
        until("a block is stored", || first.write(n).is_ok());
    }
    for n in 4..8 {
        until("a block is stored", || second.write(n).is_ok());
    }
    first.drain();
    drop(first);
    let mut n = 8;
    until("all of the cap can be used", || {
        n += u64::from(second.write(n).is_ok());
        let bytes = disk_bytes(dir.path());
        assert!(bytes <= CAP * FILE_BYTES, "{bytes} bytes");
        bytes == CAP * FILE_BYTES
    });
}

/// A depot that has seen an empty directory only finds what the others wrote since, and evicts it.
#[test]
fn a_depot_that_comes_late_evicts_what_others_wrote() {
    const CAP: u64 = 16;
    let dir = directory();
    let late = Bench::new(open(shared(dir.path(), CAP)));
    late.drain();
    let early = Bench::new(open(shared(dir.path(), CAP)));
    for n in 0..40 {
        early.write(n).unwrap();
    }
    for n in 100..140 {
        late.write(n).unwrap();
        assert!(disk_bytes(dir.path()) <= CAP * FILE_BYTES);
    }
    assert!(late.read_is_right(139) && early.read_is_right(139));
}

#[test]
fn the_smallest_cap_holds_for_all() {
    let dir = directory();
    let large = open(shared(dir.path(), 40));
    let bench = Bench::new(Arc::clone(&large) as _);
    for n in 0..30 {
        bench.write(n).unwrap();
    }
    // A short lease, and so short turns, would do as well; the writes below wake the ledger.
    let small = Bench::new(open(shared(dir.path(), 10)));
    let mut n = 100;
    until("the directory comes below the smaller cap, for both", || {
        let _ = small.write(n);
        let _ = bench.write(n + 1000);
        n += 1;
        disk_bytes(dir.path()) <= 10 * FILE_BYTES && large.usage().bytes_max == 10 * FILE_BYTES
    });
    for n in 200..230 {
        let _ = small.write(n);
        let _ = bench.write(n + 1000);
        assert!(disk_bytes(dir.path()) <= 10 * FILE_BYTES);
    }
}

/// Damaged ledgers, and things that stand in their place.
#[test]
fn a_damaged_ledger_begins_anew_below_the_cap() {
    const CAP: u64 = 16;
    type Damage = fn(&Path, u64);
    let damages: [(&str, Damage); 5] = [
        ("cut off", |dir, last| {
            let path = ledger(dir).join(format!("{last:020}"));
            let file = std::fs::File::options().write(true).open(path).unwrap();
            file.set_len(50).unwrap();
        }),
        ("garbage", |dir, last| {
            std::fs::write(ledger(dir).join(format!("{:020}", last + 5)), [0x55; 1000]).unwrap();
        }),
        ("a pipe", |dir, last| {
            let path = ledger(dir).join(format!("{:020}", last + 5));
            let (fifo, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR);
            rustix::fs::mknodat(rustix::fs::CWD, path, fifo, mode, 0).unwrap();
        }),
        ("a directory", |dir, last| {
            std::fs::create_dir(ledger(dir).join(format!("{:020}", last + 5))).unwrap();
        }),
        ("a link", |dir, last| {
            std::os::unix::fs::symlink("/dev/zero", ledger(dir).join(format!("{:020}", last + 5))).unwrap();
        }),
    ];
    for (what, damage) in damages {
        let dir = directory();
        let (one, two) = (open(shared(dir.path(), CAP)), open(shared(dir.path(), CAP)));
        let (one, two) = (Bench::new(one), Bench::new(two));
        for n in 0..30 {
            one.write(n).unwrap();
            two.write(n + 100).unwrap();
        }
        damage(dir.path(), newest(dir.path()));
        let planted = newest(dir.path());
        // Whoever comes next finds it.
        let three = Bench::new(open(shared(dir.path(), CAP)));
        for n in 200..240 {
            for bench in [&one, &two, &three] {
                let _ = bench.write(n + 1000 * u64::from(std::ptr::eq(bench, &two)));
                let bytes = disk_bytes(dir.path());
                assert!(bytes <= CAP * FILE_BYTES, "{what}: {bytes} bytes");
            }
        }
        until(what, || three.write(300).is_ok());
        assert!(newest(dir.path()) > planted, "{what}: a new ledger was written");
        assert!(one.read_is_right(300) && two.read_is_right(300), "{what}");
    }
}

/// The directory with the ledger does not answer: writes stop, also those to another directory, and reads go on.
#[test]
fn a_ledger_out_of_reach_stops_writes_only() {
    let (first, second) = (directory(), directory());
    let faults = Faults::default();
    let plain = |dir: &Path| Arc::new(DirDevice::open(dir, DirectUse::Never).unwrap()) as Arc<dyn Device>;
    let devices = vec![
        Arc::new(FaultDevice::new(plain(first.path()), faults.clone())) as Arc<dyn Device>,
        plain(second.path()),
    ];
    let config = PosixConfig { ledger_lease: Duration::from_secs(4), ..shared(first.path(), 4096) };
    let tier = PosixTier::open_on_devices(config, devices).unwrap();
    let bench = Bench::new(Arc::new(tier));
    let is_second = |n: &u64| u128::from_be_bytes(bench.key(*n).hash.0) % 2 == 1;
    let mut numbers = (0..).filter(is_second);
    let there: Vec<u64> = numbers.by_ref().take(4).collect();
    until("blocks are stored", || there.iter().all(|n| bench.write(*n).is_ok()));
    for op in [FaultOp::Meta, FaultOp::Grow, FaultOp::Create, FaultOp::Publish] {
        faults.hang(op);
    }
    until("writes are refused", || {
        bench.write(numbers.next().unwrap()).is_err_and(|error| error.kind() == ErrorKind::Busy)
    });
    assert!(there.iter().all(|n| bench.read_is_right(*n)), "reads go on");
    faults.release();
    faults.set_enabled(false);
    until("writes go on", || bench.write(numbers.next().unwrap()).is_ok());
}

/// A second directory that hangs, just when the file of a failed write is to be removed there, delays no turn of the
/// ledger: the depot would lose its membership, and with it the writes to all directories.
#[test]
fn a_second_directory_that_hangs_delays_no_turn_of_the_ledger() {
    let (first, second) = (directory(), directory());
    let faults = Faults::default();
    let plain = |dir: &Path| Arc::new(DirDevice::open(dir, DirectUse::Never).unwrap()) as Arc<dyn Device>;
    let devices = vec![
        plain(first.path()),
        Arc::new(FaultDevice::new(plain(second.path()), faults.clone())) as Arc<dyn Device>,
    ];
    let config = PosixConfig { ledger_lease: Duration::from_secs(4), ..shared(first.path(), 4096) };
    let tier = PosixTier::open_on_devices(config, devices).unwrap();
    let bench = Bench::new(Arc::new(tier));
    let is_second = |n: &u64| u128::from_be_bytes(bench.key(*n).hash.0) % 2 == 1;
    let mut at_second = (0..).filter(is_second);
    until("a block is stored", || bench.write(at_second.next().unwrap()).is_ok());
    until("its thread hangs", || {
        faults.release();
        faults.at(FaultOp::Write, 0, Fault::Eio);
        assert!(bench.write(at_second.next().unwrap()).is_err());
        // It removes the file itself; then, a second after the last turn, whoever keeps the account makes sure of that.
        faults.hang(FaultOp::Unlink);
        faults.wait_hung(1, Instant::now() + Duration::from_secs(3))
    });
    let before = newest(first.path());
    until("turns go on", || newest(first.path()) > before + 3);
    let mut at_first = (0..).filter(|n| !is_second(n));
    until("a write to the first goes on", || bench.write(at_first.next().unwrap()).is_ok());
    faults.release();
}

/// A full disk: blocks make room for the ledger, because no write gets as far as that without it.
#[test]
fn the_ledger_finds_room_on_a_full_disk() {
    let memory = MemoryDevice::default();
    let lease = Duration::from_secs(2);
    let config = PosixConfig { ledger_lease: lease, ..shared(Path::new("memory"), 4096) };
    let tier = PosixTier::open_on_devices(config, vec![Arc::new(memory.clone())]).unwrap();
    let bench = Bench::new(Arc::new(tier));
    for n in 0..40 {
        until("blocks are stored", || bench.write(n).is_ok());
    }
    let newest = || {
        let mut last = 0;
        let mut note = |entry: kvdepot_io::ListEntry| last = last.max(entry.name.parse::<u64>().unwrap_or(0));
        memory.list(Path::new(".kvdepot-ledger"), &mut note).unwrap();
        last
    };
    // Less than there is: nothing fits before many blocks are gone, not even in the place of an old ledger.
    memory.set_disk_bytes(Some(24 * FILE_BYTES));
    let before = newest();
    until("the ledger is written on", || newest() > before + 2);
    until("blocks are stored again", || bench.write(50).is_ok());
}

/// Without hard links there is no ledger, so that the tier does not start: it would promise what it cannot keep.
#[test]
fn a_file_system_without_hard_links_is_an_error() {
    let faults = Faults::default();
    faults.forbid_links();
    let device: Arc<dyn Device> = Arc::new(FaultDevice::new(Arc::new(MemoryDevice::default()), faults));
    let error =
        PosixTier::open_on_devices(shared(Path::new("memory"), 100), vec![Arc::clone(&device)]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    let text = error.to_string();
    assert!(text.contains("hard links") && text.contains("posix_capacity_shared to false"), "{text}");
    let each = PosixConfig { capacity_shared: false, ..shared(Path::new("memory"), 100) };
    let bench = Bench::new(Arc::new(PosixTier::open_on_devices(each, vec![device]).unwrap()));
    bench.write(1).unwrap();
}

/// The depots name the same directories in the same order: the ledger lies in the first one.
#[test]
fn a_ledger_in_another_than_the_first_directory_is_an_error() {
    let (first, second) = (directory(), directory());
    let tier = open(shared(first.path(), 100));
    until("a ledger is written", || newest(first.path()) > 0);
    drop(tier);
    let mut config = shared(second.path(), 100);
    config.directories.push(first.path().to_owned());
    let error = PosixTier::open(config.clone()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("in the same order"), "{error}");
    config.directories.reverse();
    drop(open(config));
}

/// A ledger of a later version is no damaged one, which a depot may replace.
#[test]
fn the_ledger_of_a_later_version_is_left_alone() {
    let dir = directory();
    let config = || PosixConfig { ledger_lease: Duration::from_secs(2), ..shared(dir.path(), 100) };
    let bench = Bench::new(open(config()));
    until("a block is stored", || bench.write(1).is_ok());
    bench.drain();
    drop(bench);
    let last = newest(dir.path());
    let mut bytes = std::fs::read(ledger(dir.path()).join(format!("{last:020}"))).unwrap();
    let end = bytes.len() - 8;
    bytes[8] = 2;
    bytes[16..24].copy_from_slice(&(last + 1).to_le_bytes());
    let crc = kvdepot_io::checksum::crc64(&bytes[..end]);
    bytes[end..].copy_from_slice(&crc.to_le_bytes());
    let planted = ledger(dir.path()).join(format!("{:020}", last + 1));
    std::fs::write(&planted, &bytes).unwrap();
    let tier = open(config());
    // Before it has counted, it may evict.
    until("the files are counted", || tier.wait_scanned(Bench::soon()));
    let bench = Bench::new(tier);
    until("writes are refused", || bench.write(2).is_err_and(|error| error.kind() == ErrorKind::Busy));
    assert!(bench.read_is_right(1), "blocks are read");
    assert_eq!((newest(dir.path()), std::fs::read(&planted).unwrap()), (last + 1, bytes));
}

/// The ledger is opt-in.
#[test]
fn a_ledger_is_kept_only_for_a_shared_cap() {
    let each = |dir: &Path| PosixConfig { capacity_shared: false, ..shared(dir, 100) };
    let by_disk = |dir: &Path| PosixConfig { capacity_percent: 50, ..config(dir) };
    for config in [&each as &dyn Fn(&Path) -> PosixConfig, &by_disk] {
        let dir = directory();
        let bench = Bench::new(open(config(dir.path())));
        bench.write_all(3);
        bench.drain();
        assert_eq!(bench.tier.figures(), []);
        assert!(!ledger(dir.path()).exists());
        assert_eq!(files(dir.path()).len(), 4);
    }
}

#[test]
fn stat_tells_of_the_shared_cap() {
    const CAP: u64 = 40;
    let dir = directory();
    let depots = [0, 1].map(|_| Bench::new(open(shared(dir.path(), CAP))));
    for (n, bench) in (0..).zip(&depots) {
        until("a block is stored", || bench.write(n).is_ok());
    }
    let figure =
        |bench: &Bench, name: &str| bench.tier.figures().iter().find(|(one, _)| *one == name).unwrap().1;
    let mut n = 10;
    until("each knows of the other", || {
        n += 1;
        depots.iter().all(|bench| bench.write(n).is_ok() && figure(bench, "shared_depots") == 2)
    });
    for bench in &depots {
        let (bytes, granted) = (figure(bench, "shared_bytes"), figure(bench, "shared_granted_bytes"));
        assert!(
            granted <= bytes && (FILE_BYTES..=CAP * FILE_BYTES).contains(&bytes),
            "{granted} of {bytes} bytes"
        );
    }
}

#[test]
fn a_shared_cap_needs_shared_directories_and_a_cap() {
    let dir = directory();
    let own = PosixConfig { shared: false, ..shared(dir.path(), 100) };
    for config in [own, shared(dir.path(), 0)] {
        let error = config.check().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("posix_capacity_shared needs"), "{error}");
    }
}

/// As after a restart of an NFS server, whose answer to a repeated rename is that there is no such file.
#[test]
fn a_rename_that_fails_and_takes_effect_is_counted() {
    const CAP: u64 = 24;
    let (memory, faults) = (MemoryDevice::default(), Faults::default());
    faults.forbid_overwriting();
    let device: Arc<dyn Device> = Arc::new(FaultDevice::new(Arc::new(memory.clone()), faults.clone()));
    let tier = PosixTier::open_on_devices(shared(Path::new("memory"), CAP), vec![device]).unwrap();
    let bench = Bench::new(Arc::new(tier));
    let write = |n| bench.begin_write(n, bench.filled(n), Bench::soon()).recv().unwrap();
    (0..8).for_each(|n| assert!(write(n).is_ok()));
    // The second makes it impossible to look whether the first took effect.
    faults.chance(FaultOp::Publish, Fault::Late, 0.5).chance(FaultOp::Meta, Fault::Eio, 0.2);
    let outcomes: Vec<bool> = (100..400).map(|n| write(n).is_ok()).collect();
    faults.set_enabled(false);
    assert!(outcomes.contains(&true) && outcomes.contains(&false));
    // What was in doubt is in nobody's way for good.
    (400..500).for_each(|n| _ = write(n));
    bench.drain();
    let most = memory.images().iter().map(block_bytes).max().unwrap();
    assert!(most <= CAP * FILE_BYTES, "{} blocks of {CAP}", most / FILE_BYTES);
}
