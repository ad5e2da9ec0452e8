//! Receives that connections of a thread share: requests are copied out, and their receives posted again, at once.
//!
//! A client that finds none is told to wait by the device, and tries again by itself.

use std::time::{Duration, Instant};

use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_verbs::{Access, Buffer, Completion, Pd, RecvList, Srq};

/// Set in the id of every receive. Below it stand the inbox's generation and the receive's index.
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
    /// Receives that have not completed since a connection was destroyed: it may have taken one of them with it.
    suspects: Vec<bool>,
    suspect_count: usize,
    /// Upper bound of the receives that are lost.
    lost_max: usize,
    /// Since when all receives may be lost.
    empty_since: Option<Instant>,
}

impl Inbox {
    /// Highest generation; the next one is 0.
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

    /// The queue, for queue pairs.
    pub(super) const fn srq(&self) -> &Srq {
        &self.srq
    }

    /// Number of this inbox among those of its thread.
    pub(super) const fn generation(&self) -> u32 {
        self.generation
    }

    /// Whether a completion is a receive's, also where it failed.
    pub(super) const fn owns(completion: &Completion) -> bool {
        completion.id & RECEIVE != 0
    }

    /// Generation of the inbox that a receive's completion belongs to.
    pub(super) const fn generation_of(completion: &Completion) -> u32 {
        (completion.id >> GENERATION_SHIFT) as u32 & Self::GENERATION_MAX
    }

    /// What came by a receive, which goes back with the next [`Inbox::post`].
    pub(super) fn take(&mut self, completion: &Completion) -> Vec<u8> {
        let mut bytes = vec![0; (completion.len_bytes as usize).min(self.receive_bytes)];
        self.buffer.read(self.offset(completion.id), &mut bytes);
        self.give_back(completion);
        bytes
    }

    /// Gives back a receive whose completion was taken off the queue.
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

    /// Posts what was given back.
    pub(super) fn post(&mut self) -> Result<()> {
        self.srq.post_recv(&mut self.list)?;
        self.list.clear();
        Ok(())
    }

    /// A connection of this inbox was destroyed, with its completions off the queue. A message of which only a part has
    /// come may have had a receive that no completion names any more; a connection receives one message at a time.
    pub(super) fn buried_one(&mut self, now: Instant) {
        self.suspects.fill(true);
        self.suspect_count = self.suspects.len();
        self.lost_max = (self.lost_max + 1).min(self.suspect_count);
        if self.lost_max == self.suspects.len() {
            self.empty_since.get_or_insert(now);
        }
    }

    /// Whether so many receives may be lost that new connections need another inbox.
    pub(super) fn is_worn(&self) -> bool {
        self.lost_max >= (self.suspects.len() / 2).max(1)
    }

    /// Whether all receives may have been lost for so long, as nothing came by any, so that connections wait for ever.
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
