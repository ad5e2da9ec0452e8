//! A device's primary context, which the engine's own CUDA uses as well.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use kvdepot_core::Result;

use crate::cuda::device::DeviceInfo;
use crate::cuda::driver::{Driver, Table};
use crate::cuda::types::{CAPTURE_MODE_RELAXED, HOST_ALLOC_PORTABLE_DEVICEMAP, Handle, STREAM_NON_BLOCKING};

/// A retained primary context: the engine may release its own use of it before we do.
pub(crate) struct Context {
    driver: &'static Driver,
    device: DeviceInfo,
    handle: Handle,
}

/// Keeps the context current in this thread. Dropping it restores the previous context.
///
/// Meanwhile the thread's capture mode is relaxed. Engines capture graphs at start, just when the pool is registered,
/// and in the default mode a registration, an allocation or an event query would make such a capture fail.
pub(crate) struct Entered<'a> {
    context: &'a Context,
    capture_mode_before: c_int,
    /// Contexts are current for a thread, so this value must stay in it.
    _thread: PhantomData<*mut ()>,
}

impl Context {
    pub(crate) fn retain(driver: &'static Driver, device: DeviceInfo) -> Result<Arc<Self>> {
        let mut handle = 0;
        // SAFETY: the pointer lives during the call; the driver checks the device.
        let code = unsafe { (driver.table().primary_context_retain)(&raw mut handle, device.handle) };
        driver.check("cuDevicePrimaryCtxRetain", code)?;
        Ok(Arc::new(Self { driver, device, handle }))
    }

    pub(crate) fn enter(&self) -> Result<Entered<'_>> {
        // SAFETY: the context is retained.
        self.check("cuCtxPushCurrent_v2", unsafe { (self.table().context_push)(self.handle) })?;
        let mut entered =
            Entered { context: self, capture_mode_before: CAPTURE_MODE_RELAXED, _thread: PhantomData };
        entered.exchange_capture_mode()?;
        Ok(entered)
    }

    pub(crate) fn driver(&self) -> &'static Driver {
        self.driver
    }

    pub(crate) fn table(&self) -> &'static Table {
        self.driver.table()
    }

    pub(crate) fn device(&self) -> &DeviceInfo {
        &self.device
    }

    pub(crate) fn check(&self, call: &'static str, code: c_int) -> Result<()> {
        self.driver.check(call, code).map_err(|e| e.with("device", self.device.ordinal))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once, by `retain`; no user is left, as it would hold the `Arc`.
        let _ = unsafe { (self.table().primary_context_release)(self.device.handle) };
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context(device {})", self.device.ordinal)
    }
}

impl Entered<'_> {
    /// Exchanges the thread's capture mode with the stored one.
    fn exchange_capture_mode(&mut self) -> Result<()> {
        // SAFETY: the pointer lives during the call.
        let code =
            unsafe { (self.context.table().thread_exchange_capture_mode)(&raw mut self.capture_mode_before) };
        self.context.check("cuThreadExchangeStreamCaptureMode", code)
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let _ = self.exchange_capture_mode();
        let mut popped = 0;
        // SAFETY: pushed in this thread by `enter`.
        let _ = unsafe { (self.context.table().context_pop)(&raw mut popped) };
    }
}

/// The priority of a stream's kernels. The driver promises nothing for copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Priority {
    Least,
    Greatest,
}

/// A stream that does not synchronize with the default stream.
pub(crate) struct Stream {
    context: Arc<Context>,
    handle: Handle,
}

impl Stream {
    pub(crate) fn new(context: &Arc<Context>, priority: Priority) -> Result<Self> {
        let _entered = context.enter()?;
        let (mut least, mut greatest, mut handle) = (0, 0, 0);
        // SAFETY: the pointers live during the calls.
        unsafe {
            let code = (context.table().stream_priority_range)(&raw mut least, &raw mut greatest);
            context.check("cuCtxGetStreamPriorityRange", code)?;
            let priority = if priority == Priority::Least { least } else { greatest };
            let code = (context.table().stream_create)(&raw mut handle, STREAM_NON_BLOCKING, priority);
            context.check("cuStreamCreateWithPriority", code)?;
        }
        Ok(Self { context: Arc::clone(context), handle })
    }

    pub(crate) fn handle(&self) -> Handle {
        self.handle
    }

    /// Makes later work wait on the device for an event of any stream.
    pub(crate) fn wait_event(&self, event: Handle) -> Result<()> {
        // SAFETY: the stream lives; the driver checks the event's handle as far as it can.
        let code = unsafe { (self.context.table().stream_wait_event)(self.handle, event, 0) };
        self.context.check("cuStreamWaitEvent", code)
    }

    /// Waits until all queued work has run.
    pub(crate) fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream lives.
        let code = unsafe { (self.context.table().stream_synchronize)(self.handle) };
        self.context.check("cuStreamSynchronize", code)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: created by `new`, and not used any more.
            let _ = unsafe { (self.context.table().stream_destroy)(self.handle) };
        }
    }
}

/// Driver-allocated host memory that kernels can read.
pub(crate) struct Pinned {
    context: Arc<Context>,
    address: *mut c_void,
    device: u64,
    len: usize,
}

// SAFETY: memory that only its owner uses; the driver frees it in any thread.
unsafe impl Send for Pinned {}
// SAFETY: shared references only give out addresses.
unsafe impl Sync for Pinned {}

impl Pinned {
    pub(crate) fn new(context: &Arc<Context>, len: usize) -> Result<Self> {
        let _entered = context.enter()?;
        let mut pinned = Self { context: Arc::clone(context), address: std::ptr::null_mut(), device: 0, len };
        // SAFETY: the pointers live during the calls.
        unsafe {
            let flags = HOST_ALLOC_PORTABLE_DEVICEMAP;
            let code = (context.table().mem_host_alloc)(&raw mut pinned.address, len, flags);
            context.check("cuMemHostAlloc", code).map_err(|e| e.with("bytes", len))?;
            let code =
                (context.table().mem_host_get_device_pointer)(&raw mut pinned.device, pinned.address, 0);
            context.check("cuMemHostGetDevicePointer_v2", code)?;
        }
        Ok(pinned)
    }

    pub(crate) fn address(&self) -> *mut u8 {
        self.address.cast()
    }

    /// Returns its address on the device.
    pub(crate) fn device(&self) -> u64 {
        self.device
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.address.is_null() {
            return;
        }
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: allocated by `new`, and no work that uses it is left.
            let _ = unsafe { (self.context.table().mem_free_host)(self.address) };
        }
    }
}

/// Memory on the device.
pub(crate) struct DeviceBuffer {
    context: Arc<Context>,
    address: u64,
}

impl DeviceBuffer {
    pub(crate) fn new(context: &Arc<Context>, len: usize) -> Result<Self> {
        let _entered = context.enter()?;
        let mut address = 0;
        // SAFETY: the pointer lives during the call.
        let code = unsafe { (context.table().mem_alloc)(&raw mut address, len) };
        context.check("cuMemAlloc_v2", code).map_err(|e| e.with("bytes", len))?;
        Ok(Self { context: Arc::clone(context), address })
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: allocated by `new`, and no work that uses it is left.
            let _ = unsafe { (self.context.table().mem_free)(self.address) };
        }
    }
}
