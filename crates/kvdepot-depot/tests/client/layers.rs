//! A dump that follows the engine layer by layer, whose device and queue have no room for the next one.
#![allow(clippy::unwrap_used, reason = "tests fail where they cannot go on")]

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::unbounded;
use kvdepot_core::{BlockHash, BlockLayout, ErrorKind, NamespaceSpec};
use kvdepot_depot::client::{Attachment, DeviceEngine, Store};
use kvdepot_depot::{Depot, DepotConfig};

use crate::held_device::HeldDevice;

/// More than there are threads for dumps and places in their queue.
const SHARDS: usize = 8;
const SHARD_BYTES: usize = 4096;
/// Reached only if the test hangs; not a measure of speed.
const HANG: Duration = Duration::from_secs(60);

/// P9: an engine's forward pass must not wait for a copy, however full the queue is. Repeated, because the dump's threads meet in
/// several orders.
#[test]
fn a_shard_that_finds_the_queue_full_fails_the_dump_without_waiting_for_the_one_in_copy() {
    (0..30).for_each(|_| a_dump_finds_the_queue_full());
}

fn a_dump_finds_the_queue_full() {
    let config = serde_json::json!({"pipeline": "Cache", "pool_bytes": 1 << 20, "waiting_queue_depth": 1});
    let depot = Depot::start_private(DepotConfig::from_json(&config.to_string()).unwrap()).unwrap();
    let attachment = Attachment::embedded(depot).unwrap();
    let layout = BlockLayout::uniform(SHARDS, &[SHARD_BYTES as u64]).unwrap();
    let spec = Arc::new(NamespaceSpec::new(r#"{"a":"layers"}"#, layout).unwrap());
    let (sender, device) = unbounded();
    let store = Store::new(
        &attachment,
        spec,
        DeviceEngine::new(Arc::new(HeldDevice { begun: sender, may_hang: false })),
        HANG,
    )
    .unwrap();
    let memory = vec![7_u8; SHARDS * SHARD_BYTES];
    let bases = (0..SHARDS).map(|shard| memory[shard * SHARD_BYTES..].as_ptr() as u64).collect();
    // SAFETY: the memory lives longer than the store.
    unsafe { store.register_pages(bases, vec![SHARD_BYTES as i64; SHARDS], 1) }.unwrap();
    // SAFETY: nothing writes the memory.
    let dump = unsafe { store.begin_dump_pages(vec![BlockHash([1; 16])], &[0]) }.unwrap();
    let task = Arc::clone(dump.state());
    dump.submit_shard(0, 0).unwrap();
    let (batch, sink) = device.recv_timeout(HANG).unwrap();

    let (submitted, all) = unbounded();
    let engine = std::thread::spawn(move || {
        (1..SHARDS).for_each(|shard| dump.submit_shard(shard, 0).unwrap());
        submitted.send(()).unwrap();
        dump
    });
    all.recv_timeout(HANG).expect("the engine goes on while a shard is in copy");
    assert!(!task.done());
    (0..batch.ends.len()).for_each(|group| sink.group_ended(group, Ok(())));
    drop((batch, sink));
    assert!(task.wait(Some(HANG)));
    assert_eq!(task.failed(), [(0, ErrorKind::Busy)]);
    assert!(device.is_empty(), "no further shard is copied");
    drop(engine.join().unwrap());
    assert!(store.close(HANG));
    assert_eq!(attachment.stats()["depot"]["leases"], 0);
}
