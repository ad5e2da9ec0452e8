//! Completions: the device's reports about finished work requests.

use kvdepot_core::{Error, ErrorKind, Result};

use crate::sys::{IBV_WC_RECV, IBV_WC_RECV_RDMA_WITH_IMM, IBV_WC_WITH_IMM, ibv_wc};

/// The status of a completion, with the library's numbers.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct WcStatus(pub u32);

impl WcStatus {
    /// Success.
    pub const SUCCESS: Self = Self(crate::sys::IBV_WC_SUCCESS);
    /// The receive was shorter than the message.
    pub const LOCAL_LENGTH: Self = Self(crate::sys::IBV_WC_LOC_LEN_ERR);
    /// This side's queue pair could not execute the request.
    pub const LOCAL_OPERATION: Self = Self(crate::sys::IBV_WC_LOC_QP_OP_ERR);
    /// Local memory is not registered for this access.
    pub const LOCAL_PROTECTION: Self = Self(crate::sys::IBV_WC_LOC_PROT_ERR);
    /// Never begun, because an earlier request failed or the queue pair was stopped.
    pub const FLUSHED: Self = Self(crate::sys::IBV_WC_WR_FLUSH_ERR);
    /// The peer could not accept the request: too long for its receive, or not allowed on its queue pair.
    pub const REMOTE_INVALID_REQUEST: Self = Self(crate::sys::IBV_WC_REM_INV_REQ_ERR);
    /// The peer's memory is not registered for this access.
    pub const REMOTE_ACCESS: Self = Self(crate::sys::IBV_WC_REM_ACCESS_ERR);
    /// The peer failed while it executed the request.
    pub const REMOTE_OPERATION: Self = Self(crate::sys::IBV_WC_REM_OP_ERR);
    /// The peer did not answer.
    pub const RETRIES_EXCEEDED: Self = Self(crate::sys::IBV_WC_RETRY_EXC_ERR);
    /// The peer had no receive posted for too long.
    pub const RECEIVER_NOT_READY: Self = Self(crate::sys::IBV_WC_RNR_RETRY_EXC_ERR);

    /// Returns what the status means, and what to check.
    pub fn meaning(self) -> &'static str {
        match self {
            Self::SUCCESS => "done",
            Self::LOCAL_LENGTH => "a receive was shorter than the message",
            Self::LOCAL_OPERATION => "this side's queue pair could not carry it out",
            Self::LOCAL_PROTECTION => "local memory is not registered for this access",
            Self::FLUSHED => "not begun: the connection had failed or was closed before",
            Self::REMOTE_INVALID_REQUEST => {
                "the peer refused the request (message too long, or access not allowed)"
            }
            Self::REMOTE_ACCESS => "the peer's memory is not registered for this access",
            Self::REMOTE_OPERATION => "the peer failed while carrying it out",
            Self::RETRIES_EXCEEDED => "the peer does not answer (process gone, port down, or no route)",
            Self::RECEIVER_NOT_READY => "the peer posted no receive in time",
            _ => "the device failed it",
        }
    }
}

impl std::fmt::Debug for WcStatus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "WcStatus({}: {})", self.0, self.meaning())
    }
}

/// The operation of a work request that succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Done {
    /// A SEND was delivered.
    Send,
    /// A WRITE was placed.
    Write,
    /// A READ has arrived.
    Read,
    /// A receive got a message.
    Receive,
    /// A peer's WRITE WITH IMM is placed; it used up a receive.
    ReceiveWrite,
    /// An operation that this side never posts.
    Other(u32),
}

/// One completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The id of the work request.
    pub id: u64,
    /// The status.
    pub status: WcStatus,
    /// The number of its queue pair.
    pub qp_number: u32,
    /// The operation; only meaningful on success.
    pub done: Done,
    /// Number of bytes received; only meaningful for a successful receive.
    pub len_bytes: u32,
    /// The immediate data of a successful receive.
    pub imm: Option<[u8; 4]>,
    /// The device's own error code.
    pub vendor_error: u32,
}

impl Completion {
    pub(crate) fn new(wc: &ibv_wc) -> Self {
        let done = match wc.opcode {
            crate::sys::IBV_WC_SEND => Done::Send,
            crate::sys::IBV_WC_RDMA_WRITE => Done::Write,
            crate::sys::IBV_WC_RDMA_READ => Done::Read,
            IBV_WC_RECV => Done::Receive,
            IBV_WC_RECV_RDMA_WITH_IMM => Done::ReceiveWrite,
            other => Done::Other(other),
        };
        let received = matches!(done, Done::Receive | Done::ReceiveWrite);
        let has_imm = wc.status == 0 && received && wc.wc_flags & IBV_WC_WITH_IMM != 0;
        Self {
            id: wc.wr_id,
            status: WcStatus(wc.status),
            qp_number: wc.qp_num,
            done,
            len_bytes: wc.byte_len,
            // The number's bytes in memory are the bytes on the wire.
            imm: has_imm.then(|| wc.imm_data.to_be().to_be_bytes()),
            vendor_error: wc.vendor_err,
        }
    }

    /// Returns the operation if it succeeded, else an error with the reason.
    pub fn ok(&self) -> Result<Done> {
        if self.status == WcStatus::SUCCESS {
            return Ok(self.done);
        }
        let kind = match self.status {
            WcStatus::FLUSHED => ErrorKind::Closed,
            WcStatus::RETRIES_EXCEEDED | WcStatus::RECEIVER_NOT_READY => ErrorKind::Unavailable,
            _ => ErrorKind::Io,
        };
        Err(Error::new(kind, format!("an RDMA request failed: {}", self.status.meaning()))
            .with("status", self.status.0)
            .with("vendor_error", self.vendor_error)
            .with("id", self.id)
            .with("qp_number", self.qp_number))
    }
}
