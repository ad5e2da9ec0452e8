//! Completion queues, and the channel that wakes a waiting thread.

use std::ffi::c_void;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvdepot_core::{Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::completion::Completion;
use crate::context::Context;
use crate::failure;
use crate::sys::{ibv_comp_channel, ibv_cq, ibv_wc};

/// Largest number of completions that one call of `poll` takes.
const POLL_BATCH: usize = 32;

/// A descriptor that becomes readable when an armed completion queue gets a completion. Cheap to clone.
#[derive(Clone)]
pub struct CompletionChannel {
    inner: Arc<ChannelInner>,
}

struct ChannelInner {
    context: Context,
    channel: *mut ibv_comp_channel,
}

// SAFETY: the library's calls on a channel are thread-safe.
unsafe impl Send for ChannelInner {}
// SAFETY: as for Send.
unsafe impl Sync for ChannelInner {}

impl CompletionChannel {
    /// Makes a new channel.
    pub fn new(context: &Context) -> Result<Self> {
        // SAFETY: the context is open.
        let channel = unsafe { (context.table().ibv_create_comp_channel)(context.raw()) };
        if channel.is_null() {
            return Err(failure::last_os("ibv_create_comp_channel", context.name()));
        }
        let channel = Self { inner: Arc::new(ChannelInner { context: context.clone(), channel }) };
        let nonblocking = rustix::fs::fcntl_getfl(channel.as_fd())
            .and_then(|flags| rustix::fs::fcntl_setfl(channel.as_fd(), flags | rustix::fs::OFlags::NONBLOCK));
        nonblocking.map_err(|e| Error::io("cannot make a completion channel non-blocking", e.into()))?;
        Ok(channel)
    }

    /// Takes an event if there is one. Returns the token of its completion queue.
    pub fn take(&self) -> Result<Option<usize>> {
        let (mut cq, mut token) = (std::ptr::null_mut(), std::ptr::null_mut());
        let table = self.inner.context.table();
        // SAFETY: the channel is open and non-blocking; the call fills both places when it returns 0.
        let rc = unsafe { (table.ibv_get_cq_event)(self.inner.channel, &raw mut cq, &raw mut token) };
        if rc != 0 {
            let error = std::io::Error::last_os_error();
            return match error.kind() {
                std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted => Ok(None),
                _ => Err(failure::last_os("ibv_get_cq_event", self.inner.context.name())),
            };
        }
        // Acknowledged immediately, because a queue with an unacknowledged event cannot be destroyed.
        // SAFETY: the event is of this queue, which lives until the event is acknowledged.
        unsafe { (table.ibv_ack_cq_events)(cq, 1) };
        Ok(Some(token as usize))
    }

    /// Waits for an event until `deadline`. Returns the token of its completion queue, or `None` on timeout.
    pub fn wait(&self, deadline: Instant) -> Result<Option<usize>> {
        loop {
            if let Some(token) = self.take()? {
                return Ok(Some(token));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            let timeout = Timespec::try_from(left).map_err(|_| {
                Error::new(ErrorKind::Config, "a deadline is too far away").with("left_s", left.as_secs())
            })?;
            match poll(&mut [PollFd::new(self, PollFlags::IN)], Some(&timeout)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(e) => return Err(Error::io("cannot wait on a completion channel", e.into())),
            }
        }
    }
}

impl AsFd for CompletionChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as the channel is.
        unsafe { BorrowedFd::borrow_raw((*self.inner.channel).fd) }
    }
}

impl Drop for ChannelInner {
    fn drop(&mut self) {
        // SAFETY: created, and destroyed once; its completion queues hold it, so none is left.
        unsafe { (self.context.table().ibv_destroy_comp_channel)(self.channel) };
    }
}

impl fmt::Debug for CompletionChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CompletionChannel({})", self.inner.context.name())
    }
}

/// A completion queue. Cheap to clone; queue pairs hold the ones that they report to.
#[derive(Clone)]
pub struct Cq {
    inner: Arc<CqInner>,
}

struct CqInner {
    context: Context,
    channel: Option<CompletionChannel>,
    cq: *mut ibv_cq,
}

// SAFETY: the library's calls on a completion queue are thread-safe.
unsafe impl Send for CqInner {}
// SAFETY: as for Send.
unsafe impl Sync for CqInner {}

impl Cq {
    /// Makes a queue of at least `entries`, without events. A queue that overflows is lost, so count all possible
    /// completions: every signalled request and every receive of its queue pairs, and every request of a queue pair
    /// that fails.
    pub fn new(context: &Context, entries: u32) -> Result<Self> {
        Self::create(context, entries, None, 0)
    }

