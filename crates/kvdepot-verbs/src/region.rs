//! Memory that a device may access.

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_io::SlotBuf;

use crate::context::Pd;
use crate::failure::{self, MemoryOf};
use crate::sys::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_RELAXED_ORDERING, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE,
    ibv_mr,
};
use crate::work::{Remote, Sge};

/// The access rights of a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// The device may write it: required for the target of a READ or a receive.
    pub local_write: bool,
    /// Peers may read it.
    pub remote_read: bool,
    /// Peers may write it; implies that the device may.
    pub remote_write: bool,
    /// Bytes may arrive in any order between completions. Ignored if the library is too old.
    pub relaxed_ordering: bool,
}

impl Access {
    /// Only the device itself may read: the source of sends and WRITEs.
    pub const READ_ONLY: Self =
        Self { local_write: false, remote_read: false, remote_write: false, relaxed_ordering: false };
    /// The device itself reads and writes, peers do not.
    pub const LOCAL: Self = Self { local_write: true, ..Self::READ_ONLY };
    /// Everything, in order.
    pub const ALL: Self = Self { remote_read: true, remote_write: true, ..Self::LOCAL };

    pub(crate) fn flags(self) -> u32 {
        let flag = |on: bool, flag: u32| if on { flag } else { 0 };
        flag(self.local_write || self.remote_write, IBV_ACCESS_LOCAL_WRITE)
            | flag(self.remote_read, IBV_ACCESS_REMOTE_READ)
            | flag(self.remote_write, IBV_ACCESS_REMOTE_WRITE)
            | flag(self.relaxed_ordering, IBV_ACCESS_RELAXED_ORDERING)
    }
}

/// A registered range of memory. Dropping it ends the registration; work requests that still use it then fail.
pub struct Mr {
    pd: Pd,
    mr: *mut ibv_mr,
    address: u64,
    len: usize,
    /// Keeps the memory alive until the registration has ended.
    _owner: Option<Arc<dyn Any + Send + Sync>>,
}

// SAFETY: the library's calls on a region are thread-safe, and we only read its keys.
unsafe impl Send for Mr {}
// SAFETY: as for Send.
unsafe impl Sync for Mr {}

impl Mr {
    /// Registers `len` bytes at `address` of this process's memory.
    ///
    /// # Safety
    /// Until the region is dropped the range must stay mapped. The device and, as `access` allows, peers may read and
    /// write it at any time: no reference to bytes that a work request writes may be alive meanwhile.
    pub unsafe fn register(pd: &Pd, address: *mut u8, len: usize, access: Access) -> Result<Self> {
        // SAFETY: the caller's contract.
        unsafe { Self::register_as(pd, MemoryOf::Host, address as u64, len, access, None) }
    }

    /// Like `register`, for memory that `owner` keeps mapped. `owner` is dropped after the registration has ended.
    ///
    /// # Safety
    /// As for `register`, except that the range stays mapped while `owner` lives.
    pub unsafe fn register_owned(
        pd: &Pd,
        address: *mut u8,
        len: usize,
        access: Access,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        // SAFETY: the caller's contract.
        unsafe { Self::register_as(pd, MemoryOf::Host, address as u64, len, access, Some(owner)) }
    }

    /// Registers lent memory, which must be one run and stays lent until the registration has ended. Peers get no
    /// access: this side's work requests do nothing that a holder of the memory may not do.
    pub fn register_lent(pd: &Pd, memory: &SlotBuf) -> Result<Self> {
        let &[run] = memory.runs() else {
            return Err(Error::new(ErrorKind::Config, "memory is registered a piece at a time")
                .with("pieces", memory.runs().len()));
        };
        let owner = Arc::new(memory.clone());
        // SAFETY: mapped, readable and writable while the clone lives, by the contract of `SlotBuf`; by the same
        // contract, the maker of a request on a part of it holds that part.
        unsafe { Self::register_owned(pd, run.ptr, run.len, Access::LOCAL, owner) }
    }

