//! The Slab tier's medium.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvdepot_core::{BlockLayout, ErrorKind, Result};
use kvdepot_io::device::DirectAlign;
use kvdepot_io::faults::{Kept, MemoryVolume};
use kvdepot_io::{IoBuf, Volume};
use kvdepot_tier::conformance::{Bench, Waiting, spec};
use kvdepot_tier::scan::Scan;
use kvdepot_tier::stored::{InUse, Stored, StoredBlock};
use kvdepot_tier::{Compression, Presence, SlabConfig, SlabTier, Tier, Written};
use parking_lot::Mutex;

use crate::tools::{checked, has_all_of, numbers, rest, unused, used};

const BYTES: usize = 2 << 20;
const TABLES: std::ops::Range<usize> = 8192..8192 + 2 * 65_536;

fn open(memory: &MemoryVolume) -> Arc<SlabTier> {
    open_by(memory, Compression::Off)
}

fn open_by(memory: &MemoryVolume, compression: Compression) -> Arc<SlabTier> {
    let config = SlabConfig {
        segment_bytes: 256 << 10,
        read_threads: 1,
        write_threads: 1,
        open_wait: Duration::from_secs(60),
        compression,
        ..SlabConfig::new("/memory")
    };
    Arc::new(SlabTier::open_on(config, Arc::new(memory.clone())).unwrap())
}

type Hook = Box<dyn FnOnce() + Send>;

/// A volume with a flipped bit, which calls a hook after the read of an offset.
#[derive(Default)]
struct Watched {
    memory: MemoryVolume,
    flipped: Mutex<Option<usize>>,
    hook: Mutex<Option<(u64, u32, Hook)>>,
}

impl std::fmt::Debug for Watched {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Watched({:?})", self.flipped)
    }
}

impl Volume for Watched {
    fn path(&self) -> &Path {
        self.memory.path()
    }
    fn bytes(&self) -> u64 {
        self.memory.bytes()
    }
    fn can_grow(&self) -> bool {
        false
    }
    fn allocate(&self, bytes: u64) -> Result<()> {
        panic!("a reader allocates {bytes} bytes")
    }
    fn direct(&self) -> Option<DirectAlign> {
        None
    }
    fn read_at(&self, buf: &mut IoBuf, offset: u64) -> Result<()> {
        self.memory.read_at(buf, offset)?;
        if let Some(at) = self.flipped.lock().and_then(|bit| bit.checked_sub(offset as usize * 8))
            && at < buf.len() * 8
        {
            buf.flip_bit(at);
        }
        let mut hook = self.hook.lock();
        match &mut *hook {
            Some((at, left, _)) if *at == offset && *left > 1 => *left -= 1,
            Some((at, ..)) if *at == offset => {
                let (.., run) = hook.take().unwrap();
                drop(hook);
                run();
            }
            _ => {}
        }
        Ok(())
    }
    fn write_at(&self, _: &[IoBuf], offset: u64) -> Result<()> {
        panic!("a reader writes at {offset}")
    }
    fn sync(&self) -> Result<()> {
        panic!("a reader syncs")
    }
}

fn watched(memory: &MemoryVolume) -> Arc<Watched> {
    Arc::new(Watched { memory: memory.clone(), ..Watched::default() })
}

fn scan(volume: &Arc<Watched>, in_use: InUse) -> Scan {
    Scan::of_volume(Arc::clone(volume) as _, in_use).unwrap()
}

/// A closed medium: segments that were recycled, removed blocks, a past epoch, two namespaces, blocks in no segment with a
/// footer.
fn filled() -> MemoryVolume {
    filled_by(Compression::Off)
}

/// The same of a tier that may compress.
fn filled_by(compression: Compression) -> MemoryVolume {
    let memory = MemoryVolume::new(vec![0; BYTES]);
    let tier = open_by(&memory, compression);
    let mut bench = Bench::new(Arc::clone(&tier) as _);
    bench.write_all(120);
    let other = spec("other", BlockLayout::uniform(3, &[4096]).unwrap());
    let other = Bench::with(Arc::clone(&tier) as _, other);
    other.write_all(7);
    bench.remove(110).unwrap();
    bench.remove(119).unwrap();
    bench.epoch = bench.tier.advance_and_wait(&bench.spec, 5).unwrap();
    bench.write_all(20);
    bench.remove(3).unwrap();
    bench.write(20).unwrap();
    assert!(tier.stats().segments_recycled > 7 || compression != Compression::Off);
    memory
}

