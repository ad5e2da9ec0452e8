//! Registered regions, and copies between them that cannot crash. The kernel moves the bytes, so an access to memory
//! that is registered but was freed is a failed request, as on a device.

use std::ffi::c_void;

use kvdepot_verbs::sys::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE, IBV_WC_LOC_PROT_ERR,
    IBV_WC_REM_ACCESS_ERR,
};

use crate::state::State;

/// A range of a process's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) pid: i32,
    pub(crate) address: u64,
    pub(crate) len: usize,
}

#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) pd: usize,
    /// First address in requests.
    pub(crate) start: u64,
    pub(crate) len: u64,
    pub(crate) access: u32,
    /// Address of the bytes in this process.
    pub(crate) backing: u64,
    /// Another device's memory: bytes written to it arrive after the request has completed, unless they are read back.
    pub(crate) peer: bool,
    /// Mapped by us from a dma-buf, and must be unmapped.
    pub(crate) mapped: bool,
}

impl Region {
    fn translate(&self, address: u64, len: usize) -> Option<u64> {
        let offset = address.checked_sub(self.start)?;
        let end = offset.checked_add(len as u64)?;
        (end <= self.len).then_some(self.backing + offset)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.mapped {
            // SAFETY: mapped by `ibv_reg_dmabuf_mr` with this address and length, unmapped once.
            unsafe { libc::munmap(self.backing as *mut c_void, self.len as usize) };
        }
    }
}

/// A gather or scatter entry of this process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) address: u64,
    pub(crate) len: u32,
    pub(crate) lkey: u32,
}

pub(crate) fn own_pid() -> i32 {
    std::process::id().cast_signed()
}

impl State {
    /// Returns the part `from..from + len` of a message in `entries`, checked.
    pub(crate) fn local(
        &self,
        pd: usize,
        entries: &[Entry],
        from: usize,
        len: usize,
        write: bool,
    ) -> Result<Vec<Piece>, u32> {
        let (mut skip, mut left) = (from, len);
        let mut pieces = Vec::new();
        for entry in entries {
            let entry_len = entry.len as usize;
            if skip >= entry_len {
                skip -= entry_len;
                continue;
            }
            let take = left.min(entry_len - skip);
            if take == 0 {
                break;
            }
            let region = self.regions.get(&entry.lkey).ok_or(IBV_WC_LOC_PROT_ERR)?;
            if region.pd != pd || (write && region.access & IBV_ACCESS_LOCAL_WRITE == 0) {
                return Err(IBV_WC_LOC_PROT_ERR);
            }
            let address = region.translate(entry.address + skip as u64, take).ok_or(IBV_WC_LOC_PROT_ERR)?;
            pieces.push(Piece { pid: own_pid(), address, len: take });
            (skip, left) = (0, left - take);
        }
        if left > 0 { Err(IBV_WC_LOC_PROT_ERR) } else { Ok(pieces) }
    }

    /// Returns a peer's range in a region of this process, checked.
    pub(crate) fn remote(
        &self,
        pd: usize,
        address: u64,
        len: usize,
        rkey: u32,
        write: bool,
    ) -> Result<Piece, u32> {
        let lkey = self.lkey_of_rkey.get(&rkey).ok_or(IBV_WC_REM_ACCESS_ERR)?;
        let region = self.regions.get(lkey).ok_or(IBV_WC_REM_ACCESS_ERR)?;
        let need = if write { IBV_ACCESS_REMOTE_WRITE } else { IBV_ACCESS_REMOTE_READ };
        if region.pd != pd || region.access & need == 0 {
            return Err(IBV_WC_REM_ACCESS_ERR);
        }
        let address = region.translate(address, len).ok_or(IBV_WC_REM_ACCESS_ERR)?;
        Ok(Piece { pid: own_pid(), address, len })
    }

    /// Writes into a region of this process, or queues the bytes if it is another device's memory.
    pub(crate) fn deliver(&mut self, rkey: u32, piece: Piece, bytes: Vec<u8>) -> bool {
        let lkey = self.lkey_of_rkey.get(&rkey).copied().unwrap_or(0);
        if self.regions.get(&lkey).is_some_and(|region| region.peer) {
            self.posted.push_back(Posted { lkey, piece, bytes });
            return true;
        }
        place(&[piece], &bytes)
    }

    /// Completes one write to another device.
    pub(crate) fn land_one(&mut self) {
        if let Some(posted) = self.posted.pop_front() {
            place(&[posted.piece], &posted.bytes);
        }
    }

    /// Completes all writes to other devices, because a read arrives after them.
    pub(crate) fn land_all(&mut self) {
        while !self.posted.is_empty() {
            self.land_one();
        }
    }
}

/// A write to another device that is in flight.
#[derive(Debug)]
pub(crate) struct Posted {
    pub(crate) lkey: u32,
    piece: Piece,
    bytes: Vec<u8>,
}

/// Reads the bytes of `pieces`. Returns `None` if some of them do not exist any more.
pub(crate) fn fetch(pieces: &[Piece]) -> Option<Vec<u8>> {
    let mut bytes = vec![0; pieces.iter().map(|piece| piece.len).sum()];
    let mut at = 0;
    for piece in pieces {
        let mut done = 0;
        while done < piece.len {
            let own = libc::iovec { iov_base: bytes[at..].as_mut_ptr().cast(), iov_len: piece.len - done };
            let theirs = libc::iovec {
                iov_base: (piece.address + done as u64) as *mut c_void,
                iov_len: piece.len - done,
            };
            // SAFETY: `own` lies in `bytes`; the kernel checks the other side.
            let moved =
                unsafe { libc::process_vm_readv(piece.pid, &raw const own, 1, &raw const theirs, 1, 0) };
            let moved = usize::try_from(moved).ok().filter(|&moved| moved > 0)?;
            (done, at) = (done + moved, at + moved);
        }
    }
    Some(bytes)
}

/// Writes `bytes` to `pieces`. Returns false if some of them do not exist any more.
pub(crate) fn place(pieces: &[Piece], bytes: &[u8]) -> bool {
    let mut at = 0;
    for piece in pieces {
        let mut done = 0;
        while done < piece.len {
            let own =
                libc::iovec { iov_base: bytes[at..].as_ptr().cast_mut().cast(), iov_len: piece.len - done };
            let theirs = libc::iovec {
                iov_base: (piece.address + done as u64) as *mut c_void,
                iov_len: piece.len - done,
            };
            // SAFETY: `own` lies in `bytes` and is only read; the kernel checks the other side.
            let moved =
                unsafe { libc::process_vm_writev(piece.pid, &raw const own, 1, &raw const theirs, 1, 0) };
            let Some(moved) = usize::try_from(moved).ok().filter(|&moved| moved > 0) else { return false };
            (done, at) = (done + moved, at + moved);
        }
    }
    true
}

/// Returns whether every page of the range is mapped.
pub(crate) fn is_mapped(address: u64, len: u64) -> bool {
    const PAGE: u64 = 4096;
    let first = address & !(PAGE - 1);
    let Some(end) = address.checked_add(len) else { return false };
    let pages = (end - first).div_ceil(PAGE);
    let mut resident = vec![0u8; pages as usize];
    // SAFETY: `resident` has a byte for every page; the call touches nothing else.
    unsafe { libc::mincore(first as *mut c_void, (pages * PAGE) as usize, resident.as_mut_ptr()) == 0 }
}
