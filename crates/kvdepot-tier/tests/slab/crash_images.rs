//! What a crash or a power loss may leave of a Slab tier's medium, at every boundary between two writes: complete
//! blocks or none (P1), no epoch that comes back (P8), nothing acknowledged that is missing.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvdepot_core::ErrorKind;
use kvdepot_io::faults::{Kept, MemoryVolume, VolumeOp};
use kvdepot_tier::conformance::{Bench, Waiting};
use kvdepot_tier::{Compression, SlabConfig, SlabTier, Written};

const BLOCKS: u64 = 40;
const EPOCHS: u32 = 4;
/// Bytes of block `n` in its `v`-th version are those of block `n + v * VERSION`.
const VERSION: u64 = 1000;
const SEGMENT_BYTES: u64 = 192 << 10;
const SEGMENTS: u64 = 5;
/// Superblocks and tables of namespaces.
const HEAD_BYTES: u64 = 136 << 10;
const MEDIUM_BYTES: u64 = HEAD_BYTES + SEGMENTS * SEGMENT_BYTES;
/// Segments that keep their blocks when another one begins: all but the one that is cleared for the next.
const KEPT: usize = SEGMENTS as usize - 1;

fn config(compression: Compression) -> SlabConfig {
    let hang = std::time::Duration::from_secs(60);
    SlabConfig {
        segment_bytes: SEGMENT_BYTES,
        read_threads: 1,
        write_threads: 1,
        open_wait: hang,
        compression,
        ..SlabConfig::new("/memory")
    }
}

fn open(memory: &MemoryVolume, compression: Compression) -> Arc<SlabTier> {
    Arc::new(SlabTier::open_on(config(compression), Arc::new(memory.clone())).unwrap())
}

/// When a version of a block was begun and acknowledged.
type Version = (usize, Option<usize>);

/// What was done when; "when" is the number of operations on the medium.
#[derive(Default)]
struct History {
    /// For each block of each epoch: when its versions were begun and acknowledged.
    writes: BTreeMap<(u32, u64), Vec<Version>>,
    /// When a block was removed that is not written again before blocks are evicted.
    removed: BTreeMap<(u32, u64), usize>,
    /// When epochs were acknowledged.
    resets: Vec<(usize, u32)>,
    /// Up to here no block had been evicted.
    complete: usize,
    /// When segments were begun.
    segments: Vec<usize>,
}

/// The operations that wrote the beginning of a segment.
fn segments_begun(memory: &MemoryVolume) -> Vec<usize> {
    let is_begin = |operation: &usize| match memory.operation(*operation) {
        Some(VolumeOp::Write { offset, .. }) => {
            offset >= HEAD_BYTES && (offset - HEAD_BYTES).is_multiple_of(SEGMENT_BYTES)
        }
        _ => false,
    };
    (0..memory.operations()).filter(is_begin).collect()
}

struct Workload {
    compression: Compression,
    memory: MemoryVolume,
    history: History,
}

impl Workload {
    fn write(&mut self, bench: &Bench, n: u64) {
        self.write_begun(bench, n, self.memory.operations());
    }

    fn write_begun(&mut self, bench: &Bench, n: u64, begun: usize) {
        let versions = self.history.writes.entry((bench.epoch, n)).or_default();
        let version = versions.len() as u64;
        versions.push((begun, None));
        let write = bench.begin_write(n, bench.filled(n + version * VERSION), Bench::soon());
        match Bench::answer(&write).unwrap() {
            Written::New => versions.last_mut().unwrap().1 = Some(self.memory.operations()),
            Written::AlreadyThere => drop(versions.pop()),
        }
    }

    fn write_at_once(&mut self, bench: &Bench, blocks: std::ops::Range<u64>) {
        let begun = self.memory.operations();
        let bytes = |n| {
            let versions = self.history.writes.get(&(bench.epoch, n)).map_or(0, Vec::len);
            bench.filled(n + versions as u64 * VERSION)
        };
        let writes: Vec<_> = blocks.clone().map(|n| bench.begin_write(n, bytes(n), Bench::soon())).collect();
        for (n, write) in blocks.zip(writes) {
            if Bench::answer(&write).unwrap() == Written::New {
                let end = Some(self.memory.operations());
                self.history.writes.entry((bench.epoch, n)).or_default().push((begun, end));
            }
        }
    }

    fn replace(&mut self, bench: &Bench, n: u64) {
        let begun = self.memory.operations();
        bench.remove(n).unwrap();
        self.write_begun(bench, n, begun);
    }