fn is_present(bench: &Bench, block: &StoredBlock) -> bool {
    let mut out = Vec::new();
    bench.tier.peek(&[block.key], &mut out);
    out == [Presence::Present]
}

fn holding(stored: &Stored, at: usize) -> Option<&StoredBlock> {
    let is_it =
        |block: &&StoredBlock| (block.offset_bytes..block.offset_bytes + block.bytes).contains(&(at as u64));
    stored.blocks.iter().find(is_it)
}

#[test]
fn a_list_is_what_the_tier_finds() {
    let memory = filled();
    let (stored, findings) = checked(&scan(&watched(&memory), unused()));
    assert_eq!(findings, []);
    let tier = open(&memory);
    let bench = Bench::new(Arc::clone(&tier) as _);
    let other = spec("other", BlockLayout::uniform(3, &[4096]).unwrap());
    let other = Bench::with(Arc::clone(&tier) as _, other);
    for bench in [&bench, &other] {
        has_all_of(&stored, bench);
    }
    assert_eq!(stored.namespaces.len(), 2);
    assert_eq!(bench.epoch, 5);
    assert_eq!(stored.namespaces.iter().map(|one| one.blocks).sum::<u64>(), tier.usage().blocks);
    assert_eq!(stored.namespaces.iter().map(|one| one.bytes).sum::<u64>(), tier.usage().bytes);
    let newest = stored.blocks.iter().max_by_key(|block| block.order).unwrap();
    assert_eq!(newest.key, bench.key(20), "the order is that of writing");
}

#[test]
fn every_flipped_bit_of_a_block_is_found_and_nothing_else() {
    let memory = filled();
    let volume = watched(&memory);
    let stored = checked(&scan(&volume, unused())).0;
    // Header, its tag, checksums of shards, payload, padding: of every block; then anywhere.
    let in_blocks = stored.blocks.iter().flat_map(|block| {
        let at = block.offset_bytes as usize;
        [0, 30, 136, 140, 145, 160, 4000, 4096, 9000, 14_100, 16_383]
            .map(|byte| at + byte % block.bytes as usize)
    });
    for (at, bit) in in_blocks.chain(numbers(7, BYTES).take(800)).zip(numbers(9, 8)) {
        // Another magic in a superblock is somebody else's data.
        if at % 4096 < 8 && at < TABLES.start {
            continue;
        }
        *volume.flipped.lock() = Some(at * 8 + bit);
        let (_, findings) = checked(&scan(&volume, unused()));
        let expected =
            holding(&stored, at).map(|block| (Some(block.root), Some(block.key.hash), block.offset_bytes));
        let found: Vec<_> = findings.iter().map(|one| (one.root, one.hash, one.offset_bytes)).collect();
        assert_eq!(found, expected.into_iter().collect::<Vec<_>>(), "byte {at}, bit {bit}: {findings:?}");
    }
}

#[test]
fn what_a_running_depot_may_still_be_writing_is_no_finding() {
    let memory = filled();
    let volume = watched(&memory);
    let stored = scan(&volume, unused()).list().unwrap();
    let newest = stored.blocks.iter().max_by_key(|block| block.order).unwrap();
    let oldest = stored.blocks.iter().min_by_key(|block| block.order).unwrap();
    for (block, in_use, count) in
        [(newest, unused(), 1), (newest, used(), 0), (oldest, unused(), 1), (oldest, used(), 1)]
    {
        *volume.flipped.lock() = Some((block.offset_bytes as usize + 5000) * 8);
        assert_eq!(checked(&scan(&volume, in_use)).1.len(), count, "{block:?}");
    }
}

