//! The CUDA driver, loaded at run time: one table of entry points, no link-time dependency, no panic without it.
//!
//! `cuMemcpyBatchAsync` has had two ABIs under one name. `cuGetProcAddress_v2` returns the ABI of the requested
//! version, so this one build works with drivers of CUDA 12 and 13. A driver older than the requested version may
//! return its own, earlier ABI, so nothing newer than the driver is requested.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::sync::OnceLock;

use kvdepot_core::{Error, ErrorKind, Result};
use libloading::Library;

use crate::cuda::types::{
    BATCH_VERSION, BATCH_VERSION_2, CuResult, DevicePtr, Handle, MEM_GET_HANDLE_VERSION, MemcpyAttributes,
    NOT_SUPPORTED, OUT_OF_MEMORY, SUCCESS, Uuid,
};

/// The name of the driver's library. Not `libcuda.so`, which is the toolkit's stub where there is no driver.
const LIBRARY: &str = "libcuda.so.1";
/// The oldest supported driver: CUDA 12.0.
const VERSION_MIN: c_int = 12_000;

macro_rules! entry_points {
    (
        required { $( $name:ident = $symbol:literal ( $($arg:ty),* ); )* }
        versioned { $( $vname:ident = $vsymbol:literal, $version:expr, ( $($varg:ty),* ); )* }
    ) => {
        /// Entry points of the driver.
        pub(crate) struct Table {
            $( pub(crate) $name: unsafe extern "C" fn($($arg),*) -> CuResult, )*
            $( pub(crate) $vname: Option<unsafe extern "C" fn($($varg),*) -> CuResult>, )*
        }

        impl Table {
            /// Finds the entry points. Also returns the driver's version and the result of the call that queried it.
            ///
            /// # Safety
            /// The library is a CUDA driver, or behaves like one.
            unsafe fn find(library: &Library) -> Result<(Self, c_int, CuResult)> {
                // SAFETY: each type is the one that cuda.h gives to that name; the library is never unloaded.
                unsafe {
                    let find = symbol::<GetProcAddress>(library, "cuGetProcAddress_v2")?;
                    let (driver, asked) = version_of(library)?;
                    $( let $name = symbol::<unsafe extern "C" fn($($arg),*) -> CuResult>(library, $symbol)?; )*
                    $( let $vname = versioned(find, $vsymbol, $version, driver).map(|address| {
                        std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($varg),*) -> CuResult>(address)
                    }); )*
                    Ok((Self { $( $name, )* $( $vname, )* }, driver, asked))
                }
            }
        }
    };
}

type GetProcAddress =
    unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> CuResult;