    fn remove(&mut self, bench: &Bench, n: u64) {
        self.history.removed.insert((bench.epoch, n), self.memory.operations());
        bench.remove(n).unwrap();
        bench.drain();
    }

    fn reset(&mut self, bench: &mut Bench) {
        bench.epoch = bench.tier.advance_and_wait(&bench.spec, bench.epoch + 1).unwrap();
        self.history.resets.push((self.memory.operations(), bench.epoch));
    }

    fn run(compression: Compression) -> Self {
        let memory = MemoryVolume::new(vec![0; MEDIUM_BYTES as usize]);
        let mut work = Self { compression, memory: memory.clone(), history: History::default() };
        let tier = open(&memory, compression);
        let bench = Bench::new(Arc::clone(&tier) as _);
        (0..6).for_each(|n| work.write(&bench, n));
        work.write_at_once(&bench, 6..12);
        work.replace(&bench, 2);
        work.replace(&bench, 2);
        work.remove(&bench, 4);
        work.write_at_once(&bench, 12..18);
        work.replace(&bench, 13);
        assert!(tier.stats().segments_recycled > 0 && tier.stats().blocks_evicted == 0);
        drop((tier, bench));
        // After a clean shutdown the open segment is continued.
        let tier = open(&memory, compression);
        let mut bench = Bench::new(Arc::clone(&tier) as _);
        (18..22).for_each(|n| work.write(&bench, n));
        assert!(tier.stats().blocks_evicted == 0);
        work.history.complete = memory.operations();
        // Around the ring more than once: some blocks stay in use, and some are replaced when their originals are
        // evicted.
        // The medium holds more records that are compressed: it takes longer to go around, and fewer are evicted.
        let (rounds, evicted) = if compression == Compression::Off { (12, 20) } else { (24, 10) };
        for round in 0..rounds {
            bench.tier.touch(&bench.keys(3));
            work.write_at_once(&bench, 22..32);
            work.replace(&bench, 1);
            (32..BLOCKS).for_each(|n| work.write(&bench, n));
            work.replace(&bench, 30 + round % 5);
            (3..12).for_each(|n| work.write(&bench, n));
        }
        let stats = tier.stats();
        assert!(stats.blocks_evicted > evicted && stats.rewritten_bytes > 0, "{stats:?}");
        work.reset(&mut bench);
        (0..8).for_each(|n| work.write(&bench, n));
        work.replace(&bench, 3);
        work.reset(&mut bench);
        work.write_at_once(&bench, 0..6);
        work.history.segments = segments_begun(&memory);
        work
    }

    /// How many segments had begun before operation `at`.
    fn segments_before(&self, at: usize) -> usize {
        self.history.segments.partition_point(|begun| *begun < at)
    }

    /// Versions that a block may have after operation `at`: from the last one acknowledged to the last one begun.
    fn versions(&self, epoch: u32, n: u64, at: usize) -> std::ops::Range<u64> {
        let writes = self.history.writes.get(&(epoch, n)).map_or(&[][..], Vec::as_slice);
        let last = writes.iter().rposition(|(_, end)| end.is_some_and(|end| end <= at)).unwrap_or(0);
        let begun = writes.iter().filter(|(begun, _)| *begun <= at).count();
        last as u64..begun as u64
    }

    /// Whether a block must exist after operation `at` and the beginning of `more` segments.
    fn must_be_there(&self, epoch: u32, n: u64, at: usize, more: usize) -> bool {
        let removed = self.history.removed.get(&(epoch, n)).is_some_and(|when| *when <= at);
        let writes = self.history.writes.get(&(epoch, n)).map_or(&[][..], Vec::as_slice);
        let acknowledged = writes.iter().filter(|(_, end)| end.is_some_and(|end| end <= at)).count();
        let begun = writes.iter().take_while(|(begun, _)| *begun <= at).count();
        // A block that is being replaced was removed first.
        if removed || acknowledged == 0 || acknowledged < begun {
            return false;
        }
        // It lies in the segment that was open when its write was begun, or in a later one.
        let later = self.segments_before(at) + more - self.segments_before(writes[begun - 1].0);
        at <= self.history.complete || later < KEPT
    }

    fn epoch_at(&self, at: usize) -> u32 {
        self.history.resets.iter().filter(|(when, _)| *when <= at).map(|(_, epoch)| *epoch).max().unwrap_or(0)
    }

