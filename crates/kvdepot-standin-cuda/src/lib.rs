//! A stand-in for libcuda, for tests: the part of the driver API that kvdepot calls, over host memory.
//!
//! It is loaded by the same `dlopen` path as the real library. What it does on purpose, so that a missing wait or a
//! wrong range shows (P3):
//!
//! - Nothing that is queued runs at once. Work runs when somebody waits, one piece at a time, from a stream that a
//!   seeded generator picks among those that may run; some streams are much lazier than others.
//! - Copies of one batch, and pieces of one kernel, run in any order; a batch source of access order `ANY` may be read
//!   while the call is still under way.
//! - Addresses of device memory and of mapped host memory are not addresses of this process: touching them ends it.
//! - A stream, or all, can be made to hang: what waits for it waits until the test lets it go on.
//! - What a copy engine has queued is counted in a time of its own; a stream that takes more calls than a device's queue
//!   holds is written down.
//! - Registration touches every page. What is exported as a dma-buf is whole pages of one allocation, and keeps its memory
//!   when the allocation's addresses are given other memory.
//! - Every range is checked when it is queued and again when it is used; what is wrong is refused and written down.
//!
//! Each device is a world of its own, so that tests that run side by side take one each. [`Control`] is how a test
//! seeds a world, plans failures and reads what went wrong.

mod abi;
mod abi_copy;
mod abi_memory;
mod abi_stream;
mod control;
mod copy_engines;
mod faults;
mod kernels;
mod memory;
mod rng;
mod schedule;
mod world;

pub use control::{Control, DEVICE_COUNT, EVERY_STREAM, Left, library_path};

/// Results of the driver API that the stand-in gives.
pub mod code {
    /// All is well.
    pub const SUCCESS: i32 = 0;
    /// An argument is wrong.
    pub const INVALID_VALUE: i32 = 1;
    /// No memory.
    pub const OUT_OF_MEMORY: i32 = 2;
    /// No such device.
    pub const INVALID_DEVICE: i32 = 101;
    /// The image is no PTX.
    pub const INVALID_PTX: i32 = 218;
    /// No current context, or the wrong one.
    pub const INVALID_CONTEXT: i32 = 201;
    /// A handle is unknown or gone.
    pub const INVALID_HANDLE: i32 = 400;
    /// A name is unknown.
    pub const NOT_FOUND: i32 = 500;
    /// Not yet.
    pub const NOT_READY: i32 = 600;
    /// A kernel touched what it may not; the context is lost.
    pub const ILLEGAL_ADDRESS: i32 = 700;
    /// Nothing could run any more.
    pub const LAUNCH_TIMEOUT: i32 = 702;
    /// Part of the range is registered already.
    pub const ALREADY_REGISTERED: i32 = 712;
    /// The range is not registered.
    pub const NOT_REGISTERED: i32 = 713;
    /// A kernel failed; the context is lost.
    pub const LAUNCH_FAILED: i32 = 719;
}
