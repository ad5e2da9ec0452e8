//! Log lines of tasks, in the format that operators of Unified Cache Management search for. The log's writer puts
//! `[UC][D]` before and `[PID,TID]` after lines of [`TARGET`].

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The tracing target of these lines.
pub const TARGET: &str = "uc";

/// The direction of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Engine to depot.
    Dump,
    /// Depot to engine.
    Load,
}

impl Operation {
    /// Returns the spelling in log lines.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Dump => "DUMP",
            Self::Load => "LOAD",
        }
    }
}

/// The name of a client's task in its lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Store {
    /// `Cache task(7,DUMP,…)`: a pool that keeps blocks.
    Cache,
    /// `Task(7,PC::D2S,…)`: a pool that blocks only pass through. Such a task logs no line when it begins.
    PassThrough,
}

/// A client's task, as named in its lines.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TaskLine {
    pub(crate) id: u64,
    pub(crate) operation: Operation,
    pub(crate) store: Store,
    /// Number of shards of blocks.
    pub(crate) subtasks: usize,
    pub(crate) bytes: u64,
}

impl TaskLine {
    pub(crate) fn dispatching(&self) {
        if self.store == Store::Cache {
            tracing::debug!(target: TARGET, "{self} dispatching.");
        }
    }

    pub(crate) fn finished(&self, took: Duration) {
        tracing::debug!(target: TARGET, "{}", self.finished_text(took));
    }

    fn finished_text(&self, took: Duration) -> String {
        let seconds = took.as_secs_f64();
        match self.store {
            Store::Cache => format!("{self} finished, cost {:.3}ms.", seconds * 1e3),
            Store::PassThrough => {
                let rate = if seconds > 0.0 { self.bytes as f64 / seconds / 1e9 } else { 0.0 };
                format!("{self} finished, costs={seconds:.6}s, bw={rate:.6}GB/s")
            }
        }
    }
}

impl fmt::Display for TaskLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, operation) = match (self.store, self.operation) {
            (Store::Cache, operation) => ("Cache task", operation.as_str()),
            (Store::PassThrough, Operation::Dump) => ("Task", "PC::D2S"),
            (Store::PassThrough, Operation::Load) => ("Task", "PC::S2D"),
        };
        write!(f, "{name}({},{operation},{},{})", self.id, self.subtasks, self.bytes)
    }
}

/// The blocks of one tier call. It logs its end when the last of them drops it.
#[derive(Debug)]
pub(crate) struct TierTask {
    id: u64,
    tier: &'static str,
    operation: &'static str,
    blocks: AtomicU64,
    bytes: AtomicU64,
    begun: Instant,
}

impl TierTask {
    /// From a tier into the pool.
    pub(crate) const READ: &'static str = "Backend2Cache";
    /// From the pool into a tier.
    pub(crate) const WRITE: &'static str = "Cache2Backend";

    /// Makes a task without blocks; `None` if its lines are not enabled.
    pub(crate) fn begin(id: u64, tier: &'static str, operation: &'static str) -> Option<Self> {
        tracing::enabled!(target: TARGET, tracing::Level::DEBUG).then(|| Self {
            id,
            tier,
            operation,
            blocks: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            begun: Instant::now(),
        })
    }

    /// Adds a block.
    pub(crate) fn add(&self, bytes: usize) {
        self.blocks.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Logs that the task has all of its blocks.
    pub(crate) fn dispatching(&self) {
        tracing::debug!(target: TARGET, "{self} dispatching.");
    }
}

impl Drop for TierTask {
    fn drop(&mut self) {
        let cost_ms = self.begun.elapsed().as_secs_f64() * 1e3;
        tracing::debug!(target: TARGET, "{self} finished, cost {cost_ms:.3}ms.");
    }
}

impl fmt::Display for TierTask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (blocks, bytes) = (self.blocks.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed));
        write!(f, "{} task({},{},{blocks},{bytes})", self.tier, self.id, self.operation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(operation: Operation, store: Store) -> TaskLine {
        TaskLine { id: 7, operation, store, subtasks: 48, bytes: 3_000_000_000 }
    }

    #[test]
    fn tasks_are_named_as_the_seeds_name_them() {
        let took = Duration::from_millis(1500);
        for (operation, cache, pass_through) in
            [(Operation::Dump, "DUMP", "PC::D2S"), (Operation::Load, "LOAD", "PC::S2D")]
        {
            assert_eq!(
                line(operation, Store::Cache).finished_text(took),
                format!("Cache task(7,{cache},48,3000000000) finished, cost 1500.000ms.")
            );
            assert_eq!(
                line(operation, Store::PassThrough).finished_text(took),
                format!("Task(7,{pass_through},48,3000000000) finished, costs=1.500000s, bw=2.000000GB/s")
            );
        }
    }

    #[test]
    fn a_task_that_takes_no_time_has_a_number_as_its_rate() {
        let text = line(Operation::Load, Store::PassThrough).finished_text(Duration::ZERO);
        assert!(text.ends_with("bw=0.000000GB/s"), "{text}");
    }
}
