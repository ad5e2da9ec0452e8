//! Host memory that an engine was told about beforehand.

use std::fmt::Debug;
use std::time::Duration;

use crate::limit::{close_wait, within};

/// What an engine keeps for memory that it registered.
pub trait Registration: Send + Sync + Debug {
    /// Bytes that are registered by now.
    fn registered_bytes(&self) -> u64;
    /// Waits until all that can be registered by now is, at most `timeout`; whether it is. What is not in memory yet is
    /// registered later.
    fn wait(&self, timeout: Duration) -> bool;
    /// Why registration stopped early, if it did.
    fn failure(&self) -> Option<kvdepot_core::Error>;
}

/// Keeps a pool registered with an engine's device; dropping it undoes that. Drop it before the memory is unmapped, and
/// when no copy into or out of it is under way.
#[derive(Debug, Default)]
pub struct PoolRegistration(Option<Box<dyn Registration>>);

impl PoolRegistration {
    /// Of an engine that needs none.
    pub const fn none() -> Self {
        Self(None)
    }

    /// Wraps an engine's own.
    pub fn new(registration: Box<dyn Registration>) -> Self {
        Self(Some(registration))
    }

    /// Undoes it, and lets go of `memory` then. Takes `CLOSE_WAIT` of the caller's time at most: when the driver hangs, the
    /// memory stays mapped.
    pub fn end(mut self, memory: impl Send + 'static) {
        let Some(registration) = self.0.take() else { return };
        let undo = move || {
            drop(registration);
            drop(memory);
        };
        let wait = close_wait();
        if let Err(error) = within("undoing the pool's registration", wait, undo)
            && !wait.is_zero()
        {
            tracing::warn!("the pool stays registered for now: {error}");
        }
    }

    /// Bytes that are registered by now.
    pub fn registered_bytes(&self) -> u64 {
        self.0.as_ref().map_or(0, |registration| registration.registered_bytes())
    }

    /// Waits until all that can be registered by now is, at most `timeout`; whether it is. Copies do not need to wait for it.
    pub fn wait(&self, timeout: Duration) -> bool {
        self.0.as_ref().is_none_or(|registration| registration.wait(timeout))
    }

    /// Why registration stopped early, if it did: copies of the rest are slower, and right.
    pub fn failure(&self) -> Option<kvdepot_core::Error> {
        self.0.as_ref().and_then(|registration| registration.failure())
    }
}

/// Keeps a range of device memory known to an engine. Drop it before the memory is freed, and when no copy of it is under
/// way.
#[derive(Debug, Default)]
pub struct DeviceMemory(Option<Box<dyn KeptRegistration>>);

/// What an engine keeps for device memory.
pub trait KeptRegistration: Send + Sync + Debug {}

impl DeviceMemory {
    /// Of an engine that needs none.
    pub const fn none() -> Self {
        Self(None)
    }

    /// Wraps an engine's own.
    pub fn new(registration: Box<dyn KeptRegistration>) -> Self {
        Self(Some(registration))
    }

    /// Whether the engine keeps anything for it.
    pub fn is_registered(&self) -> bool {
        self.0.is_some()
    }
}
