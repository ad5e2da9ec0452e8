//! `Meter`: estimates the hits of depots of several sizes. A thread alongside the engine does the counting.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use kvdepot_core::replay::{self, block_number};
use kvdepot_core::{Error, Result};
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::convert::hashes;
use crate::errors::OrRaise;

/// Capacity of the queue in blocks of requests. Further ones are dropped and counted as dropped.
const QUEUED_BLOCKS_MAX: usize = 4 << 20;

enum Seen {
    LookUp(Vec<u64>),
    Store(Vec<u64>),
    Settle(Sender<()>),
}

impl Seen {
    fn blocks(&self) -> usize {
        match self {
            Self::LookUp(blocks) | Self::Store(blocks) => blocks.len() + 8, // an empty one takes room, too
            Self::Settle(_) => 0,
        }
    }
}

#[derive(Default)]
struct Shared {
    queued_blocks: AtomicUsize,
    dropped: AtomicU64,
    report: Mutex<Counted>,
}

#[derive(Clone, Default)]
struct Counted {
    asked: u64,
    ceiling: u64,
    sizes: Vec<(u64, u64, u64)>,
}

#[pyclass(frozen, module = "kvdepot._native")]
pub(crate) struct Meter {
    queue: Sender<Seen>,
    shared: Arc<Shared>,
}

fn count_all(queue: &Receiver<Seen>, mut meter: replay::Meter, shared: &Shared) {
    while let Ok(seen) = queue.recv() {
        shared.queued_blocks.fetch_sub(seen.blocks(), Ordering::Relaxed);
        match seen {
            Seen::LookUp(blocks) => meter.look_up(&blocks),
            Seen::Store(blocks) => meter.store(&blocks),
            Seen::Settle(told) => {
                publish(&meter, shared);
                let _ = told.send(());
            }
        }
        if queue.is_empty() {
            publish(&meter, shared);
        }
    }
}

fn publish(meter: &replay::Meter, shared: &Shared) {
    let sizes = meter.sizes().map(|size| (size.capacity, size.held, size.hits)).collect();
    *shared.report.lock() = Counted { asked: meter.asked(), ceiling: meter.ceiling(), sizes };
}

impl Meter {
    fn start(policy: &str, capacities: &[u64]) -> Result<Self> {
        let meter = replay::Meter::new(policy, capacities)?;
        // Bounded by blocks: see `offer`.
        let (queue, seen) = unbounded();
        let shared = Arc::new(Shared::default());
        publish(&meter, &shared);
        let counted = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("kvdepot-lite".to_owned())
            .spawn(move || count_all(&seen, meter, &counted))
            .map_err(|e| Error::io("cannot start the thread that counts hits", e))?;
        Ok(Self { queue, shared })
    }

    fn offer(&self, seen: Seen) -> bool {
        let blocks = seen.blocks();
        let queued = self.shared.queued_blocks.fetch_add(blocks, Ordering::Relaxed);
        if queued + blocks > QUEUED_BLOCKS_MAX || self.queue.send(seen).is_err() {
            self.shared.queued_blocks.fetch_sub(blocks, Ordering::Relaxed);
            self.shared.dropped.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        true
    }
}

fn numbers(block_hashes: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    Ok(hashes(block_hashes)?.iter().map(block_number).collect())
}

#[pymethods]
impl Meter {
    #[new]
    fn new(policy: &str, capacities: Vec<u64>) -> PyResult<Self> {
        Self::start(policy, &capacities).or_raise()
    }

    fn look_up(&self, block_hashes: &Bound<'_, PyAny>) -> PyResult<bool> {
        Ok(self.offer(Seen::LookUp(numbers(block_hashes)?)))
    }

    fn store(&self, block_hashes: &Bound<'_, PyAny>) -> PyResult<bool> {
        Ok(self.offer(Seen::Store(numbers(block_hashes)?)))
    }

    fn settle(&self, py: Python<'_>, wait_ms: u64) -> bool {
        let (tell, told) = bounded(1);
        let asked = self.queue.send(Seen::Settle(tell)).is_ok();
        py.detach(|| asked && told.recv_timeout(Duration::from_millis(wait_ms)).is_ok())
    }

    fn report_json(&self) -> String {
        let counted = self.shared.report.lock().clone();
        let sizes: Vec<serde_json::Value> = counted
            .sizes
            .iter()
            .map(|(capacity, held, hits)| serde_json::json!({"capacity": capacity, "held": held, "hits": hits}))
            .collect();
        let dropped = self.shared.dropped.load(Ordering::Relaxed);
        serde_json::json!({
            "asked": counted.asked, "ceiling": counted.ceiling, "sizes": sizes, "dropped": dropped
        })
        .to_string()
    }
}
