//! Open devices and their protection domains.

use std::fmt;
use std::mem::MaybeUninit;
use std::sync::Arc;

use kvdepot_core::Result;

use crate::device::Device;
use crate::failure;
use crate::sys::{ibv_context, ibv_device_attr, ibv_pd};
use crate::table::Table;

/// An open device. Every object made on it keeps it open. Cheap to clone.
#[derive(Clone)]
pub struct Context {
    inner: Arc<Inner>,
}

struct Inner {
    device: Device,
    name: String,
    context: *mut ibv_context,
}

// SAFETY: the library's calls on a context are thread-safe by its own contract.
unsafe impl Send for Inner {}
// SAFETY: as for Send.
unsafe impl Sync for Inner {}

/// The limits of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Version of the firmware.
    pub firmware: String,
    /// Number of ports, which are numbered from 1.
    pub ports: u8,
    /// Largest memory region.
    pub region_bytes_max: u64,
    /// Largest number of outstanding work requests of one queue.
    pub queue_requests_max: u32,
    /// Largest number of entries of a completion queue.
    pub completions_max: u32,
    /// Largest number of pieces of local memory in one work request.
    pub sges_max: u32,
    /// Largest number of READs that one queue pair may have in flight.
    pub reads_max: u8,
}

impl Context {
    /// Opens `device`.
    pub fn open(device: &Device) -> Result<Self> {
        // SAFETY: the device is valid while `device` is, which the context keeps.
        let context = unsafe { (device.table().ibv_open_device)(device.raw()) };
        let name = device.name();
        if context.is_null() {
            return Err(failure::last_os("ibv_open_device", &name));
        }
        Ok(Self { inner: Arc::new(Inner { device: device.clone(), name, context }) })
    }

    /// Returns the device.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// Returns the device's name.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Returns the device's limits.
    pub fn limits(&self) -> Result<DeviceLimits> {
        let mut attributes = MaybeUninit::<ibv_device_attr>::zeroed();
        // SAFETY: the context is open, and the call fills the attributes.
        let rc = unsafe { (self.table().ibv_query_device)(self.raw(), attributes.as_mut_ptr()) };
        if rc != 0 {
            return Err(failure::from_errno("ibv_query_device", self.name(), rc));
        }
        // SAFETY: all-zero bytes are a value of this type, and the call succeeded.
        let attributes = unsafe { attributes.assume_init() };
        let positive = |value: i32| u32::try_from(value).unwrap_or(0);
        let firmware = attributes.fw_ver.iter().take_while(|&&c| c != 0);
        Ok(DeviceLimits {
            firmware: firmware.map(|&c| char::from(c as u8)).collect(),
            ports: attributes.phys_port_cnt,
            region_bytes_max: attributes.max_mr_size,
            queue_requests_max: positive(attributes.max_qp_wr),
            completions_max: positive(attributes.max_cqe),
            sges_max: positive(attributes.max_sge),
            reads_max: u8::try_from(attributes.max_qp_rd_atom).unwrap_or(u8::MAX),
        })
    }

    pub(crate) fn table(&self) -> &Table {
        self.inner.device.table()
    }

    pub(crate) fn raw(&self) -> *mut ibv_context {
        self.inner.context
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: open, and closed once; all objects on it hold it, so none is left.
        unsafe { (self.device.table().ibv_close_device)(self.context) };
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Context({})", self.name())
    }
}

/// A protection domain: queue pairs can only access regions of their own domain. Cheap to clone.
#[derive(Clone)]
pub struct Pd {
    inner: Arc<PdInner>,
}

struct PdInner {
    context: Context,
    pd: *mut ibv_pd,
}

// SAFETY: as for the context.
unsafe impl Send for PdInner {}
// SAFETY: as for Send.
unsafe impl Sync for PdInner {}

impl Pd {
    /// Makes a new domain.
    pub fn new(context: &Context) -> Result<Self> {
        // SAFETY: the context is open.
        let pd = unsafe { (context.table().ibv_alloc_pd)(context.raw()) };
        if pd.is_null() {
            return Err(failure::last_os("ibv_alloc_pd", context.name()));
        }
        Ok(Self { inner: Arc::new(PdInner { context: context.clone(), pd }) })
    }

    /// Returns the device of the domain.
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    pub(crate) fn raw(&self) -> *mut ibv_pd {
        self.inner.pd
    }
}

impl Drop for PdInner {
    fn drop(&mut self) {
        // SAFETY: allocated, and freed once; regions and queue pairs hold it, so none is left.
        unsafe { (self.context.table().ibv_dealloc_pd)(self.pd) };
    }
}

impl fmt::Debug for Pd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pd({})", self.context().name())
    }
}
