//! A stand-in for libcuda, for tests: the part of the driver API that kvdepot calls, over host memory.
//!
//! It is loaded by the same `dlopen` path as the real library. It behaves as follows, so that a missing wait or a wrong
//! range shows (P3):
//!
//! - Queued work does not run immediately. It runs when something waits, one piece at a time, from a stream that a
//!   seeded generator picks among those that may run; some streams are much slower than others.
//! - Copies of one batch, and pieces of one kernel, run in any order. A batch source with access order `ANY` may be
//!   read during the call.
//! - Addresses of device memory and of mapped host memory are not addresses of this process: accessing them crashes it.
//! - A stream, or all, can be made to hang: everything that waits for it waits until the test lets it continue.
//! - The queue of a copy engine is measured in its own time. A stream that takes more calls than a device's queue holds
//!   is recorded.
//! - Registration touches every page. A dma-buf export consists of whole pages of one allocation, and keeps its memory
//!   when the allocation's addresses get other memory.
//! - Every range is checked when it is queued and again when it is used; wrong ones are refused and recorded.
//!
//! Each device is a separate world, so tests that run in parallel use one each. With [`Control`] a test seeds a world,
//! plans failures and reads the violations.

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

/// Results of the driver API that the stand-in returns.
pub mod code {
    /// Success.
    pub const SUCCESS: i32 = 0;
    /// An argument is wrong.
    pub const INVALID_VALUE: i32 = 1;
    /// No memory.
    pub const OUT_OF_MEMORY: i32 = 2;
    /// No such device.
    pub const INVALID_DEVICE: i32 = 101;
    /// The image is not PTX.
    pub const INVALID_PTX: i32 = 218;
    /// No current context, or the wrong one.
    pub const INVALID_CONTEXT: i32 = 201;
    /// A handle is unknown or was destroyed.
    pub const INVALID_HANDLE: i32 = 400;
    /// A name is unknown.
    pub const NOT_FOUND: i32 = 500;
    /// Not finished yet.
    pub const NOT_READY: i32 = 600;
    /// A kernel accessed memory that it must not; the context is lost.
    pub const ILLEGAL_ADDRESS: i32 = 700;
    /// No work could run any more.
    pub const LAUNCH_TIMEOUT: i32 = 702;
    /// Part of the range is registered already.
    pub const ALREADY_REGISTERED: i32 = 712;
    /// The range is not registered.
    pub const NOT_REGISTERED: i32 = 713;
    /// A kernel failed; the context is lost.
    pub const LAUNCH_FAILED: i32 = 719;
}
