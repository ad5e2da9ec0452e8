//! Work requests, in lists that are posted with one ring of the device's doorbell.

use std::fmt;

use crate::sys::{
    IBV_SEND_FENCE, IBV_SEND_INLINE, IBV_SEND_SIGNALED, IBV_SEND_SOLICITED, IBV_WR_RDMA_READ,
    IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, ibv_recv_wr,
    ibv_send_wr, ibv_sge,
};

/// A piece of local memory in a registered region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sge {
    /// First address.
    pub address: u64,
    /// Length in bytes.
    pub len: u32,
    /// The region's key.
    pub lkey: u32,
}

/// A place in a peer's registered region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// First address.
    pub address: u64,
    /// The region's key.
    pub rkey: u32,
}

/// The local bytes of a request.
#[derive(Clone, Copy, Debug)]
pub enum Payload<'a> {
    /// Registered memory, read or written until the request completes.
    Sges(&'a [Sge]),
    /// Bytes copied when the request is posted. Not for READ, and limited by the queue pair's configuration.
    Inline(&'a [u8]),
}

/// The operation of a request.
#[derive(Clone, Copy, Debug)]
pub enum Operation<'a> {
    /// Reads the peer's memory.
    Read(&'a [Sge], Remote),
    /// Writes the peer's memory.
    Write(Payload<'a>, Remote),
    /// Writes the peer's memory, then completes one of its receives with four bytes.
    WriteImm(Payload<'a>, Remote, [u8; 4]),
    /// Sends into one of the peer's receives.
    Send(Payload<'a>),
    /// Sends into one of the peer's receives, with four bytes.
    SendImm(Payload<'a>, [u8; 4]),
}

/// Options of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags {
    /// Reports success. Failures are always reported. A queue frees the places of its requests only when a later
    /// signalled request was polled, so every queue needs some.
    pub signaled: bool,
    /// Waits until earlier READs have completed.
    pub fence: bool,
    /// Wakes a peer that waits for solicited messages only.
    pub solicited: bool,
}

impl Flags {
    /// Reports success.
    pub const SIGNALED: Self = Self { signaled: true, fence: false, solicited: false };
    /// Reports only failures.
    pub const SILENT: Self = Self { signaled: false, fence: false, solicited: false };
}

/// Requests for the send queue of a queue pair, in order. Reuse lists, because they keep their allocations.
#[derive(Default)]
pub struct SendList {
    requests: Vec<ibv_send_wr>,
    sges: Vec<ibv_sge>,
    inline: Vec<u8>,
    /// The index of each request's first piece.
    first: Vec<usize>,
}

// SAFETY: the pointers inside are written when the list is posted, and point into the list itself.
unsafe impl Send for SendList {}
// SAFETY: as for Send.
unsafe impl Sync for SendList {}

impl SendList {
    /// Makes an empty list.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a request; its completion has the same `id`.
    pub fn push(&mut self, id: u64, operation: Operation<'_>, flags: Flags) {
        let bit = |on: bool, flag: u32| if on { flag } else { 0 };
        let mut send_flags = bit(flags.signaled, IBV_SEND_SIGNALED)
            | bit(flags.fence, IBV_SEND_FENCE)
            | bit(flags.solicited, IBV_SEND_SOLICITED);
        let (opcode, payload, remote, imm) = match operation {
            Operation::Read(sges, remote) => (IBV_WR_RDMA_READ, Payload::Sges(sges), Some(remote), None),
            Operation::Write(payload, remote) => (IBV_WR_RDMA_WRITE, payload, Some(remote), None),
            Operation::WriteImm(payload, remote, imm) => {
                (IBV_WR_RDMA_WRITE_WITH_IMM, payload, Some(remote), Some(imm))
            }
            Operation::Send(payload) => (IBV_WR_SEND, payload, None, None),
            Operation::SendImm(payload, imm) => (IBV_WR_SEND_WITH_IMM, payload, None, Some(imm)),
        };
        let first = self.sges.len();
        match payload {
            Payload::Sges(sges) => self.sges.extend(sges.iter().map(raw_sge)),
            Payload::Inline(bytes) => {
                send_flags |= IBV_SEND_INLINE;
                // An offset, which `link` turns into an address, since the buffer may still move.
                let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
                self.sges.push(ibv_sge { addr: self.inline.len() as u64, length, lkey: 0 });
                self.inline.extend_from_slice(bytes);
            }
        }
        self.first.push(first);
        self.requests.push(ibv_send_wr {
            wr_id: id,
            next: std::ptr::null_mut(),
            sg_list: std::ptr::null_mut(),
            num_sge: i32::try_from(self.sges.len() - first).unwrap_or(i32::MAX),
            opcode,
            send_flags,
            imm_data: imm.map_or(0, |imm| u32::from_be_bytes(imm).to_be()),
            remote_addr: remote.map_or(0, |remote| remote.address),
            rkey: remote.map_or(0, |remote| remote.rkey),
            _wr_rest: [0; 5],
            _qp_type: 0,
            _bind_mw_or_tso: [0; 6],
        });
    }

    /// Returns the number of requests.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Makes the last request report its success.
    pub fn signal_last(&mut self) {
        if let Some(last) = self.requests.last_mut() {
            last.send_flags |= IBV_SEND_SIGNALED;
        }
    }

    /// Empties the list.
    pub fn clear(&mut self) {
        self.requests.clear();
        self.sges.clear();
        self.inline.clear();
        self.first.clear();
    }

    /// Links the requests. Returns null if there are none. Valid until the list is changed or moved.
    pub(crate) fn link(&mut self) -> *mut ibv_send_wr {
        let (requests, sges) = (self.requests.as_mut_ptr(), self.sges.as_mut_ptr());
        let inline = self.inline.as_ptr() as u64;
        for index in 0..self.requests.len() {
            // SAFETY: `index` is inside, and so is the next one where it is made a pointer; `first` is at most
            // `sges.len()`.
            unsafe {
                let request = &mut *requests.add(index);
                request.sg_list = sges.add(self.first[index]);
                let has_next = index + 1 < self.requests.len();
                request.next = if has_next { requests.add(index + 1) } else { std::ptr::null_mut() };
                if request.send_flags & IBV_SEND_INLINE != 0 {
                    (*request.sg_list).addr += inline;
                }
            }
        }
        if self.requests.is_empty() { std::ptr::null_mut() } else { requests }
    }

    /// Undoes the changes of `link` to inline pieces, so that a list can be posted again.
    pub(crate) fn unlink(&mut self) {
        let inline = self.inline.as_ptr() as u64;
        for (request, &first) in self.requests.iter().zip(&self.first) {
            if request.send_flags & IBV_SEND_INLINE != 0 {
                self.sges[first].addr -= inline;
            }
        }
    }

    pub(crate) fn position(&self, request: *const ibv_send_wr) -> usize {
        self.requests.iter().position(|other| std::ptr::eq(other, request)).unwrap_or(0)
    }
}

/// Receives for a queue pair or a shared queue, in order.
#[derive(Default)]
pub struct RecvList {
    requests: Vec<ibv_recv_wr>,
    sges: Vec<ibv_sge>,
    first: Vec<usize>,
}

// SAFETY: as for `SendList`.
unsafe impl Send for RecvList {}
// SAFETY: as for Send.
unsafe impl Sync for RecvList {}

impl RecvList {
    /// Makes an empty list.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a receive into `sges`, which are empty for messages without bytes.
    pub fn push(&mut self, id: u64, sges: &[Sge]) {
        self.first.push(self.sges.len());
        self.sges.extend(sges.iter().map(raw_sge));
        let num_sge = i32::try_from(sges.len()).unwrap_or(i32::MAX);
        self.requests.push(ibv_recv_wr {
            wr_id: id,
            next: std::ptr::null_mut(),
            sg_list: std::ptr::null_mut(),
            num_sge,
        });
    }

    /// Returns the number of receives.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Empties the list.
    pub fn clear(&mut self) {
        self.requests.clear();
        self.sges.clear();
        self.first.clear();
    }

    /// As for `SendList`.
    pub(crate) fn link(&mut self) -> *mut ibv_recv_wr {
        let (requests, sges) = (self.requests.as_mut_ptr(), self.sges.as_mut_ptr());
        for index in 0..self.requests.len() {
            // SAFETY: as in `SendList::link`.
            unsafe {
                let request = &mut *requests.add(index);
                request.sg_list = sges.add(self.first[index]);
                let has_next = index + 1 < self.requests.len();
                request.next = if has_next { requests.add(index + 1) } else { std::ptr::null_mut() };
            }
        }
        if self.requests.is_empty() { std::ptr::null_mut() } else { requests }
    }

    pub(crate) fn position(&self, request: *const ibv_recv_wr) -> usize {
        self.requests.iter().position(|other| std::ptr::eq(other, request)).unwrap_or(0)
    }
}

fn raw_sge(sge: &Sge) -> ibv_sge {
    ibv_sge { addr: sge.address, length: sge.len, lkey: sge.lkey }
}

impl fmt::Debug for SendList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SendList({} requests)", self.len())
    }
}

impl fmt::Debug for RecvList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RecvList({} requests)", self.len())
    }
}
