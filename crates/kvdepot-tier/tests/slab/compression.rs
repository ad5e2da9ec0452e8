//! Compressed records: the suite of all tiers, media with records of both forms, recycling, damage.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::path::Path;
use std::sync::Arc;

use kvdepot_core::{BlockLayout, ErrorKind, Result};
use kvdepot_io::checksum::crc64;
use kvdepot_io::device::DirectAlign;
use kvdepot_io::faults::{Fault, FaultOp, FaultVolume, Faults, Kept, MemoryVolume};
use kvdepot_io::{IoBuf, MemRun, SlotBuf, Volume};
use kvdepot_tier::conformance::{Bench, Waiting, spec};
use kvdepot_tier::format::BlockHeader;
use kvdepot_tier::scan::Scan;
use kvdepot_tier::stored::StoredBlock;
use kvdepot_tier::{Compression, Presence, SlabConfig, SlabTier, Tier, Written, conformance};

use crate::media::{HANG, MIB, Media};

const PLAIN_BYTES: u64 = 16_384;
const ENCODED_BYTES: u64 = 12_288;
const SEGMENT_BYTES: u64 = 256 << 10;
const BYTES: usize = 2 << 20;

fn config(compression: Compression) -> SlabConfig {
    SlabConfig {
        segment_bytes: SEGMENT_BYTES,
        read_threads: 1,
        write_threads: 1,
        open_wait: HANG,
        compression,
        ..SlabConfig::new("/memory")
    }
}

fn open(volume: impl Volume + 'static, compression: Compression) -> Arc<SlabTier> {
    Arc::new(SlabTier::open_on(config(compression), Arc::new(volume)).unwrap())
}

fn bench(volume: impl Volume + 'static, compression: Compression) -> Bench {
    Bench::new(open(volume, compression) as _)
}

fn medium() -> MemoryVolume {
    MemoryVolume::new(vec![0; BYTES])
}

/// Returns what is on the medium now.
fn image(memory: &MemoryVolume) -> Vec<u8> {
    memory.crash(memory.operations(), |_| Kept::All)
}

fn scan(image: &[u8]) -> Scan {
    Scan::of_volume(Arc::new(MemoryVolume::new(image.to_vec())), Box::new(|| Ok(false))).unwrap()
}

/// Returns where the record of block `n` lies.
fn place(image: &[u8], bench: &Bench, n: u64) -> StoredBlock {
    let key = bench.key(n);
    scan(image).list().unwrap().blocks.into_iter().find(|block| block.key == key).unwrap()
}

/// Returns the bytes of the record of block `n`.
fn record<'a>(image: &'a [u8], bench: &Bench, n: u64) -> &'a [u8] {
    let block = place(image, bench, n);
    let at = usize::try_from(block.offset_bytes).unwrap();
    &image[at..at + usize::try_from(block.bytes).unwrap()]
}

fn figure(tier: &dyn Tier, name: &str) -> u64 {
    tier.figures().into_iter().find(|(known, _)| *known == name).unwrap_or_else(|| panic!("{name}")).1
}

/// The length of the record of block `n` if it may be compressed: every third one is random.
const fn record_bytes(n: u64) -> u64 {
    if n % 3 == 2 { PLAIN_BYTES } else { ENCODED_BYTES }
}

#[test]
fn the_suite() {
    let media = Media::new();
    let compressing = |config| SlabConfig { compression: Compression::On, ..config };
    let open = |config| Arc::new(SlabTier::open(compressing(config)).unwrap()) as Arc<dyn Tier>;
    conformance::check(&|| open(media.next(128 * MIB)));
    let medium = media.next(128 * MIB);
    conformance::check_persistent_alone(&|| open(medium.clone()));
}

#[test]
fn blocks_that_get_smaller_are_stored_compressed_and_counted() {
    let memory = medium();
    let tier = open(memory.clone(), Compression::On);
    let bench = Bench::new(Arc::clone(&tier) as _);
    bench.write_all(6);
    let image = image(&memory);
    for n in 0..6 {
        let record = record(&image, &bench, n);
        let header = BlockHeader::parse(record).unwrap();
        assert_eq!(header.encoding != 0, n % 3 != 2, "{n}");
        assert_eq!((record.len() as u64, header.file_bytes()), (record_bytes(n), record_bytes(n)));
        assert!(bench.read_is_right(n));
    }
    let total: u64 = (0..6).map(record_bytes).sum();
    assert_eq!((tier.usage().blocks, tier.usage().bytes), (6, total));
    assert_eq!(tier.stats().accepted_bytes, total);
    // Each block was written alone, after a page of a head.
    assert_eq!(tier.stats().written_bytes, total + 6 * 4096);
    for (name, expected) in [
        ("accepted_bytes", total),
        ("compressed_blocks", 4),
        ("uncompressed_blocks", 2),
        ("compression_input_bytes", 6 * (PLAIN_BYTES - 4096)),
        ("compression_output_bytes", total - 6 * 4096),
        ("decompressed_blocks", 4),
        ("decompressed_bytes", 4 * (PLAIN_BYTES - 4096)),
    ] {
        assert_eq!(figure(&*tier, name), expected, "{name}");
    }
    assert!(figure(&*tier, "compression_cpu_us") > 0);
}

