//! P1: a write-back error is reported once, to whichever thread syncs next, and what could not be written counts as clean
//! from then on. No other thread may take its own bytes for written then.
#![allow(clippy::unwrap_used)] // a failing test panics

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use kvdepot_core::{BlockLayout, Error, ErrorKind, NamespaceSpec, Result};
use kvdepot_io::device::DirectAlign;
use kvdepot_io::faults::{MemoryVolume, VolumeOp};
use kvdepot_io::{IoBuf, SlotBuf, Volume};
use kvdepot_tier::conformance::{Bench, Waiting, spec, until};
use kvdepot_tier::{SlabConfig, SlabTier, Tier, Written};
use parking_lot::Mutex;

const BYTES: usize = 2 << 20;
/// Superblocks and tables of namespaces.
const HEAD_BYTES: u64 = TABLE + 2 * TABLE_BYTES;
const TABLE: u64 = 8192;
const TABLE_BYTES: u64 = 65_536;

/// Tells that a call waits, and receives when it shall go on.
type Gate = (Sender<()>, Receiver<()>);

/// What has reached the disk.
#[derive(Debug)]
struct Disk {
    bytes: Vec<u8>,
    /// Operations on the cache of which nothing is dirty any more.
    cleaned: usize,
}

/// A file as the kernel keeps it: writes go to the cache, and a sync takes them to the disk, or fails and forgets them.
#[derive(Clone, Debug)]
struct CachedVolume {
    cache: MemoryVolume,
    /// Locked while a sync runs: another one waits for what is being written.
    disk: Arc<Mutex<Disk>>,
    /// The next sync waits, and then fails.
    failing: Arc<Mutex<Option<Gate>>>,
    /// The next write to a table of namespaces waits once it is in the cache.
    table: Arc<Mutex<Option<Gate>>>,
}

impl CachedVolume {
    fn new(bytes: Vec<u8>) -> Self {
        let disk = Disk { bytes: bytes.clone(), cleaned: 0 };
        Self {
            cache: MemoryVolume::new(bytes),
            disk: Arc::new(Mutex::new(disk)),
            failing: Arc::default(),
            table: Arc::default(),
        }
    }

    fn open(&self) -> Arc<SlabTier> {
        let config = SlabConfig {
            segment_bytes: 256 << 10,
            read_threads: 1,
            write_threads: 1,
            open_wait: Duration::from_secs(60),
            ..SlabConfig::new("/memory")
        };
        Arc::new(SlabTier::open_on(config, Arc::new(self.clone())).unwrap())
    }

    /// The machine loses its power and is started again.
    fn without_cache(&self) -> Self {
        Self::new(self.disk.lock().bytes.clone())
    }

    /// Damages one of the two tables of namespaces.
    fn damage_table(&self, copy: u64) {
        let zeros = IoBuf::payload(SlotBuf::anonymous(4096), 4096).unwrap();
        self.cache.write_at(&[zeros], TABLE + copy * TABLE_BYTES).unwrap();
    }

    /// Waits until something more than this many operations is in the cache.
    fn until_written(&self, operations: usize) {
        until("a write is in the cache", || self.cache.operations() > operations);
    }
}

/// Returns a gate, the receiver that reports that a call waits there, and the sender that lets it go on.
fn gate() -> (Gate, Receiver<()>, Sender<()>) {
    let ((enter, entered), (go, wait)) = (channel(), channel());
    ((enter, wait), entered, go)
}

fn wait_at(gate: Gate) {
    let (enter, wait) = gate;
    enter.send(()).unwrap();
    wait.recv().unwrap();
}

impl Volume for CachedVolume {
    fn path(&self) -> &Path {
        Path::new("file")
    }

    fn bytes(&self) -> u64 {
        self.cache.bytes()
    }

    fn can_grow(&self) -> bool {
        false
    }

    fn allocate(&self, bytes: u64) -> Result<()> {
        self.cache.allocate(bytes)
    }

    fn direct(&self) -> Option<DirectAlign> {
        None
    }

    fn read_at(&self, buf: &mut IoBuf, offset: u64) -> Result<()> {
        self.cache.read_at(buf, offset)
    }

    fn write_at(&self, bufs: &[IoBuf], offset: u64) -> Result<()> {
        self.cache.write_at(bufs, offset)?;
        if offset < HEAD_BYTES
            && let Some(gate) = self.table.lock().take()
        {
            wait_at(gate);
        }
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        let mut disk = self.disk.lock();
        let failing = self.failing.lock().take();
        let fails = failing.is_some();
        if let Some(gate) = failing {
            wait_at(gate);
        }
        let end = self.cache.operations();
        for number in std::mem::replace(&mut disk.cleaned, end)..end {
            if let Some(VolumeOp::Write { offset, bytes }) = self.cache.operation(number)
                && !fails
            {
                let at = usize::try_from(offset).unwrap();
                disk.bytes[at..at + bytes.len()].copy_from_slice(&bytes);
            }
        }
        if fails { Err(Error::new(ErrorKind::Io, "the disk does not take it")) } else { Ok(()) }
    }
}

