//! What is registered with the adapter.

use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_verbs::{Access, Mr, Pd};
use parking_lot::{Mutex, RwLock};

use crate::cuda::context::Context;

/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
const HANDLE_DMA_BUF: i32 = 1;

/// Pool memory, which the adapter alone reads and writes. Bytes may land in any order between completions: a completion is
/// written behind them, and a READ that pushes a load's bytes along the bus never passes them.
const HOST_ACCESS: Access = Access { relaxed_ordering: true, ..Access::LOCAL };
/// The device's memory, named by the queue pairs as a peer's.
const DEVICE_ACCESS: Access = Access { relaxed_ordering: true, ..Access::ALL };

/// Regions of one kind of memory, by address.
pub(crate) type Known = RwLock<Vec<Arc<Mr>>>;

/// What an engine registered ahead, and how to register more.
#[derive(Debug)]
pub(crate) struct Regions {
    pub(crate) pd: Pd,
    pub(crate) context: Arc<Context>,
    pub(crate) host: Known,
    pub(crate) device: Known,
    /// Regions of `device`, and how many registrations use each.
    kept: Mutex<Vec<(Arc<Mr>, usize)>>,
    /// The kernel's pages: what the driver exports as a dma-buf is made of whole ones.
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

    /// Regions that cover a range of the device's memory, until each was given to `release`. Whoever asks for the same
    /// range gets the same regions: a GPU's window on the bus is small. A range that cannot be registered as one is cut
    /// where allocations end, since an adapter takes memory of one allocation only, and neighbours often touch. The
    /// context is current.
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

    /// Ends one use of a region that `keep` gave.
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

    /// The parts of a range that lie in one allocation each; none if some of it lies in none.
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

    /// Registers memory of the device: by dma-buf where driver and adapter can, else by its address (peer memory). The
    /// context is current.
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

    /// A dma-buf of the device's memory, if the driver can make one.
    fn export(&self, address: u64, len: usize) -> Result<OwnedFd> {
        let Some(export) = self.context.table().mem_get_handle else {
            return Err(Error::new(ErrorKind::Unsupported, "the CUDA driver exports no memory as a dma-buf"));
        };
        let mut fd = -1;
        // SAFETY: the place lives during the call and has room for a descriptor.
        let code = unsafe { export((&raw mut fd).cast(), address, len, HANDLE_DMA_BUF, 0) };
        self.context.check("cuMemGetHandleForAddressRange", code)?;
        // SAFETY: a new descriptor that nobody else has.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
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
    // Behind one that begins at the same address: the last that was added is found first.
    let at = regions.partition_point(|other| other.address() <= mr.address());
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
