//! A device that copies when the test lets it.
#![allow(clippy::unwrap_used, reason = "tests fail where they cannot go on")]

use std::sync::Arc;

use crossbeam_channel::Sender;
use kvdepot_copy::{CopyBatch, CopyEngine, GroupSink};
use kvdepot_core::Result;

/// A batch that a device was given.
pub(crate) type Begun = (CopyBatch, Arc<dyn GroupSink>);

/// Passes each batch to the test, which ends its copies.
#[derive(Debug)]
pub(crate) struct HeldDevice {
    pub(crate) begun: Sender<Begun>,
    /// What it says of itself.
    pub(crate) may_hang: bool,
}

impl CopyEngine for HeldDevice {
    fn name(&self) -> &'static str {
        "device"
    }

    fn may_hang(&self) -> bool {
        self.may_hang
    }

    unsafe fn run(&self, batch: CopyBatch, sink: Arc<dyn GroupSink>) -> Result<()> {
        self.begun.send((batch, sink)).unwrap();
        Ok(())
    }
}