/// A tier on a new volume, and two open namespaces, one of them with blocks.
fn begin() -> (CachedVolume, Bench, Bench) {
    let volume = CachedVolume::new(vec![0; BYTES]);
    let tier = volume.open();
    let bench = Bench::new(Arc::clone(&tier) as _);
    let layout = BlockLayout::new(vec![vec![4096]]).unwrap();
    let other = Bench::with(tier, spec("other", layout));
    bench.write_all(3);
    (volume, bench, other)
}

fn begin_advance(bench: &Bench) -> Receiver<Result<u32>> {
    let (send, receive) = channel();
    let spec: Arc<NamespaceSpec> = Arc::new(bench.spec.clone());
    bench.tier.advance_epoch(&spec, 0, Bench::soon(), Box::new(move |end| drop(send.send(end))));
    receive
}

/// A reset that succeeded must not be undone by a power loss, even if either table is damaged later, and one that failed is
/// tried again.
fn check_reset(volume: &CachedVolume, bench: &mut Bench, reset: &Result<u32>) {
    let epoch_on_disk = || Bench::new(volume.without_cache().open()).epoch;
    match reset {
        Ok(epoch) => {
            for copy in [0, 1] {
                let machine = volume.without_cache();
                machine.damage_table(copy);
                let after = Bench::new(machine.open()).epoch;
                assert!(after >= *epoch, "epoch {after} came back from before {epoch} without copy {copy}");
            }
        }
        Err(error) => assert_eq!(error.kind(), ErrorKind::Io, "{error}"),
    }
    until("the reset is stored", || epoch_on_disk() > bench.epoch);
    assert!(bench.read(0).is_err(), "a block from before the reset");
    bench.epoch = bench.tier.open_and_wait(&bench.spec, 0).unwrap();
    assert_eq!(bench.write(0).unwrap(), Written::New, "the medium is used again");
}

#[test]
fn a_reset_is_not_taken_for_stored_while_the_sync_of_a_group_fails() {
    let (volume, mut bench, other) = begin();
    let (gate, waits, go) = gate();
    *volume.failing.lock() = Some(gate);
    let write = other.begin_write(0, other.filled(0), Bench::soon());
    waits.recv().unwrap();
    let before = volume.cache.operations();
    let reset = begin_advance(&bench);
    volume.until_written(before);
    go.send(()).unwrap();
    assert_eq!(Bench::answer(&write).unwrap_err().kind(), ErrorKind::Io);
    check_reset(&volume, &mut bench, &Bench::answer(&reset));
}

#[test]
fn a_reset_is_not_taken_for_stored_if_the_sync_of_a_group_has_failed_before_its_own() {
    let (volume, mut bench, other) = begin();
    let (gate, waits, go) = gate();
    *volume.table.lock() = Some(gate);
    let reset = begin_advance(&bench);
    waits.recv().unwrap();
    let (failing, fails, fail) = self::gate();
    *volume.failing.lock() = Some(failing);
    let write = other.begin_write(0, other.filled(0), Bench::soon());
    fails.recv().unwrap();
    fail.send(()).unwrap();
    assert_eq!(Bench::answer(&write).unwrap_err().kind(), ErrorKind::Io);
    go.send(()).unwrap();
    check_reset(&volume, &mut bench, &Bench::answer(&reset));
}

#[test]
fn a_block_is_not_taken_for_stored_while_the_sync_of_a_reset_fails() {
    let (volume, mut bench, other) = begin();
    let (gate, waits, go) = gate();
    *volume.failing.lock() = Some(gate);
    let reset = begin_advance(&bench);
    waits.recv().unwrap();
    let before = volume.cache.operations();
    let write = other.begin_write(0, other.filled(0), Bench::soon());
    volume.until_written(before);
    go.send(()).unwrap();
    let written = Bench::answer(&write);
    let after = Bench::with(volume.without_cache().open(), other.spec.clone());
    assert!(written.is_err() || after.read_is_right(0), "an acknowledged block is gone");
    assert_eq!(Bench::answer(&reset).unwrap_err().kind(), ErrorKind::Io);
    if written.is_err() {
        assert_eq!(other.write(0).unwrap(), Written::New, "a failed write does not stick to its key");
    }
    check_reset(&volume, &mut bench, &Err(Error::new(ErrorKind::Io, "as above")));
}
