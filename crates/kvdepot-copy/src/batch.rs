//! A batch of copies: ops in order, cut into groups that complete as one.

use std::fmt::Debug;
use std::time::Instant;

use kvdepot_core::{Error, ErrorKind, Result};

use crate::bounded::late;
use crate::event::DeviceEvent;

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Device to pool: a dump.
    ToHost,
    /// Pool to device: a load.
    ToDevice,
}

/// One contiguous copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyOp {
    /// Address in the device's memory.
    pub device: u64,
    /// Address in the pool.
    pub host: *mut u8,
    /// Length in bytes.
    pub len: usize,
}

// SAFETY: an op is two addresses; whoever runs it answers for them (`CopyEngine::run`).
unsafe impl Send for CopyOp {}
// SAFETY: as for Send.
unsafe impl Sync for CopyOp {}

/// Ops in groups: group `g` is `ops[ends[g - 1]..ends[g]]`, a shard of some blocks as a rule.
#[derive(Clone, Debug)]
pub struct CopyBatch {
    /// Which way.
    pub direction: Direction,
    /// What to copy, in order.
    pub ops: Vec<CopyOp>,
    /// Where each group ends, ascending; the last is `ops.len()`. A group may be empty.
    pub ends: Vec<usize>,
    /// Device event to wait for before the first byte (P3), a `CUevent` that was recorded before `run`; 0 = none. The
    /// host engine knows no events.
    pub wait_event: u64,
    /// Until when somebody waits for the batch; nothing of it is begun after that. A [`crate::Bounded`] engine reports
    /// all groups of a dump by then, and those of a load when the device is through with it (P2).
    pub deadline: Option<Instant>,
    /// Whether the engine is decoding: then copies should leave its multiprocessors alone, even if that is slower.
    pub decoding: bool,
}

impl CopyBatch {
    /// An empty batch.
    pub const fn new(direction: Direction) -> Self {
        Self { direction, ops: Vec::new(), ends: Vec::new(), wait_event: 0, deadline: None, decoding: false }
    }

    /// Ends the current group.
    pub fn end_group(&mut self) {
        self.ends.push(self.ops.len());
    }

    /// The ops of a group.
    pub fn group(&self, index: usize) -> &[CopyOp] {
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.ops[start..self.ends[index]]
    }

    /// Refuses to begin what nobody waits for any more.
    pub(crate) fn check_deadline(&self) -> Result<()> {
        if self.deadline.is_some_and(|deadline| deadline <= Instant::now()) { Err(late()) } else { Ok(()) }
    }

    /// Refuses ends that do not cut the ops into groups.
    pub(crate) fn check(&self) -> Result<()> {
        let ascending = self.ends.windows(2).all(|pair| pair[0] <= pair[1]);
        if ascending && self.ends.last().copied().unwrap_or(0) == self.ops.len() {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Config, "the ends of a batch's groups do not ascend to its last op")
            .with("ops", self.ops.len())
            .with("groups", self.ends.len()))
    }

    /// Bytes of all ops.
    pub fn bytes(&self) -> u64 {
        self.ops.iter().map(|op| op.len as u64).sum()
    }
}

/// Who hears that a group has ended. Called from the engine's threads; must not block.
pub trait GroupSink: Send + Sync + Debug {
    /// Group `group` of a load was handed to the device, and `event` comes after its last byte: the engine's compute
    /// stream can wait for it on the device, layer by layer. Called before `group_ended` of the same group, which may
    /// still report a failure. Engines without streams do not call it, nor is it called for a group that failed earlier.
    fn group_submitted(&self, _group: usize, _event: DeviceEvent) {}

    /// Group `group` has ended.
    fn group_ended(&self, group: usize, outcome: Result<()>);
}
