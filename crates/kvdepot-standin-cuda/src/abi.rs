//! Entry points: driver, devices, contexts, modules, and the table by name.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicI32, Ordering};

use crate::control::DEVICE_COUNT;
use crate::kernels::Kernel;
use crate::world::{CAPTURE_MODE, CONTEXTS, call, context_handle, device_of, world};
use crate::{abi_copy, abi_memory, code};

/// Version that `cuDriverGetVersion` returns and that `cuGetProcAddress_v2` uses.
pub(crate) static DRIVER_VERSION: AtomicI32 = AtomicI32::new(13_000);

/// First bytes of a device's UUID; the ordinal follows.
const UUID_BYTES: [u8; 15] = *b"kvdepot-standin";

/// Writes a result if there is a place for it.
///
/// # Safety
/// `to` is null or may be written.
pub(crate) unsafe fn put<T>(to: *mut T, value: T) -> Result<(), i32> {
    if to.is_null() {
        return Err(code::INVALID_VALUE);
    }
    // SAFETY: the caller's contract.
    unsafe { to.write(value) };
    Ok(())
}

fn answer(result: Result<(), i32>) -> i32 {
    result.map_or_else(|code| code, |()| code::SUCCESS)
}

fn device(ordinal: c_int) -> Result<usize, i32> {
    let ordinal = usize::try_from(ordinal).map_err(|_| code::INVALID_DEVICE)?;
    if ordinal < DEVICE_COUNT { Ok(ordinal) } else { Err(code::INVALID_DEVICE) }
}

