//! A copy engine and the pool that it was told about: shared by all stores whose pages are in one device's memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvdepot_copy::{CopyEngine, PoolRegistration};
use kvdepot_core::Result;
use parking_lot::Mutex;

use crate::pool::PoolMapping;

/// See the module.
#[derive(Debug)]
pub struct DeviceEngine {
    // Dropped before the engine.
    registered: Mutex<Option<Arc<RegisteredPool>>>,
    decoding: AtomicBool,
    engine: Arc<dyn CopyEngine>,
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
        Arc::new(Self { registered: Mutex::new(None), decoding: AtomicBool::new(false), engine })
    }

    /// The engine.
    pub fn engine(&self) -> &Arc<dyn CopyEngine> {
        &self.engine
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
    pub(crate) fn pool(&self, mapping: &Arc<PoolMapping>) -> Result<Arc<RegisteredPool>> {
        let mut registered = self.registered.lock();
        if let Some(known) = registered.as_ref().filter(|known| Arc::ptr_eq(&known.mapping, mapping)) {
            return Ok(Arc::clone(known));
        }
        let registration = mapping.register_with(&*self.engine)?;
        let pool = Arc::new(RegisteredPool { registration, mapping: Arc::clone(mapping) });
        let replaced = registered.replace(Arc::clone(&pool));
        // After the lock: a registration may take long to undo.
        drop(registered);
        drop(replaced);
        Ok(pool)
    }
}
