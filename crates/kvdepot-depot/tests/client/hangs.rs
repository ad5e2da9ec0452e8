//! A device that hangs under a client: dumps end by their deadline, loads when nothing is written any more, and nobody
//! gets the slots that the device may still touch before it has finished (P1, P2).
#![allow(clippy::unwrap_used, reason = "tests fail where they cannot go on")]

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use kvdepot_copy::{Bounded, CopyEngine, Direction, HostEngine};
use kvdepot_core::{BlockHash, BlockLayout, ErrorKind, NamespaceSpec};
use kvdepot_depot::client::{Attachment, DeviceEngine, Kept, Store, TaskState};
use kvdepot_depot::{Depot, DepotConfig};

use crate::held_device::{Begun, HeldDevice};

/// Blocks that fit in the pool.
const ROOM: usize = 16;
const BLOCK_BYTES: usize = 64 << 10;
/// Blocks of the hanging task.
const BLOCKS: usize = 4;
/// Reached only if the test hangs; not a measure of speed.
const HANG: Duration = Duration::from_secs(60);
/// Timeout of the hanging task: its slots must have been reserved by then.
const TASK: Duration = Duration::from_secs(6);

struct Lab {
    attachment: Arc<Attachment>,
    spec: Arc<NamespaceSpec>,
    memory: Vec<u8>,
    /// Uses the hanging device.
    hangs: Store,
    device: Receiver<Begun>,
    /// Uses an engine that does not hang, for another namespace.
    others: Store,
}

fn hashes(first: u64, count: usize) -> Vec<BlockHash> {
    (first..first + count as u64).map(|n| BlockHash::from_engine(&n.to_le_bytes()).unwrap()).collect()
}

fn pages(count: usize) -> Vec<i64> {
    (0..count as i64).collect()
}

