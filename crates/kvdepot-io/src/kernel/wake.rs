//! An eventfd that wakes a thread waiting on its queue.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::Duration;

use kvdepot_core::{Error, Result};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// Readable between `wake` and `clear`.
#[derive(Debug)]
pub(crate) struct Wake(OwnedFd);

impl Wake {
    pub(crate) fn new() -> Result<Self> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::io("cannot make an eventfd for an I/O thread", e.into()))?;
        Ok(Self(fd))
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    pub(crate) fn wake(&self) {
        // It only fails when the counter is full, and then the descriptor is readable already.
        let _ = rustix::io::write(&self.0, &1_u64.to_le_bytes());
    }

    /// Waits until the eventfd is readable, at most this long.
    pub(crate) fn wait(&self, timeout: Duration) {
        let time = Timespec::try_from(timeout).ok();
        // An interrupted wait returns early, which callers expect.
        let _ = poll(&mut [PollFd::new(&self.0, PollFlags::IN)], time.as_ref());
    }

    pub(crate) fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0_u8; 8]);
    }
}
