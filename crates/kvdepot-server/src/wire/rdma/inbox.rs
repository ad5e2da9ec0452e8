//! Receives that all connections of a thread share: requests are copied out, and their receives posted again, at once.
//!
//! A client that finds none is told to wait by the device, and tries again by itself.

use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_verbs::{Access, Buffer, Completion, Pd, RecvList, Srq};

/// Set in the id of every receive.
const RECEIVE: u64 = 1 << 63;

#[derive(Debug)]
pub(super) struct Inbox {
    srq: Srq,
    buffer: Buffer,
    receive_bytes: usize,
    list: RecvList,
}

impl Inbox {
    pub(super) fn new(pd: &Pd, receives: u32, receive_bytes: usize) -> Result<Self> {
        let bytes =
            receive_bytes.checked_mul(receives as usize).filter(|_| u32::try_from(receive_bytes).is_ok());
        let bytes = bytes.ok_or_else(|| {
            Error::new(ErrorKind::Config, "the receives of RDMA are too large")
                .with("receives", receives)
                .with("receive_bytes", receive_bytes)
        })?;
        let buffer = Buffer::new(pd, bytes, Access::LOCAL)?;
        let mut inbox =
            Self { srq: Srq::new(pd, receives, 1)?, buffer, receive_bytes, list: RecvList::new() };
        for index in 0..receives {
            inbox.add(RECEIVE | u64::from(index));
        }
        inbox.post()?;
        Ok(inbox)
    }

    /// The queue, for queue pairs.
    pub(super) const fn srq(&self) -> &Srq {
        &self.srq
    }

    /// Whether a completion is a receive's, also where it failed.
    pub(super) const fn owns(completion: &Completion) -> bool {
        completion.id & RECEIVE != 0
    }

    /// What came by a receive, which goes back with the next [`Inbox::post`].
    pub(super) fn take(&mut self, completion: &Completion) -> Vec<u8> {
        let mut bytes = vec![0; (completion.len_bytes as usize).min(self.receive_bytes)];
        self.buffer.read(self.offset(completion.id), &mut bytes);
        self.add(completion.id);
        bytes
    }

    /// Gives back a receive that nothing came by.
    pub(super) fn add(&mut self, id: u64) {
        let sge = self.buffer.mr().sge(self.offset(id), self.receive_bytes as u32);
        self.list.push(id, &[sge]);
    }

    /// Posts what was given back.
    pub(super) fn post(&mut self) -> Result<()> {
        self.srq.post_recv(&mut self.list)?;
        self.list.clear();
        Ok(())
    }

    const fn offset(&self, id: u64) -> usize {
        (id & !RECEIVE) as usize * self.receive_bytes
    }
}
