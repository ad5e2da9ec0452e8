//! The conformance suite of copy engines. Each engine's tests run it over memory that the engine can reach.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::Result;
use parking_lot::{Condvar, Mutex};

use crate::conformance::draw::pattern;
use crate::{CopyBatch, CopyEngine, CopyOp, Direction, GroupSink};

pub(crate) mod draw;
pub mod streams;
pub(crate) mod work;

pub use streams::{StreamDevice, check_streams};

/// Memory that an engine treats as device memory.
pub trait DeviceMemory {
    /// Returns the address of its first byte.
    fn address(&self) -> u64;
    /// Returns its current content.
    fn read(&self) -> Vec<u8>;
    /// Overwrites its content.
    fn write(&self, bytes: &[u8]);
}

/// Collects the outcomes of groups and waits for all of them.
#[derive(Debug)]
pub struct Collect {
    outcomes: Mutex<Vec<Option<Result<()>>>>,
    all: Condvar,
}

impl Collect {
    /// Makes a collector for a batch of `groups` groups.
    pub fn new(groups: usize) -> Arc<Self> {
        Arc::new(Self { outcomes: Mutex::new(vec![None; groups]), all: Condvar::new() })
    }

    /// Waits until every group was reported and returns the outcomes.
    pub fn wait(&self) -> Vec<Result<()>> {
        let mut outcomes = self.outcomes.lock();
        while outcomes.iter().any(Option::is_none) {
            self.all.wait(&mut outcomes);
        }
        outcomes.iter().flatten().cloned().collect()
    }

    /// Like `wait`, for at most `limit`. Returns `None` if some group was not reported by then.
    pub fn wait_for(&self, limit: Duration) -> Option<Vec<Result<()>>> {
        let deadline = Instant::now() + limit;
        let mut outcomes = self.outcomes.lock();
        while outcomes.iter().any(Option::is_none) {
            if self.all.wait_until(&mut outcomes, deadline).timed_out() {
                break;
            }
        }
        outcomes.iter().cloned().collect()
    }
}

impl GroupSink for Collect {
    fn group_ended(&self, group: usize, outcome: Result<()>) {
        let mut outcomes = self.outcomes.lock();
        assert!(outcomes[group].is_none(), "group {group} was reported twice");
        outcomes[group] = Some(outcome);
        self.all.notify_all();
    }
}

/// Runs the suite. `device(len)` allocates device memory of `len` bytes.
///
/// # Panics
/// When the engine breaks a rule.
pub fn check<D: DeviceMemory>(engine: &dyn CopyEngine, device: impl Fn(usize) -> D) {
    for seed in 0..8 {
        round_trip(engine, &device, seed);
    }
    empty_batches_end(engine);
    bad_groups_are_refused(engine);
}

/// Odd sizes, permuted order, several groups: a dump comes back unchanged, and no other byte changes.
fn round_trip<D: DeviceMemory>(engine: &dyn CopyEngine, device: &impl Fn(usize) -> D, seed: u64) {
    let sizes: Vec<usize> =
        (0..60).map(|i| [1, 7, 64, 4096, 4097, 65_536, 300_000][(i + seed as usize) % 7]).collect();
    let total: usize = sizes.iter().sum();
    let (source, target) = (device(total), device(total + 2));
    let bytes = pattern(total, seed + 1);
    source.write(&bytes);
    target.write(&vec![0xEE; total + 2]);
    let mut host = vec![0u8; total];
    for (direction, memory, shift) in [(Direction::ToHost, &source, 0), (Direction::ToDevice, &target, 1)] {
        let mut batch = CopyBatch::new(direction);
        let mut offset = 0;
        for (index, &len) in sizes.iter().enumerate() {
            // SAFETY: `offset < total`, the length of `host`.
            let host = unsafe { host.as_mut_ptr().add(offset) };
            batch.ops.push(CopyOp { device: memory.address() + (offset + shift) as u64, host, len });
            offset += len;
            if index % 13 == 12 {
                batch.end_group();
            }
        }
        batch.end_group();
        batch.end_group();
        let collect = Collect::new(batch.ends.len());
        // SAFETY: all memory lives until `wait` has returned, and nothing else touches it before.
        unsafe { engine.run(batch, Arc::clone(&collect) as Arc<dyn GroupSink>) }.expect("a legal batch runs");
        collect.wait().into_iter().for_each(|outcome| outcome.expect("a legal copy succeeds"));
    }
    assert_eq!(host, bytes, "dump, seed {seed}");
    let back = target.read();
    assert_eq!(&back[1..=total], &bytes[..], "load, seed {seed}");
    assert_eq!((back[0], back[total + 1]), (0xEE, 0xEE), "bytes beside the target changed, seed {seed}");
}

fn empty_batches_end(engine: &dyn CopyEngine) {
    let mut batch = CopyBatch::new(Direction::ToHost);
    batch.end_group();
    let collect = Collect::new(1);
    // SAFETY: no memory is named.
    unsafe { engine.run(batch, Arc::clone(&collect) as Arc<dyn GroupSink>) }.expect("an empty batch runs");
    assert_eq!(collect.wait().len(), 1);
}

/// A batch whose groups do not split its ops is refused entirely: no group of it is reported.
fn bad_groups_are_refused(engine: &dyn CopyEngine) {
    let mut bytes = [0u8; 4];
    for ends in [vec![0], vec![1, 0], vec![2], vec![]] {
        let mut batch = CopyBatch::new(Direction::ToHost);
        batch.ops.push(CopyOp { device: bytes.as_ptr() as u64, host: bytes.as_mut_ptr(), len: 0 });
        batch.ends = ends.clone();
        // SAFETY: the op names no byte.
        let refused = unsafe { engine.run(batch, Collect::new(2) as Arc<dyn GroupSink>) };
        assert!(refused.is_err(), "groups that end at {ends:?}");
    }
}
