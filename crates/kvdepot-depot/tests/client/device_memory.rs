//! An engine keeps the caller's pages registered only until the store is closed, even if a part of the store is still
//! referenced.
#![allow(clippy::unwrap_used, reason = "tests fail where they cannot go on")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kvdepot_copy::pool::KeptRegistration;
use kvdepot_copy::{CopyBatch, CopyEngine, DeviceMemory, GroupSink, HostEngine};
use kvdepot_core::{BlockHash, BlockLayout, NamespaceSpec, Result};
use kvdepot_depot::client::{Attachment, DeviceEngine, Store};
use kvdepot_depot::{Depot, DepotConfig};

const BLOCK_BYTES: usize = 8 << 10;
const SHARDS: usize = 2;
/// Reached only if the test hangs; not a measure of speed.
const HANG: Duration = Duration::from_secs(60);

/// Copies on the host and counts what is registered.
#[derive(Debug)]
struct Registering {
    copies: HostEngine,
    registered: Arc<AtomicUsize>,
}

#[derive(Debug)]
struct Kept(Arc<AtomicUsize>);

impl KeptRegistration for Kept {}

impl Drop for Kept {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl CopyEngine for Registering {
    fn name(&self) -> &'static str {
        "registering"
    }

    unsafe fn run(&self, batch: CopyBatch, sink: Arc<dyn GroupSink>) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.copies.run(batch, sink) }
    }

    unsafe fn register_device(&self, _address: u64, _len: usize) -> Result<DeviceMemory> {
        self.registered.fetch_add(1, Ordering::SeqCst);
        Ok(DeviceMemory::new(Box::new(Kept(Arc::clone(&self.registered)))))
    }
}

/// A sleeping engine gives its pages' memory back, and later gets other memory at the same addresses. A registration
/// that outlived the store would name memory that is gone.
#[test]
fn a_closed_store_has_nothing_registered_although_its_tasks_are_held() {
    let config = serde_json::json!({ "pipeline": "Cache", "pool_bytes": 1 << 20, "timeout_ms": 10_000 });
    let depot = Depot::start_private(DepotConfig::from_json(&config.to_string()).unwrap()).unwrap();
    let attachment = Attachment::embedded(depot).unwrap();
    let shard = BLOCK_BYTES / SHARDS;
    let layout = BlockLayout::new(vec![vec![shard as u64]; SHARDS]).unwrap();
    let spec = Arc::new(NamespaceSpec::new(r#"{"a":1}"#, layout).unwrap());
    let registered = Arc::new(AtomicUsize::new(0));
    let engine = Registering { copies: HostEngine::new(1).unwrap(), registered: Arc::clone(&registered) };
    let store = Store::new(&attachment, spec, DeviceEngine::new(Arc::new(engine)), HANG).unwrap();
    let memory = vec![7u8; BLOCK_BYTES];
    let bases = (0..SHARDS).map(|index| memory.as_ptr() as u64 + (index * shard) as u64).collect();
    // SAFETY: the memory outlives the store.
    unsafe { store.register_pages(bases, vec![BLOCK_BYTES as i64; SHARDS], 1) }.unwrap();
    assert!(registered.load(Ordering::SeqCst) > 0);
    let hash = BlockHash::from_engine(&7u64.to_le_bytes()).unwrap();
    // SAFETY: the memory outlives the dump, and nobody writes it.
    let dump = unsafe { store.begin_dump_pages(vec![hash], &[0]) }.unwrap();
    (0..SHARDS).for_each(|shard| dump.submit_shard(shard, 0).unwrap());
    assert!(dump.state().wait(Some(HANG)) && dump.state().failed().is_empty());
    assert!(store.close(HANG));
    drop(store);
    assert_eq!(registered.load(Ordering::SeqCst), 0, "{dump:?} holds the registration");
}
