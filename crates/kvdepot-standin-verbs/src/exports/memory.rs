//! Registration of memory.

use std::ffi::{c_int, c_void};

use kvdepot_verbs::sys::{IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_WRITE, ibv_mr, ibv_pd};

use super::null;
use crate::memory::{Region, is_mapped};
use crate::state::{State, lock};

/// Location of a region's bytes.
#[derive(Clone, Copy, Default)]
struct Backing {
    address: u64,
    mapped: bool,
    peer: bool,
}

/// Start of the content of a dma-buf of the stand-in for libcuda; address and length follow.
const PEER_MAGIC: [u8; 8] = *b"kvdepeer";

/// Returns the address of a dma-buf of the other stand-in.
fn peer_address(fd: c_int) -> Option<u64> {
    let mut bytes = [0u8; 24];
    // SAFETY: the place has the room that is named.
    let read = unsafe { libc::pread(fd, bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    let (magic, rest) = bytes.split_first_chunk::<8>()?;
    let address = rest.first_chunk::<8>()?;
    (read == 24 && *magic == PEER_MAGIC).then(|| u64::from_le_bytes(*address))
}

fn register(
    mut state: parking_lot::MutexGuard<'static, State>,
    pd: *mut ibv_pd,
    start: u64,
    len: usize,
    access: u32,
    backing: Backing,
) -> *mut ibv_mr {
    let region = Region {
        pd: pd as usize,
        start,
        len: len as u64,
        access,
        backing: backing.address,
        peer: backing.peer,
        mapped: backing.mapped,
    };
    if access & IBV_ACCESS_REMOTE_WRITE != 0 && access & IBV_ACCESS_LOCAL_WRITE == 0 {
        return null(libc::EINVAL);
    }
    let covered: u64 = state.regions.values().map(|region| region.len).sum();
    if covered.saturating_add(len as u64) > state.config.region_bytes_max {
        return null(libc::ENOMEM);
    }
    let peer: u64 = state.regions.values().filter(|region| region.peer).map(|region| region.len).sum();
    if backing.peer && peer.saturating_add(len as u64) > state.config.peer_bytes_max {
        return null(libc::ENOMEM);
    }
    let Some(users) = state.pds.get_mut(&(pd as usize)) else { return null(libc::EINVAL) };
    *users += 1;
    // Two different keys that are never reused, so that a mixed-up or stale one is detected.
    let index = state.next_key;
    state.next_key += 1;
    let (lkey, rkey) = ((index << 9) | 0x100, (index << 9) | (state.rng.next() as u32 & 0xff));
    state.regions.insert(lkey, region);
    state.lkey_of_rkey.insert(rkey, lkey);
    // SAFETY: the domain is alive: the table has it.
    let context = unsafe { (*pd).context };
    Box::into_raw(Box::new(ibv_mr {
        context,
        pd,
        addr: start as *mut c_void,
        length: len,
        handle: index,
        lkey,
        rkey,
    }))
}

fn register_host(
    call: &str,
    pd: *mut ibv_pd,
    address: *mut c_void,
    len: usize,
    iova: u64,
    access: u32,
) -> *mut ibv_mr {
    let mut state = lock();
    if let Some(errno) = state.fault(call) {
        return null(errno);
    }
    if len == 0 {
        return null(libc::EINVAL);
    }
    let offset = state.config.peer_offset;
    let peer = offset != 0 && address as u64 >= offset;
    let address = if peer { address as u64 - offset } else { address as u64 };
    if !is_mapped(address, len as u64) {
        return null(libc::EFAULT);
    }
    register(state, pd, iova, len, access, Backing { address, peer, mapped: false })
}

#[unsafe(no_mangle)]
extern "C" fn ibv_reg_mr(pd: *mut ibv_pd, address: *mut c_void, len: usize, access: c_int) -> *mut ibv_mr {
    register_host("ibv_reg_mr", pd, address, len, address as u64, access.cast_unsigned())
}

#[unsafe(no_mangle)]
extern "C" fn ibv_reg_mr_iova(
    pd: *mut ibv_pd,
    address: *mut c_void,
    len: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    register_host("ibv_reg_mr_iova", pd, address, len, iova, access.cast_unsigned())
}

#[unsafe(no_mangle)]
extern "C" fn ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    address: *mut c_void,
    len: usize,
    iova: u64,
    access: u32,
) -> *mut ibv_mr {
    register_host("ibv_reg_mr_iova2", pd, address, len, iova, access)
}

/// A dma-buf of the other stand-in, or any descriptor that can be mapped.
#[unsafe(no_mangle)]
extern "C" fn ibv_reg_dmabuf_mr(
    pd: *mut ibv_pd,
    offset: u64,
    len: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr {
    let mut state = lock();
    if let Some(errno) = state.fault("ibv_reg_dmabuf_mr") {
        return null(errno);
    }
    if !state.config.dmabuf {
        return null(libc::EOPNOTSUPP);
    }
    if let Some(address) = peer_address(fd) {
        let backing = Backing { address: address + offset, peer: true, mapped: false };
        return register(state, pd, iova, len, access.cast_unsigned(), backing);
    }
    // SAFETY: a new mapping, at a place of the kernel's choice.
    let backing = unsafe {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        libc::mmap(std::ptr::null_mut(), len, protection, libc::MAP_SHARED, fd, offset.cast_signed())
    };
    if backing == libc::MAP_FAILED {
        return null(libc::EINVAL);
    }
    register(
        state,
        pd,
        iova,
        len,
        access.cast_unsigned(),
        Backing { address: backing as u64, mapped: true, peer: false },
    )
}

#[unsafe(no_mangle)]
extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    let mut state = lock();
    // SAFETY: a region of `register`.
    let (lkey, rkey, pd) = unsafe { ((*mr).lkey, (*mr).rkey, (*mr).pd as usize) };
    if state.regions.remove(&lkey).is_none() {
        return libc::EINVAL;
    }
    state.lkey_of_rkey.remove(&rkey);
    // Writes that were still in flight are lost, unless they were flushed.
    state.posted.retain(|posted| posted.lkey != lkey);
    if let Some(users) = state.pds.get_mut(&pd) {
        *users -= 1;
    }
    // SAFETY: made by `register`, freed once, as the table says.
    drop(unsafe { Box::from_raw(mr) });
    0
}
