//! P1, P5: after a crash between any two writes of a tier, the next tier opens the directories, serves no wrong byte
//! and nothing of a past epoch, and keeps the cap.
//!
//! A device in memory keeps an image after every mutation. Two kinds of crash are tried on each: the process dies,
//! which leaves the image; or the machine loses power. A power loss also takes bytes of files that were not synced
//! although their names are there (delayed allocation), or what was written over them; or it takes the last names
//! although the bytes written over other files are there. Names are assumed to reach the disk in order, and to be safe
//! once a directory has been synced, as in journalling file systems.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use crate::common::config;
use kvdepot_io::faults::{Fault, FaultDevice, FaultOp, Faults, Image, Loss, MemoryDevice, Mutation};
use kvdepot_io::{Device, EngineKind};
use kvdepot_tier::conformance::{Bench, Waiting};
use kvdepot_tier::{Compression, PosixConfig, PosixTier, Presence, Tier, Written};

const FILE_BYTES: u64 = 16_384;
const CAP: u64 = 6 * FILE_BYTES;
/// Blocks of the workload are below this number.
const BLOCKS: u64 = 12;
/// Epochs of the workload are below this number.
const EPOCHS: u32 = 5;
/// Block `n` in version `v` has the bytes of block `n + v * VERSION`.
const VERSION: u64 = 1000;

/// How the tier is set up.
#[derive(Clone, Copy, Debug)]
struct Setup {
    shared: bool,
    /// Whether each block lies in its own directory. Otherwise all lie in one, and files are overwritten.
    sharded: bool,
    engine: EngineKind,
    compression: Compression,
}

const PLAIN: Setup =
    Setup { shared: false, sharded: false, engine: EngineKind::Psync, compression: Compression::Off };

fn open_on(device: &Arc<dyn Device>, setup: Setup) -> Arc<PosixTier> {
    let Setup { shared, sharded: shard_directories, engine, compression } = setup;
    let memory = config(Path::new("memory"));
    let config =
        PosixConfig { capacity_bytes: CAP, shared, shard_directories, engine, compression, ..memory };
    Arc::new(PosixTier::open_on_devices(config, vec![Arc::clone(device)]).unwrap())
}

/// A write: when it began, when it was acknowledged, and which version of its block it wrote.
type Write = (usize, Option<usize>, u64);

/// What was done when; "when" is the number of mutations so far.
#[derive(Default)]
struct History {
    /// Writes by epoch and block.
    writes: HashMap<(u32, u64), Vec<Write>>,
    /// Resets: when they had returned, and the new epoch.
    resets: Vec<(usize, u32)>,
}

struct Workload {
    memory: MemoryDevice,
    device: Arc<dyn Device>,
    faults: Faults,
    setup: Setup,
    history: History,
}

impl Workload {
    fn new(setup: Setup) -> Self {
        let (memory, faults) = (MemoryDevice::default(), Faults::default());
        let device: Arc<dyn Device> = Arc::new(FaultDevice::new(Arc::new(memory.clone()), faults.clone()));
        Self { memory, device, faults, setup, history: History::default() }
    }

    fn open(&self) -> Bench {
        Bench::new(open_on(&self.device, self.setup))
    }

    fn write(&mut self, bench: &Bench, n: u64) {
        let versions = self.history.writes.entry((bench.epoch, n)).or_default();
        let version = versions.len() as u64;
        versions.push((self.memory.mutations(), None, version));
        let write = bench.begin_write(n, bench.filled(n + version * VERSION), Bench::soon());
        if let Ok(Written::New) = Bench::answer(&write) {
            versions.last_mut().unwrap().1 = Some(self.memory.mutations());
        } else {
            versions.pop();
        }
    }

    fn replace(&mut self, bench: &Bench, n: u64) {
        bench.remove(n).unwrap();
        self.write(bench, n);
    }