#[test]
fn a_tier_that_does_not_compress_tells_nothing_of_it() {
    let bench = bench(medium(), Compression::Off);
    bench.write_all(1);
    assert!(bench.read_is_right(0));
    assert!(bench.tier.figures().iter().all(|(name, _)| !name.contains("compress")));
    assert_eq!(bench.tier.usage().bytes, PLAIN_BYTES);
}

/// What a write holds until its sync is the length of its record, too.
#[test]
fn a_write_in_flight_counts_what_it_writes() {
    let faults = Faults::default();
    let volume = FaultVolume::new(Arc::new(medium()), faults.clone());
    let bench = bench(volume, Compression::On);
    bench.write_all(1);
    faults.at(FaultOp::Flush, 0, Fault::Hang);
    let write = bench.begin_write(1, bench.filled(1), Bench::soon());
    assert!(faults.wait_hung(1, Bench::soon()), "its sync");
    let usage = bench.tier.usage();
    assert_eq!((usage.bytes, usage.blocks), (2 * ENCODED_BYTES, 1));
    faults.release();
    assert_eq!(Bench::answer(&write).unwrap(), Written::New);
    assert_eq!(bench.tier.usage().bytes, 2 * ENCODED_BYTES);
    bench.remove(0).unwrap();
    bench.remove(1).unwrap();
    bench.drain();
    assert_eq!(bench.tier.usage().bytes, 0);
}

/// The slot's bytes after the block belong to an earlier one, and must not be seen after a compressed read either.
#[test]
fn padding_of_a_slot_is_zero_after_a_read() {
    let bench = bench(medium(), Compression::On);
    bench.write_all(1);
    let slot = bench.slot();
    Bench::answer(&bench.begin_read(0, slot.clone(), Bench::soon())).unwrap();
    let mut rest = vec![1; slot.len() - 10_000];
    slot.read_at(10_000, &mut rest);
    assert!(rest.iter().all(|&byte| byte == 0));
}

/// In segments with a footer, and in the open one, which a start walks through.
#[test]
fn the_key_may_change_between_restarts() {
    let memory = medium();
    let modes = [Compression::On, Compression::Off, Compression::Auto, Compression::On];
    let mut bytes = 0;
    for (round, compression) in modes.into_iter().enumerate() {
        let tier = open(memory.clone(), compression);
        let bench = Bench::new(Arc::clone(&tier) as _);
        // Few enough that none is evicted, whatever `auto` decides.
        let (before, after) = (round as u64 * 15, round as u64 * 15 + 15);
        assert_eq!(tier.usage().bytes, bytes, "{round}");
        assert_eq!(tier.usage().blocks, before);
        (0..before).for_each(|n| assert!(bench.read_is_right(n), "{round} {n}"));
        (before..after).for_each(|n| assert_eq!(bench.write(n).unwrap(), Written::New));
        (0..after).for_each(|n| assert!(bench.read_is_right(n), "{round} {n}"));
        bytes += match compression {
            Compression::On => (before..after).map(record_bytes).sum(),
            Compression::Off => (before..after).map(|_| PLAIN_BYTES).sum(),
            Compression::Auto => tier.usage().bytes - bytes,
        };
        assert_eq!(tier.usage().bytes, bytes, "{round}");
        assert_eq!(tier.stats().blocks_evicted, 0);
        bench.drain();
    }
    let stored = scan(&image(&memory)).list().unwrap();
    assert!(stored.blocks.iter().any(|block| block.bytes == ENCODED_BYTES));
    assert!(stored.blocks.iter().map(|block| block.offset_bytes / SEGMENT_BYTES).max() > Some(2));
}

#[test]
fn a_medium_holds_more_blocks_that_are_compressed() {
    let held = |compression| {
        let tier = open(medium(), compression);
        let bench = Bench::new(Arc::clone(&tier) as _);
        let mut count = 0;
        while tier.stats().blocks_evicted == 0 {
            assert_eq!(bench.write(count).unwrap(), Written::New);
            assert!(tier.usage().bytes <= tier.usage().bytes_max, "P5");
            count += 1;
        }
        count
    };
    let (plain, compressed) = (held(Compression::Off), held(Compression::On));
    assert!(compressed * 10 >= plain * 11, "{compressed} instead of {plain}");
}