#[test]
fn blocks_that_are_overwritten_during_a_check_are_no_findings() {
    let memory = filled();
    let tier = open(&memory);
    let bench = Bench::new(Arc::clone(&tier) as _);
    let volume = watched(&memory);
    let scan = scan(&volume, used());
    let stored = scan.list().unwrap();
    let begin = memory.operations();
    let mut check = scan.check(&stored, None);
    // One block is read; then everything is overwritten.
    assert_eq!(check.next(1).unwrap().unwrap().blocks, 1);
    (1000..1200).for_each(|n| assert_eq!(bench.write(n).unwrap(), Written::New));
    let (before, now) =
        (memory.crash(begin, |_| Kept::All), memory.crash(memory.operations(), |_| Kept::All));
    let is_gone = |block: &&StoredBlock| {
        let range = block.offset_bytes as usize..(block.offset_bytes + block.bytes) as usize;
        before[range.clone()] != now[range]
    };
    assert!(stored.blocks.iter().filter(is_gone).count() > 20);
    let all = rest(check);
    assert_eq!((all.blocks, all.findings), (stored.blocks.len() as u64 - 1, Vec::new()));
    let (stored, findings) = checked(&scan);
    assert_eq!((stored.blocks.len() as u64, findings.len()), (tier.usage().blocks, 0));
}

#[test]
fn a_damaged_block_is_found_unless_its_segment_is_given_up_before_it_was_read_again() {
    for overwrites in [false, true] {
        let memory = filled();
        let tier = open(&memory);
        let bench = Bench::new(Arc::clone(&tier) as _);
        let volume = watched(&memory);
        let scan = scan(&volume, used());
        let stored = scan.list().unwrap();
        // A block of the middle: a few more blocks do not reach its segment.
        let mut blocks = stored.blocks.clone();
        blocks.sort_unstable_by_key(|block| block.order);
        let block = blocks[blocks.len() / 2];
        *volume.flipped.lock() = Some((block.offset_bytes as usize + 5000) * 8);
        let count = if overwrites { 200 } else { 5 };
        let write =
            move || (2000..2000 + count).for_each(|n| assert_eq!(bench.write(n).unwrap(), Written::New));
        // The second read of the block.
        *volume.hook.lock() = Some((block.offset_bytes, 2, Box::new(write)));
        let all = rest(scan.check(&stored, None));
        assert!(volume.hook.lock().is_none(), "it was read twice");
        assert_eq!(all.findings.len(), usize::from(!overwrites), "{:?}", all.findings);
    }
}

/// The oldest segment may be overwritten from the moment in which the one before it begins another life, and the records
/// there may change before its own head does.
#[test]
fn a_segment_that_is_given_up_is_not_judged() {
    for is_given_up in [false, true] {
        let memory = MemoryVolume::new(vec![0; BYTES]);
        let tier = open(&memory);
        let bench = Bench::new(Arc::clone(&tier) as _);
        bench.write_all(60);
        let volume = watched(&memory);
        let scan = scan(&volume, used());
        let stored = scan.list().unwrap();
        let oldest = *stored.blocks.iter().min_by_key(|block| block.order).unwrap();
        *volume.flipped.lock() = Some((oldest.offset_bytes as usize + 5000) * 8);
        let write = move || {
            let mut next = 60;
            let mut write_one = || {
                next += 1;
                assert_eq!(bench.write(next).unwrap(), Written::New);
            };
            write_one();
            while is_given_up && is_present(&bench, &oldest) {
                write_one();
            }
        };
        *volume.hook.lock() = Some((oldest.offset_bytes, 2, Box::new(write)));
        let all = rest(scan.check(&stored, None));
        assert!(volume.hook.lock().is_none(), "it was read twice");
        let head =
            memory.crash(memory.operations(), |_| Kept::All)[TABLES.end + 32..TABLES.end + 40].to_vec();
        assert_eq!((oldest.offset_bytes as usize, head), (TABLES.end + 4096, vec![0; 8]), "its first life");
        assert_eq!(all.findings.len(), usize::from(!is_given_up));
    }
}

