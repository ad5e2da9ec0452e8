//! The types of the driver's ABI, as laid out in cuda.h.

use std::ffi::{c_int, c_uint};

/// Result of every call.
pub(crate) type CuResult = c_int;
/// Handles (context, stream, event, module, function): pointers that only the driver dereferences.
pub(crate) type Handle = usize;
/// An address on the device.
pub(crate) type DevicePtr = u64;

pub(crate) const SUCCESS: CuResult = 0;
pub(crate) const OUT_OF_MEMORY: CuResult = 2;
pub(crate) const NOT_READY: CuResult = 600;
pub(crate) const ALREADY_REGISTERED: CuResult = 712;
pub(crate) const NOT_SUPPORTED: CuResult = 801;

pub(crate) const STREAM_NON_BLOCKING: c_uint = 1;
/// The waiting thread sleeps instead of spinning, and no timestamps are recorded.
pub(crate) const EVENT_BLOCKING_NO_TIMING: c_uint = 1 | 2;
/// Usable by every context of the process, and by kernels.
pub(crate) const HOST_REGISTER_PORTABLE_DEVICEMAP: c_uint = 1 | 2;
pub(crate) const HOST_ALLOC_PORTABLE_DEVICEMAP: c_uint = 1 | 2;

/// Calls of this thread do not disturb a graph capture in another thread.
pub(crate) const CAPTURE_MODE_RELAXED: c_int = 2;

pub(crate) const ATTRIBUTE_MULTIPROCESSORS: c_int = 16;
pub(crate) const ATTRIBUTE_CAPABILITY_MAJOR: c_int = 75;
pub(crate) const ATTRIBUTE_CAPABILITY_MINOR: c_int = 76;

/// First version of the driver that exports memory as a dma-buf.
pub(crate) const MEM_GET_HANDLE_VERSION: c_int = 11_070;
/// First version of the driver with `cuMemcpyBatchAsync`, and the one that changed its ABI.
pub(crate) const BATCH_VERSION: c_int = 12_080;
pub(crate) const BATCH_VERSION_2: c_int = 13_000;

/// The source is read in stream order: after all work queued before.
pub(crate) const SOURCE_ORDER_STREAM: c_int = 1;
/// The source may be read at any time from the call on, regardless of events.
pub(crate) const SOURCE_ORDER_ANY: c_int = 3;
/// Prefer copy engines to kernels.
pub(crate) const FLAG_OVERLAP_WITH_COMPUTE: c_uint = 1;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct MemLocation {
    pub(crate) kind: c_int,
    pub(crate) id: c_int,
}

/// `CUmemcpyAttributes`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct MemcpyAttributes {
    pub(crate) source_access_order: c_int,
    pub(crate) source_location: MemLocation,
    pub(crate) target_location: MemLocation,
    pub(crate) flags: c_uint,
}

/// `CUuuid`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Uuid {
    pub(crate) bytes: [u8; 16],
}

const _: () = {
    assert!(size_of::<MemLocation>() == 8);
    assert!(size_of::<MemcpyAttributes>() == 24);
    assert!(size_of::<Uuid>() == 16);
    assert!(size_of::<Handle>() == size_of::<*mut u8>());
    // The driver's sizes are size_t, and its device addresses have 64 bits.
    assert!(size_of::<usize>() == 8);
};