    /// Like `new`, with events on `channel`, which identifies the queue by `token`.
    pub fn with_events(channel: &CompletionChannel, entries: u32, token: usize) -> Result<Self> {
        Self::create(&channel.inner.context, entries, Some(channel.clone()), token)
    }

    fn create(
        context: &Context,
        entries: u32,
        channel: Option<CompletionChannel>,
        token: usize,
    ) -> Result<Self> {
        let raw_channel = channel.as_ref().map_or(std::ptr::null_mut(), |channel| channel.inner.channel);
        let count = i32::try_from(entries).unwrap_or(i32::MAX);
        let token = std::ptr::without_provenance_mut::<c_void>(token);
        // SAFETY: context and channel are open; the token is opaque to the library.
        let cq = unsafe { (context.table().ibv_create_cq)(context.raw(), count, token, raw_channel, 0) };
        if cq.is_null() {
            return Err(failure::last_os("ibv_create_cq", context.name()).with("entries", entries));
        }
        Ok(Self { inner: Arc::new(CqInner { context: context.clone(), channel, cq }) })
    }

    /// Takes completions off the queue and appends them to `out`. Returns their number. Some may be left.
    pub fn poll(&self, out: &mut Vec<Completion>) -> Result<usize> {
        let mut batch = [ibv_wc::default(); POLL_BATCH];
        // SAFETY: the queue is alive, and so is its context with the provider's functions; at most `POLL_BATCH`
        // entries are filled.
        let count = unsafe {
            match (*(*self.inner.cq).context).ops.poll_cq {
                Some(poll) => poll(self.inner.cq, POLL_BATCH as i32, batch.as_mut_ptr()),
                None => return Err(no_function("poll_cq", &self.inner.context)),
            }
        };
        let Ok(count) = usize::try_from(count) else {
            return Err(Error::new(
                ErrorKind::Io,
                "a completion queue broke: it held more completions than it has entries, or its device failed",
            )
            .with("call", "ibv_poll_cq")
            .with("device", self.inner.context.name())
            .with("returned", count));
        };
        out.extend(batch[..count].iter().map(Completion::new));
        Ok(count)
    }

    /// Requests one event at the next completion (with `solicited_only`: of a message marked as solicited, or a
    /// failure). Completions in the queue raise no event, so poll once more after this call before waiting.
    pub fn request_event(&self, solicited_only: bool) -> Result<()> {
        // SAFETY: as for `poll`.
        let rc = unsafe {
            match (*(*self.inner.cq).context).ops.req_notify_cq {
                Some(request) => request(self.inner.cq, i32::from(solicited_only)),
                None => return Err(no_function("req_notify_cq", &self.inner.context)),
            }
        };
        match rc {
            0 => Ok(()),
            rc => Err(failure::from_errno("ibv_req_notify_cq", self.inner.context.name(), rc)),
        }
    }

    /// Polls for `spin`, then sleeps until there is a completion. Appends completions to `out` and returns their
    /// number, 0 on timeout. Needs a channel that no other queue uses.
    pub fn wait(&self, spin: Duration, deadline: Instant, out: &mut Vec<Completion>) -> Result<usize> {
        let spin_until = deadline.min(Instant::now() + spin);
        loop {
            match self.poll(out)? {
                0 if Instant::now() < spin_until => std::hint::spin_loop(),
                0 => break,
                count => return Ok(count),
            }
        }
        let Some(channel) = &self.inner.channel else {
            return Err(Error::new(ErrorKind::Config, "this completion queue has no channel to wait on"));
        };
        loop {
            self.request_event(false)?;
            // A completion may have arrived between the last poll and the request.
            let count = self.poll(out)?;
            if count > 0 {
                return Ok(count);
            }
            if channel.wait(deadline)?.is_none() {
                return self.poll(out);
            }
            let count = self.poll(out)?;
            if count > 0 {
                return Ok(count);
            }
        }
    }

    pub(crate) fn raw(&self) -> *mut ibv_cq {
        self.inner.cq
    }
}

fn no_function(name: &'static str, context: &Context) -> Error {
    Error::new(ErrorKind::Unsupported, "the RDMA device's driver lacks a function")
        .with("call", name)
        .with("device", context.name())
}

impl Drop for CqInner {
    fn drop(&mut self) {
        // SAFETY: created, and destroyed once; queue pairs that report to it hold it, so none is left.
        unsafe { (self.context.table().ibv_destroy_cq)(self.cq) };
    }
}

impl fmt::Debug for Cq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cq({}, events: {})", self.inner.context.name(), self.inner.channel.is_some())
    }
}
