//! A copy engine and the pool that it was told about: shared by all stores whose pages are in one device's memory.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvdepot_copy::{CopyEngine, PoolRegistration};
use kvdepot_core::Result;
use parking_lot::Mutex;

use crate::client::attached_pool::AttachedPool;
use crate::pool::{PoolMapping, own_node};

/// Names of this library's threads begin with this.
const OWN_THREADS: &str = "kvd";

/// See the module.
#[derive(Debug)]
pub struct DeviceEngine {
    registered: Mutex<Option<Arc<RegisteredPool>>>,
    decoding: AtomicBool,
    /// The NUMA node that its device, or this process, is at.
    node: Option<u32>,
    /// None only while it is dropped.
    engine: Option<Arc<dyn CopyEngine>>,
}

impl Drop for DeviceEngine {
    /// The last holder may be a copy that ends on a thread of the engine, which must not wait for its own end.
    fn drop(&mut self) {
        let (registered, engine) = (self.registered.get_mut().take(), self.engine.take());
        let end = move || {
            // The pool before the engine that knows it.
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

/// A pool that the engine knows. Held by every copy that names it: a pool that was replaced is given up after the last.
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

    /// The engine.
    pub fn engine(&self) -> &Arc<dyn CopyEngine> {
        self.engine.as_ref().expect("an engine is there until it is dropped")
    }

    /// The NUMA node near which its blocks are to lie; none where there is no such.
    pub(crate) const fn node(&self) -> Option<u32> {
        self.node
    }

    /// Says whether the device decodes for somebody: then copies leave its multiprocessors alone.
    pub(crate) fn set_decoding(&self, decoding: bool) {
        self.decoding.store(decoding, Ordering::Relaxed);
    }

    /// What was said last.
    pub(crate) fn is_decoding(&self) -> bool {
        self.decoding.load(Ordering::Relaxed)
    }

    /// Tells the engine about the pool, unless it knows it; registration goes on in the background. Copies keep what is
    /// returned until they have ended.
    pub(crate) fn pool(&self, pool: &AttachedPool) -> Result<Arc<RegisteredPool>> {
        let mut registered = self.registered.lock();
        // Under the lock: `forget` comes after the pool was given up, so it finds what is registered here.
        let mapping = pool.mapping()?;
        if let Some(known) = registered.as_ref().filter(|known| Arc::ptr_eq(&known.mapping, &mapping)) {
            return Ok(Arc::clone(known));
        }
        let registration = mapping.register_with(&**self.engine())?;
        let pool = Arc::new(RegisteredPool { registration, mapping });
        let replaced = registered.replace(Arc::clone(&pool));
        // After the lock: a registration may take long to undo.
        drop(registered);
        drop(replaced);
        Ok(pool)
    }

    /// Lets go of a pool that was given up: what to drop, which may take long. Copies under way keep it until they end.
    pub(crate) fn forget(&self, mapping: &Arc<PoolMapping>) -> Option<Arc<RegisteredPool>> {
        self.registered.lock().take_if(|known| Arc::ptr_eq(&known.mapping, mapping))
    }
}
