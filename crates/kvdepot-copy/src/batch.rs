//! A batch of copies: ops in order, in groups that complete as one.

use std::fmt::Debug;
use std::time::Instant;

use kvdepot_core::{Error, ErrorKind, Result};

use crate::bounded::late;
use crate::event::DeviceEvent;

/// The direction of a copy.
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

// SAFETY: an op is two addresses; the caller of `CopyEngine::run` is responsible for them.
unsafe impl Send for CopyOp {}
// SAFETY: as for Send.
unsafe impl Sync for CopyOp {}

/// Ops in groups: group `g` is `ops[ends[g - 1]..ends[g]]`, usually one shard of some blocks.
#[derive(Clone, Debug)]
pub struct CopyBatch {
    /// The direction.
    pub direction: Direction,
    /// The copies, in order.
    pub ops: Vec<CopyOp>,
    /// The end of each group, ascending; the last is `ops.len()`. A group may be empty.
    pub ends: Vec<usize>,
    /// The device event to wait for before the first byte (P3), a `CUevent` recorded before `run`; 0 = none. The host
    /// engine does not support events.
    pub wait_event: u64,
    /// The time until which the caller waits for the batch; nothing of it begins later. A [`crate::Bounded`] engine
    /// reports all groups of a dump by then, and those of a load when the device has finished it (P2).
    pub deadline: Option<Instant>,
    /// Whether the engine is decoding: then copies should leave its multiprocessors alone, even if they get slower.
    pub decoding: bool,
}

impl CopyBatch {
    /// Makes an empty batch.
    pub const fn new(direction: Direction) -> Self {
        Self { direction, ops: Vec::new(), ends: Vec::new(), wait_event: 0, deadline: None, decoding: false }
    }

    /// Ends the current group.
    pub fn end_group(&mut self) {
        self.ends.push(self.ops.len());
    }

    /// Returns the ops of a group.
    pub fn group(&self, index: usize) -> &[CopyOp] {
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.ops[start..self.ends[index]]
    }

    /// Fails if the deadline has passed.
    pub(crate) fn check_deadline(&self) -> Result<()> {
        if self.deadline.is_some_and(|deadline| deadline <= Instant::now()) { Err(late()) } else { Ok(()) }
    }

    /// Fails if `ends` does not split the ops into groups.
    pub(crate) fn check(&self) -> Result<()> {
        let ascending = self.ends.windows(2).all(|pair| pair[0] <= pair[1]);
        if ascending && self.ends.last().copied().unwrap_or(0) == self.ops.len() {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Config, "the ends of a batch's groups do not ascend to its last op")
            .with("ops", self.ops.len())
            .with("groups", self.ends.len()))
    }

    /// Returns the number of bytes of all ops.
    pub fn bytes(&self) -> u64 {
        self.ops.iter().map(|op| op.len as u64).sum()
    }
}

/// Receives the outcomes of groups. Called from the engine's threads; must not block.
pub trait GroupSink: Send + Sync + Debug {
    /// Reports that group `group` of a load was submitted to the device. `event` follows its last byte: the engine's
    /// compute stream can wait for it on the device, layer by layer. Called before `group_ended` of the same group,
    /// which may still report a failure. It is not called by engines without streams, nor for a group that failed
    /// earlier.
    fn group_submitted(&self, _group: usize, _event: DeviceEvent) {}

    /// Reports the outcome of group `group`.
    fn group_ended(&self, group: usize, outcome: Result<()>);
}
