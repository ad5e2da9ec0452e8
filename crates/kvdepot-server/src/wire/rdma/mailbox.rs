//! Messages from other threads to a poller, which wake it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam_channel::{Receiver, Sender};
use kvdepot_core::{Error, ErrorKind, Result};
use kvdepot_depot::values::Value;
use rustix::event::{EventfdFlags, eventfd};

use super::link::Link;

/// A message to a poller.
#[derive(Debug)]
pub(super) enum Command {
    /// Serve this connection.
    Open(Box<Link>),
    /// End this connection.
    Close(u64),
    /// The result of a request to a tier.
    Found { link: u64, request: u64, index: usize, value: Option<Value> },
    /// More of the pool was registered.
    Look,
    /// Terminate.
    Stop,
}

/// The sending end of a poller's queue of messages.
#[derive(Debug)]
pub(super) struct Mailbox {
    sender: Sender<Command>,
    wake: OwnedFd,
    closed: AtomicBool,
}

impl Mailbox {
    pub(super) fn new() -> Result<(Arc<Self>, Receiver<Command>)> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::io("cannot make an event descriptor", e.into()))?;
        let (sender, receiver) = crossbeam_channel::unbounded();
        Ok((Arc::new(Self { sender, wake, closed: AtomicBool::new(false) }), receiver))
    }

    /// Sends a message. Fails if the poller has ended.
    pub(super) fn tell(&self, command: Command) -> Result<()> {
        let sent = !self.closed.load(Ordering::Acquire) && self.sender.send(command).is_ok();
        if !sent {
            return Err(Error::new(ErrorKind::Unavailable, "RDMA has ended at this depot: see its log"));
        }
        // If the counter is full, a wake-up is pending already.
        let _ = rustix::io::write(&self.wake, &1u64.to_le_bytes());
        Ok(())
    }

    /// Clears wake-ups, before messages are read.
    pub(super) fn hush(&self) {
        let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
    }

    /// Refuses messages from now on.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }
}

impl AsFd for Mailbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}