entry_points! {
    required {
        init = "cuInit"(c_uint);
        get_error_name = "cuGetErrorName"(CuResult, *mut *const c_char);
        device_get_count = "cuDeviceGetCount"(*mut c_int);
        device_get = "cuDeviceGet"(*mut c_int, c_int);
        device_get_name = "cuDeviceGetName"(*mut c_char, c_int, c_int);
        device_get_uuid = "cuDeviceGetUuid_v2"(*mut Uuid, c_int);
        device_get_pci_bus_id = "cuDeviceGetPCIBusId"(*mut c_char, c_int, c_int);
        device_get_attribute = "cuDeviceGetAttribute"(*mut c_int, c_int, c_int);
        primary_context_retain = "cuDevicePrimaryCtxRetain"(*mut Handle, c_int);
        primary_context_release = "cuDevicePrimaryCtxRelease_v2"(c_int);
        context_push = "cuCtxPushCurrent_v2"(Handle);
        context_pop = "cuCtxPopCurrent_v2"(*mut Handle);
        thread_exchange_capture_mode = "cuThreadExchangeStreamCaptureMode"(*mut c_int);
        stream_priority_range = "cuCtxGetStreamPriorityRange"(*mut c_int, *mut c_int);
        mem_alloc = "cuMemAlloc_v2"(*mut DevicePtr, usize);
        mem_free = "cuMemFree_v2"(DevicePtr);
        mem_get_address_range = "cuMemGetAddressRange_v2"(*mut DevicePtr, *mut usize, DevicePtr);
        mem_host_alloc = "cuMemHostAlloc"(*mut *mut c_void, usize, c_uint);
        mem_free_host = "cuMemFreeHost"(*mut c_void);
        mem_host_register = "cuMemHostRegister_v2"(*mut c_void, usize, c_uint);
        mem_host_unregister = "cuMemHostUnregister"(*mut c_void);
        mem_host_get_device_pointer = "cuMemHostGetDevicePointer_v2"(*mut DevicePtr, *mut c_void, c_uint);
        memcpy_to_device = "cuMemcpyHtoDAsync_v2"(DevicePtr, *const c_void, usize, Handle);
        memcpy_to_host = "cuMemcpyDtoHAsync_v2"(*mut c_void, DevicePtr, usize, Handle);
        stream_create = "cuStreamCreateWithPriority"(*mut Handle, c_uint, c_int);
        stream_destroy = "cuStreamDestroy_v2"(Handle);
        stream_synchronize = "cuStreamSynchronize"(Handle);
        stream_wait_event = "cuStreamWaitEvent"(Handle, Handle, c_uint);
        event_create = "cuEventCreate"(*mut Handle, c_uint);
        event_destroy = "cuEventDestroy_v2"(Handle);
        event_record = "cuEventRecord"(Handle, Handle);
        event_query = "cuEventQuery"(Handle);
        event_synchronize = "cuEventSynchronize"(Handle);
        module_load_data = "cuModuleLoadData"(*mut Handle, *const c_void);
        module_unload = "cuModuleUnload"(Handle);
        module_get_function = "cuModuleGetFunction"(*mut Handle, Handle, *const c_char);
        launch_kernel = "cuLaunchKernel"(Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void);
    }
    versioned {
        mem_get_handle = "cuMemGetHandleForAddressRange", MEM_GET_HANDLE_VERSION, (*mut c_void, DevicePtr, usize, c_int, u64);
        batch_1 = "cuMemcpyBatchAsync", BATCH_VERSION, (*const DevicePtr, *const DevicePtr, *const usize, usize, *const MemcpyAttributes, *const usize, usize, *mut usize, Handle);
        batch_2 = "cuMemcpyBatchAsync", BATCH_VERSION_2, (*const DevicePtr, *const DevicePtr, *const usize, usize, *const MemcpyAttributes, *const usize, usize, Handle);
    }
}

/// # Safety
/// `T` is the type of the named function.
unsafe fn symbol<T: Copy>(library: &Library, name: &'static str) -> Result<T> {
    let lacks = |e: libloading::Error| {
        Error::new(ErrorKind::Unsupported, "the CUDA driver lacks an entry point, GPU copy engines are off")
            .with("symbol", name)
            .with_source(e)
    };
    // SAFETY: the caller's contract.
    unsafe { library.get::<T>(name.as_bytes()).map(|found| *found).map_err(lacks) }
}

/// Returns the newest CUDA version that the driver supports, and the result of the query.
///
/// # Safety
/// As for `Table::find`.
unsafe fn version_of(library: &Library) -> Result<(c_int, CuResult)> {
    type GetVersion = unsafe extern "C" fn(*mut c_int) -> CuResult;
    let mut version = 0;
    // SAFETY: the type is the one of cuda.h; the pointer lives during the call.
    let asked = unsafe { symbol::<GetVersion>(library, "cuDriverGetVersion")?(&raw mut version) };
    Ok((version, asked))
}

/// Returns the function of CUDA `version`, unless the driver is older: up to 12.9 a driver would answer with the ABI
/// that it has.
///
/// # Safety
/// `find` is the driver's `cuGetProcAddress_v2`.
unsafe fn versioned(find: GetProcAddress, name: &str, version: c_int, driver: c_int) -> Option<*mut c_void> {
    if driver < version {
        return None;
    }
    let name = CString::new(name).ok()?;
    let (mut address, mut status) = (std::ptr::null_mut(), 0);
    // SAFETY: all pointers live during the call.
    let code = unsafe { find(name.as_ptr(), &raw mut address, version, 0, &raw mut status) };
    (code == SUCCESS && !address.is_null()).then_some(address)
}

