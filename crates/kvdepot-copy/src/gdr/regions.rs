//! The memory registered with the adapter.

use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_verbs::{Access, Mr, Pd};
use parking_lot::{Mutex, RwLock};

use crate::cuda::context::Context;

/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
const HANDLE_DMA_BUF: i32 = 1;

/// Access to pool memory, which only the adapter reads and writes. Bytes may arrive in any order between completions: a
/// completion is written after them, and a READ that pushes a load's bytes along the bus never passes them.
const HOST_ACCESS: Access = Access { relaxed_ordering: true, ..Access::LOCAL };
/// Access to the device's memory, which the queue pairs address as a peer's.
const DEVICE_ACCESS: Access = Access { relaxed_ordering: true, ..Access::ALL };

/// Regions of one kind of memory, by address.
pub(crate) type Known = RwLock<Vec<Arc<Mr>>>;

/// The regions that an engine registered in advance, and the means to register more.
#[derive(Debug)]
pub(crate) struct Regions {
    pub(crate) pd: Pd,
    pub(crate) context: Arc<Context>,
    pub(crate) host: Known,
    pub(crate) device: Known,
    /// The regions of `device`, with the number of registrations that use each.
    kept: Mutex<Vec<(Arc<Mr>, usize)>>,
    /// The kernel's page size: the driver exports whole pages as a dma-buf.
    page_bytes: u64,
}

impl Regions {
    pub(crate) fn new(pd: &Pd, context: &Arc<Context>, page_bytes: u64) -> Arc<Self> {
        Arc::new(Self {
            pd: pd.clone(),
            context: Arc::clone(context),
            host: Known::default(),
            device: Known::default(),
            kept: Mutex::default(),
            page_bytes,
        })
    }

    /// Returns regions that cover a range of the device's memory until each was passed to `release`. Registrations of
    /// the same range share regions, since a GPU's window on the bus is small. A range that cannot be registered as one
    /// is cut at the ends of allocations: an adapter takes memory of one allocation only, and allocations are often
    /// adjacent. The context is current.
    ///
    /// # Safety
    /// As for `Mr::register`, for memory of the device.
    pub(crate) unsafe fn keep(&self, address: u64, len: usize) -> Result<Vec<Arc<Mr>>> {
        let mut kept = self.kept.lock();
        // SAFETY: the caller's contract.
        let error = match unsafe { self.keep_one(&mut kept, address, len) } {
            Ok(mr) => return Ok(vec![mr]),
            Err(error) => error,
        };
        let parts = self.cut(address, len).filter(|parts| parts.len() > 1).ok_or(error)?;
        let mut regions = Vec::with_capacity(parts.len());
        for (address, len) in parts {
            // SAFETY: a part of the caller's range.
            match unsafe { self.keep_one(&mut kept, address, len) } {
                Ok(mr) => regions.push(mr),
                Err(error) => {
                    regions.iter().for_each(|mr| self.let_go(&mut kept, mr));
                    return Err(error);
                }
            }
        }
        Ok(regions)
    }

    /// Releases one use of a region that `keep` returned.
    pub(crate) fn release(&self, mr: &Arc<Mr>) {
        self.let_go(&mut self.kept.lock(), mr);
    }

    /// # Safety
    /// As for `keep`.
    unsafe fn keep_one(&self, kept: &mut Vec<(Arc<Mr>, usize)>, address: u64, len: usize) -> Result<Arc<Mr>> {
        if let Some((mr, users)) = kept.iter_mut().find(|(mr, _)| (mr.address(), mr.len()) == (address, len))
        {
            *users += 1;
            return Ok(Arc::clone(mr));
        }
        // SAFETY: the caller's contract.
        let mr = unsafe { self.register_device(address, len) }?;
        kept.push((Arc::clone(&mr), 1));
        add(&self.device, &mr);
        Ok(mr)
    }

    fn let_go(&self, kept: &mut Vec<(Arc<Mr>, usize)>, mr: &Arc<Mr>) {
        let Some(at) = kept.iter().position(|(other, _)| Arc::ptr_eq(other, mr)) else { return };
        kept[at].1 -= 1;
        if kept[at].1 == 0 {
            kept.swap_remove(at);
            remove(&self.device, mr);
        }
    }

    /// Returns the parts of a range that lie in one allocation each; `None` if some of it lies in no allocation.
    fn cut(&self, address: u64, len: usize) -> Option<Vec<(u64, usize)>> {
        let end = address.checked_add(len as u64)?;
        let (mut parts, mut at) = (Vec::new(), address);
        while at < end {
            let (base, allocated) = self.allocation(at).ok()?;
            let part =
                end.min(base.checked_add(allocated as u64)?).checked_sub(at).filter(|&part| part > 0)?;
            parts.push((at, usize::try_from(part).ok()?));
            at += part;
        }
        Some(parts)
    }

    /// # Safety
    /// As for `Mr::register`.
    pub(crate) unsafe fn register_host(&self, address: u64, len: usize) -> Result<Arc<Mr>> {
        // SAFETY: the caller's contract.
        unsafe { Mr::register(&self.pd, address as *mut u8, len, HOST_ACCESS) }.map(Arc::new)
    }

