//! The library's functions, looked up once.

use std::ffi::{c_int, c_void};
use std::path::Path;

use kvdepot_core::{Error, ErrorKind, Result};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::sys::*;

/// The library installed by rdma-core.
const LIBRARY: &str = "libibverbs.so.1";

macro_rules! table {
    (
        required { $($name:ident: fn($($arg:ty),*) $(-> $ret:ty)?;)* }
        optional { $($opt:ident: fn($($oarg:ty),*) $(-> $oret:ty)?;)* }
    ) => {
        /// Functions by their C names. The library stays loaded until the process ends: providers keep threads and
        /// thread-local data that need its code.
        #[allow(clippy::struct_field_names, reason = "C names")]
        pub(crate) struct Table {
            $(pub(crate) $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
            $(pub(crate) $opt: Option<unsafe extern "C" fn($($oarg),*) $(-> $oret)?>,)*
        }

        impl Table {
            fn from_library(library: &Library, path: &str) -> Result<Self> {
                Ok(Self {
                    $($name: {
                        // SAFETY: the type is the header's declaration of this name.
                        let symbol = unsafe { library.get::<unsafe extern "C" fn($($arg),*) $(-> $ret)?>(
                            concat!(stringify!($name), "\0").as_bytes(),
                        ) };
                        *symbol.map_err(|e| missing_symbol(path, stringify!($name), e))?
                    },)*
                    $($opt: {
                        // SAFETY: as above.
                        let symbol = unsafe { library.get::<unsafe extern "C" fn($($oarg),*) $(-> $oret)?>(
                            concat!(stringify!($opt), "\0").as_bytes(),
                        ) };
                        symbol.ok().map(|symbol| *symbol)
                    },)*
                })
            }
        }
    };
}

table! {
    required {
        ibv_get_device_list: fn(*mut c_int) -> *mut *mut ibv_device;
        ibv_free_device_list: fn(*mut *mut ibv_device);
        ibv_get_device_guid: fn(*mut ibv_device) -> u64;
        ibv_open_device: fn(*mut ibv_device) -> *mut ibv_context;
        ibv_close_device: fn(*mut ibv_context) -> c_int;
        ibv_query_device: fn(*mut ibv_context, *mut ibv_device_attr) -> c_int;
        ibv_query_port: fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
        ibv_query_gid: fn(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int;
        ibv_alloc_pd: fn(*mut ibv_context) -> *mut ibv_pd;
        ibv_dealloc_pd: fn(*mut ibv_pd) -> c_int;
        ibv_reg_mr: fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
        ibv_dereg_mr: fn(*mut ibv_mr) -> c_int;
        ibv_create_comp_channel: fn(*mut ibv_context) -> *mut ibv_comp_channel;
        ibv_destroy_comp_channel: fn(*mut ibv_comp_channel) -> c_int;
        ibv_create_cq: fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
        ibv_destroy_cq: fn(*mut ibv_cq) -> c_int;
        ibv_get_cq_event: fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
        ibv_ack_cq_events: fn(*mut ibv_cq, u32);
        ibv_create_srq: fn(*mut ibv_pd, *mut ibv_srq_init_attr) -> *mut ibv_srq;
        ibv_destroy_srq: fn(*mut ibv_srq) -> c_int;
        ibv_create_qp: fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
        ibv_modify_qp: fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
        ibv_query_qp: fn(*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr) -> c_int;
        ibv_destroy_qp: fn(*mut ibv_qp) -> c_int;
    }
    optional {
        // rdma-core 34: registers another device's memory as a dma-buf.
        ibv_reg_dmabuf_mr: fn(*mut ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ibv_mr;
        // rdma-core 34: access flags that a device may ignore, such as relaxed ordering.
        ibv_reg_mr_iova2: fn(*mut ibv_pd, *mut c_void, usize, u64, u32) -> *mut ibv_mr;
        // rdma-core 34: a GID with its type, which tells RoCE version 1 from 2.
        _ibv_query_gid_ex: fn(*mut ibv_context, u32, u32, *mut ibv_gid_entry, u32, usize) -> c_int;
    }
}

impl Table {
    /// Loads `path`, or the system's libibverbs.
    pub(crate) fn load(path: Option<&Path>) -> Result<Self> {
        let name = path.map_or_else(|| LIBRARY.to_owned(), |path| path.display().to_string());
        // SAFETY: loading runs the library's constructors; those of a libibverbs require nothing from the caller.
        let library = unsafe { Library::open(Some(&name), RTLD_NOW | RTLD_LOCAL) }.map_err(|e| {
            Error::new(
                ErrorKind::Unsupported,
                "libibverbs was not found; for RDMA install rdma-core (Debian: ibverbs-providers), or use a \
                 transport without RDMA",
            )
            .with("library", &name)
            .with_source(e)
        })?;
        let table = Self::from_library(&library, &name);
        std::mem::forget(library);
        table
    }
}

impl std::fmt::Debug for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Table")
    }
}

fn missing_symbol(path: &str, symbol: &str, source: libloading::Error) -> Error {
    Error::new(
        ErrorKind::Unsupported,
        "the library is not a usable libibverbs: a function is missing; install rdma-core 34 or newer",
    )
    .with("library", path)
    .with("symbol", symbol)
    .with_source(source)
}
