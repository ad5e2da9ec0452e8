//! Registrations of host and device memory with an engine.

use std::fmt::Debug;
use std::time::Duration;

use crate::limit::{close_wait, within};

/// An engine's record of registered memory.
pub trait Registration: Send + Sync + Debug {
    /// Returns the number of bytes registered so far.
    fn registered_bytes(&self) -> u64;
    /// Waits until all memory that can be registered now is, at most `timeout`. Returns whether it is. Memory that is
    /// not resident yet is registered later.
    fn wait(&self, timeout: Duration) -> bool;
    /// Returns why registration stopped early, if it did.
    fn failure(&self) -> Option<kvdepot_core::Error>;
}

/// Keeps a pool registered with an engine's device. Drop it before the memory is unmapped, and when no copy into or out
/// of it is in flight.
#[derive(Debug, Default)]
pub struct PoolRegistration(Option<Box<dyn Registration>>);

impl PoolRegistration {
    /// The registration with an engine that needs none.
    pub const fn none() -> Self {
        Self(None)
    }

    /// Wraps an engine's registration.
    pub fn new(registration: Box<dyn Registration>) -> Self {
        Self(Some(registration))
    }

    /// Undoes the registration, then drops `memory`. Takes at most `CLOSE_WAIT` of the caller's time: if the driver
    /// hangs, the memory stays mapped.
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

    /// Returns the number of bytes registered so far.
    pub fn registered_bytes(&self) -> u64 {
        self.0.as_ref().map_or(0, |registration| registration.registered_bytes())
    }

    /// Waits until all memory that can be registered now is, at most `timeout`. Returns whether it is. Copies do not
    /// need to wait for it.
    pub fn wait(&self, timeout: Duration) -> bool {
        self.0.as_ref().is_none_or(|registration| registration.wait(timeout))
    }

    /// Returns why registration stopped early, if it did. Copies of the rest are slower, but correct.
    pub fn failure(&self) -> Option<kvdepot_core::Error> {
        self.0.as_ref().and_then(|registration| registration.failure())
    }
}

/// Keeps a range of device memory registered with an engine. Drop it before the memory is freed, and when no copy of it
/// is in flight.
#[derive(Debug, Default)]
pub struct DeviceMemory(Option<Box<dyn KeptRegistration>>);

/// An engine's record of registered device memory.
pub trait KeptRegistration: Send + Sync + Debug {}

impl DeviceMemory {
    /// The registration with an engine that needs none.
    pub const fn none() -> Self {
        Self(None)
    }

    /// Wraps an engine's registration.
    pub fn new(registration: Box<dyn KeptRegistration>) -> Self {
        Self(Some(registration))
    }

    /// Returns whether the engine has a registration for it.
    pub fn is_registered(&self) -> bool {
        self.0.is_some()
    }
}