/// A block that stays in use is copied as it is, at first by a tier that compresses, then by one that does not.
#[test]
fn a_segment_that_is_recycled_keeps_records_as_they_are() {
    let memory = medium();
    let (mut first, mut next) = (None, 4);
    for compression in [Compression::On, Compression::Off] {
        let tier = open(memory.clone(), compression);
        let bench = Bench::new(Arc::clone(&tier) as _);
        if first.is_none() {
            bench.write_all(4);
            let image = image(&memory);
            assert_eq!(place(&image, &bench, 0).bytes, ENCODED_BYTES);
            first = Some([0, 2].map(|n| (place(&image, &bench, n), record(&image, &bench, n).to_vec())));
        }
        let decoded = figure(&*tier, "segments_recycled");
        for n in next..next + 300 {
            tier.touch(&[bench.key(0), bench.key(2)]);
            assert_eq!(bench.write(n).unwrap(), Written::New);
        }
        next += 300;
        bench.drain();
        assert!(tier.stats().segments_recycled > decoded + 14 && tier.stats().rewritten_bytes > 0);
        assert_eq!(tier.stats().rewritten_bytes % (ENCODED_BYTES + PLAIN_BYTES), 0);
        let image = image(&memory);
        for (n, (before, bytes)) in [0, 2].into_iter().zip(first.as_ref().unwrap()) {
            assert_ne!(place(&image, &bench, n).order, before.order, "it was written again");
            assert!(record(&image, &bench, n) == bytes.as_slice(), "block {n} has other bytes");
            assert!(bench.read_is_right(n));
        }
        assert_eq!(bench.peek(1), Presence::Absent);
    }
}

/// P1: whatever is changed in an encoded record, it is damaged and never served.
#[test]
fn a_damaged_compressed_record_is_never_served() {
    for compression in [Compression::On, Compression::Off] {
        let memory = medium();
        bench(memory.clone(), Compression::On).write_all(3);
        let tier = open(memory.clone(), compression);
        let bench = Bench::new(Arc::clone(&tier) as _);
        let image = image(&memory);
        let block = place(&image, &bench, 0);
        let stored = 4096 + BlockHeader::parse(record(&image, &bench, 0)).unwrap().stored_bytes;
        for at in [30, 140, 4000, 4096, 4099, 4100, 4105, 6000, stored - 1, stored, ENCODED_BYTES - 1] {
            let mut image = image.clone();
            image[usize::try_from(block.offset_bytes + at).unwrap()] ^= 1;
            let tier = open(MemoryVolume::new(image), compression);
            let bench = Bench::new(Arc::clone(&tier) as _);
            let error = bench.read(0).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "byte {at}: {error}");
            assert_eq!(bench.peek(0), Presence::Absent, "byte {at}");
            assert_eq!(bench.read(0).unwrap_err().kind(), ErrorKind::NotFound, "byte {at}");
            assert_eq!(bench.write(0).unwrap(), Written::New);
            assert!((0..3).all(|n| bench.read_is_right(n)), "byte {at}");
        }
    }
}

/// The log says how long a record is, and its header says how long it must be.
#[test]
fn a_record_of_another_length_than_its_header_says_is_refused() {
    for (n, pages, reason) in [
        (2, 3, "ends early"),
        (2, 1, "another length"),
        (2, 5, "another length"),
        (0, 2, "ends early"),
        (0, 1, "another length"),
        (0, 4, "too long"),
    ] {
        let memory = medium();
        let bench = bench(memory.clone(), Compression::On);
        bench.write(5).unwrap();
        bench.write(n).unwrap();
        let mut image = image(&memory);
        let head = usize::try_from(place(&image, &bench, n).offset_bytes).unwrap() - 4096;
        // The group's length, the pages of its only entry, and the checksum.
        let head = &mut image[head..head + 4096];
        head[56..64].copy_from_slice(&(u64::from(pages) * 4096 + 4096).to_le_bytes());
        head[72 + 32..72 + 36].copy_from_slice(&u32::to_le_bytes(pages));
        head[64..72].fill(0);
        let checksum = crc64(head);
        head[64..72].copy_from_slice(&checksum.to_le_bytes());
        let scan = scan(&image);
        let mut check = scan.check(&scan.list().unwrap(), None);
        let mut findings = Vec::new();
        while let Some(checked) = check.next(u64::MAX).unwrap() {
            findings.extend(checked.findings);
        }
        assert_eq!(findings.len(), 1, "{n} {pages}: {findings:?}");
        assert!(findings[0].reason.contains(reason), "{n} {pages}: {findings:?}");
        let bench = self::bench(MemoryVolume::new(image), Compression::On);
        assert_eq!(bench.peek(n), Presence::Present, "{n} {pages}: the log has it");
        assert!(bench.read(n).is_err(), "{n} {pages}");
        assert_eq!((bench.peek(n), bench.read_is_right(5)), (Presence::Absent, true), "{n} {pages}");
    }
}

