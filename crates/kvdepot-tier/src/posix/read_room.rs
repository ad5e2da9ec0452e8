//! Tests: writes wait for space that reads and removals under way still take up. No thread of the tier runs here, so
//! that nothing but what is waited for wakes a write.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use kvdepot_core::{BlockHash, BlockKey, BlockLayout, Error, ErrorKind, NamespaceSpec, Result};
use kvdepot_io::faults::MemoryDevice;
use kvdepot_io::{Device, IoBuf, Request, SlotBuf};

use super::PosixConfig;
use super::shared::Shared;
use super::space::Space;
use super::state::{Adopt, Prior};
use crate::ReadItem;
use crate::conformance::{Bench, until};

const FILE_BYTES: u64 = 8192;

/// Why the file of the only block does not go now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Why {
    BlockIsRead,
    RemovedBlockIsRead,
    AnotherThreadUnlinksIt,
}

const ALL: [Why; 3] = [Why::BlockIsRead, Why::RemovedBlockIsRead, Why::AnotherThreadUnlinksIt];

/// A directory with one block, which is as much as the cap allows.
struct Full {
    shared: Arc<Shared>,
    space: Arc<Space>,
}

impl Full {
    /// With 50 percent there is no room above the floor, either.
    fn new(free_floor_percent: u64) -> Self {
        let disk = Arc::new(MemoryDevice::default());
        disk.set_disk_bytes(Some(3 * FILE_BYTES));
        let layout = BlockLayout::new(vec![vec![4096]]).expect("a layout");
        let spec = NamespaceSpec::new(r#"{"model":"m"}"#, layout).expect("a description");
        let space = Arc::new(Space::new(spec, 0, false));
        assert_eq!(space.file_bytes, FILE_BYTES);
        disk.make_dir(&space.epoch_dir()).expect("a directory");
        let full = Self { shared: Self::shared(Arc::clone(&disk) as _, free_floor_percent), space };
        let (space, key) = (&full.space, full.key(0));
        let content = [7; FILE_BYTES as usize];
        disk.write_small(&space.block_path(key.hash), Path::new(".tmp"), &content).expect("a file");
        let mut state = full.shared.lock();
        state.spaces.insert(space.id, Arc::clone(space));
        state.roots.insert(space.root, space.id);
        state.scanned.insert(space.id);
        state.counted = true;
        state.adopt(key, Adopt { space: Arc::clone(space), directory: 0, bytes: FILE_BYTES, used: None });
        drop(state);
        full
    }

    fn shared(disk: Arc<dyn Device>, free_floor_percent: u64) -> Arc<Shared> {
        let prior = Prior { bound: None, total: None, set: BlockHash([0; 16]) };
        let config = PosixConfig { shared: false, free_floor_percent, ..PosixConfig::new("memory") };
        Arc::new(Shared::new(config, vec![disk], vec![0], FILE_BYTES, prior))
    }

    fn key(&self, n: u8) -> BlockKey {
        self.space.key(BlockHash([n; 16]))
    }

    /// Begins to read the block. The read ends when what is returned is dropped.
    fn read(&self) -> Vec<Request> {
        let dst = SlotBuf::anonymous(self.space.slot_bytes);
        let reads = vec![ReadItem::new(self.key(0), dst, Box::new(drop))];
        let begun = self.shared.begin_reads(reads, Bench::soon());
        assert_eq!(begun.len(), 1);
        begun
    }

    /// Keeps the block's file. Returns what lets it go.
    fn keep(&self, why: Why) -> Box<dyn FnOnce() + Send> {
        if why == Why::AnotherThreadUnlinksIt {
            let victim = self.shared.lock().next_victim(None).expect("the block");
            let shared = Arc::clone(&self.shared);
            return Box::new(move || assert_eq!(shared.give_up_now(victim).expect("it goes"), FILE_BYTES));
        }
        let read = self.read();
        if why == Why::RemovedBlockIsRead {
            self.shared.lock().leave(&self.key(0));
        }
        Box::new(move || drop(read))
    }

    fn make_room(&self, deadline: Instant) -> Result<()> {
        let no_space = || Error::new(ErrorKind::NoSpace, "nothing was freed");
        self.shared.make_room(0, FILE_BYTES, deadline)?.then_some(()).ok_or_else(no_space)
    }

    fn keep_floor(&self, deadline: Instant) -> Result<()> {
        self.shared.keep_floor(0, FILE_BYTES, Some(deadline))
    }

    fn reserve(&self, n: u8, deadline: Instant) -> Result<()> {
        let slot = SlotBuf::anonymous(FILE_BYTES as usize);
        let sealed = IoBuf::payload(slot, FILE_BYTES as usize).expect("a slot of this length");
        let path = Path::new(".tmp-write");
        self.shared.reserve(self.key(n), FILE_BYTES, &sealed, path, deadline).map(drop)
    }
}

/// Checks that a write is refused as busy at its deadline, and otherwise waits for what takes up its room.
fn waits(why: Why, full: &Full, write: impl Fn(&Full, Instant) -> Result<()> + Sync) {
    let let_go = full.keep(why);
    let late = write(full, Instant::now()).expect_err("there is no room");
    assert_eq!(late.kind(), ErrorKind::Busy, "{why:?}: {late}");
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| write(full, Bench::soon()));
        until("a write waits or ends", || full.shared.lock().writes_waiting == 1 || writer.is_finished());
        assert!(!writer.is_finished(), "{why:?}: {:?}", writer.join());
        let_go();
        let outcome = writer.join().expect("it ends");
        assert!(outcome.is_ok(), "{why:?}: {outcome:?}");
    });
}

#[test]
fn a_write_at_the_cap_waits() {
    ALL.into_iter().for_each(|why| waits(why, &Full::new(0), |full, deadline| full.reserve(1, deadline)));
}

#[test]
fn a_write_of_a_removed_block_waits_for_its_reads() {
    let write = |full: &Full, deadline| full.shared.unlink_predecessor(&full.key(0), deadline);
    waits(Why::RemovedBlockIsRead, &Full::new(0), write);
}

#[test]
fn a_write_below_the_floor_waits() {
    ALL.into_iter().for_each(|why| waits(why, &Full::new(50), Full::keep_floor));
}

#[test]
fn a_write_to_a_full_disk_waits() {
    ALL.into_iter().for_each(|why| waits(why, &Full::new(0), Full::make_room));
}

/// Nothing that is under way will free any space.
#[test]
fn where_nothing_is_left_a_write_does_not_wait() {
    let full = Full::new(100);
    full.keep(Why::AnotherThreadUnlinksIt)();
    let refused = [full.make_room(Bench::soon()), full.keep_floor(Bench::soon())];
    assert_eq!(refused.map(|refused| refused.expect_err("no room").kind()), [ErrorKind::NoSpace; 2]);
}

#[test]
fn a_block_is_kept_until_its_last_read_ends() {
    let full = Full::new(0);
    let (one, other) = (full.read(), full.read());
    drop(one);
    assert_eq!(full.reserve(1, Instant::now()).expect_err("it is being read").kind(), ErrorKind::Busy);
    drop(other);
    assert!(full.make_room(Bench::soon()).is_ok());
    assert_eq!(full.shared.lock().bytes, 0);
}