    fn reset(&mut self, bench: &mut Bench) {
        bench.epoch = bench.tier.advance_and_wait(&bench.spec, bench.epoch + 1).unwrap();
        self.history.resets.push((self.memory.mutations(), bench.epoch));
    }

    fn run(mut self) -> Self {
        let mut bench = self.open();
        bench.drain();
        // Beyond the cap: the last ones evict.
        (0..9).for_each(|n| self.write(&bench, n));
        self.replace(&bench, 8);
        self.replace(&bench, 7);
        // Includes some evicted ones.
        (9..BLOCKS).chain(0..3).for_each(|n| self.write(&bench, n));
        self.reset(&mut bench);
        (0..4).for_each(|n| self.write(&bench, n));
        bench.drain();
        // With a checkpoint and a recorded total.
        drop(bench);
        let mut bench = self.open();
        (4..8).for_each(|n| self.write(&bench, n));
        self.replace(&bench, 5);
        self.faults.at(FaultOp::Read, 0, Fault::Flip);
        assert!(!bench.read_is_right(6), "a corrupt block is put aside");
        self.write(&bench, 6);
        // A reset on a full disk is stored by a rename.
        self.faults.at_name(FaultOp::Grow, "e2", Fault::NoSpace);
        self.reset(&mut bench);
        (0..3).for_each(|n| self.write(&bench, n));
        bench.drain();
        // The disk fills up below the cap.
        let used: u64 = self.last().files().map(|(_, bytes)| bytes.next_multiple_of(4096)).sum();
        self.memory.set_disk_bytes(Some(used + FILE_BYTES));
        (3..BLOCKS).for_each(|n| self.write(&bench, n));
        self.memory.set_disk_bytes(None);
        bench.drain();
        drop(bench);
        self
    }

    fn last(&self) -> Image {
        self.memory.images().pop().unwrap()
    }

    /// The epoch that must not be forgotten after mutation `at`: of a reset that had returned, and whose last sync of
    /// the directory is not later.
    fn epoch_at(&self, images: &[Image], at: usize) -> u32 {
        let synced = |when: usize| {
            let is_barrier =
                |image: &Image| image.mutation == Mutation::SyncDir && !image.path.as_os_str().is_empty();
            (0..=when).rev().find(|&at| is_barrier(&images[at])).unwrap()
        };
        let kept = self.history.resets.iter().filter(|(when, _)| synced(*when) <= at);
        kept.map(|(_, epoch)| *epoch).max().unwrap_or(0)
    }

    /// Versions that block `n` may have after mutation `at`: from the last one acknowledged to the last one begun.
    fn versions(&self, epoch: u32, n: u64, at: usize) -> std::ops::Range<u64> {
        let writes = self.history.writes.get(&(epoch, n)).map_or(&[][..], Vec::as_slice);
        let acknowledged = writes.iter().filter(|(_, end, _)| end.is_some_and(|end| end <= at));
        let begun = writes.iter().filter(|(begun, ..)| *begun <= at);
        let least = acknowledged.map(|(.., version)| *version).max().unwrap_or(0);
        least..begun.map(|(.., version)| version + 1).max().unwrap_or(0)
    }
}

/// Bytes of what a cap counts: everything in the directories of epochs.
fn block_bytes(image: &Image) -> u64 {
    let below = image.files().filter(|(path, _)| path.components().count() > 2);
    below.map(|(_, bytes)| bytes.next_multiple_of(4096)).sum()
}

fn is_of(path: &Path, epoch: u32) -> bool {
    let dir = format!("e{epoch}");
    path.iter().nth(1).is_some_and(|part| *part == *dir)
}

fn whole_blocks(image: &Image, epoch: u32, compression: Compression) -> usize {
    // Of two thirds of the blocks, compression saves a page. A file of that length is a plain one without its end if nothing
    // is compressed.
    let is_whole =
        |bytes: u64| bytes == FILE_BYTES || (compression == Compression::On && bytes == FILE_BYTES - 4096);
    let whole = image.files().filter(|(path, bytes)| {
        is_of(path, epoch) && is_whole(*bytes) && path.extension().is_some_and(|suffix| suffix == "kvb")
    });
    whole.count()
}

