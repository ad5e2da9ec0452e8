//! What must not come back in a Slab tier after failures, damage and restarts: removed or replaced values, past epochs,
//! blocks that were never complete. P1, P8.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use kvdepot_core::{ErrorKind, Result};
use kvdepot_io::device::DirectAlign;
use kvdepot_io::faults::{Fault, FaultOp, FaultVolume, Faults, Kept, MemoryVolume, VolumeOp};
use kvdepot_io::{IoBuf, Volume};
use kvdepot_tier::conformance::{Bench, Waiting};
use kvdepot_tier::{Presence, SlabConfig, SlabTier, Tier, Written};
use parking_lot::Mutex;

const SEGMENT_BYTES: u64 = 256 << 10;
const BYTES: usize = 2 << 20;
const SEGMENTS: u64 = 7;
/// Number of blocks in a segment if they are written one by one.
const BLOCKS: u64 = 12;
const TABLE: usize = 8192;
const TABLE_BYTES: usize = 65_536;
const SEGMENT_0: usize = TABLE + 2 * TABLE_BYTES;
/// The second version of a block has the bytes of the block with a number this much higher.
const SECOND: u64 = 1000;

fn config() -> SlabConfig {
    SlabConfig {
        segment_bytes: SEGMENT_BYTES,
        read_threads: 1,
        write_threads: 1,
        open_wait: Duration::from_secs(60),
        ..SlabConfig::new("/memory")
    }
}

fn open(volume: impl Volume + 'static) -> Arc<SlabTier> {
    Arc::new(SlabTier::open_on(config(), Arc::new(volume)).unwrap())
}

fn bench(volume: impl Volume + 'static) -> Bench {
    Bench::new(open(volume) as _)
}

fn medium() -> MemoryVolume {
    MemoryVolume::new(vec![0; BYTES])
}

fn faulty(memory: &MemoryVolume, faults: &Faults) -> FaultVolume {
    FaultVolume::new(Arc::new(memory.clone()), faults.clone())
}

/// Returns what is on the medium now.
fn image(memory: &MemoryVolume) -> Vec<u8> {
    memory.crash(memory.operations(), |_| Kept::All)
}

fn begin_second(bench: &Bench, n: u64) -> Receiver<Result<Written>> {
    bench.begin_write(n, bench.filled(n + SECOND), Bench::soon())
}

fn write_second(bench: &Bench, n: u64) {
    assert_eq!(Bench::answer(&begin_second(bench, n)).unwrap(), Written::New);
}

fn is_second(bench: &Bench, n: u64) -> bool {
    bench.read(n).unwrap() == bench.bytes(n + SECOND)
}

/// Finds the last write of more than two pages, a group with a block: its number and its range.
fn last_group(memory: &MemoryVolume) -> (usize, std::ops::Range<usize>) {
    let group = |number: usize| match memory.operation(number) {
        Some(VolumeOp::Write { offset, bytes }) if bytes.len() > 8192 => {
            let at = usize::try_from(offset).unwrap();
            Some((number, at..at + bytes.len()))
        }
        _ => None,
    };
    (0..memory.operations()).rev().find_map(group).unwrap()
}

/// Reports that a sync has begun, and receives when it shall fail.
type Ends = (Sender<()>, Receiver<()>);

/// A volume whose next sync waits and then fails, and which may refuse long writes.
#[derive(Debug)]
struct Gate {
    inner: MemoryVolume,
    refuses: Arc<AtomicBool>,
    next: Arc<Mutex<Option<Ends>>>,
}

impl Volume for Gate {
    fn path(&self) -> &Path {
        self.inner.path()
    }
    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }
    fn can_grow(&self) -> bool {
        false
    }
    fn allocate(&self, bytes: u64) -> Result<()> {
        self.inner.allocate(bytes)
    }
    fn direct(&self) -> Option<DirectAlign> {
        None
    }
    fn read_at(&self, buf: &mut IoBuf, offset: u64) -> Result<()> {
        self.inner.read_at(buf, offset)
    }
    fn write_at(&self, bufs: &[IoBuf], offset: u64) -> Result<()> {
        if self.refuses.load(Ordering::Acquire) && bufs.len() > 1 {
            return Err(kvdepot_core::Error::new(ErrorKind::Io, "a write that fails"));
        }
        self.inner.write_at(bufs, offset)
    }
    fn sync(&self) -> Result<()> {
        let Some((entered, go)) = self.next.lock().take() else { return self.inner.sync() };
        entered.send(()).unwrap();
        go.recv().unwrap();
        Err(kvdepot_core::Error::new(ErrorKind::Io, "a sync that fails"))
    }
}