#[unsafe(no_mangle)]
extern "C" fn cuInit(flags: c_uint) -> c_int {
    if flags == 0 { code::SUCCESS } else { code::INVALID_VALUE }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_int {
    // SAFETY: the API's contract.
    answer(unsafe { put(version, DRIVER_VERSION.load(Ordering::Relaxed)) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(error: c_int, name: *mut *const c_char) -> c_int {
    let text = match error {
        code::SUCCESS => c"CUDA_SUCCESS",
        code::INVALID_VALUE => c"CUDA_ERROR_INVALID_VALUE",
        code::OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
        code::INVALID_CONTEXT => c"CUDA_ERROR_INVALID_CONTEXT",
        code::INVALID_HANDLE => c"CUDA_ERROR_INVALID_HANDLE",
        code::ILLEGAL_ADDRESS => c"CUDA_ERROR_ILLEGAL_ADDRESS",
        code::LAUNCH_FAILED => c"CUDA_ERROR_LAUNCH_FAILED",
        _ => return code::INVALID_VALUE,
    };
    // SAFETY: the API's contract.
    answer(unsafe { put(name, text.as_ptr()) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    // SAFETY: the API's contract.
    answer(unsafe { put(count, DEVICE_COUNT as c_int) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(found: *mut c_int, ordinal: c_int) -> c_int {
    // SAFETY: the API's contract.
    answer(device(ordinal).and_then(|_| unsafe { put(found, ordinal) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, ordinal: c_int) -> c_int {
    let text = format!("stand-in {ordinal}\0");
    // SAFETY: the API's contract: `name` has room for `len` bytes.
    answer(device(ordinal).and_then(|_| unsafe { put_text(name, len, &text) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetPCIBusId(name: *mut c_char, len: c_int, ordinal: c_int) -> c_int {
    let text = format!("0000:{:02X}:00.0\0", ordinal + 1);
    // SAFETY: the API's contract: `name` has room for `len` bytes.
    answer(device(ordinal).and_then(|_| unsafe { put_text(name, len, &text) }))
}

/// # Safety
/// `to` has room for `len` bytes.
unsafe fn put_text(to: *mut c_char, len: c_int, text: &str) -> Result<(), i32> {
    if to.is_null() || usize::try_from(len).map_or(true, |len| len < text.len()) {
        return Err(code::INVALID_VALUE);
    }
    // SAFETY: the text, its zero included, is no longer than `len`.
    unsafe { std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, text.len()) };
    Ok(())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], ordinal: c_int) -> c_int {
    let mut bytes = [0; 16];
    bytes[..15].copy_from_slice(&UUID_BYTES);
    bytes[15] = ordinal as u8;
    // SAFETY: the API's contract.
    answer(device(ordinal).and_then(|_| unsafe { put(uuid, bytes) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, ordinal: c_int) -> c_int {
    // Multiprocessors, compute capability (major, minor). Every other attribute is a capability.
    let found = match attribute {
        16 => 132,
        75 => 9,
        76 => 0,
        _ => 1,
    };
    // SAFETY: the API's contract.
    answer(device(ordinal).and_then(|_| unsafe { put(value, found) }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut u64, ordinal: c_int) -> c_int {
    answer(device(ordinal).and_then(|device| {
        let world = world(device).ok_or(code::INVALID_DEVICE)?;
        let mut state = world.state.lock();
        if let Some(code) = state.faults.called("cuDevicePrimaryCtxRetain") {
            return Err(code);
        }
        state.retained += 1;
        // SAFETY: the API's contract.
        unsafe { put(context, context_handle(device)) }
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(ordinal: c_int) -> c_int {
    answer(device(ordinal).and_then(|device| {
        let mut state = world(device).ok_or(code::INVALID_DEVICE)?.state.lock();
        if state.retained == 0 {
            state.violation("a context was released more often than retained".into());
            return Err(code::INVALID_CONTEXT);
        }
        state.retained -= 1;
        Ok(())
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxPushCurrent_v2(context: u64) -> c_int {
    let Some(device) = device_of(context) else { return code::INVALID_CONTEXT };
    CONTEXTS.with_borrow_mut(|contexts| contexts.push(device));
    code::SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxPopCurrent_v2(context: *mut u64) -> c_int {
    let Some(device) = CONTEXTS.with_borrow_mut(Vec::pop) else { return code::INVALID_CONTEXT };
    if !context.is_null() {
        // SAFETY: the API's contract.
        unsafe { context.write(context_handle(device)) };
    }
    code::SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int) -> c_int {
    if mode.is_null() {
        return code::INVALID_VALUE;
    }
    // SAFETY: the API's contract.
    unsafe { mode.write(CAPTURE_MODE.replace(mode.read())) };
    code::SUCCESS
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) -> c_int {
    // SAFETY: the API's contract.
    call("cuCtxGetStreamPriorityRange", |_, _| unsafe { put(least, 0).and_then(|()| put(greatest, -5)) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadData(module: *mut u64, image: *const c_char) -> c_int {
    call("cuModuleLoadData", |_, state| {
        if image.is_null() {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: PTX is a text that ends with a zero.
        let text = unsafe { CStr::from_ptr(image) }.to_string_lossy();
        if !text.contains(".version 8.0") || !text.contains(".target sm_80") {
            state.violation("the image is no PTX 8.0 for sm_80".into());
            return Err(code::INVALID_PTX);
        }
        let handle = state.handle();
        state.modules.insert(handle, ());
        // SAFETY: the API's contract.
        unsafe { put(module, handle) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleUnload(module: u64) -> c_int {
    call("cuModuleUnload", |_, state| state.modules.remove(&module).ok_or(code::INVALID_HANDLE))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleGetFunction(function: *mut u64, module: u64, name: *const c_char) -> c_int {
    call("cuModuleGetFunction", |_, state| {
        if name.is_null() || !state.modules.contains_key(&module) {
            return Err(code::INVALID_HANDLE);
        }
        // SAFETY: the API's contract: a text that ends with a zero.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        let kernel = Kernel::named(&name).ok_or(code::NOT_FOUND)?;
        let handle = state.handle();
        state.functions.insert(handle, kernel);
        // SAFETY: the API's contract.
        unsafe { put(function, handle) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetProcAddress_v2(
    name: *const c_char,
    found: *mut *mut c_void,
    version: c_int,
    _flags: u64,
    status: *mut c_int,
) -> c_int {
    if name.is_null() || found.is_null() {
        return code::INVALID_VALUE;
    }
    // SAFETY: the API's contract: a text that ends with a zero.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
    let driver = DRIVER_VERSION.load(Ordering::Relaxed);
    // From 13.0 on, a version above the driver's is an error. Earlier drivers return their newest function.
    if version > driver && driver >= 13_000 {
        return code::INVALID_VALUE;
    }
    let address = match (name.as_ref(), version.min(driver)) {
        ("cuMemcpyBatchAsync", 13_000..) => abi_copy::cuMemcpyBatchAsync_v2 as *mut c_void,
        ("cuMemcpyBatchAsync", 12_080..) => abi_copy::cuMemcpyBatchAsync as *mut c_void,
        ("cuMemGetHandleForAddressRange", 11_070..) => {
            abi_memory::cuMemGetHandleForAddressRange as *mut c_void
        }
        _ => std::ptr::null_mut(),
    };
    // SAFETY: `found` is not null; `status` may be.
    unsafe {
        found.write(address);
        if !status.is_null() {
            status.write(c_int::from(address.is_null()));
        }
    }
    if address.is_null() { code::NOT_FOUND } else { code::SUCCESS }
}