    /// Registers a GPU's memory by its address, which needs a peer memory module in the kernel.
    ///
    /// # Safety
    /// As for `register`; the range is one of the GPU's addresses.
    pub unsafe fn register_peer(pd: &Pd, address: u64, len: usize, access: Access) -> Result<Self> {
        // SAFETY: the caller's contract.
        unsafe { Self::register_as(pd, MemoryOf::Peer, address, len, access, None) }
    }

    unsafe fn register_as(
        pd: &Pd,
        memory: MemoryOf,
        address: u64,
        len: usize,
        access: Access,
        owner: Option<Arc<dyn Any + Send + Sync>>,
    ) -> Result<Self> {
        let table = pd.context().table();
        let (flags, pointer) = (access.flags(), address as *mut c_void);
        let (call, mr) = match table.ibv_reg_mr_iova2 {
            Some(register) if access.relaxed_ordering => {
                // SAFETY: the domain is alive; the range is the caller's promise.
                ("ibv_reg_mr_iova2", unsafe { register(pd.raw(), pointer, len, address, flags) })
            }
            _ => {
                let flags = flags & !IBV_ACCESS_RELAXED_ORDERING;
                // SAFETY: as above.
                ("ibv_reg_mr", unsafe { (table.ibv_reg_mr)(pd.raw(), pointer, len, flags.cast_signed()) })
            }
        };
        if mr.is_null() {
            let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
            return Err(failure::registration(call, pd.context().name(), errno, memory, len));
        }
        Ok(Self { pd: pd.clone(), mr, address, len, _owner: owner })
    }

    /// Registers `len` bytes of a dma-buf from `offset` on, under addresses from `address` on.
    ///
    /// # Safety
    /// As for `register`, for the memory behind the dma-buf. The descriptor itself may be closed afterwards.
    pub unsafe fn register_dmabuf(
        pd: &Pd,
        fd: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        address: u64,
        access: Access,
    ) -> Result<Self> {
        let call = "ibv_reg_dmabuf_mr";
        let Some(register) = pd.context().table().ibv_reg_dmabuf_mr else {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "this libibverbs is too old for dma-buf; install rdma-core 34 or newer",
            )
            .with("call", call));
        };
        let flags = access.flags().cast_signed();
        // SAFETY: the domain is alive, the descriptor is open; the memory is the caller's promise.
        let mr = unsafe { register(pd.raw(), offset, len, address, fd.as_raw_fd(), flags) };
        if mr.is_null() {
            let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
            return Err(failure::registration(call, pd.context().name(), errno, MemoryOf::DmaBuf, len));
        }
        Ok(Self { pd: pd.clone(), mr, address, len, _owner: None })
    }

    /// Returns the local key.
    pub fn lkey(&self) -> u32 {
        // SAFETY: registered, so the library keeps it.
        unsafe { (*self.mr).lkey }
    }

    /// Returns the key for peers.
    pub fn rkey(&self) -> u32 {
        // SAFETY: as above.
        unsafe { (*self.mr).rkey }
    }

    /// Returns the first address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns whether it covers `len` bytes at `address`.
    pub fn covers(&self, address: u64, len: usize) -> bool {
        address.checked_sub(self.address).is_some_and(|offset| {
            usize::try_from(offset).is_ok_and(|offset| offset <= self.len && len <= self.len - offset)
        })
    }

    /// Describes `len` bytes from `offset` on for a work request of this side. The device checks the range.
    pub fn sge(&self, offset: usize, len: u32) -> Sge {
        Sge { address: self.address + offset as u64, len, lkey: self.lkey() }
    }

    /// Describes the place at `offset` for a work request of a peer. The device checks the range.
    pub fn remote(&self, offset: usize) -> Remote {
        Remote { address: self.address + offset as u64, rkey: self.rkey() }
    }

    /// Returns its domain.
    pub fn pd(&self) -> &Pd {
        &self.pd
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: registered, and ended once.
        unsafe { (self.pd.context().table().ibv_dereg_mr)(self.mr) };
    }
}

impl fmt::Debug for Mr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mr({:#x} + {} on {})", self.address, self.len, self.pd.context().name())
    }
}