#[test]
fn nothing_counts_behind_a_group_that_could_not_be_synced() {
    let (memory, next) = (medium(), Arc::new(Mutex::new(None)));
    let bench = self::bench(Gate { inner: memory.clone(), refuses: Arc::default(), next: Arc::clone(&next) });
    bench.write_all(3);
    let ((enter, entered), (go, wait)) = (channel(), channel());
    *next.lock() = Some((enter, wait));
    let first = bench.begin_write(3, bench.filled(3), Bench::soon());
    entered.recv().unwrap();
    let (_, torn) = last_group(&memory);
    // While the sync runs, a block is replaced and another one is removed.
    let before = memory.operations();
    bench.remove(1).unwrap();
    bench.remove(0).unwrap();
    let replaced = begin_second(&bench, 0);
    let end = Bench::soon();
    while last_group(&memory).0 < before {
        assert!(Instant::now() < end, "the next group is written meanwhile");
        std::thread::yield_now();
    }
    go.send(()).unwrap();
    assert_eq!(Bench::answer(&first).unwrap_err().kind(), ErrorKind::Io);
    assert_eq!(Bench::answer(&replaced).unwrap_err().kind(), ErrorKind::Io, "it lies behind what is torn");
    // A write that comes after the failure does count.
    write_second(&bench, 0);
    bench.drain();
    drop(bench);
    let mut image = image(&memory);
    image[torn].fill(0);
    let bench = self::bench(MemoryVolume::new(image));
    assert!(is_second(&bench, 0), "the replaced value is back");
    assert_eq!(bench.peek(1), Presence::Absent, "the removed one is back");
    assert!(bench.read_is_right(2) && bench.peek(3) == Presence::Absent);
}

#[test]
fn a_failed_write_that_is_removed_stays_away() {
    for op in [FaultOp::Flush, FaultOp::Write] {
        let (memory, faults) = (medium(), Faults::default());
        let bench = self::bench(faulty(&memory, &faults));
        bench.write_all(1);
        faults.at(op, 0, Fault::Eio);
        assert_eq!(bench.write(1).unwrap_err().kind(), ErrorKind::Io);
        bench.remove(1).unwrap();
        bench.drain();
        drop(bench);
        let bench = self::bench(MemoryVolume::new(image(&memory)));
        assert!(bench.read_is_right(0) && bench.peek(1) == Presence::Absent, "{op:?}");
    }
}

#[test]
fn what_was_given_up_stays_away_before_the_next_group_is_written() {
    let memory = medium();
    let tier = open(memory.clone());
    let bench = Bench::new(Arc::clone(&tier) as _);
    let mut n = 0;
    while tier.stats().blocks_evicted == 0 {
        assert_eq!(bench.write(n).unwrap(), Written::New);
        n += 1;
    }
    assert_eq!(bench.peek(0), Presence::Absent);
    // Before the group whose write made space.
    let bench = self::bench(MemoryVolume::new(memory.crash(last_group(&memory).0, |_| Kept::All)));
    assert_eq!(bench.peek(0), Presence::Absent, "it was given up, and may have been removed");
    assert!(bench.read_is_right(n - 2) && bench.peek(n - 1) == Presence::Absent);
}