/// A loaded driver. It lives until the process ends: its library must not be unloaded while the engine's own CUDA uses
/// it.
pub struct Driver {
    table: Table,
    version: c_int,
    _library: Library,
}

impl Driver {
    /// Loads the machine's driver. The result is the same for the complete process.
    pub fn load() -> Result<&'static Self> {
        static DRIVER: OnceLock<Result<&'static Driver>> = OnceLock::new();
        DRIVER.get_or_init(|| Self::load_from(Path::new(LIBRARY))).clone()
    }

    /// Loads the driver in a given library. Each call makes a table that lives as long as the process.
    pub fn load_from(path: &Path) -> Result<&'static Self> {
        // SAFETY: the initialisers of a CUDA driver may run in any thread at any time.
        let library = unsafe { Library::new(path) }.map_err(|e| {
            Error::new(
                ErrorKind::Unavailable,
                format!("CUDA driver not found: {}, GPU copy engines are off", first_line(&e.to_string())),
            )
        })?;
        // SAFETY: callers that name another library than the driver's are responsible for it.
        let (table, version, asked) = unsafe { Table::find(&library) }?;
        let driver = Self { table, version, _library: library };
        driver.check("cuDriverGetVersion", asked)?;
        if version < VERSION_MIN {
            let text = "the CUDA driver is too old, GPU copy engines are off: update it to one for CUDA 12.0 or later";
            return Err(Error::new(ErrorKind::Unsupported, text).with("version", driver.version_text()));
        }
        // SAFETY: may be called any number of times.
        driver.check("cuInit", unsafe { (driver.table.init)(0) })?;
        Ok(Box::leak(Box::new(driver)))
    }

    pub(crate) fn table(&self) -> &Table {
        &self.table
    }

    /// Returns the newest CUDA version that the driver supports: 13000 is 13.0.
    pub fn version(&self) -> i32 {
        self.version
    }

    /// Returns the version as text.
    pub fn version_text(&self) -> String {
        format!("{}.{}", self.version / 1000, self.version % 1000 / 10)
    }

    /// Returns whether the driver copies batches.
    pub fn has_batch(&self) -> bool {
        self.table.batch_1.is_some() || self.table.batch_2.is_some()
    }

    /// Converts a return code into a result that names the call.
    pub(crate) fn check(&self, call: &'static str, code: CuResult) -> Result<()> {
        if code == SUCCESS {
            return Ok(());
        }
        let kind = match code {
            // Not `NoSpace`, which to a task means that the pool is full.
            OUT_OF_MEMORY => ErrorKind::Unavailable,
            NOT_SUPPORTED => ErrorKind::Unsupported,
            _ => ErrorKind::Io,
        };
        Err(Error::new(kind, format!("{call} failed"))
            .with("error", self.error_name(code))
            .with("code", code))
    }

    fn error_name(&self, code: CuResult) -> String {
        let mut name = std::ptr::null();
        // SAFETY: the pointer lives during the call; what it is set to is a constant of the driver's.
        unsafe {
            if (self.table.get_error_name)(code, &raw mut name) == SUCCESS && !name.is_null() {
                return CStr::from_ptr(name).to_string_lossy().into_owned();
            }
        }
        "unknown".into()
    }
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or(text)
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Driver(CUDA {})", self.version_text())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_driver_there_is_one_sentence() {
        let error = Driver::load_from(Path::new("/nowhere/libcuda.so.1")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        let text = error.to_string();
        assert!(
            text.starts_with("CUDA driver not found: ") && text.ends_with("GPU copy engines are off"),
            "{text}"
        );
        assert_eq!(text.lines().count(), 1);
    }

    #[test]
    fn a_library_that_is_no_driver_is_refused() {
        let error = Driver::load_from(Path::new("libc.so.6")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("symbol=cuGetProcAddress_v2"), "{error}");
    }
}