#[test]
fn a_complete_record_of_another_time_is_found() {
    let image = |version: u64| {
        let memory = MemoryVolume::new(vec![0; BYTES]);
        let bench = Bench::new(open(&memory) as _);
        bench.write_all(3);
        let write = bench.begin_write(3, bench.filled(version), Bench::soon());
        assert_eq!(Bench::answer(&write).unwrap(), Written::New);
        bench.write(4).unwrap();
        let key = bench.key(3);
        drop(bench);
        (memory.crash(memory.operations(), |_| Kept::All), key)
    };
    let ((mut image, key), (other, _)) = (image(3), image(1003));
    let scan_of =
        |image: &[u8]| Scan::of_volume(Arc::new(MemoryVolume::new(image.to_vec())), unused()).unwrap();
    let stored = scan_of(&image).list().unwrap();
    let block = stored.blocks.iter().find(|block| block.key == key).unwrap();
    let range = block.offset_bytes as usize..(block.offset_bytes + block.bytes) as usize;
    image[range.clone()].copy_from_slice(&other[range]);
    let findings = checked(&scan_of(&image)).1;
    assert_eq!((findings.len(), findings[0].hash), (1, Some(key.hash)));
    assert!(findings[0].reason.contains("not the one that was written there last"), "{findings:?}");
}

#[test]
fn one_damaged_superblock_or_table_is_enough_to_read_a_medium() {
    let memory = filled();
    let image = memory.crash(memory.operations(), |_| Kept::All);
    let stored = scan(&watched(&memory), unused()).list().unwrap();
    let damaged = |at: &[usize]| {
        let mut image = image.clone();
        at.iter().for_each(|&at| image[at] ^= 1);
        Scan::of_volume(Arc::new(MemoryVolume::new(image)), unused())
    };
    for at in [20, 4096 + 20, TABLES.start + 60, TABLES.start + 65_536 + 60] {
        assert_eq!(damaged(&[at]).unwrap().list().unwrap(), stored);
    }
    assert_eq!(damaged(&[20, 4096 + 20]).unwrap_err().kind(), ErrorKind::Corrupt);
    let tables = damaged(&[TABLES.start + 60, TABLES.start + 65_536 + 60]).unwrap();
    assert_eq!(tables.list().unwrap_err().kind(), ErrorKind::Corrupt);
    let short = MemoryVolume::new(image[..BYTES / 2].to_vec());
    assert_eq!(Scan::of_volume(Arc::new(short), unused()).unwrap_err().kind(), ErrorKind::Corrupt);
    let blank = MemoryVolume::new(vec![0; BYTES]);
    assert_eq!(Scan::of_volume(Arc::new(blank), unused()).unwrap_err().kind(), ErrorKind::Config);
}

/// Records of both forms, and namespaces of which the first record to be read is an encoded one.
#[test]
fn compressed_records_are_checked_like_plain_ones() {
    let memory = filled_by(Compression::On);
    let volume = watched(&memory);
    let (stored, findings) = checked(&scan(&volume, unused()));
    assert_eq!(findings, []);
    let lengths = |bytes: u64| stored.blocks.iter().filter(|block| block.bytes == bytes).count();
    assert!(lengths(12_288) > 10 && lengths(16_384) > 5 && stored.namespaces.len() == 2);
    let tier = open_by(&memory, Compression::Off);
    let bench = Bench::new(Arc::clone(&tier) as _);
    has_all_of(&stored, &bench);
    assert_eq!(stored.namespaces.iter().map(|one| one.bytes).sum::<u64>(), tier.usage().bytes);
    let encoded = stored.blocks.iter().filter(|block| block.bytes == 12_288).step_by(3);
    let at = encoded.flat_map(|block| {
        [30, 140, 160, 4000, 4096, 4100, 9000, 12_287].map(|byte| block.offset_bytes as usize + byte)
    });
    for (at, bit) in at.zip(numbers(9, 8)) {
        *volume.flipped.lock() = Some(at * 8 + bit);
        let (_, findings) = checked(&scan(&volume, unused()));
        let found: Vec<_> = findings.iter().map(|one| (one.hash, one.offset_bytes)).collect();
        let block = holding(&stored, at).unwrap();
        assert_eq!(found, [(Some(block.key.hash), block.offset_bytes)], "byte {at}, bit {bit}: {findings:?}");
    }
}
