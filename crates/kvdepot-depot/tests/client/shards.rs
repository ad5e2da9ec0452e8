//! Dumps of single shards whose slot is lost before the block is whole (P1, P4).
#![allow(clippy::unwrap_used, reason = "tests fail where they cannot go on")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvdepot_copy::{CopyBatch, CopyEngine, GroupSink, HostEngine};
use kvdepot_core::{BlockHash, BlockLayout, Error, ErrorKind, NamespaceSpec, Result};
use kvdepot_depot::client::{Attachment, DeviceEngine, Store};
use kvdepot_depot::{Depot, DepotConfig};

const SHARD_BYTES: usize = 4096;
/// Reached only if the test hangs; not a measure of speed.
const HANG: Duration = Duration::from_secs(60);

/// A device that refuses copies while the test says so.
#[derive(Debug)]
struct Device(HostEngine, Arc<AtomicBool>);

impl CopyEngine for Device {
    fn name(&self) -> &'static str {
        "device"
    }

    unsafe fn run(&self, batch: CopyBatch, sink: Arc<dyn GroupSink>) -> Result<()> {
        if self.1.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Io, "the test refuses it"));
        }
        // SAFETY: the caller's contract.
        unsafe { self.0.run(batch, sink) }
    }
}

/// Two engines with the same namespace of blocks of two shards.
struct Lab {
    attachment: Arc<Attachment>,
    memory: Vec<u8>,
    one: Store,
    another: Store,
    /// Whether copies of the first one fail.
    fails: Arc<AtomicBool>,
}

impl Lab {
    fn new(timeout: Duration) -> Self {
        let config = serde_json::json!({"pipeline": "Cache", "pool_bytes": 1 << 20, "timeout_ms": 60_000});
        let depot = Depot::start_private(DepotConfig::from_json(&config.to_string()).unwrap()).unwrap();
        let attachment = Attachment::embedded(depot).unwrap();
        let layout = BlockLayout::uniform(2, &[SHARD_BYTES as u64]).unwrap();
        let spec = Arc::new(NamespaceSpec::new(r#"{"a":"shards"}"#, layout).unwrap());
        let fails = Arc::new(AtomicBool::new(false));
        let store = |timeout| {
            let device = Device(HostEngine::new(1).unwrap(), Arc::clone(&fails));
            let device = DeviceEngine::new(Arc::new(device));
            Store::new(&attachment, Arc::clone(&spec), device, timeout).unwrap()
        };
        let (one, another) = (store(timeout), store(HANG));
        Self { one, another, attachment, memory: vec![7; SHARD_BYTES], fails }
    }

    /// Dumps shards of a block. Returns why they were not stored.
    fn dump(&self, store: &Store, block: u8, shards: &[i64]) -> Vec<ErrorKind> {
        let addresses = vec![self.memory.as_ptr() as u64; shards.len()];
        // SAFETY: the memory lives in the lab, and nothing writes it.
        let task = unsafe { store.dump(vec![hash(block); shards.len()], shards, &addresses, 0) }.unwrap();
        assert!(task.wait(Some(HANG)));
        task.failed().into_iter().map(|(_, kind)| kind).collect()
    }

    fn has(&self, block: u8) -> bool {
        self.another.lookup(&[hash(block)]) == [1]
    }

    fn leases(&self) -> u64 {
        self.attachment.stats()["depot"]["leases"].as_u64().unwrap()
    }
}

fn hash(block: u8) -> BlockHash {
    BlockHash([block; 16])
}

#[test]
fn a_shard_does_not_count_as_stored_when_those_before_it_are_lost() {
    let lab = Lab::new(HANG);
    assert_eq!(lab.dump(&lab.one, 1, &[0]), []);
    assert_eq!(lab.dump(&lab.one, 2, &[0]), []);
    lab.fails.store(true, Ordering::Relaxed);
    assert_eq!(lab.dump(&lab.one, 3, &[0]), [ErrorKind::Io], "its slot goes, and those of the others");
    lab.fails.store(false, Ordering::Relaxed);
    assert_eq!(lab.dump(&lab.one, 1, &[1]), [ErrorKind::Unavailable]);
    assert_eq!((lab.has(1), lab.leases()), (false, 0));

    assert_eq!(lab.dump(&lab.another, 1, &[0, 1]), []);
    assert!(lab.has(1), "the key is free for others");
    for (block, shards) in [(2, [0, 1]), (3, [1, 0])] {
        for shard in shards {
            assert_eq!(lab.dump(&lab.one, block, &[shard]), [], "block {block} is begun anew, shard {shard}");
        }
        assert!(lab.has(block));
    }
}

#[test]
fn the_slot_of_a_block_whose_shards_come_no_more_is_given_back() {
    let lab = Lab::new(Duration::from_secs(1));
    lab.dump(&lab.one, 1, &[0]);
    let end = Instant::now() + HANG;
    // On a slow machine these may fail; then the slot is given back because of that.
    lab.dump(&lab.one, 2, &[0]);
    while lab.leases() > 1 {
        assert!(Instant::now() < end, "the slot of an aborted request stays");
        lab.dump(&lab.one, 2, &[0]);
    }
    assert_eq!(lab.dump(&lab.another, 1, &[0, 1]), []);
    assert!(lab.has(1));
}
