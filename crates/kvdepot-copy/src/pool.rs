//! Host memory that an engine was told about beforehand.

use std::fmt::Debug;
use std::time::Duration;

/// What an engine keeps for memory that it registered.
pub trait Registration: Send + Sync + Debug {
    /// Bytes that are registered by now.
    fn registered_bytes(&self) -> u64;
    /// Waits until all that can be registered is, at most `timeout`; whether it is.
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

    /// Bytes that are registered by now.
    pub fn registered_bytes(&self) -> u64 {
        self.0.as_ref().map_or(0, |registration| registration.registered_bytes())
    }

    /// Waits until all that can be registered is, at most `timeout`; whether it is. Copies do not need to wait for it.
    pub fn wait(&self, timeout: Duration) -> bool {
        self.0.as_ref().is_none_or(|registration| registration.wait(timeout))
    }

    /// Why registration stopped early, if it did: copies of the rest are slower, and right.
    pub fn failure(&self) -> Option<kvdepot_core::Error> {
        self.0.as_ref().and_then(|registration| registration.failure())
    }
}
