//! What is registered with the adapter.

use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use kvdepot_core::{Error, Result};
use kvdepot_verbs::{Access, Mr, Pd};
use parking_lot::RwLock;

use crate::cuda::context::Context;

/// What the driver exports as a dma-buf is made of whole pages.
const PAGE_BYTES: u64 = 4096;
/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
const HANDLE_DMA_BUF: i32 = 1;

/// Regions of one kind of memory, by address.
pub(crate) type Known = RwLock<Vec<Arc<Mr>>>;

/// What an engine registered ahead, and how to register more.
#[derive(Debug)]
pub(crate) struct Regions {
    pub(crate) pd: Pd,
    pub(crate) context: Arc<Context>,
    pub(crate) host: Known,
    pub(crate) device: Known,
}

impl Regions {
    pub(crate) fn new(pd: &Pd, context: &Arc<Context>) -> Arc<Self> {
        Arc::new(Self {
            pd: pd.clone(),
            context: Arc::clone(context),
            host: Known::default(),
            device: Known::default(),
        })
    }

    /// # Safety
    /// As for `Mr::register`.
    pub(crate) unsafe fn register_host(&self, address: u64, len: usize) -> Result<Arc<Mr>> {
        // SAFETY: the caller's contract.
        unsafe { Mr::register(&self.pd, address as *mut u8, len, Access::LOCAL) }.map(Arc::new)
    }

    /// Registers memory of the device: by dma-buf where driver and adapter can, else by its address (peer memory). The
    /// context is current.
    ///
    /// # Safety
    /// As for `Mr::register`, for memory of the device.
    pub(crate) unsafe fn register_device(&self, address: u64, len: usize) -> Result<Arc<Mr>> {
        let start = address & !(PAGE_BYTES - 1);
        let end = (address + len as u64).next_multiple_of(PAGE_BYTES);
        if let Some(fd) = self.export(start, (end - start) as usize) {
            let offset = address - start;
            // SAFETY: the caller's contract.
            let mr = unsafe { Mr::register_dmabuf(&self.pd, fd.as_fd(), offset, len, address, Access::ALL) };
            if let Ok(mr) = mr {
                return Ok(Arc::new(mr));
            }
        }
        // SAFETY: the caller's contract.
        unsafe { Mr::register_peer(&self.pd, address, len, Access::ALL) }.map(Arc::new)
    }

    /// A dma-buf of the device's memory, if the driver can make one.
    fn export(&self, address: u64, len: usize) -> Option<OwnedFd> {
        let export = self.context.table().mem_get_handle?;
        let mut fd = -1;
        // SAFETY: the place lives during the call and has room for a descriptor.
        let code = unsafe { export((&raw mut fd).cast(), address, len, HANDLE_DMA_BUF, 0) };
        // SAFETY: a new descriptor that nobody else has.
        (code == 0 && fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// The allocation of the device's memory that an address lies in. The context is current.
    fn allocation(&self, address: u64) -> Result<(u64, usize)> {
        let (mut base, mut len) = (0, 0);
        // SAFETY: the pointers live during the call.
        let code =
            unsafe { (self.context.table().mem_get_address_range)(&raw mut base, &raw mut len, address) };
        self.context.check("cuMemGetAddressRange_v2", code).map_err(|e: Error| e.with("address", address))?;
        Ok((base, len))
    }
}

/// Adds a region to those that are known.
pub(crate) fn add(known: &Known, mr: &Arc<Mr>) {
    let mut regions = known.write();
    let at = regions.partition_point(|other| other.address() < mr.address());
    regions.insert(at, Arc::clone(mr));
}

pub(crate) fn remove(known: &Known, mr: &Arc<Mr>) {
    known.write().retain(|other| !Arc::ptr_eq(other, mr));
}

/// What one batch uses: regions that are known, and those made for it. It keeps them until it is dropped, so drop it when
/// the adapter is through.
#[derive(Debug)]
pub(crate) struct InUse<'a> {
    regions: &'a Regions,
    host: Vec<Arc<Mr>>,
    device: Vec<Arc<Mr>>,
}

impl<'a> InUse<'a> {
    pub(crate) fn new(regions: &'a Regions) -> Self {
        Self { regions, host: regions.host.read().clone(), device: regions.device.read().clone() }
    }

    /// The region of host memory that `address` lies in, and how much of `len` bytes it covers.
    ///
    /// # Safety
    /// The range is valid until this is dropped.
    pub(crate) unsafe fn host(&mut self, address: u64, len: usize) -> Result<(Arc<Mr>, usize)> {
        if let Some(found) = covering(&self.host, address, len) {
            return Ok(found);
        }
        // SAFETY: the caller's contract.
        let mr = unsafe { self.regions.register_host(address, len) }?;
        insert(&mut self.host, &mr);
        Ok((mr, len))
    }

    /// The region of the device's memory that `address` lies in, and how much of `len` bytes it covers. The context is
    /// current.
    ///
    /// # Safety
    /// As for `host`.
    pub(crate) unsafe fn device(&mut self, address: u64, len: usize) -> Result<(Arc<Mr>, usize)> {
        if let Some(found) = covering(&self.device, address, len) {
            return Ok(found);
        }
        let (base, allocated) = self.regions.allocation(address)?;
        // SAFETY: what holds a valid range is an allocation that lives as long.
        let mr = unsafe { self.regions.register_device(base, allocated) }?;
        insert(&mut self.device, &mr);
        let left = (base + allocated as u64 - address) as usize;
        Ok((mr, len.min(left)))
    }

    /// Forgets regions while the adapter may still use them: a mistake that tests make.
    pub(crate) fn end_early(&mut self) {
        self.host.clear();
        self.device.clear();
    }
}

fn insert(regions: &mut Vec<Arc<Mr>>, mr: &Arc<Mr>) {
    let at = regions.partition_point(|other| other.address() < mr.address());
    regions.insert(at, Arc::clone(mr));
}

/// Regions do not contain one another, but those made for a batch may overlap others: the last that begins at or before
/// the address, and those before it that still reach it.
fn covering(regions: &[Arc<Mr>], address: u64, len: usize) -> Option<(Arc<Mr>, usize)> {
    let end = regions.partition_point(|mr| mr.address() <= address);
    let found = regions[..end].iter().rev().find(|mr| mr.covers(address, 1))?;
    let left = (found.address() + found.len() as u64 - address) as usize;
    Some((Arc::clone(found), len.min(left)))
}
