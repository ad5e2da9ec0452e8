//! Points in a device's work that other work can wait for.

use std::fmt::Debug;
use std::sync::Arc;

use kvdepot_core::Result;

/// What an engine's events can do.
pub trait EventWait: Send + Sync + Debug {
    /// Lets a stream of the device wait for the event; returns at once.
    fn wait_on_stream(&self, stream: u64) -> Result<()>;
    /// Whether the event has been reached.
    fn reached(&self) -> Result<bool>;
}

/// A recorded event. Clones are cheap; the driver's event lives, and is not used for anything else, as long as one does.
#[derive(Clone, Debug)]
pub struct DeviceEvent(Arc<dyn EventWait>);

impl DeviceEvent {
    /// Wraps an engine's event.
    pub fn new(event: Arc<dyn EventWait>) -> Self {
        Self(event)
    }

    /// Lets what is queued on `stream` (a `CUstream`; 0 is the default stream) after this call wait for the event, on
    /// the device: no thread of the host waits.
    pub fn wait_on_stream(&self, stream: u64) -> Result<()> {
        self.0.wait_on_stream(stream)
    }

    /// Whether the event has been reached, without waiting.
    pub fn reached(&self) -> Result<bool> {
        self.0.reached()
    }
}
