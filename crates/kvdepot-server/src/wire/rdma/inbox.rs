//! The receives shared by a thread's connections. Requests are copied out and their receives posted again immediately.
//!
//! The device tells a client that finds no receive to wait, and the client's device retries.

use std::time::{Duration, Instant};

use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_verbs::{Access, Buffer, Completion, Pd, RecvList, Srq};

/// Set in the id of every receive. The bits below hold the inbox's generation and the receive's index.
const RECEIVE: u64 = 1 << 63;
const GENERATION_SHIFT: u32 = 32;

/// A shared receive queue with its buffers.
#[derive(Debug)]
pub(super) struct Inbox {
    srq: Srq,
    buffer: Buffer,
    receive_bytes: usize,
    generation: u32,
    list: RecvList,
    /// Receives that have not completed since a connection was destroyed, which may have taken one of them with it.
    suspects: Vec<bool>,
    suspect_count: usize,
    /// Upper bound of the number of lost receives.
    lost_max: usize,
    /// When it became possible that all receives are lost.
    empty_since: Option<Instant>,
}

impl Inbox {
    /// The highest generation; the next one is 0.
    pub(super) const GENERATION_MAX: u32 = (1 << 31) - 1;

    pub(super) fn new(pd: &Pd, generation: u32, receives: u32, receive_bytes: usize) -> Result<Self> {
        let bytes =
            receive_bytes.checked_mul(receives as usize).filter(|_| u32::try_from(receive_bytes).is_ok());
        let bytes = bytes.ok_or_else(|| {
            Error::new(ErrorKind::Config, "the receives of RDMA are too large")
                .with("receives", receives)
                .with("receive_bytes", receive_bytes)
        })?;
        let buffer = Buffer::new(pd, bytes, Access::LOCAL)?;
        let mut inbox = Self {
            srq: Srq::new(pd, receives, 1)?,
            buffer,
            receive_bytes,
            generation,
            list: RecvList::new(),
            suspects: vec![false; receives as usize],
            suspect_count: 0,
            lost_max: 0,
            empty_since: None,
        };
        for index in 0..u64::from(receives) {
            inbox.add(RECEIVE | u64::from(generation) << GENERATION_SHIFT | index);
        }
        inbox.post()?;
        Ok(inbox)
    }

    /// Returns the receive queue for queue pairs.
    pub(super) const fn srq(&self) -> &Srq {
        &self.srq
    }

    /// Returns the number of this inbox among those of its thread.
    pub(super) const fn generation(&self) -> u32 {
        self.generation
    }

    /// Returns whether a completion is that of a receive, even a failed one.
    pub(super) const fn owns(completion: &Completion) -> bool {
        completion.id & RECEIVE != 0
    }

    /// Returns the generation of the inbox that a receive's completion belongs to.
    pub(super) const fn generation_of(completion: &Completion) -> u32 {
        (completion.id >> GENERATION_SHIFT) as u32 & Self::GENERATION_MAX
    }

    /// Returns the message of a receive. The receive is posted again by the next [`Inbox::post`].
    pub(super) fn take(&mut self, completion: &Completion) -> Vec<u8> {
        let mut bytes = vec![0; (completion.len_bytes as usize).min(self.receive_bytes)];
        self.buffer.read(self.offset(completion.id), &mut bytes);
        self.give_back(completion);
        bytes
    }

    /// Returns a receive whose completion was taken off the queue.
    pub(super) fn give_back(&mut self, completion: &Completion) {
        if std::mem::take(&mut self.suspects[index(completion.id)]) {
            self.suspect_count -= 1;
            self.lost_max = self.lost_max.min(self.suspect_count);
            self.empty_since = None;
        }
        self.add(completion.id);
    }

    fn add(&mut self, id: u64) {
        let sge = self.buffer.mr().sge(self.offset(id), self.receive_bytes as u32);
        self.list.push(id, &[sge]);
    }

    /// Posts the returned receives.
    pub(super) fn post(&mut self) -> Result<()> {
        self.srq.post_recv(&mut self.list)?;
        self.list.clear();
        Ok(())
    }

    /// Notes that a connection of this inbox was destroyed, with its completions off the queue. A message that arrived
    /// only in part may have taken a receive that no completion will name. A connection receives one message at a time.
    pub(super) fn buried_one(&mut self, now: Instant) {
        self.suspects.fill(true);
        self.suspect_count = self.suspects.len();
        self.lost_max = (self.lost_max + 1).min(self.suspect_count);
        if self.lost_max == self.suspects.len() {
            self.empty_since.get_or_insert(now);
        }
    }

    /// Returns whether so many receives may be lost that new connections need another inbox.
    pub(super) fn is_worn(&self) -> bool {
        self.lost_max >= (self.suspects.len() / 2).max(1)
    }

    /// Returns whether all receives may be lost and none has completed for so long that connections may wait forever.
    pub(super) fn is_starved(&self, now: Instant, patience: Duration) -> bool {
        self.empty_since.is_some_and(|since| now.saturating_duration_since(since) >= patience)
    }

    const fn offset(&self, id: u64) -> usize {
        index(id) * self.receive_bytes
    }
}

const fn index(id: u64) -> usize {
    (id & ((1 << GENERATION_SHIFT) - 1)) as usize
}