impl Lab {
    fn new(shards: usize) -> Self {
        let config = serde_json::json!({
            "pipeline": "Cache", "pool_bytes": ROOM * BLOCK_BYTES, "timeout_ms": 10_000, "eviction": "lru",
        });
        let depot = Depot::start_private(DepotConfig::from_json(&config.to_string()).unwrap()).unwrap();
        let attachment = Attachment::embedded(depot).unwrap();
        let shard = (BLOCK_BYTES / shards) as u64;
        let layout = BlockLayout::new(vec![vec![shard]; shards]).unwrap();
        let spec = |name: &str| {
            Arc::new(NamespaceSpec::new(&format!(r#"{{"a":"{name}"}}"#), layout.clone()).unwrap())
        };
        let memory: Vec<u8> = (0..ROOM * BLOCK_BYTES).map(|i| (i / 3 + i / BLOCK_BYTES * 7) as u8).collect();
        let (sender, device) = crossbeam_channel::unbounded();
        let bounded =
            Arc::new(Bounded::new(Arc::new(HeldDevice { begun: sender, may_hang: false })).unwrap());
        let store = |name: &str, engine: Arc<dyn CopyEngine>, wait| {
            let store = Store::new(&attachment, spec(name), DeviceEngine::new(engine), wait).unwrap();
            let base = memory.as_ptr() as u64;
            let bases = (0..shards as u64).map(|index| base + index * shard).collect();
            // SAFETY: the memory lives in the lab, after the stores.
            unsafe { store.register_pages(bases, vec![BLOCK_BYTES as i64; shards], ROOM as u64) }.unwrap();
            store
        };
        let hangs = store("hangs", bounded, TASK);
        let others = store("others", Arc::new(HostEngine::new(1).unwrap()), HANG);
        let spec = Arc::clone(others.spec());
        Self { attachment, spec, memory, hangs, device, others }
    }

    /// Asserts that every block of the task failed by its deadline and was counted by kind.
    fn timed_out(&self, task: &Arc<TaskState>, operation: &str) {
        assert!(task.wait(Some(HANG)), "the task did not end");
        let kinds: Vec<ErrorKind> = task.failed().into_iter().map(|(_, kind)| kind).collect();
        assert_eq!(kinds, [ErrorKind::Timeout; BLOCKS]);
        let stats = self.attachment.stats()["failures"].to_string();
        assert!(stats.contains(operation) && stats.contains("timeout"), "{stats}");
    }

    /// Dumps as many blocks as fit in the pool; returns how many of them it then has.
    fn fill(&self, first: u64) -> usize {
        // SAFETY: the memory lives in the lab, and nothing writes it.
        let task = unsafe { self.others.dump_pages(hashes(first, ROOM), &pages(ROOM), 0) }.unwrap();
        assert!(task.wait(Some(HANG)));
        self.present(first)
    }

    fn present(&self, first: u64) -> usize {
        self.others.lookup(&hashes(first, ROOM)).iter().filter(|&&byte| byte != 0).count()
    }

    /// Asserts that those blocks of `fill` that are there hold what was dumped.
    fn are_whole(&self, first: u64) {
        for (index, hash) in hashes(first, ROOM).into_iter().enumerate() {
            if self.others.lookup(&[hash]) == [0] {
                continue;
            }
            let mut page = vec![0u8; BLOCK_BYTES];
            let shards = self.spec.layout().shard_count();
            let part = BLOCK_BYTES / shards;
            let addresses: Vec<u64> =
                (0..shards).map(|s| page.as_mut_ptr() as u64 + (s * part) as u64).collect();
            let numbers: Vec<i64> = (0..shards as i64).collect();
            // SAFETY: the page lives until the task is done.
            let task = unsafe { self.others.load(vec![hash; shards], &numbers, &addresses, 0) }.unwrap();
            assert!(task.wait(Some(HANG)) && task.failed().is_empty(), "{:?}", task.failed());
            assert!(page == self.memory[index * BLOCK_BYTES..(index + 1) * BLOCK_BYTES], "block {index}");
        }
    }

    /// The device comes back, writes what it was told to, and then releases everything.
    fn come_back(&self) {
        for (batch, sink) in self.device.try_iter() {
            for op in &batch.ops {
                let (from, to) = match batch.direction {
                    // Bytes that nobody dumped, so that they show wherever they go.
                    Direction::ToHost => (vec![0xDD; op.len], op.host),
                    Direction::ToDevice => (vec![0; 0], op.host),
                };
                // SAFETY: the sink keeps the slot.
                unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) };
            }
            (0..batch.ends.len()).for_each(|group| sink.group_ended(group, Ok(())));
        }
    }
}

/// Something that a task holds, and a way to see whether it does.
fn owner() -> (Option<Kept>, Weak<()>) {
    let owner = Arc::new(());
    let seen = Arc::downgrade(&owner);
    (Some(owner), seen)
}

/// The threads that took part in a copy release it one after the other, and its slots before its owner.
fn is_let_go(seen: &Weak<()>) {
    let end = Instant::now() + HANG;
    while seen.strong_count() > 0 {
        assert!(Instant::now() < end, "the owner of the memory is still held");
        std::thread::yield_now();
    }
}

fn a_dump_that_hangs(lab: &Lab, dump: impl FnOnce(&Store) -> Arc<TaskState>) {
    let (owner, held) = owner();
    let task = dump(&lab.hangs.keeping(owner));
    lab.timed_out(&task, "dump");
    assert!(held.strong_count() > 0, "memory that the device may still read was let go of");
    assert!(lab.hangs.lookup(&hashes(0, BLOCKS)).iter().all(|&byte| byte == 0), "a block is half there");
    assert_eq!(lab.fill(100), ROOM - BLOCKS, "slots of the copy that hangs were given away");
    // SAFETY: refused before it begins.
    let refused = unsafe { lab.hangs.dump_pages(hashes(50, 1), &pages(1), 0) }.unwrap();
    assert!(refused.wait(Some(HANG)));
    assert_eq!(refused.failed(), [(0, ErrorKind::Unavailable)]);
    assert!(task.done() && !lab.hangs.close(Duration::ZERO), "the device may still read the pages");
    lab.come_back();
    assert!(lab.hangs.close(HANG));
    lab.are_whole(100);
    is_let_go(&held);
    assert_eq!(lab.fill(200), ROOM, "the slots did not come back");
}

#[test]
fn slots_of_a_dump_that_hangs_are_nobody_elses_until_the_device_is_through() {
    let lab = Lab::new(1);
    a_dump_that_hangs(&lab, |store| {
        // SAFETY: the memory lives in the lab.
        unsafe { store.dump_pages(hashes(0, BLOCKS), &pages(BLOCKS), 0) }.unwrap()
    });
}

#[test]
fn slots_of_a_layered_dump_that_hangs_are_kept_too() {
    let lab = Lab::new(2);
    a_dump_that_hangs(&lab, |store| {
        // SAFETY: the memory lives in the lab.
        let dump = unsafe { store.begin_dump_pages(hashes(0, BLOCKS), &pages(BLOCKS)) }.unwrap();
        (0..2).for_each(|shard| dump.submit_shard(shard, 0).unwrap());
        Arc::clone(dump.state())
    });
}

#[test]
fn slots_of_single_shards_that_hang_are_kept_too() {
    let lab = Lab::new(2);
    a_dump_that_hangs(&lab, |store| {
        let base = lab.memory.as_ptr() as u64;
        let addresses: Vec<u64> = (0..BLOCKS).map(|page| base + (page * BLOCK_BYTES) as u64).collect();
        // SAFETY: the memory lives in the lab.
        unsafe { store.dump(hashes(0, BLOCKS), &[0; BLOCKS], &addresses, 0) }.unwrap()
    });
}

#[test]
fn slots_of_a_load_that_hangs_are_not_evicted() {
    let lab = Lab::new(1);
    let host = DeviceEngine::new(Arc::new(HostEngine::new(1).unwrap()));
    let store = Store::new(&lab.attachment, Arc::clone(lab.hangs.spec()), host, HANG).unwrap();
    let addresses: Vec<u64> = (0..BLOCKS).map(|n| lab.memory[n * BLOCK_BYTES..].as_ptr() as u64).collect();
    // SAFETY: the memory lives in the lab, and nothing writes it.
    let dump = unsafe { store.dump(hashes(0, BLOCKS), &[0; BLOCKS], &addresses, 0) }.unwrap();
    assert!(dump.wait(Some(HANG)) && dump.failed().is_empty(), "{:?}", dump.failed());
    let (owner, held) = owner();
    let hangs = lab.hangs.keeping(owner);
    // SAFETY: the memory lives in the lab; the device writes nothing.
    let load = unsafe { hangs.load_pages(hashes(0, BLOCKS), &pages(BLOCKS), 0) }.unwrap();
    drop(hangs);
    // More loads than there are threads for them: each is refused, or ends in time, unless it is begun as well.
    let mut hung = vec![load];
    for attempt in 0.. {
        assert!(attempt < 4, "no load was refused");
        assert!(!hung[0].wait(Some(TASK)), "the device may still write");
        // SAFETY: as above.
        let behind = unsafe { lab.hangs.load_pages(hashes(0, BLOCKS), &pages(BLOCKS), 0) }.unwrap();
        if behind.wait(Some(TASK)) {
            let kinds: Vec<ErrorKind> = behind.failed().into_iter().map(|(_, kind)| kind).collect();
            assert_eq!(kinds, [ErrorKind::Unavailable; BLOCKS]);
            break;
        }
        hung.push(behind);
    }
    assert_eq!(lab.fill(100), ROOM - BLOCKS);
    assert_eq!(lab.hangs.lookup(&hashes(0, BLOCKS)), [1; BLOCKS], "evicted under a copy");
    assert!(!hung[0].done() && hung[0].failed().is_empty());
    assert!(held.strong_count() > 0, "memory that the device may still write was let go of");
    assert!(!lab.hangs.close(Duration::ZERO), "a load is under way");
    lab.come_back();
    for load in &hung {
        assert!(load.wait(Some(HANG)), "the task did not end");
        let kinds: Vec<ErrorKind> = load.failed().into_iter().map(|(_, kind)| kind).collect();
        // On a busy machine its thread may not have run between the deadline and the device's end: it has succeeded.
        assert!(kinds.is_empty() || kinds == [ErrorKind::Timeout; BLOCKS], "{kinds:?}");
    }
    assert!(lab.hangs.close(HANG));
    is_let_go(&held);
    assert_eq!(lab.fill(200), ROOM, "the slots did not come back");
}

/// Closing a store whose device hangs returns, and what the device may touch stays.
#[test]
fn a_store_closes_under_a_device_that_hangs() {
    let lab = Lab::new(1);
    let (owner, held) = owner();
    // SAFETY: the memory lives in the lab.
    let task = unsafe { lab.hangs.keeping(owner).dump_pages(hashes(0, BLOCKS), &pages(BLOCKS), 0) }.unwrap();
    lab.timed_out(&task, "dump");
    let Lab { attachment, spec, memory, hangs, device, others } = lab;
    drop(hangs);
    let (sender, _) = crossbeam_channel::unbounded();
    let again = Arc::new(Bounded::new(Arc::new(HeldDevice { begun: sender, may_hang: false })).unwrap());
    let hangs = Store::new(&attachment, Arc::clone(&spec), DeviceEngine::new(again), TASK).unwrap();
    let lab = Lab { attachment, spec, memory, hangs, device, others };
    assert_eq!(lab.fill(100), ROOM - BLOCKS, "slots of the copy that hangs were given away");
    lab.come_back();
    lab.are_whole(100);
    is_let_go(&held);
    assert_eq!(lab.fill(200), ROOM, "the slots did not come back");
}

/// A caller that has waited for a task may rely on its memory being free without waiting for that.
#[test]
fn the_owner_of_memory_is_let_go_of_before_the_task_is_done() {
    let lab = Lab::new(2);
    let keeping = || {
        let (owner, held) = owner();
        (lab.others.keeping(owner), held)
    };
    for round in 0..100 {
        let (store, held) = keeping();
        // SAFETY: the memory lives in the lab, and nothing writes it.
        let dump = unsafe { store.dump_pages(hashes(round, 1), &pages(1), 0) }.unwrap();
        drop(store);
        assert!(dump.wait(Some(HANG)));
        assert_eq!(held.strong_count(), 0, "a dump");
        let (store, held) = keeping();
        // SAFETY: as above.
        let dump = unsafe { store.begin_dump_pages(hashes(1000 + round, 1), &pages(1)) }.unwrap();
        drop(store);
        dump.submit_shard(0, 0).unwrap();
        assert!(dump.state().wait_shard(0, Some(HANG)));
        assert!(held.strong_count() > 0, "a shard is still to come");
        dump.submit_shard(1, 0).unwrap();
        assert!(dump.state().wait(Some(HANG)));
        assert_eq!(held.strong_count(), 0, "a layered dump");
    }
}

#[test]
fn pages_are_held_until_the_store_is_closed_and_their_tasks_have_ended() {
    let lab = Lab::new(1);
    let (owner, held) = owner();
    // SAFETY: the memory lives in the lab.
    unsafe {
        let bases = vec![lab.memory.as_ptr() as u64];
        lab.hangs.keeping(owner).register_pages(bases, vec![BLOCK_BYTES as i64], ROOM as u64).unwrap();
    }
    // SAFETY: as above.
    let task = unsafe { lab.hangs.dump_pages(hashes(0, BLOCKS), &pages(BLOCKS), 0) }.unwrap();
    lab.timed_out(&task, "dump");
    assert!(!lab.hangs.close(Duration::ZERO), "the device may still read the pages");
    assert!(held.strong_count() > 0, "memory that the device may still read was let go of");
    lab.come_back();
    is_let_go(&held);
}
