//! A load acquires its next chunk while the device copies the previous one.
#![allow(clippy::unwrap_used, reason = "tests fail where they cannot go on")]

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::Receiver;
use kvdepot_copy::{CopyEngine, Direction, HostEngine};
use kvdepot_core::{BlockHash, BlockLayout, Error, ErrorKind, NamespaceSpec};
use kvdepot_depot::client::{Attachment, DeviceEngine, Store, TaskState};
use kvdepot_depot::{Depot, DepotConfig};

use crate::held_device::{Begun, HeldDevice};

/// Two blocks make a chunk, and two chunks move at a time.
const BLOCK_BYTES: usize = 4 << 20;
const BLOCKS: usize = 6;
/// Reached only if the test hangs; not a measure of speed.
const HANG: Duration = Duration::from_secs(30);

struct Lab {
    device: Receiver<Begun>,
    loads: Store,
    dumped: Vec<u8>,
    loaded: Vec<u8>,
}

fn hashes() -> Vec<BlockHash> {
    (0..BLOCKS as u64).map(|n| BlockHash::from_engine(&n.to_le_bytes()).unwrap()).collect()
}

fn pages() -> Vec<i64> {
    (0..BLOCKS as i64).collect()
}

impl Lab {
    fn new() -> Self {
        Self::with_depth(524_288)
    }

    fn with_depth(running_queue_depth: usize) -> Self {
        let pool_bytes = (BLOCKS + 2) * BLOCK_BYTES;
        let config = serde_json::json!({
            "pipeline": "Cache",
            "pool_bytes": pool_bytes,
            "timeout_ms": 60_000,
            "running_queue_depth": running_queue_depth,
        });
        let depot = Depot::start_private(DepotConfig::from_json(&config.to_string()).unwrap()).unwrap();
        let attachment = Attachment::embedded(depot).unwrap();
        let layout = BlockLayout::new(vec![vec![BLOCK_BYTES as u64]]).unwrap();
        let spec = Arc::new(NamespaceSpec::new(r#"{"a":1}"#, layout).unwrap());
        let dumped: Vec<u8> =
            (0..BLOCKS * BLOCK_BYTES).map(|i| (i / 5 + i / BLOCK_BYTES * 7) as u8).collect();
        let loaded = vec![0; BLOCKS * BLOCK_BYTES];
        let store = |engine: Arc<dyn CopyEngine>, memory: &[u8]| {
            let store =
                Store::new(&attachment, Arc::clone(&spec), DeviceEngine::new(engine), HANG * 2).unwrap();
            let bases = vec![memory.as_ptr() as u64];
            // SAFETY: the memory lives in the lab, after the stores.
            unsafe { store.register_pages(bases, vec![BLOCK_BYTES as i64], BLOCKS as u64) }.unwrap();
            store
        };
        let dumps = store(Arc::new(HostEngine::new(1).unwrap()), &dumped);
        // SAFETY: the memory lives in the lab, and nothing writes it.
        let dump = unsafe { dumps.dump_pages(hashes(), &pages(), 0) }.unwrap();
        assert!(dump.wait(Some(HANG)) && dump.failed().is_empty(), "{:?}", dump.failed());
        let (sender, device) = crossbeam_channel::unbounded();
        let loads = store(Arc::new(HeldDevice { begun: sender, may_hang: true }), &loaded);
        Self { device, loads, dumped, loaded }
    }

    fn load(&self) -> Arc<TaskState> {
        // SAFETY: the memory lives in the lab, and nobody else touches it.
        unsafe { self.loads.load_pages(hashes(), &pages(), 0) }.unwrap()
    }

    fn begun(&self) -> Begun {
        self.device.recv_timeout(HANG).expect("the next chunk was not begun while one moves")
    }
}

/// Makes the copies of a batch.
fn copy((batch, sink): Begun) {
    assert_eq!(batch.direction, Direction::ToDevice);
    for op in &batch.ops {
        // SAFETY: the device's addresses are host memory of the lab's; the sink keeps the slot.
        unsafe { std::ptr::copy_nonoverlapping(op.host.cast_const(), op.device as *mut u8, op.len) };
    }
    (0..batch.ends.len()).for_each(|group| sink.group_ended(group, Ok(())));
}

#[test]
fn the_next_chunk_is_begun_while_one_moves() {
    let lab = Lab::new();
    let task = lab.load();
    let (first, second) = (lab.begun(), lab.begun());
    assert!(lab.device.is_empty(), "two chunks are enough");
    copy(first);
    let third = lab.begun();
    copy(second);
    copy(third);
    assert!(task.wait(Some(HANG)) && task.failed().is_empty(), "{:?}", task.failed());
    assert!(lab.loaded == lab.dumped);
}

/// The blocks of the failed chunk and of those not begun have failed; the others have arrived, each once.
#[test]
fn a_chunk_that_fails_takes_only_what_is_behind_it() {
    let lab = Lab::new();
    let task = lab.load();
    let (first, (batch, sink)) = (lab.begun(), lab.begun());
    copy(first);
    let third = lab.begun();
    let error = Error::new(ErrorKind::Io, "a copy that fails");
    (0..batch.ends.len()).for_each(|group| sink.group_ended(group, Err(error.clone())));
    drop((batch, sink));
    copy(third);
    assert!(task.wait(Some(HANG)));
    let mut failed: Vec<usize> = task.failed().into_iter().map(|(item, _)| item).collect();
    failed.sort_unstable();
    assert_eq!(failed, [2, 3]);
    for block in [0, 1, 4, 5] {
        let bytes = block * BLOCK_BYTES..(block + 1) * BLOCK_BYTES;
        assert!(lab.loaded[bytes.clone()] == lab.dumped[bytes], "block {block}");
    }
    // The leases came back: the pool has space for another load.
    let again = lab.load();
    (0..3).for_each(|_| copy(lab.begun()));
    assert!(again.wait(Some(HANG)) && again.failed().is_empty(), "{:?}", again.failed());
    assert!(lab.loaded == lab.dumped);
}

/// Without the limit two chunks of two blocks would move at a time.
#[test]
fn shards_in_flight_are_no_more_than_the_running_queue_is_deep() {
    for (depth, chunks) in [(1, 1), (2, 2), (3, 2)] {
        let lab = Lab::with_depth(depth);
        let task = lab.load();
        let mut moving: Vec<Begun> = (0..chunks).map(|_| lab.begun()).collect();
        for left in (0..BLOCKS).rev() {
            assert!(lab.device.is_empty(), "more than {chunks} chunks of depth {depth}");
            let bytes: usize = moving.iter().flat_map(|(batch, _)| &batch.ops).map(|op| op.len).sum();
            assert!(bytes <= depth * BLOCK_BYTES, "{bytes} bytes move with depth {depth}");
            copy(moving.remove(0));
            if left >= chunks {
                moving.push(lab.begun());
            }
        }
        assert!(task.wait(Some(HANG)) && task.failed().is_empty(), "{:?}", task.failed());
        assert!(lab.loaded == lab.dumped);
    }
}
