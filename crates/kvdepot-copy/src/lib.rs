//! Copies bytes between an engine's memory and the pool: one trait, and an engine for each kind of device.
//!
//! P3: a batch waits for its event before it touches device memory, and a group is reported only when its bytes are in
//! place. P2: engines of devices, which may hang, are wrapped with deadlines ([`Bounded`]).

mod background;
pub mod batch;
pub mod bounded;
pub mod conformance;
pub mod cuda;
pub mod event;
pub mod gdr;
pub mod host;
pub mod limit;
mod mutation;
mod on_use;
mod paced;
mod pages;
pub mod pool;
mod resident;
pub mod select;
mod stream;

pub use batch::{CopyBatch, CopyOp, Direction, GroupSink};
pub use bounded::Bounded;
pub use event::DeviceEvent;
pub use host::HostEngine;
pub use pool::{DeviceMemory, PoolRegistration};
pub use select::EngineSpec;

use std::fmt::Debug;
use std::sync::Arc;

use kvdepot_core::Result;

/// Moves batches of bytes between device memory and pool memory.
pub trait CopyEngine: Send + Sync + Debug {
    /// Short name: `host`, `memcpy`, `batch`, `kernel`, `auto`, `gdr`.
    fn name(&self) -> &'static str;

    /// Runs a batch: waits for its event, then makes every copy. Each group is reported to `sink` exactly once, as soon
    /// as all of its ops have completed, in the batch's order where the device allows. May return before or after that;
    /// dumps may wait here for their turn. An error means that nothing was begun and that no group will be reported.
    /// Once something was begun, a failure is reported to the group that it hit and to all that follow.
    ///
    /// The engine drops `sink` when nothing touches the batch's memory any more. For a dump that failed at its batch's
    /// deadline that is after the last report, so whatever keeps the memory valid belongs in the sink (P1). A load is
    /// reported when nothing is written any more, however late.
    ///
    /// # Safety
    /// Until the engine has dropped `sink`, every op's device and host range must stay valid. No other code may write
    /// to a range that is read, or touch a range that is written. Device memory of a dump that failed at its deadline
    /// may be written nevertheless: the dump's bytes are undefined then.
    unsafe fn run(&self, batch: CopyBatch, sink: Arc<dyn GroupSink>) -> Result<()>;

    /// Returns whether a load can be in flight after its batch's deadline. Then callers that wait for one need their
    /// own limit (P2).
    fn may_hang(&self) -> bool {
        false
    }

    /// Returns the NUMA node nearest to the engine's device, if it has a device and the machine reports it.
    fn numa_node(&self) -> Option<u32> {
        None
    }

    /// Registers host memory for faster copies, in the background, until the returned value is dropped. Batches may use
    /// that memory, or any other, before, during and after. Does nothing for engines that copy all memory alike.
    ///
    /// # Safety
    /// The memory must stay mapped until the registration is dropped, and no batch that uses it may be in flight then.
    unsafe fn register_pool(&self, _base: *mut u8, _len: usize) -> Result<PoolRegistration> {
        Ok(PoolRegistration::none())
    }

    /// Like `register_pool`, for memory whose pages are reserved already: none is missing, whether it was touched or
    /// not. In other memory, an engine whose registration would make pages resident skips the missing ones and returns
    /// to them later.
    ///
    /// # Safety
    /// As for `register_pool`.
    unsafe fn register_reserved_pool(&self, base: *mut u8, len: usize) -> Result<PoolRegistration> {
        // SAFETY: the caller's contract.
        unsafe { self.register_pool(base, len) }
    }

    /// Registers device memory, the engine's KV cache, for faster copies until the returned value is dropped. Does
    /// nothing for engines that copy all memory alike.
    ///
    /// # Safety
    /// The memory must not be freed before the registration is dropped, and the registration must not be dropped while
    /// a batch that uses it is in flight.
    unsafe fn register_device(&self, _address: u64, _len: usize) -> Result<DeviceMemory> {
        Ok(DeviceMemory::none())
    }
}