#[test]
fn a_medium_that_cannot_be_read_is_not_opened() {
    let memory = medium();
    let bench = self::bench(memory.clone());
    (0..BLOCKS + 2).for_each(|n| assert_eq!(bench.write(n).unwrap(), Written::New));
    bench.remove(0).unwrap();
    write_second(&bench, 0);
    bench.drain();
    drop(bench);
    let (image, faults) = (image(&memory), Faults::default());
    drop(open(faulty(&MemoryVolume::new(image.clone()), &faults)));
    let (reads, mut refused) = (faults.count(FaultOp::Read), 0);
    for nth in 0..reads {
        let faults = Faults::default();
        faults.at(FaultOp::Read, nth, Fault::Eio);
        let volume = faulty(&MemoryVolume::new(image.clone()), &faults);
        match SlabTier::open_on(config(), Arc::new(volume)) {
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Io, "read {nth}");
                refused += 1;
            }
            // It was a superblock or a table: the other copy was read.
            Ok(tier) => {
                let bench = Bench::new(Arc::new(tier) as _);
                assert!(is_second(&bench, 0) && (1..BLOCKS + 2).all(|n| bench.read_is_right(n)), "{nth}");
            }
        }
    }
    assert!(reads > 2 * SEGMENTS && refused >= reads - 4, "{refused} of {reads}");
}

#[test]
fn a_segment_whose_first_head_is_damaged_counts_by_its_footer() {
    let memory = medium();
    let bench = self::bench(memory.clone());
    (0..BLOCKS + 1).for_each(|n| assert_eq!(bench.write(n).unwrap(), Written::New));
    bench.remove(0).unwrap();
    (BLOCKS + 1..3 * BLOCKS).for_each(|n| assert_eq!(bench.write(n).unwrap(), Written::New));
    bench.drain();
    drop(bench);
    let mut image = image(&memory);
    image[SEGMENT_0 + SEGMENT_BYTES as usize + 100] ^= 1;
    let bench = self::bench(MemoryVolume::new(image));
    assert_eq!(bench.peek(0), Presence::Absent, "its removal is in the footer");
    assert!((1..3 * BLOCKS).all(|n| bench.read_is_right(n)));
}

#[test]
fn a_record_of_an_earlier_life_is_no_later_version() {
    let memory = medium();
    let bench = self::bench(memory.clone());
    let (block, mut at) = (5000, None);
    let (first, second) = (BLOCKS + 3, BLOCKS + 3 + SEGMENTS * BLOCKS);
    for n in 0..second {
        let n = if n == first { block } else { n };
        assert_eq!(bench.write(n).unwrap(), Written::New);
        if n == block {
            at = Some(last_group(&memory).1);
        }
    }
    assert_eq!(bench.peek(block), Presence::Absent, "it was given up");
    write_second(&bench, block);
    let (number, place) = last_group(&memory);
    assert_eq!(Some(place), at, "both lie at the same place");
    // The head reaches the medium, the record does not.
    let kept = |other: usize| if other == number { Kept::First(4096) } else { Kept::All };
    let torn = MemoryVolume::new(memory.crash(number + 1, kept));
    for start in ["first", "second"] {
        let bench = self::bench(torn.clone());
        assert_eq!(bench.read(block).unwrap_err().kind(), ErrorKind::NotFound, "{start} start");
        assert_eq!(bench.write(1).unwrap(), Written::New);
        bench.remove(1).unwrap();
        bench.drain();
    }
    // A read of a tier that keeps running does not take it for one either.
    let Some(VolumeOp::Write { offset, bytes }) = memory.operation(number) else { panic!("a write") };
    let slot = kvdepot_io::SlotBuf::anonymous(bytes.len());
    let old = memory.crash(number, |_| Kept::All);
    let from = usize::try_from(offset).unwrap();
    slot.write_at(0, &old[from + 4096..from + bytes.len()]);
    let record = IoBuf::payload(slot, bytes.len() - 4096).unwrap();
    memory.write_at(&[record], offset + 4096).unwrap();
    assert_eq!(bench.read(block).unwrap_err().kind(), ErrorKind::Corrupt);
}

#[test]
fn an_epoch_that_a_start_has_used_does_not_go_back() {
    let (memory, faults) = (medium(), Faults::default());
    let bench = self::bench(memory.clone());
    let before = memory.operations();
    let epoch = bench.tier.advance_and_wait(&bench.spec, 5).unwrap();
    // The second table is stored first, then the first one.
    let cut = MemoryVolume::new(memory.crash(before + 2, |_| Kept::All));
    faults.at(FaultOp::Write, 0, Fault::Eio);
    let error = SlabTier::open_on(config(), Arc::new(faulty(&cut, &faults))).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io, "what cannot be repaired is not used");
    assert_eq!(self::bench(cut.clone()).epoch, epoch);
    let mut image = image(&cut);
    image[TABLE + TABLE_BYTES + 40] ^= 1;
    assert_eq!(self::bench(MemoryVolume::new(image)).epoch, epoch, "the other table knows it, too");
}