/// Reads every block of every epoch; returns how many were found.
fn read_all(work: &Workload, bench: &Bench, crash: Crash, what: &str) -> usize {
    let mut found = 0;
    for epoch in 0..EPOCHS {
        let old = Bench { tier: Arc::clone(&bench.tier), spec: bench.spec.clone(), epoch };
        for n in 0..BLOCKS {
            let Ok(bytes) = old.read(n) else { continue };
            assert_eq!(epoch, bench.epoch, "{what}: block {n} of a past epoch is served (P1)");
            let is_right = |version| bytes == old.bytes(n + version * VERSION);
            let known = work.versions(epoch, n, crash.at);
            // A replacement may be undone by the loss of its name.
            let versions = if crash.names < crash.at { 0..known.end } else { known };
            assert!(versions.clone().any(is_right), "{what}: wrong bytes of block {n}, not of {versions:?}");
            found += 1;
        }
    }
    found
}

/// What a crash leaves: bytes as after mutation `at`, names as after mutation `names`, minus what was not synced.
#[derive(Clone, Copy, Debug)]
struct Crash {
    at: usize,
    names: usize,
    loss: Option<Loss>,
}

impl Crash {
    fn is_of_power(self) -> bool {
        self.loss.is_some() || self.names < self.at
    }
}

/// Opens a tier on what a crash left, and checks everything that is promised.
fn check(work: &Workload, images: &[Image], crash: Crash) {
    let Crash { at, names, loss } = crash;
    let mut image = images[at].clone();
    let what = format!("{crash:?}, {:?} {}", image.mutation, image.path.display());
    if names < at {
        image.take_names(&images[names]);
    }
    // The writer is dead: otherwise this process's own temporary files would count as those of a living writer.
    let own = PosixTier::writer_identity();
    let (process, start) = own.rsplit_once('-').unwrap();
    let dead = format!("{process}-{}", start.parse::<u64>().unwrap() + 1);
    image.replace_in_names(&own, &dead);
    if let Some(loss) = loss {
        image.lose(loss);
    }
    let memory = MemoryDevice::from_image(image.clone());
    let device: Arc<dyn Device> = Arc::new(memory.clone());
    let tier = open_on(&device, work.setup);
    let bench = Bench::new(Arc::clone(&tier) as _);
    assert!(bench.epoch >= work.epoch_at(images, names), "{what}: epoch {} came back", bench.epoch);
    // Writes need not wait for the scan, and keep the cap all the same. What they evict before it has ended is guessed
    // from a checkpoint, so in half of the crashes what was found is checked first.
    let scan_first = at.is_multiple_of(2);
    let scan = || assert!(tier.wait_scanned(Bench::soon()), "{what}: the scan ends");
    if scan_first {
        scan();
        let found = read_all(work, &bench, crash, &what);
        let whole =
            if !crash.is_of_power() { whole_blocks(&image, bench.epoch, work.setup.compression) } else { 0 };
        assert!(found >= whole, "{what}: {found} of {whole} whole blocks are found");
        if !crash.is_of_power() {
            // Those of past epochs go with their directories, unless an eviction took them before.
            let is_bad = |path: &Path| path.extension().is_some_and(|suffix| suffix == "bad");
            let aside = image.files().filter(|(path, _)| is_bad(path) && is_of(path, bench.epoch)).count();
            assert_eq!(tier.quarantined(&bench.spec), aside, "{what}: no half block was visible");
        }
    }
    for n in [500, 501] {
        let written = bench.write(n);
        assert!(matches!(written, Ok(Written::New)), "{what}: {written:?}");
        assert!(bench.read_is_right(n), "{what}: a new block is served");
    }
    scan();
    let usage = tier.usage().bytes;
    assert!(usage <= CAP && usage == block_bytes(&memory.images().pop().unwrap()), "{what}: {usage}");
    read_all(work, &bench, crash, &what);
    // What was torn is written again.
    for n in 0..4 {
        bench.write(n).unwrap();
        assert!(bench.peek(n) == Presence::Present, "{what}");
    }
    bench.drain();
    let most = memory.images().iter().skip(1).map(block_bytes).max().unwrap_or(0);
    assert!(most <= CAP.max(block_bytes(&image)), "{what}: {most} bytes at one time (P5)");
    assert_eq!(tier.usage().bytes, block_bytes(&memory.images().pop().unwrap()), "{what}");
}

