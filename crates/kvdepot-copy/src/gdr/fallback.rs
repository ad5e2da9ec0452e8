//! `use_gdr: auto`: uses an adapter until it turns out that it cannot reach the engine's memory or the pool.
//!
//! A small buffer shows at attach whether the adapter reaches any memory of the device. The KV cache itself may still
//! exceed the GPU's window on the bus, and the pool what the process may lock; and an adapter may fail while it serves.
//! Then all copies go the way that they go without an adapter.

use std::fmt;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use kvdepot_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use crate::CopyEngine;
use crate::batch::{CopyBatch, GroupSink};
use crate::gdr::engine::GdrEngine;
use crate::pool::{DeviceMemory, PoolRegistration, Registration};

/// Makes the engine without an adapter.
type Make = Box<dyn FnOnce() -> Result<Arc<dyn CopyEngine>> + Send>;

/// See the module.
pub(crate) struct Fallback {
    by_adapter: GdrEngine,
    make: Mutex<Option<Make>>,
    instead: OnceLock<Arc<dyn CopyEngine>>,
    /// Registered pools; locked while they move from one engine to the other.
    pools: Mutex<Vec<Weak<Pool>>>,
}

/// Host memory registered with one of the two engines.
struct Pool {
    base: usize,
    len: usize,
    reserved: bool,
    /// `None` after its owner has dropped it: then the memory may be freed.
    registration: Mutex<Option<PoolRegistration>>,
}

/// The handle of the pool's owner.
struct Owned(Arc<Pool>);

impl Fallback {
    pub(crate) fn new(by_adapter: GdrEngine, make: Make) -> Self {
        let (make, pools) = (Mutex::new(Some(make)), Mutex::default());
        Self { by_adapter, make, instead: OnceLock::new(), pools }
    }

    fn engine(&self) -> &dyn CopyEngine {
        self.instead.get().map_or(&self.by_adapter, |engine| &**engine)
    }

    /// # Safety
    /// As for `CopyEngine::register_pool`.
    unsafe fn register(&self, base: *mut u8, len: usize, reserved: bool) -> Result<PoolRegistration> {
        let base = base.expose_provenance();
        if self.instead.get().is_none() {
            // SAFETY: the caller's contract.
            match unsafe { self.register_now(base, len, reserved) } {
                Ok(registration) => return Ok(registration),
                Err(error) => self.give_up(&error)?,
            }
        }
        // SAFETY: the caller's contract.
        unsafe { self.register_now(base, len, reserved) }
    }

    /// Registers with the engine that copies now.
    ///
    /// # Safety
    /// As for `CopyEngine::register_pool`.
    unsafe fn register_now(&self, base: usize, len: usize, reserved: bool) -> Result<PoolRegistration> {
        let mut pools = self.pools.lock();
        // SAFETY: the caller's contract.
        let registration = Mutex::new(Some(unsafe { register(self.engine(), base, len, reserved) }?));
        let pool = Arc::new(Pool { base, len, reserved, registration });
        pools.retain(|pool| pool.strong_count() > 0);
        pools.push(Arc::downgrade(&pool));
        Ok(PoolRegistration::new(Box::new(Owned(pool))))
    }

    /// Switches to copies without the adapter.
    fn give_up(&self, why: &Error) -> Result<()> {
        let mut make = self.make.lock();
        if self.instead.get().is_some() {
            return Ok(());
        }
        let Some(make) = make.take() else {
            return Err(Error::new(ErrorKind::Unavailable, "neither an RDMA adapter nor the device copies"));
        };
        let engine = make().inspect_err(|error| {
            tracing::warn!("copies stay with an RDMA adapter that cannot serve: {why}, and there is no other way: {error}");
        })?;
        tracing::warn!("GPUDirect RDMA is not used from here on: {why}");
        let mut pools = self.pools.lock();
        let engine = self.instead.get_or_init(|| engine);
        for pool in pools.drain(..).filter_map(|pool| pool.upgrade()) {
            pool.move_to(&**engine);
        }
        Ok(())
    }
}

impl Pool {
    fn move_to(&self, engine: &dyn CopyEngine) {
        let mut registration = self.registration.lock();
        if registration.take().is_none() {
            return;
        }
        // SAFETY: its owner has not dropped it, and waits for this lock before it does: until then the memory stays
        // mapped (`CopyEngine::register_pool`).
        match unsafe { register(engine, self.base, self.len, self.reserved) } {
            Ok(registered) => *registration = Some(registered),
            // Copies are slower, but correct.
            Err(error) => {
                tracing::warn!("the pool is not registered: {error}");
                *registration = Some(PoolRegistration::none());
            }
        }
    }
}

/// # Safety
/// As for `CopyEngine::register_pool`.
unsafe fn register(
    engine: &dyn CopyEngine,
    base: usize,
    len: usize,
    reserved: bool,
) -> Result<PoolRegistration> {
    let base = std::ptr::with_exposed_provenance_mut(base);
    // SAFETY: the caller's contract.
    unsafe {
        if reserved { engine.register_reserved_pool(base, len) } else { engine.register_pool(base, len) }
    }
}

impl CopyEngine for Fallback {
    fn name(&self) -> &'static str {
        self.engine().name()
    }

    fn numa_node(&self) -> Option<u32> {
        self.engine().numa_node()
    }

    unsafe fn run(&self, batch: CopyBatch, sink: Arc<dyn GroupSink>) -> Result<()> {
        if self.instead.get().is_none()
            && let Some(why) = self.by_adapter.unusable()
        {
            // Without another way the adapter is still tried.
            let _ = self.give_up(why);
        }
        // SAFETY: the caller's contract.
        unsafe { self.engine().run(batch, sink) }
    }

    unsafe fn register_pool(&self, base: *mut u8, len: usize) -> Result<PoolRegistration> {
        // SAFETY: the caller's contract.
        unsafe { self.register(base, len, false) }
    }

    unsafe fn register_reserved_pool(&self, base: *mut u8, len: usize) -> Result<PoolRegistration> {
        // SAFETY: the caller's contract.
        unsafe { self.register(base, len, true) }
    }

    unsafe fn register_device(&self, address: u64, len: usize) -> Result<DeviceMemory> {
        if self.instead.get().is_none() {
            // SAFETY: the caller's contract.
            match unsafe { self.by_adapter.register_device(address, len) } {
                Ok(memory) => return Ok(memory),
                Err(error) => self.give_up(&error)?,
            }
        }
        // SAFETY: the caller's contract.
        unsafe { self.engine().register_device(address, len) }
    }
}

impl Registration for Owned {
    fn registered_bytes(&self) -> u64 {
        self.0.registration.lock().as_ref().map_or(0, PoolRegistration::registered_bytes)
    }

    fn wait(&self, timeout: Duration) -> bool {
        self.0.registration.lock().as_ref().is_none_or(|registration| registration.wait(timeout))
    }

    fn failure(&self) -> Option<Error> {
        self.0.registration.lock().as_ref().and_then(PoolRegistration::failure)
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        drop(self.0.registration.lock().take());
    }
}

impl fmt::Debug for Owned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Owned({} bytes)", self.0.len)
    }
}

impl fmt::Debug for Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fallback({})", self.name())
    }
}
