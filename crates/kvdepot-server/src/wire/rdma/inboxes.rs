//! The inboxes of a thread: the one for new connections, and the previous one while connections use it.
//!
//! If the device took a receive for a message that its failing peer never finished, the receive may never complete. It
//! cannot be posted again, since nothing identifies it. So when half of the receives may be lost, new connections get a
//! new inbox, and the old one is dropped with its last connection.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::Result;
use kvdepot_verbs::{Completion, Pd, Srq};
use parking_lot::Mutex;

use super::inbox::Inbox;

/// Number of inboxes that a thread has at a time. The completion queue is sized for the receives of all.
pub(super) const INBOXES_MAX: u32 = 2;

/// The receive queue for new queue pairs, and the generation of its inbox.
pub(super) type CurrentSrq = Arc<Mutex<(u32, Srq)>>;

#[derive(Debug)]
pub(super) struct Inboxes {
    pd: Pd,
    receives: u32,
    receive_bytes: usize,
    now: Inbox,
    before: Option<Inbox>,
    current: CurrentSrq,
}

impl Inboxes {
    pub(super) fn new(pd: &Pd, receives: u32, receive_bytes: usize) -> Result<Self> {
        let now = Inbox::new(pd, 0, receives, receive_bytes)?;
        let current = Arc::new(Mutex::new((0, now.srq().clone())));
        Ok(Self { pd: pd.clone(), receives, receive_bytes, now, before: None, current })
    }

    /// Returns the receive queue for new queue pairs.
    pub(super) const fn current(&self) -> &CurrentSrq {
        &self.current
    }

    /// Returns whether a connection's inbox exists.
    pub(super) fn has(&mut self, generation: u32) -> bool {
        self.find(generation).is_some()
    }

    fn find(&mut self, generation: u32) -> Option<&mut Inbox> {
        if self.now.generation() == generation {
            return Some(&mut self.now);
        }
        self.before.as_mut().filter(|inbox| inbox.generation() == generation)
    }

    /// Returns the message of a receive, which is posted again by the next [`Inboxes::post`]. `None` if its inbox is
    /// gone.
    pub(super) fn take(&mut self, completion: &Completion) -> Option<Vec<u8>> {
        self.find(Inbox::generation_of(completion)).map(|inbox| inbox.take(completion))
    }

    /// Returns a receive without a message.
    pub(super) fn give_back(&mut self, completion: &Completion) {
        if let Some(inbox) = self.find(Inbox::generation_of(completion)) {
            inbox.give_back(completion);
        }
    }

    /// Posts the returned receives.
    pub(super) fn post(&mut self) -> Result<()> {
        self.now.post()?;
        self.before.as_mut().map_or(Ok(()), Inbox::post)
    }

    /// Notes that a connection of this generation was destroyed.
    pub(super) fn buried_one(&mut self, generation: u32, now: Instant) {
        if let Some(inbox) = self.find(generation) {
            inbox.buried_one(now);
        }
    }

    /// Replaces the current inbox if it is worn, unless connections still use the previous one. `is_used` tells whether
    /// a generation has connections.
    pub(super) fn renew(&mut self, is_used: impl Fn(u32) -> bool) {
        self.before.take_if(|inbox| !is_used(inbox.generation()));
        if !self.now.is_worn() || self.before.is_some() {
            return;
        }
        let generation = self.now.generation().wrapping_add(1) & Inbox::GENERATION_MAX;
        match Inbox::new(&self.pd, generation, self.receives, self.receive_bytes) {
            Ok(next) => {
                *self.current.lock() = (generation, next.srq().clone());
                let worn = std::mem::replace(&mut self.now, next);
                tracing::info!(
                    "RDMA connections that ended may have lost half of {} receives: new connections get new ones",
                    self.receives
                );
                self.before = Some(worn).filter(|inbox| is_used(inbox.generation()));
            }
            Err(error) => {
                tracing::warn!("RDMA gets no new receives in place of those that may be lost: {error}");
            }
        }
    }

    /// Returns whether connections of this generation may wait for a receive that never completes, or must end to make
    /// way for a new inbox.
    pub(super) fn is_starved(&self, generation: u32, now: Instant, patience: Duration) -> bool {
        let is_starved = |inbox: &Inbox| inbox.is_starved(now, patience);
        let own = self.before.as_ref().filter(|inbox| inbox.generation() == generation);
        is_starved(&self.now) || own.is_some_and(is_starved)
    }
}
