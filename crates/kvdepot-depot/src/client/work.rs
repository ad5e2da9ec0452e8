//! The work of a task: what it moves, between which memory and which depot, and who owns that memory.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use kvdepot_core::{BlockLayout, Error, ErrorKind, NamespaceSpec, Priority};

use crate::client::attach::Attachment;
use crate::client::device::DeviceEngine;
use crate::client::plan::{Item, PageTable, Source};
use crate::client::task::TaskState;
use crate::task_line::Operation;

/// A value that must outlive a copy, such as the owner of the memory that a task reads or writes.
pub type Kept = Arc<dyn Any + Send + Sync>;

/// The part of a store that its tasks use.
pub(crate) struct Base {
    pub(crate) attachment: Arc<Attachment>,
    pub(crate) spec: Arc<NamespaceSpec>,
    pub(crate) device: Arc<DeviceEngine>,
}

/// The work of a task.
#[derive(Clone)]
pub(crate) struct Work {
    /// The store itself, whose registrations of device memory outlive every copy. Dropped before the engine.
    pub(crate) _store: Kept,
    pub(crate) base: Arc<Base>,
    pub(crate) state: Arc<TaskState>,
    pub(crate) items: Arc<Vec<Item>>,
    pub(crate) pages: Option<Arc<PageTable>>,
    /// The device event that every copy of the task waits for; 0 = none (P3).
    pub(crate) wait_event: u64,
    /// Priority of the blocks that a dump stores.
    pub(crate) priority: Priority,
    /// How long a load waits for a block that is not in the pool; `None` for the task's time limit.
    pub(crate) patience: Option<Duration>,
    /// The owners of the task's memory. The work, and with it all of this, is held by the job that carries it out and
    /// by every copy until the device has finished, even if nothing waits for the task.
    pub(crate) kept: Vec<Kept>,
}

impl Work {
    /// Completes the task. The owners of its memory are dropped first, so that a waiting caller finds that done, unless
    /// a device has not finished with it.
    pub(crate) fn finish(mut self) {
        self.kept.clear();
        self.state.finish();
    }

    pub(crate) fn layout(&self) -> &BlockLayout {
        self.base.spec.layout()
    }

    /// Notes that the item will not be moved.
    pub(crate) fn fail(&self, item: usize, kind: ErrorKind) {
        let entry = &self.items[item];
        match &entry.source {
            Source::Page(_) => self.state.failed_block(item, entry.shards(self.layout()).into_iter(), kind),
            Source::Shards(shards) => {
                for &(shard, index, _) in shards {
                    self.state.failed_block(index, std::iter::once(shard), kind);
                }
            }
        }
    }

    /// Notes that none of the items will be moved.
    pub(crate) fn fail_all(&self, error: &Error) {
        for item in 0..self.items.len() {
            self.fail(item, error.kind());
        }
        let operation = if self.state.operation() == Operation::Load { "load" } else { "dump" };
        self.base.attachment.stats.failed(operation, error);
        self.state.finish();
    }
}