/// Transfers only what O_DIRECT accepts.
#[derive(Debug)]
struct Strict(MemoryVolume);

const ALIGN: DirectAlign = DirectAlign { memory_bytes: 512, offset_bytes: 4096 };

impl Volume for Strict {
    fn path(&self) -> &Path {
        self.0.path()
    }
    fn bytes(&self) -> u64 {
        self.0.bytes()
    }
    fn can_grow(&self) -> bool {
        false
    }
    fn allocate(&self, bytes: u64) -> Result<()> {
        self.0.allocate(bytes)
    }
    fn direct(&self) -> Option<DirectAlign> {
        Some(ALIGN)
    }
    fn read_at(&self, buf: &mut IoBuf, offset: u64) -> Result<()> {
        assert!(buf.fits(ALIGN), "a read into memory that O_DIRECT refuses");
        self.0.read_at(buf, offset)
    }
    fn write_at(&self, bufs: &[IoBuf], offset: u64) -> Result<()> {
        assert!(bufs.iter().all(|buf| buf.fits(ALIGN)), "a write from memory that O_DIRECT refuses");
        self.0.write_at(bufs, offset)
    }
    fn sync(&self) -> Result<()> {
        self.0.sync()
    }
}

/// Returns a slot of the bench's blocks at an odd address.
fn askew(bench: &Bench) -> SlotBuf {
    let bytes = usize::try_from(bench.spec.layout().slot_bytes()).unwrap();
    let owner = SlotBuf::anonymous(bytes + 8);
    // SAFETY: `owner` keeps its memory, of which this is a part, and is not used by anybody else.
    let slot = unsafe {
        let run = MemRun { ptr: owner.runs()[0].ptr.add(8), len: bytes };
        SlotBuf::new([run], Arc::new(owner))
    };
    slot.write_at(0, &vec![0xa5; bytes]);
    slot
}

#[test]
fn slots_that_o_direct_refuses_hold_compressed_blocks_all_the_same() {
    let tier = open(Strict(medium()), Compression::On);
    let bench = Bench::new(Arc::clone(&tier) as _);
    for n in 0..6 {
        let slot = askew(&bench);
        slot.write_at(0, &bench.bytes(n));
        assert_eq!(Bench::answer(&bench.begin_write(n, slot, Bench::soon())).unwrap(), Written::New);
        let slot = askew(&bench);
        Bench::answer(&bench.begin_read(n, slot.clone(), Bench::soon())).unwrap();
        assert!(bench.block_of(&slot) == bench.bytes(n), "{n}");
        assert!(bench.read_is_right(n));
    }
    assert_eq!(tier.usage().bytes, (0..6).map(record_bytes).sum::<u64>());
    assert_eq!(figure(&*tier, "compressed_blocks") + figure(&*tier, "uncompressed_blocks"), 6);
}

/// `auto` compresses the blocks of a namespace that pay, and leaves others plain.
#[test]
fn auto_decides_by_namespace() {
    let memory = MemoryVolume::new(vec![0; 64 << 20]);
    let config = SlabConfig { segment_bytes: 8 << 20, ..config(Compression::Auto) };
    let tier = Arc::new(SlabTier::open_on(config, Arc::new(memory)).unwrap());
    let layout = || BlockLayout::new(vec![vec![1 << 20]]).unwrap();
    let zeros = Bench::with(Arc::clone(&tier) as _, spec("zeros", layout()));
    let random = Bench::with(Arc::clone(&tier) as _, spec("random", layout()));
    let grown = |write: &dyn Fn()| {
        let before = tier.usage().bytes;
        write();
        tier.usage().bytes - before
    };
    let zero = |bench: &Bench, n| {
        let slot = SlotBuf::anonymous(1 << 20);
        Bench::answer(&bench.begin_write(n, slot, Bench::soon())).unwrap();
    };
    let plain_bytes = (1 << 20) + 4096;
    let mut count = 0;
    for n in 0..8 {
        count += u32::from(grown(&|| zero(&zeros, 100 + n)) < plain_bytes);
        // Every third block has random bytes.
        assert_eq!(grown(&|| assert_eq!(random.write(3 * n + 2).unwrap(), Written::New)), plain_bytes);
    }
    assert!(count >= 5, "all after the samples: {count}");
    assert!((0..8).all(|n| random.read_is_right(3 * n + 2)));
    let epoch = zeros.tier.advance_and_wait(&zeros.spec, zeros.epoch + 1).unwrap();
    let again = Bench { tier: Arc::clone(&zeros.tier), spec: zeros.spec.clone(), epoch };
    zeros.drain();
    assert!(grown(&|| zero(&again, 200)) < plain_bytes, "the choice outlives a reset");
}