    fn read_all(&self, bench: &Bench, memory: &MemoryVolume, at: usize, what: &str) -> usize {
        let mut found = 0;
        for epoch in 0..EPOCHS {
            let old = Bench { tier: Arc::clone(&bench.tier), spec: bench.spec.clone(), epoch };
            for n in 0..BLOCKS {
                match old.read(n) {
                    Ok(bytes) => {
                        assert_eq!(epoch, bench.epoch, "{what}: block {n} of a past epoch is served (P8)");
                        let versions = self.versions(epoch, n, at);
                        let is_right = versions.clone().any(|v| bytes == old.bytes(n + v * VERSION));
                        assert!(is_right, "{what}: wrong bytes of block {n}, not of {versions:?} (P1)");
                        found += 1;
                    }
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::NotFound, "{what}: torn is absent: {error}");
                        // A removal of a torn block begins a segment if the open one is full: at any moment, since a block
                        // may be found torn only when it is read.
                        let more = segments_begun(memory).len();
                        assert!(
                            epoch != bench.epoch || !self.must_be_there(epoch, n, at, more),
                            "{what}: block {n} of epoch {epoch} is gone"
                        );
                    }
                }
            }
        }
        found
    }

    /// Opens a tier on what a crash left, and checks everything that is promised.
    fn check(&self, at: usize, image: Vec<u8>, what: &str) -> usize {
        let memory = MemoryVolume::new(image);
        let bench = Bench::new(open(&memory, self.compression) as _);
        assert!(bench.epoch >= self.epoch_at(at), "{what}: epoch {} came back", bench.epoch);
        let found = self.read_all(&bench, &memory, at, what);
        for n in [500, 501] {
            assert_eq!(bench.write(n).unwrap(), Written::New, "{what}");
            assert!(bench.read_is_right(n), "{what}: a new block is served");
        }
        drop(bench);
        let bench = Bench::new(open(&memory, self.compression) as _);
        assert!(bench.read_is_right(500) && bench.read_is_right(501), "{what}: new blocks stay");
        self.read_all(&bench, &memory, at, &format!("{what}, opened again"));
        found
    }
}

#[test]
fn every_crash_is_survived() {
    check_all(Compression::Off);
}

/// Records of several lengths: those of compressed blocks, and of blocks that do not get smaller.
#[test]
fn every_crash_between_compressed_records_is_survived() {
    check_all(Compression::On);
}

fn check_all(compression: Compression) {
    let work = Workload::run(compression);
    // Half of a segment may hold what lay in another before, but the other half holds new blocks: three of six pages with the
    // head of their group and with the footer.
    let (writes, segments) =
        (work.history.writes.values().map(Vec::len).sum::<usize>(), work.history.segments.len());
    assert!(segments > 10 && segments <= writes / 3, "{segments} segments for {writes} blocks");
    let count = work.memory.operations();
    let mut crashes: Vec<(usize, &str)> = Vec::new();
    for at in 0..=count {
        crashes.push((at, "as written"));
        let last = at.checked_sub(1).and_then(|last| work.memory.operation(last));
        if matches!(last, Some(VolumeOp::Write { .. })) {
            let losses = [
                "nothing of what was not synced",
                "half",
                "a page",
                "the other half",
                "the last alone",
                "every other",
            ];
            crashes.extend(losses.map(|loss| (at, loss)));
        }
    }
    println!("{count} operations, {} images", crashes.len());
    let (next, found) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let check = |(at, loss): (usize, &str)| {
        let length = match at.checked_sub(1).and_then(|last| work.memory.operation(last)) {
            Some(VolumeOp::Write { bytes, .. }) => bytes.len(),
            _ => 0,
        };
        let kept = |number: usize| match (loss, number + 1 == at) {
            ("nothing of what was not synced", _) | ("the last alone", false) => Kept::Nothing,
            ("half", true) => Kept::First(length / 2),
            ("a page", true) => Kept::First(4096),
            ("the other half", true) => Kept::Last(length / 2),
            ("every other", _) if number.is_multiple_of(2) => Kept::Nothing,
            _ => Kept::All,
        };
        work.check(at, work.memory.crash(at, kept), &format!("operation {at}, {loss}"))
    };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                // Relaxed: only numbers are shared.
                while let Some(crash) = crashes.get(next.fetch_add(1, Ordering::Relaxed)) {
                    found.fetch_add(check(*crash), Ordering::Relaxed);
                }
            });
        }
    });
    let found = found.into_inner();
    assert!(found > crashes.len() * 5, "{found} blocks were found in all: the images hold blocks");
    assert!(count > 200 && crashes.len() > 700);
}