#[test]
fn what_a_start_has_found_outlives_a_power_loss() {
    let memory = medium();
    let volume = Arc::new(memory.clone());
    let tier = SlabTier::open_on(SlabConfig { durable: false, ..config() }, volume).unwrap();
    let bench = Bench::new(Arc::new(tier) as _);
    bench.write_all(1);
    let killed = Arc::clone(&bench.tier);
    // A killed process syncs nothing.
    std::mem::forget(killed);
    drop(bench);
    let bench = self::bench(memory.clone());
    assert_eq!(bench.write(0).unwrap(), Written::AlreadyThere);
    let image = memory.crash(memory.operations(), |_| Kept::Nothing);
    assert!(self::bench(MemoryVolume::new(image)).read_is_right(0), "it was acknowledged");
}

#[test]
fn a_medium_that_takes_nothing_keeps_what_it_has() {
    for op in [FaultOp::Write, FaultOp::Flush] {
        let (memory, faults) = (medium(), Faults::default());
        let tier = open(faulty(&memory, &faults));
        let bench = Bench::new(Arc::clone(&tier) as Arc<dyn Tier>);
        // Around the ring: every new segment costs one that holds blocks.
        (0..SEGMENTS * BLOCKS + 5).for_each(|n| assert_eq!(bench.write(n).unwrap(), Written::New));
        let (blocks, stats) = (tier.usage().blocks, tier.stats());
        faults.chance(op, Fault::Eio, 1.0);
        for n in 1000..1030 {
            assert_eq!(bench.write(n).unwrap_err().kind(), ErrorKind::Io);
        }
        assert_eq!(tier.usage().blocks, blocks, "{op:?}");
        assert!(tier.stats().segments_recycled <= stats.segments_recycled + 1);
        faults.set_enabled(false);
        (1000..1030).for_each(|n| assert_eq!(bench.write(n).unwrap(), Written::New));
        bench.drain();
        drop((bench, tier));
        let bench = self::bench(MemoryVolume::new(image(&memory)));
        assert!((1000..1030).all(|n| bench.read_is_right(n)));
    }
}

/// Groups without blocks are written all the time.
#[test]
fn a_medium_that_takes_no_blocks_gives_up_one_segment() {
    let (memory, refuses) = (medium(), Arc::new(AtomicBool::new(false)));
    let tier = open(Gate { inner: memory, refuses: Arc::clone(&refuses), next: Arc::default() });
    let bench = Bench::new(Arc::clone(&tier) as Arc<dyn Tier>);
    (0..SEGMENTS * BLOCKS + 5).for_each(|n| assert_eq!(bench.write(n).unwrap(), Written::New));
    let stats = tier.stats();
    refuses.store(true, Ordering::Release);
    for n in 1000..1030 {
        assert_eq!(bench.write(n).unwrap_err().kind(), ErrorKind::Io);
    }
    assert!(tier.stats().segments_recycled <= stats.segments_recycled + 1);
    refuses.store(false, Ordering::Release);
    assert_eq!(bench.write(1000).unwrap(), Written::New);
}

#[test]
fn a_foreign_page_beside_a_superblock_is_left_alone() {
    let memory = medium();
    drop(open(memory.clone()));
    for page in [0, 4096] {
        let mut image = image(&memory);
        image[page..page + 4096].fill(b'x');
        let memory = MemoryVolume::new(image);
        let error = SlabTier::open_on(config(), Arc::new(memory.clone())).map(drop).unwrap_err();
        assert!(error.kind() == ErrorKind::Config && error.to_string().contains("something else"), "{error}");
        assert_eq!(memory.operations(), 0, "nothing is written");
    }
}

/// P5.
#[test]
fn a_file_with_holes_is_allocated() {
    use std::os::unix::fs::MetadataExt;
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("medium");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(BYTES as u64).unwrap();
    assert!(file.metadata().unwrap().blocks() * 512 < BYTES as u64);
    drop(SlabTier::open(SlabConfig { path: path.clone(), ..config() }).unwrap());
    assert!(file.metadata().unwrap().blocks() * 512 >= BYTES as u64);
}
