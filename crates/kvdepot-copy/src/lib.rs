//! What moves bytes between an engine's memory and the pool: one trait, one engine a kind of device.
//!
//! P3: a batch waits for its event before it touches device memory, and a group is reported only when its bytes are
//! where they belong. P2: engines of devices, which may hang, have deadlines before them ([`Bounded`]).

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

    /// Runs a batch: after its event, every op; each group is reported to `sink` exactly once, as soon as all of its
    /// ops have ended, in the batch's order where the device allows. May return before that, or only after it; dumps may
    /// wait here for their turn. An error means that nothing was begun and that no group will be reported; once something
    /// was begun, a failure is told to the group that it hit and to all that follow.
    ///
    /// The engine lets go of `sink` when nothing touches the batch's memory any more. That is after the last report where a
    /// dump failed because the batch's deadline had passed: what the memory needs to stay valid belongs into the sink (P1).
    /// A load is reported when nothing is written any more, however late.
    ///
    /// # Safety
    /// Until the engine has let go of `sink`, every op's device and host range must stay valid, and nobody else may write
    /// a range that is read, nor touch a range that is written. Device memory of a dump that failed by its deadline may be
    /// written all the same: what the dump brings is undefined then.
    unsafe fn run(&self, batch: CopyBatch, sink: Arc<dyn GroupSink>) -> Result<()>;

    /// Whether a load may be under way after its batch's deadline: then who waits for one needs a limit of its own (P2).
    fn may_hang(&self) -> bool {
        false
    }

    /// The NUMA node that the engine's device is nearest to, where it has a device and the machine says.
    fn numa_node(&self) -> Option<u32> {
        None
    }

    /// Makes host memory quick to reach, in the background, as long as what it returns is kept. Batches may name that
    /// memory, or any other, before, meanwhile and after. For engines to which all memory is alike it does nothing.
    ///
    /// # Safety
    /// The memory must stay mapped until the registration is dropped, and no batch that names it may be under way then.
    unsafe fn register_pool(&self, _base: *mut u8, _len: usize) -> Result<PoolRegistration> {
        Ok(PoolRegistration::none())
    }

    /// Like `register_pool`, for memory whose pages are set aside for it already: none is missing, whether it was touched or
    /// not. Of other memory, an engine that would make what it registers resident leaves out what is not, and comes back to it.
    ///
    /// # Safety
    /// As for `register_pool`.
    unsafe fn register_reserved_pool(&self, base: *mut u8, len: usize) -> Result<PoolRegistration> {
        // SAFETY: the caller's contract.
        unsafe { self.register_pool(base, len) }
    }

    /// Makes device memory quick to reach, as long as what it returns is kept: the engine's KV cache. For engines to which
    /// all memory is alike it does nothing.
    ///
    /// # Safety
    /// The memory must not be freed before the registration is dropped, nor that while a batch that names it is under
    /// way.
    unsafe fn register_device(&self, _address: u64, _len: usize) -> Result<DeviceMemory> {
        Ok(DeviceMemory::none())
    }
}
