//! A copy engine and the pool registered with it, shared by all stores with pages in the memory of one device.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvdepot_copy::{CopyEngine, PoolRegistration};
use kvdepot_core::Result;
use parking_lot::Mutex;

use crate::client::attached_pool::AttachedPool;
use crate::pool::{PoolMapping, own_node};

/// Prefix of the names of this library's threads.
const OWN_THREADS: &str = "kvd";

/// See the module.
#[derive(Debug)]
pub struct DeviceEngine {
    registered: Mutex<Option<Arc<RegisteredPool>>>,
    decoding: AtomicBool,
    /// The NUMA node of its device, or of this process.
    node: Option<u32>,
    /// `None` only while it is dropped.
    engine: Option<Arc<dyn CopyEngine>>,
}

impl Drop for DeviceEngine {
    /// The last holder may be a copy that ends on a thread of the engine, which must not wait for its own end.
    fn drop(&mut self) {
        let (registered, engine) = (self.registered.get_mut().take(), self.engine.take());
        let end = move || {
            // The pool before the engine with which it is registered.
            drop(registered);
            drop(engine);
        };
        if !std::thread::current().name().is_some_and(|name| name.starts_with(OWN_THREADS)) {
            end();
        } else if let Err(error) = std::thread::Builder::new().name("kvdepot-drop".to_owned()).spawn(end) {
            tracing::warn!("a copy engine could not be ended apart from its threads: {error}");
        }
    }
}

/// A pool registered with the engine. Every copy that uses it holds it: a replaced pool is released after the last of
/// them.
#[derive(Debug)]
pub(crate) struct RegisteredPool {
    registration: PoolRegistration,
    mapping: Arc<PoolMapping>,
}

impl Drop for RegisteredPool {
    fn drop(&mut self) {
        std::mem::take(&mut self.registration).end(Arc::clone(&self.mapping));
    }
}

impl DeviceEngine {
    /// Wraps an engine.
    pub fn new(engine: Arc<dyn CopyEngine>) -> Arc<Self> {
        Arc::new(Self {
            registered: Mutex::new(None),
            decoding: AtomicBool::new(false),
            node: engine.numa_node().or_else(|| own_node(Path::new("/"))),
            engine: Some(engine),
        })
    }

    /// Returns the engine.
    pub fn engine(&self) -> &Arc<dyn CopyEngine> {
        self.engine.as_ref().expect("an engine is there until it is dropped")
    }

    /// Returns the NUMA node near which its blocks should be placed, if any.
    pub(crate) const fn node(&self) -> Option<u32> {
        self.node
    }

    /// Sets whether the device is decoding: then copies avoid its multiprocessors.
    pub(crate) fn set_decoding(&self, decoding: bool) {
        self.decoding.store(decoding, Ordering::Relaxed);
    }

    /// Returns the last value of `set_decoding`.
    pub(crate) fn is_decoding(&self) -> bool {
        self.decoding.load(Ordering::Relaxed)
    }

    /// Registers the pool with the engine, unless it is registered; registration continues in the background. Copies
    /// keep the returned value until they have ended.
    pub(crate) fn pool(&self, pool: &AttachedPool) -> Result<Arc<RegisteredPool>> {
        let mut registered = self.registered.lock();
        // Under the lock: `forget` comes after the pool was released, so it finds what is registered here.
        let mapping = pool.mapping()?;
        if let Some(known) = registered.as_ref().filter(|known| Arc::ptr_eq(&known.mapping, &mapping)) {
            return Ok(Arc::clone(known));
        }
        let registration = mapping.register_with(&**self.engine())?;
        let pool = Arc::new(RegisteredPool { registration, mapping });
        let replaced = registered.replace(Arc::clone(&pool));
        // After unlocking: undoing a registration may take long.
        drop(registered);
        drop(replaced);
        Ok(pool)
    }

    /// Removes a released pool. Returns the value to drop, which may take long. Copies in flight keep the pool until
    /// they end.
    pub(crate) fn forget(&self, mapping: &Arc<PoolMapping>) -> Option<Arc<RegisteredPool>> {
        self.registered.lock().take_if(|known| Arc::ptr_eq(&known.mapping, mapping))
    }
}
