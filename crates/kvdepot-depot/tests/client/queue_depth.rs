//! A dump has no more shards in flight than `running_queue_depth`, whether it comes whole, by layers or by shards.
#![allow(clippy::unwrap_used, reason = "tests fail where they cannot go on")]

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::Sender;
use kvdepot_copy::{CopyBatch, CopyEngine, Direction, GroupSink, HostEngine};
use kvdepot_core::{BlockHash, BlockLayout, NamespaceSpec, Result};
use kvdepot_depot::client::{Attachment, DeviceEngine, Store, TaskState};
use kvdepot_depot::{Depot, DepotConfig};

const SHARDS: usize = 2;
const SHARD_BYTES: usize = 8192;
const BLOCK_BYTES: usize = SHARDS * SHARD_BYTES;
const BLOCKS: usize = 7;
const DEPTH: usize = 4;
/// Reached only if the test hangs; not a measure of speed.
const HANG: Duration = Duration::from_secs(60);

/// A device that tells how many shards each batch of a dump has, and copies on the host.
#[derive(Debug)]
struct Counting(HostEngine, Sender<usize>);

impl CopyEngine for Counting {
    fn name(&self) -> &'static str {
        "counting"
    }

    unsafe fn run(&self, batch: CopyBatch, sink: Arc<dyn GroupSink>) -> Result<()> {
        if batch.direction == Direction::ToHost {
            self.1.send(batch.ops.iter().map(|op| op.len).sum::<usize>() / SHARD_BYTES).unwrap();
        }
        // SAFETY: the caller's contract.
        unsafe { self.0.run(batch, sink) }
    }
}

fn hashes() -> Vec<BlockHash> {
    (0..BLOCKS as u64).map(|n| BlockHash::from_engine(&n.to_le_bytes()).unwrap()).collect()
}

/// Carries out a dump of all blocks. Returns the number of shards in each batch; batches run one after another.
fn batches(dump: impl FnOnce(&Store, &[u8]) -> Arc<TaskState>) -> Vec<usize> {
    let config = serde_json::json!({
        "pipeline": "Cache", "pool_bytes": 1 << 20, "timeout_ms": 60_000, "running_queue_depth": DEPTH,
    });
    let depot = Depot::start_private(DepotConfig::from_json(&config.to_string()).unwrap()).unwrap();
    let attachment = Attachment::embedded(depot).unwrap();
    let layout = BlockLayout::new(vec![vec![SHARD_BYTES as u64]; SHARDS]).unwrap();
    let spec = Arc::new(NamespaceSpec::new(r#"{"a":1}"#, layout).unwrap());
    let mut memory: Vec<u8> =
        (0..BLOCKS * BLOCK_BYTES).map(|i| (i / 5 + i / SHARD_BYTES * 7) as u8).collect();
    let expected = memory.clone();
    let (sender, counts) = crossbeam_channel::unbounded();
    let device = Counting(HostEngine::new(1).unwrap(), sender);
    let store = Store::new(&attachment, spec, DeviceEngine::new(Arc::new(device)), HANG).unwrap();
    let base = memory.as_mut_ptr() as u64;
    let bases = (0..SHARDS).map(|shard| base + (shard * SHARD_BYTES) as u64).collect();
    // SAFETY: the memory lives longer than the store.
    unsafe { store.register_pages(bases, vec![BLOCK_BYTES as i64; SHARDS], BLOCKS as u64) }.unwrap();
    let task = dump(&store, &memory);
    assert!(task.wait(Some(HANG)) && task.failed().is_empty(), "{:?}", task.failed());
    memory.fill(0);
    let pages: Vec<i64> = (0..BLOCKS as i64).collect();
    // SAFETY: as above.
    let load = unsafe { store.load_pages(hashes(), &pages, 0) }.unwrap();
    assert!(load.wait(Some(HANG)) && load.failed().is_empty(), "{:?}", load.failed());
    assert!(memory == expected);
    assert!(store.close(HANG));
    counts.try_iter().collect()
}

#[test]
fn whole_blocks_are_dumped_in_pieces() {
    let pages: Vec<i64> = (0..BLOCKS as i64).collect();
    // SAFETY: the memory lives longer than the store.
    let found = batches(|store, _| unsafe { store.dump_pages(hashes(), &pages, 0) }.unwrap());
    assert_eq!(found, [4, 4, 4, 2]);
}

#[test]
fn a_layer_of_many_blocks_is_dumped_in_pieces() {
    let pages: Vec<i64> = (0..BLOCKS as i64).collect();
    let found = batches(|store, _| {
        // SAFETY: the memory lives longer than the store.
        let dump = unsafe { store.begin_dump_pages(hashes(), &pages) }.unwrap();
        (0..SHARDS).for_each(|shard| dump.submit_shard(shard, 0).unwrap());
        Arc::clone(dump.state())
    });
    assert_eq!(found, [4, 3, 4, 3]);
}

#[test]
fn single_shards_are_dumped_in_pieces() {
    let found = batches(|store, memory| {
        let dump = |shard: usize| {
            let addresses: Vec<u64> =
                memory.chunks(SHARD_BYTES).skip(shard).step_by(SHARDS).map(|at| at.as_ptr() as u64).collect();
            // SAFETY: the memory lives longer than the store.
            unsafe { store.dump(hashes(), &[shard as i64; BLOCKS], &addresses, 0) }.unwrap()
        };
        let first = dump(0);
        assert!(first.wait(Some(HANG)) && first.failed().is_empty(), "{:?}", first.failed());
        dump(1)
    });
    assert!(found.iter().all(|&shards| shards <= DEPTH), "{found:?}");
    assert_eq!(found.iter().sum::<usize>(), BLOCKS * SHARDS);
}
