//! Entry points: memory of device and host.

use std::ffi::{c_int, c_uint};
use std::os::fd::IntoRawFd;

use crate::abi::put;
use crate::code;
use crate::world::call;

/// Flags of a registration that other contexts and kernels can use.
const PORTABLE_DEVICEMAP: c_uint = 3;
/// A registered range must be a multiple of this.
const PAGE_BYTES: u64 = 4096;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, len: usize) -> c_int {
    call("cuMemAlloc_v2", |_, state| {
        if len == 0 {
            return Err(code::INVALID_VALUE);
        }
        let allocated = state.memory.allocate_device(len);
        // SAFETY: the API's contract.
        unsafe { put(address, allocated) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFree_v2(address: u64) -> c_int {
    call("cuMemFree_v2", |_, state| {
        if state.memory.free_device(address) {
            return Ok(());
        }
        state.violation(format!("device memory freed that is not there: {address:#x}"));
        Err(code::INVALID_VALUE)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetAddressRange_v2(base: *mut u64, len: *mut usize, address: u64) -> c_int {
    call("cuMemGetAddressRange_v2", |_, state| {
        let (found, bytes) = state.memory.allocation(address).ok_or(code::NOT_FOUND)?;
        // SAFETY: the API's contract.
        unsafe { put(base, found).and_then(|()| put(len, bytes as usize)) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostAlloc(address: *mut u64, len: usize, _flags: c_uint) -> c_int {
    call("cuMemHostAlloc", |_, state| {
        if len == 0 {
            return Err(code::INVALID_VALUE);
        }
        let allocated = state.memory.allocate_pinned(len);
        // SAFETY: the API's contract.
        unsafe { put(address, allocated) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeHost(address: u64) -> c_int {
    call("cuMemFreeHost", |_, state| {
        if state.memory.free_pinned(address) {
            return Ok(());
        }
        state.violation(format!("host memory freed that is not there: {address:#x}"));
        Err(code::INVALID_VALUE)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostRegister_v2(address: u64, len: usize, flags: c_uint) -> c_int {
    call("cuMemHostRegister_v2", |_, state| {
        let len = len as u64;
        if flags != PORTABLE_DEVICEMAP || len == 0 || !(address | len).is_multiple_of(PAGE_BYTES) {
            state.violation(format!(
                "a registration with bad arguments: {address:#x}, {len} bytes, flags {flags}"
            ));
            return Err(code::INVALID_VALUE);
        }
        if !state.memory.register(address, len) {
            return Err(code::ALREADY_REGISTERED);
        }
        // The real driver pins: every page comes into memory, and calls of other threads wait meanwhile, as they do here.
        state.longest_registration = state.longest_registration.max(len);
        // SAFETY: a range of the caller's; its bytes stay as they are. Where the kernel refuses, nothing is touched.
        let _ = unsafe {
            rustix::mm::madvise(address as *mut _, len as usize, rustix::mm::Advice::LinuxPopulateWrite)
        };
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostUnregister(address: u64) -> c_int {
    call("cuMemHostUnregister", |_, state| {
        if state.memory.unregister(address) {
            return Ok(());
        }
        state.violation(format!("memory unregistered that is not: {address:#x}"));
        Err(code::NOT_REGISTERED)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostGetDevicePointer_v2(mapped: *mut u64, address: u64, flags: c_uint) -> c_int {
    call("cuMemHostGetDevicePointer_v2", |_, state| {
        if flags != 0 {
            return Err(code::INVALID_VALUE);
        }
        let found = state.memory.mapped(address).ok_or(code::INVALID_VALUE)?;
        // SAFETY: the API's contract.
        unsafe { put(mapped, found) }
    })
}

/// How the file that stands for a dma-buf begins; address in this process and length follow. The stand-in for libibverbs
/// knows it.
const PEER_MAGIC: [u8; 8] = *b"kvdepeer";
/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
const HANDLE_DMA_BUF: c_int = 1;

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemGetHandleForAddressRange(
    handle: *mut c_int,
    address: u64,
    len: usize,
    kind: c_int,
    flags: u64,
) -> c_int {
    call("cuMemGetHandleForAddressRange", |_, state| {
        if !state.memory.can_export(address, len as u64) || kind != HANDLE_DMA_BUF || flags != 0 {
            return Err(code::INVALID_VALUE);
        }
        let file = rustix::fs::memfd_create("standin-dma-buf", rustix::fs::MemfdFlags::CLOEXEC)
            .map_err(|_| code::OUT_OF_MEMORY)?;
        let mut bytes = PEER_MAGIC.to_vec();
        bytes.extend((state.memory.pointer(address) as u64).to_le_bytes());
        bytes.extend((len as u64).to_le_bytes());
        rustix::io::write(&file, &bytes).map_err(|_| code::OUT_OF_MEMORY)?;
        // SAFETY: the API's contract; the descriptor is the caller's from here on.
        unsafe { put(handle, file.into_raw_fd()) }
    })
}
