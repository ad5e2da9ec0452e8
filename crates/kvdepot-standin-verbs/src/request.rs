//! Requests of a send queue, and their progress.

use kvdepot_verbs::sys::{
    IBV_SEND_FENCE, IBV_SEND_SIGNALED, IBV_SEND_SOLICITED, IBV_WC_RDMA_READ, IBV_WC_RDMA_WRITE, IBV_WC_SEND,
    IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND_WITH_IMM,
};

use crate::memory::Entry;
use crate::rng::Rng;

/// Maximum number of pieces of one message.
const CHUNKS_MAX: usize = 5;

#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) id: u64,
    pub(crate) opcode: u32,
    pub(crate) flags: u32,
    pub(crate) entries: Vec<Entry>,
    /// Bytes that were copied when it was posted.
    pub(crate) inline: Option<Vec<u8>>,
    pub(crate) remote_address: u64,
    pub(crate) rkey: u32,
    pub(crate) imm: u32,
    pub(crate) len: usize,
    pub(crate) phase: Phase,
    /// Number of times that its peer was not ready.
    pub(crate) attempts: u32,
}

#[derive(Debug)]
pub(crate) enum Phase {
    Waiting,
    /// Bytes move directly from one side to the other. A SEND holds the receive that it goes into.
    Moving {
        chunks: Vec<(usize, usize)>,
        receive: Option<Receive>,
    },
    /// A READ takes its bytes.
    Taking {
        chunks: Vec<(usize, usize)>,
        staged: Vec<u8>,
    },
    /// A READ places what it took.
    Placing {
        chunks: Vec<(usize, usize)>,
        staged: Vec<u8>,
    },
    /// Sent to another process.
    Away,
    Done(u32),
}

/// A posted receive.
#[derive(Debug)]
pub(crate) struct Receive {
    pub(crate) id: u64,
    pub(crate) entries: Vec<Entry>,
}

impl Receive {
    pub(crate) fn len(&self) -> usize {
        self.entries.iter().map(|entry| entry.len as usize).sum()
    }
}

impl Request {
    pub(crate) fn is_read(&self) -> bool {
        self.opcode == IBV_WR_RDMA_READ
    }

    pub(crate) fn is_plain_write(&self) -> bool {
        self.opcode == IBV_WR_RDMA_WRITE
    }

    pub(crate) fn writes_remote(&self) -> bool {
        self.opcode == IBV_WR_RDMA_WRITE || self.opcode == IBV_WR_RDMA_WRITE_WITH_IMM
    }

    pub(crate) fn takes_receive(&self) -> bool {
        !self.is_read() && !self.is_plain_write()
    }

    pub(crate) fn has_imm(&self) -> bool {
        self.opcode == IBV_WR_RDMA_WRITE_WITH_IMM || self.opcode == IBV_WR_SEND_WITH_IMM
    }

    pub(crate) fn is_signaled(&self) -> bool {
        self.flags & IBV_SEND_SIGNALED != 0
    }

    pub(crate) fn is_fenced(&self) -> bool {
        self.flags & IBV_SEND_FENCE != 0
    }

    pub(crate) fn is_solicited(&self) -> bool {
        self.flags & IBV_SEND_SOLICITED != 0
    }

    pub(crate) fn is_done(&self) -> bool {
        matches!(self.phase, Phase::Done(_))
    }

    /// Returns whether the peer has finished with it, as far as later requests can tell.
    pub(crate) fn is_executed(&self) -> bool {
        matches!(self.phase, Phase::Done(_) | Phase::Placing { .. })
    }

    pub(crate) fn completion_opcode(&self) -> u32 {
        match self.opcode {
            IBV_WR_RDMA_READ => IBV_WC_RDMA_READ,
            _ if self.writes_remote() => IBV_WC_RDMA_WRITE,
            _ => IBV_WC_SEND,
        }
    }

    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        self.remote_address < other.remote_address.saturating_add(other.len as u64)
            && other.remote_address < self.remote_address.saturating_add(self.len as u64)
    }
}

/// Cuts `len` bytes into a few pieces in random order.
pub(crate) fn cut(rng: &mut Rng, len: usize) -> Vec<(usize, usize)> {
    if len == 0 {
        return Vec::new();
    }
    let mut ends: Vec<usize> = (0..rng.below(CHUNKS_MAX)).map(|_| 1 + rng.below(len)).collect();
    ends.push(len);
    ends.sort_unstable();
    ends.dedup();
    let mut start = 0;
    let mut chunks = Vec::with_capacity(ends.len());
    for end in ends {
        chunks.push((start, end - start));
        start = end;
    }
    rng.shuffle(&mut chunks);
    chunks
}
