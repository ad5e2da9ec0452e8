//! What moves bytes between an engine's memory and the pool: one trait, one engine a kind of device.
//!
//! P3: a batch waits for its event before it touches device memory, and a group is reported only when its bytes are
//! where they belong.

pub mod batch;
pub mod conformance;
pub mod host;
mod stream;

pub use batch::{CopyBatch, CopyOp, Direction, GroupSink};
pub use host::HostEngine;

use std::fmt::Debug;

use kvdepot_core::Result;

/// Moves batches of bytes between device memory and pool memory.
pub trait CopyEngine: Send + Sync + Debug {
    /// Short name: `host`, `memcpy`, `batch`, `kernel`, `gdr`.
    fn name(&self) -> &'static str;

    /// Runs a batch: after its event, every op; each group is reported to `sink` exactly once, as soon as all of its
    /// ops have ended, in the batch's order where the device allows. May return before that, or only after it.
    ///
    /// # Safety
    /// Until the last group was reported, every op's device and host range must stay valid, and nobody else may write
    /// a range that is read, nor touch a range that is written.
    unsafe fn run(&self, batch: CopyBatch, sink: std::sync::Arc<dyn GroupSink>) -> Result<()>;
}