fn check_all(setup: Setup) {
    let work = Workload::new(setup).run();
    let images = work.memory.images();
    for (at, image) in images.iter().enumerate() {
        let (bytes, path) = (block_bytes(image), image.path.display());
        assert!(
            bytes <= CAP,
            "{bytes} bytes after {at}, {:?} {path}: the cap is passed (P5)",
            image.mutation
        );
    }
    assert!(work.history.resets.len() == 2 && images.len() > 150);
    let mut crashes: Vec<Crash> = (0..images.len()).map(|at| Crash { at, names: at, loss: None }).collect();
    let mut overwritten = 0;
    for (at, image) in images.iter().enumerate() {
        let changed = matches!(image.mutation, Mutation::Write | Mutation::Create | Mutation::Rename);
        if changed && image.clone().lose(Loss::Empty) > 0 {
            let losses = [Loss::Empty, Loss::Torn, Loss::Zeros, Loss::Foreign, Loss::Before, Loss::Mixed];
            crashes.extend(losses.map(|loss| Crash { at, names: at, loss: Some(loss) }));
        }
        if image.mutation == Mutation::Write && images[at - 1].mutation == Mutation::Rename {
            // A renamed file is overwritten: its earlier names may come back.
            overwritten += 1;
            let is_lost =
                |at: &usize| !matches!(images[*at].mutation, Mutation::SyncDir | Mutation::SyncData);
            for later in [at, at + 1, at + 2].into_iter().filter(|later| *later < images.len()) {
                let lost = (0..=later).rev().take_while(is_lost).map(|last| last - 1).take(6);
                for (number, names) in lost.enumerate() {
                    let loss = [None, Some(Loss::Mixed)][number % 2];
                    crashes.push(Crash { at: later, names, loss });
                }
            }
        }
    }
    println!("{} boundaries, {} images with what a power loss takes", images.len(), crashes.len());
    // A compressed block seldom finds a file of its own length.
    let least = if setup.compression == Compression::Off { 5 } else { 0 };
    assert!(setup.sharded || overwritten > least, "{overwritten} files were written over");
    let next = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                // Relaxed: only the number is shared.
                while let Some(crash) = crashes.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed)) {
                    check(&work, &images, *crash);
                }
            });
        }
    });
}

#[test]
fn every_crash_of_a_node_s_own_directory_is_survived() {
    check_all(Setup { shared: false, sharded: true, ..PLAIN });
}

#[test]
fn every_crash_of_a_shared_directory_is_survived() {
    check_all(Setup { shared: true, ..PLAIN });
}

#[test]
fn every_crash_between_writes_over_other_files_is_survived() {
    check_all(PLAIN);
}

/// The order of operations of an engine on kernel queues; a device in memory has no descriptors to queue.
#[test]
fn every_crash_between_writes_of_other_engines_is_survived() {
    for engine in [EngineKind::Aio, EngineKind::IoUring] {
        check_all(Setup { engine, ..PLAIN });
    }
}

/// Files of several lengths: those of compressed blocks, and of blocks that do not get smaller.
#[test]
fn every_crash_between_compressed_blocks_is_survived() {
    for setup in [PLAIN, Setup { shared: true, sharded: true, ..PLAIN }] {
        check_all(Setup { compression: Compression::On, ..setup });
    }
}
