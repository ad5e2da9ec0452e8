//! Points in a device's work that other work can wait for.

use std::fmt::Debug;
use std::sync::Arc;

use kvdepot_core::Result;

/// The operations of an engine's event.
pub trait EventWait: Send + Sync + Debug {
    /// Makes a stream of the device wait for the event. Returns immediately.
    fn wait_on_stream(&self, stream: u64) -> Result<()>;
    /// Returns whether the event has been reached.
    fn reached(&self) -> Result<bool>;
}

/// A recorded event. Clones are cheap. The driver's event lives, and is not reused, until the last clone is dropped.
#[derive(Clone, Debug)]
pub struct DeviceEvent(Arc<dyn EventWait>);

impl DeviceEvent {
    /// Wraps an engine's event.
    pub fn new(event: Arc<dyn EventWait>) -> Self {
        Self(event)
    }

    /// Makes all work queued on `stream` (a `CUstream`; 0 is the default stream) after this call wait for the event.
    /// The wait happens on the device; no host thread waits.
    pub fn wait_on_stream(&self, stream: u64) -> Result<()> {
        self.0.wait_on_stream(stream)
    }

    /// Returns whether the event has been reached, without waiting.
    pub fn reached(&self) -> Result<bool> {
        self.0.reached()
    }
}