    /// Registers memory of the device: as a dma-buf if driver and adapter support it, else by its address (peer
    /// memory). The context is current.
    ///
    /// # Safety
    /// As for `Mr::register`, for memory of the device.
    pub(crate) unsafe fn register_device(&self, address: u64, len: usize) -> Result<Arc<Mr>> {
        let start = address - address % self.page_bytes;
        let end = (address + len as u64).next_multiple_of(self.page_bytes);
        let by_dma_buf = self.export(start, (end - start) as usize).and_then(|fd| {
            let offset = address - start;
            // SAFETY: the caller's contract.
            unsafe { Mr::register_dmabuf(&self.pd, fd.as_fd(), offset, len, address, DEVICE_ACCESS) }
        });
        let first = match by_dma_buf {
            Ok(mr) => return Ok(Arc::new(mr)),
            Err(error) => error,
        };
        // SAFETY: the caller's contract.
        let by_address = unsafe { Mr::register_peer(&self.pd, address, len, DEVICE_ACCESS) };
        by_address.map(Arc::new).map_err(|error| error.with("by_dma_buf", first))
    }

    /// Exports the device's memory as a dma-buf, if the driver can.
    fn export(&self, address: u64, len: usize) -> Result<OwnedFd> {
        let Some(export) = self.context.table().mem_get_handle else {
            return Err(Error::new(ErrorKind::Unsupported, "the CUDA driver exports no memory as a dma-buf"));
        };
        let mut fd = -1;
        // SAFETY: the pointer is valid during the call and has space for a descriptor.
        let code = unsafe { export((&raw mut fd).cast(), address, len, HANDLE_DMA_BUF, 0) };
        self.context.check("cuMemGetHandleForAddressRange", code)?;
        // SAFETY: a new descriptor without another owner.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Returns the allocation of the device's memory that contains an address. The context is current.
    fn allocation(&self, address: u64) -> Result<(u64, usize)> {
        let (mut base, mut len) = (0, 0);
        // SAFETY: the pointers live during the call.
        let code =
            unsafe { (self.context.table().mem_get_address_range)(&raw mut base, &raw mut len, address) };
        self.context.check("cuMemGetAddressRange_v2", code).map_err(|error: Error| {
            let unknown =
                "a copy's address is in no allocation of the device: its memory must stay allocated";
            Error::new(ErrorKind::Config, unknown).with("address", address).with_source(error)
        })?;
        Ok((base, len))
    }
}

/// Adds a region to the known ones.
pub(crate) fn add(known: &Known, mr: &Arc<Mr>) {
    let mut regions = known.write();
    // Behind regions with the same start: the last one added is found first.
    let at = regions.partition_point(|other| other.address() <= mr.address());
    regions.insert(at, Arc::clone(mr));
}

pub(crate) fn remove(known: &Known, mr: &Arc<Mr>) {
    known.write().retain(|other| !Arc::ptr_eq(other, mr));
}

/// The regions of one batch: known ones, and those made for it. It keeps them until it is dropped, so drop it after the
/// adapter has finished.
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

    /// Returns the region of host memory that contains `address`, and how much of `len` bytes it covers.
    ///
    /// # Safety
    /// The range is valid until this value is dropped.
    pub(crate) unsafe fn host(&mut self, address: u64, len: usize) -> Result<(Arc<Mr>, usize)> {
        if let Some(found) = covering(&self.host, address, len) {
            return Ok(found);
        }
        // SAFETY: the caller's contract.
        let mr = unsafe { self.regions.register_host(address, len) }?;
        insert(&mut self.host, &mr);
        Ok((mr, len))
    }

    /// Returns the region of the device's memory that contains `address`, and how much of `len` bytes it covers. The
    /// context is current.
    ///
    /// # Safety
    /// As for `host`.
    pub(crate) unsafe fn device(&mut self, address: u64, len: usize) -> Result<(Arc<Mr>, usize)> {
        if let Some(found) = covering(&self.device, address, len) {
            return Ok(found);
        }
        let (base, allocated) = self.regions.allocation(address)?;
        // SAFETY: a valid range lies in an allocation that lives as long.
        let mr = unsafe { self.regions.register_device(base, allocated) }?;
        insert(&mut self.device, &mr);
        let left = (base + allocated as u64 - address) as usize;
        Ok((mr, len.min(left)))
    }

    /// Drops regions while the adapter may still use them: a deliberate mistake of tests.
    pub(crate) fn end_early(&mut self) {
        self.host.clear();
        self.device.clear();
    }
}

fn insert(regions: &mut Vec<Arc<Mr>>, mr: &Arc<Mr>) {
    let at = regions.partition_point(|other| other.address() < mr.address());
    regions.insert(at, Arc::clone(mr));
}

/// Finds the region of an address. Regions do not contain one another, but those made for a batch may overlap others:
/// it checks the last that begins at or before the address, then those before it that still reach it.
fn covering(regions: &[Arc<Mr>], address: u64, len: usize) -> Option<(Arc<Mr>, usize)> {
    let end = regions.partition_point(|mr| mr.address() <= address);
    let found = regions[..end].iter().rev().find(|mr| mr.covers(address, 1))?;
    let left = (found.address() + found.len() as u64 - address) as usize;
    Some((Arc::clone(found), len.min(left)))
}
