//! Events, which are reused when their last holder has dropped them.

use std::fmt;
use std::sync::Arc;

use kvdepot_core::Result;
use parking_lot::Mutex;

use crate::cuda::context::{Context, Stream};
use crate::cuda::types::{EVENT_BLOCKING_NO_TIMING, Handle, NOT_READY};
use crate::event::EventWait;

/// The pool of unused events.
pub(crate) struct EventPool {
    context: Arc<Context>,
    free: Mutex<Vec<Handle>>,
}

/// An event in use. It returns to its pool with the last holder.
pub(crate) struct Event {
    pool: Arc<EventPool>,
    handle: Handle,
}

impl EventPool {
    pub(crate) fn new(context: &Arc<Context>) -> Arc<Self> {
        Arc::new(Self { context: Arc::clone(context), free: Mutex::default() })
    }

    /// Takes an event that has no other holder. The context is current.
    pub(crate) fn take(self: &Arc<Self>) -> Result<Arc<Event>> {
        let kept = self.free.lock().pop();
        let handle = match kept {
            Some(handle) => handle,
            None => {
                let mut handle = 0;
                // SAFETY: the pointer lives during the call.
                let code =
                    unsafe { (self.context.table().event_create)(&raw mut handle, EVENT_BLOCKING_NO_TIMING) };
                self.context.check("cuEventCreate", code)?;
                handle
            }
        };
        Ok(Arc::new(Event { pool: Arc::clone(self), handle }))
    }
}

impl Event {
    /// Records the event after everything queued. The context is current.
    pub(crate) fn record(&self, stream: &Stream) -> Result<()> {
        let context = &self.pool.context;
        // SAFETY: both live.
        let code = unsafe { (context.table().event_record)(self.handle, stream.handle()) };
        context.check("cuEventRecord", code)
    }

    /// Sleeps until the event is reached. The context is current.
    pub(crate) fn synchronize(&self) -> Result<()> {
        let context = &self.pool.context;
        // SAFETY: the event lives.
        let code = unsafe { (context.table().event_synchronize)(self.handle) };
        context.check("cuEventSynchronize", code)
    }

    #[cfg(test)]
    pub(crate) fn handle(&self) -> u64 {
        self.handle as u64
    }
}

impl EventWait for Event {
    fn wait_on_stream(&self, stream: u64) -> Result<()> {
        let context = &self.pool.context;
        let _entered = context.enter()?;
        // SAFETY: the event lives; the stream is the caller's, and the driver checks it as far as it can.
        let code = unsafe { (context.table().stream_wait_event)(stream as Handle, self.handle, 0) };
        context.check("cuStreamWaitEvent", code)
    }

    fn reached(&self) -> Result<bool> {
        let context = &self.pool.context;
        let _entered = context.enter()?;
        // SAFETY: the event lives.
        match unsafe { (context.table().event_query)(self.handle) } {
            NOT_READY => Ok(false),
            code => context.check("cuEventQuery", code).map(|()| true),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.pool.free.lock().push(self.handle);
    }
}

impl Drop for EventPool {
    fn drop(&mut self) {
        let Ok(_entered) = self.context.enter() else { return };
        for handle in self.free.get_mut().drain(..) {
            // SAFETY: every event has been returned, since each holds the pool.
            let _ = unsafe { (self.context.table().event_destroy)(handle) };
        }
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Event({:#x}, {:?})", self.handle, self.pool.context)
    }
}
